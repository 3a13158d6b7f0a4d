"""How long clients waited because of faults. Pure: answers and the faults' times in, seconds out.

A wait is the time from sending to a choice's first token, or between two pieces of it. What the same request waits at
most without faults, under the same load, is normal; the rest is stall. A wait is charged to the faults during which it
went on, to each of the kind that may stall longest among them, but to none for longer than since it struck.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.client import Answer

Family = Literal["kill", "stop", "partition", "network", "load"]
BOUNDS_S: dict[Family, float] = {"kill": 2.0, "stop": 5.0, "partition": 5.0, "network": 2.0, "load": math.inf}
"""Of the stall that 99 of 100 streams see, at most. More load than there is room for may make clients wait."""


@dataclass(frozen=True)
class Window:
    """When a fault was felt: from when it struck to when all was whole again. Times of `time.monotonic`."""

    family: Family
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Wait:
    """One wait of one choice."""

    begin: float
    end: float
    is_first: bool  # for the first token

    @property
    def length_s(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Normal:
    """What a request waits without faults, in seconds."""

    first_s: float
    between_s: float


def waits(answer: Answer) -> Iterable[Wait]:
    """All waits of an answer, the one that its end cut off included."""
    for choice in answer.choices:
        times = [answer.sent_at, *(at for at, _ in choice.pieces)]
        for index, (begin, end) in enumerate(itertools.pairwise(times)):
            yield Wait(begin, end, index == 0)


def normal_of(answers: Iterable[Answer]) -> Normal:
    """The longest waits in these answers, which were given without faults."""
    all_waits = [wait for answer in answers for wait in waits(answer)]
    return Normal(
        max((wait.length_s for wait in all_waits if wait.is_first), default=0.0),
        max((wait.length_s for wait in all_waits if not wait.is_first), default=0.0),
    )


def stalls_by_fault(
    answers: Sequence[Answer], normal: Mapping[int, Normal], windows: Sequence[Window]
) -> dict[str, list[float]]:
    """For each fault's name: the longest stall of each stream that was under way while one of that name was felt."""
    found: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        usual = normal[answer.request.key]
        met = [window for window in windows if window.begin < answer.ended_at and answer.sent_at < window.end]
        longest = {window: 0.0 for window in met}
        for wait in waits(answer):
            stall_s = wait.length_s - (usual.first_s if wait.is_first else usual.between_s)
            if stall_s > 0:
                for window in _charged(wait, met):
                    longest[window] = max(longest[window], min(stall_s, wait.end - window.begin))
        for window, stall_s in longest.items():
            found[window.name].append(stall_s)
    return dict(found)


def _charged(wait: Wait, windows: Sequence[Window]) -> list[Window]:
    during = [window for window in windows if window.begin < wait.end and wait.begin < window.end]
    most = max((BOUNDS_S[window.family] for window in during), default=0.0)
    return [window for window in during if BOUNDS_S[window.family] == most]
