"""Which promises were kept: a request's verdict, and the part of each class that got what it was promised."""

from typing import Literal

from twostroke.protocol.requests import Promise
from twostroke.router.decaying import DecayingSum
from twostroke.router.stages import Stages

Verdict = Literal["met", "missed", "refused"]

ATTAINMENT_S = 120.0
"""How far back `SLOAttainment.of` looks, fading."""


def verdict_of(promise: Promise, stages: Stages) -> Verdict:
    """Whether a request that has ended came in time. One that failed without its first token did not."""
    if promise.ttft_left_s is not None and (stages.ttft_s is None or stages.ttft_s > promise.ttft_left_s):
        return "missed"
    if promise.tpot_s is not None and stages.tpot_s is not None and stages.tpot_s > promise.tpot_s:
        return "missed"
    return "met"


class SLOAttainment:
    """Of all requests, refused and failed ones included: the part that met both of its promises, by class."""

    def __init__(self) -> None:
        self._met: dict[str, DecayingSum] = {}
        self._all: dict[str, DecayingSum] = {}

    def record(self, class_name: str, verdict: Verdict, now: float) -> None:
        """Count a request that is over."""
        self._met.setdefault(class_name, DecayingSum(ATTAINMENT_S)).add(float(verdict == "met"), now)
        self._all.setdefault(class_name, DecayingSum(ATTAINMENT_S)).add(1.0, now)

    def of(self, class_name: str, now: float) -> float:
        """Of the last minutes, 0 to 1; 1 where nobody asked."""
        if class_name not in self._all:
            return 1.0
        asked = self._all[class_name].value(now)
        return self._met[class_name].value(now) / asked if asked > 1e-9 else 1.0
