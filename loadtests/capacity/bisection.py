"""Where attainment falls below a target, found by doubling and bisection, and how sure that is. Pure.

A search is repeated with other seeds, each on its own points, so that its results are independent measurements of the
same capacity; from how much they differ follows the interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

# Student's t (W. S. Gosset, "The probable error of a mean", 1908): 97.5th percentile for 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MOST_REPEATS = len(_T) + 1


@dataclass(frozen=True)
class Measured:
    """One run."""

    rate: float  # asked, a second
    attainment: float  # 0 to 1


@dataclass(frozen=True)
class Search:
    """Where to look."""

    start: float  # where the capacity is thought to be: the first rate, where nothing is known
    factor: float = 2.0  # between rates until the capacity lies between two
    precision: float = 0.1  # the end: the two differ by this share
    least: float = 0.01  # rates beyond these are not tried
    most: float = 10_000.0
    ceiling: float | None = None  # from here on up nothing can be measured


def next_rate(measured: Sequence[Measured], target: float, search: Search) -> float | None:
    """The rate to measure next; None: the search is over.

    Noise may have a higher rate meet what a lower one has missed: what was missed at the lowest rate counts.
    """
    met, missed = bracket(measured, target)
    upper = search.ceiling if missed is None else missed.rate
    if met is None:
        wanted = search.start if upper is None else min(upper / search.factor, search.start)
        return None if upper is not None and upper <= search.least else max(wanted, search.least)
    if upper is None:
        return None if met.rate >= search.most else min(max(met.rate * search.factor, search.start), search.most)
    if upper <= met.rate * (1 + search.precision):
        return None
    if missed is None and met.rate * search.factor < upper:
        return met.rate * search.factor
    return math.sqrt(met.rate * upper)


def bracket(measured: Sequence[Measured], target: float) -> tuple[Measured | None, Measured | None]:
    """The highest rate that met the target, below the lowest that missed it, and that one."""
    missed = min((each for each in measured if each.attainment < target), key=lambda each: each.rate, default=None)
    met = max(
        (each for each in measured if each.attainment >= target and (missed is None or each.rate < missed.rate)),
        key=lambda each: each.rate,
        default=None,
    )
    return met, missed


@dataclass(frozen=True)
class Crossing:
    """The highest rate at which the target is met, by one search."""

    rate: float
    is_lower_bound: bool = False  # no rate has missed it


def crossing(measured: Sequence[Measured], target: float) -> Crossing | None:
    """On the straight line between the two rates that enclose it. None: no rate has met it."""
    met, missed = bracket(measured, target)
    if met is None:
        return None
    if missed is None:
        return Crossing(met.rate, is_lower_bound=True)
    share = (met.attainment - target) / (met.attainment - missed.attainment)
    return Crossing(met.rate + share * (missed.rate - met.rate))


def interval(rates: Sequence[float]) -> tuple[float, float] | None:
    """95% for the mean of the rates' logarithms (rates are above 0), by Student's t; None of fewer than two."""
    if not 2 <= len(rates) <= MOST_REPEATS:
        return None
    logarithms = [math.log(rate) for rate in rates]
    half = _T[len(rates) - 2] * stdev(logarithms) / math.sqrt(len(rates))
    return math.exp(mean(logarithms) - half), math.exp(mean(logarithms) + half)


def geometric_mean(rates: Sequence[float]) -> float:
    if len(set(rates)) == 1:
        return rates[0]  # a rate that was asked for, and no 15.999999999999998
    return math.exp(mean(math.log(rate) for rate in rates))
