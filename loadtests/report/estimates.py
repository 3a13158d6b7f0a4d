"""Figures with 95% confidence intervals, and how they are written.

Shares of requests: Wilson's score interval (E. B. Wilson, "Probable inference, the law of succession, and statistical
inference", 1927), which stays within 0 and 1 and holds for few requests. It takes requests for independent.

Percentiles and rates: the bootstrap (B. Efron, 1979), with stretches of time drawn instead of single requests
(H. Künsch's block bootstrap, 1989), since requests that queue behind each other are late together.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONFIDENCE = 0.95
NUM_SLICES = 30  # of the window: long enough to hold a burst whole, enough of them to draw from
NUM_RESAMPLES = 1000
MAX_CANDIDATES = 2000  # values among which a resample's percentile is sought; all where there are no more


class Estimate(msgspec.Struct, frozen=True):
    """A figure, and the interval that holds the true one with 95% confidence; None where nothing can be said of it."""

    value: float
    low: float | None = None
    high: float | None = None

    def overlaps(self, other: "Estimate") -> bool | None:
        """Return whether the two may be equal; None where an interval is missing."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low <= other.high and other.low <= self.high

    def divided_by(self, divisor: float) -> "Estimate":
        return Estimate(
            self.value / divisor,
            None if self.low is None else self.low / divisor,
            None if self.high is None else self.high / divisor,
        )


def share(hits: int, total: int) -> Estimate | None:
    """`hits` of `total`, with Wilson's interval; None of nothing."""
    if not total:
        return None
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    observed = hits / total
    shrink = 1 + z * z / total
    centre = (observed + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(observed * (1 - observed) / total + z * z / (4 * total * total))
    # At 0 and 1 the formula's two terms are equal, and rounding must not leave the observed share outside.
    return Estimate(observed, min(observed, max(0.0, centre - half)), max(observed, min(1.0, centre + half)))


def percentile(values: Floats | Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed; None of no values."""
    if not len(values):
        return None
    return float(np.percentile(values, percent, method="inverted_cdf"))


class Slices:
    """A window of time cut into equal slices, from which resamples are drawn: the same for all figures of a run."""

    def __init__(self, begin_s: float, end_s: float, seed: int = 0):
        self._begin_s = begin_s
        self._width_s = (end_s - begin_s) / NUM_SLICES
        # How often each slice is in each resample: that many draws of slices, with replacement.
        draws = np.random.default_rng(seed).multinomial(NUM_SLICES, [1 / NUM_SLICES] * NUM_SLICES, NUM_RESAMPLES)
        self._weights = draws.astype(np.float64)

    def of(self, at_s: Floats) -> Ints:
        """The slice of each moment of the window."""
        index = ((at_s - self._begin_s) / self._width_s).astype(np.int64)
        return np.clip(index, 0, NUM_SLICES - 1)

    def rate(self, slices: Ints, amounts: Floats | None = None) -> Estimate:
        """Return the rate per second of events in these slices, or of their `amounts`."""
        counts = np.bincount(slices, amounts, minlength=NUM_SLICES)
        rates = (self._weights @ counts) / (NUM_SLICES * self._width_s)
        return _estimate(float(counts.sum()) / (NUM_SLICES * self._width_s), rates)

    def percentile(self, values: Floats, slices: Ints, percent: float) -> Estimate | None:
        """Return a percentile of `values`, each of which belongs to a slice. It has no interval where the values are
        too few or all in one slice.

        n values are too few where even the largest may well be below the true percentile; the chance of that is
        (percent / 100)^n. A P99 needs 368.
        """
        value = percentile(values, percent)
        if value is None:
            return None
        if (percent / 100) ** len(values) > (1 - CONFIDENCE) / 2 or len(np.unique(slices)) < 2:
            return Estimate(value)
        candidates = np.unique(values)
        if len(candidates) > MAX_CANDIDATES:
            ranks = np.linspace(0, 100, MAX_CANDIDATES)
            candidates = np.unique(np.percentile(values, ranks, method="inverted_cdf"))
        # By slice, how many of its values do not exceed each candidate; a resample's are then a weighted sum.
        at_most = np.zeros((NUM_SLICES, len(candidates)))
        for index in np.unique(slices):
            at_most[index] = np.searchsorted(np.sort(values[slices == index]), candidates, side="right")
        counts = self._weights @ at_most
        # A resample may have drawn empty slices only.
        found = [np.searchsorted(row, row[-1] * percent / 100) for row in counts if row[-1] > 0]
        return _estimate(value, candidates[found])


def _estimate(value: float, resampled: Floats) -> Estimate:
    low, high = np.percentile(resampled, [50 - 50 * CONFIDENCE, 50 + 50 * CONFIDENCE])
    return Estimate(value, float(low), float(high))


MISSING = "-"


def duration(seconds: float | None) -> str:
    """Return a time with a unit that suits its size: 0.25 ms, 40 ms, 1.2 s; a dash for None."""
    if seconds is None or math.isnan(seconds):
        return MISSING
    factor, unit = _unit(seconds)
    return f"{number(seconds * factor)} {unit}"


def number(value: float | None) -> str:
    """Three digits, or all of those before the point."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(part: float | None) -> str:
    """Return a percentage with one digit after the point; more where it would be rounded to 0% or 100%."""
    if part is None:
        return MISSING
    if part in (0.0, 1.0):
        return f"{part:.0%}"
    digits = next((digits for digits in (1, 2, 3) if 0 < round(part, digits + 2) < 1), 4)
    return f"{part:.{digits}%}"


def duration_estimate(estimate: Estimate | None) -> str:
    """The value and its interval, in one unit and with equally many digits: 36.5 ms (35.9–37.0)."""
    if estimate is None:
        return MISSING
    factor, unit = _unit(estimate.value)
    value, interval = _alike(estimate, factor)
    return f"{value} {unit}{interval}"


def number_estimate(estimate: Estimate | None) -> str:
    return MISSING if estimate is None else "".join(_alike(estimate, 1.0))


def percent_estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return MISSING
    if estimate.low is None or estimate.high is None:
        return percent(estimate.value)
    return f"{percent(estimate.value)} ({percent(estimate.low)[:-1]}–{percent(estimate.high)[:-1]})"


def _unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if abs(seconds) >= 1 or seconds == 0 else (1e3, "ms")


def _alike(estimate: Estimate, factor: float) -> tuple[str, str]:
    """The value, and its interval in brackets, empty where there is none; as many decimals as suit the value."""
    size = abs((estimate.value or estimate.high or 0.0) * factor)
    decimals = 0 if size >= 100 or not size else 1 if size >= 10 else 2 if size >= 1 else 3
    value, *ends = (
        MISSING if each is None else f"{each * factor:,.{decimals}f}"
        for each in (estimate.value, estimate.low, estimate.high)
    )
    return value, "" if MISSING in ends else f" ({'–'.join(ends)})"
