"""SLO attainment and the errors of predictions: for metrics, and for the next admissions. Pure.

`verdict_of` says whether a request got what it was promised, `SLOAttainment` which part of each class did. `Correction`
makes the next predictions right nine times out of ten, `ClassHistory` is what a class has asked for and got lately.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from twostroke.protocol.requests import Promise
from twostroke.router.slo.demand import DecayingSum

SLOVerdict = Literal["met", "missed", "refused"]

ATTAINMENT_S = 120.0
"""Seconds over which `SLOAttainment.of` fades."""


def verdict_of(promise: Promise, ttft_s: float | None, tpot_s: float | None) -> SLOVerdict:
    """Return whether a request that has ended met its promises. One that failed without its first token did not."""
    if promise.ttft_left_s is not None and (ttft_s is None or ttft_s > promise.ttft_left_s):
        return "missed"
    if promise.tpot_s is not None and tpot_s is not None and tpot_s > promise.tpot_s:
        return "missed"
    return "met"


class SLOAttainment:
    """The part of requests, refused and failed ones included, that met both promises, by class."""

    def __init__(self) -> None:
        self._met: dict[str, DecayingSum] = {}
        self._all: dict[str, DecayingSum] = {}

    def record(self, class_name: str, verdict: SLOVerdict, now: float) -> None:
        """Count a request that is over."""
        self._met.setdefault(class_name, DecayingSum(ATTAINMENT_S)).add(float(verdict == "met"), now)
        self._all.setdefault(class_name, DecayingSum(ATTAINMENT_S)).add(1.0, now)

    def of(self, class_name: str, now: float) -> float:
        """Return the attainment over the last minutes, 0 to 1; 1 where there were no requests."""
        if class_name not in self._all:
            return 1.0
        asked = self._all[class_name].value(now)
        return self._met[class_name].value(now) / asked if asked > 1e-9 else 1.0


LEAST, MOST = 0.5, 4.0
_GAIN = 0.05  # of the newest ratio in the mean: the last 20 or so count
_DEVIATIONS = 1.5  # mean absolute ones, to about the 90th percentile
_FORGET_S = 10.0
_PART_OF_LIMIT = 0.25


class Correction:
    """The recent error of predictions of one kind of time for one class.

    The mean of actual over predicted times alone would be too short for every second request; like TCP's timers (RFC
    6298), some deviations are added to it. Times that are short against the limit are dominated by what no cost model
    knows (HTTP, the wait for the running step), and their ratio says nothing of long ones: so both sides are taken with
    a part of the limit added. As time passes the factor goes back to 1, so that what was learnt under one load does not
    rule another, and a wrong one can't refuse everybody for good.
    """

    def __init__(self) -> None:
        self._mean = 1.0
        self._deviation = 0.0
        self._at: float | None = None

    def learn(self, predicted_s: float, actual_s: float, limit_s: float, now: float) -> None:
        """A request for which `predicted_s` was expected took `actual_s`; `limit_s` was its promise."""
        added = _PART_OF_LIMIT * limit_s
        ratio = min(max((actual_s + added) / (predicted_s + added), LEAST), MOST)
        mean, deviation = self._now(now)
        self._mean = mean + _GAIN * (ratio - mean)
        self._deviation = deviation + _GAIN * (abs(ratio - mean) - deviation)
        self._at = now

    def factor(self, now: float) -> float:
        """Within LEAST and MOST."""
        mean, deviation = self._now(now)
        return min(max(mean + _DEVIATIONS * deviation, LEAST), MOST)

    def corrected(self, predicted_s: float, limit_s: float, now: float) -> float:
        """Return the time that nine requests out of ten will stay below."""
        added = _PART_OF_LIMIT * limit_s
        return (predicted_s + added) * self.factor(now) - added

    def _now(self, now: float) -> tuple[float, float]:
        if self._at is None:
            return 1.0, 0.0
        kept = math.exp((self._at - now) / _FORGET_S)
        return 1.0 + (self._mean - 1.0) * kept, self._deviation * kept


MEMORY_S = 10.0
_OUTPUT_GAIN = 0.05


def _lately() -> DecayingSum:
    return DecayingSum(MEMORY_S)


@dataclass(slots=True)
class ClassHistory:
    """The recent history of one class, which `admission.py` keeps."""

    priority: int
    share: float
    offered: DecayingSum = field(default_factory=_lately)  # requests that were judged
    admitted: DecayingSum = field(default_factory=_lately)  # requests
    tokens: DecayingSum = field(default_factory=_lately)  # of the admitted: prompts and expected outputs
    ttft: Correction = field(default_factory=Correction)
    tpot: Correction = field(default_factory=Correction)
    mean_output: float | None = None  # tokens, of the last requests
    admitted_at: float = -1e9
    refused_at: float = -1e9
    is_refusing: bool = False  # the newest request was refused

    def expected_output(self, max_tokens: int) -> float:
        """Tokens that a request will probably have, where it may have `max_tokens`."""
        return float(max_tokens) if self.mean_output is None else min(self.mean_output, float(max_tokens))

    def has_put_out(self, num_tokens: int) -> None:
        """A request has ended with so many tokens."""
        if self.mean_output is None:
            self.mean_output = float(num_tokens)
        self.mean_output += _OUTPUT_GAIN * (num_tokens - self.mean_output)

    def backlog_s(self, now: float) -> float:
        """Return the time that earlier refused requests would take at the pace of those admitted lately."""
        refused = self.offered.value(now) - self.admitted.value(now) - 1
        return max(0.0, refused) * MEMORY_S / (self.admitted.value(now) + 1)
