"""What came of one run: how many requests got what was promised, and what the workers cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.simulation.autoscaling.fleet import Change, Fleet
from tests.simulation.autoscaling.workers import Request

HOUR_S = 3600.0


@dataclass(frozen=True)
class Outcome:
    """Of one scaler on one trace."""

    requests: int
    attainment: float  # of all requests, those with both times met
    ttft_attainment: float
    tpot_attainment: float
    worker_hours: float  # from order to gone, both roles
    mean_prefill: float  # targets, averaged over time
    mean_decode: float
    max_prefill: int
    max_decode: int
    prefill_reversals: int  # the most in any hour
    decode_reversals: int
    changes: int


def outcome(fleet: Fleet, requests: Sequence[Request], start: tuple[int, int], ends_s: float) -> Outcome:
    """Of a fleet that has served `requests` for `ends_s`."""
    first = [one.ttft_s <= fleet.ttft_s for one in requests]
    rest = [one.tpot_s <= fleet.tpot_s for one in requests]
    both = sum(ttft and tpot for ttft, tpot in zip(first, rest, strict=True))
    targets = [Change(0.0, *start), *(one for one in fleet.changes if one.at_s <= ends_s)]
    spans = [
        after.at_s - before.at_s for before, after in zip(targets, [*targets[1:], Change(ends_s, 0, 0)], strict=True)
    ]
    return Outcome(
        requests=len(requests),
        attainment=both / len(requests),
        ttft_attainment=sum(first) / len(requests),
        tpot_attainment=sum(rest) / len(requests),
        worker_hours=fleet.worker_s() / HOUR_S,
        mean_prefill=sum(one.prefill * span for one, span in zip(targets, spans, strict=True)) / ends_s,
        mean_decode=sum(one.decode * span for one, span in zip(targets, spans, strict=True)) / ends_s,
        max_prefill=max(one.prefill for one in targets),
        max_decode=max(one.decode for one in targets),
        prefill_reversals=reversals([(one.at_s, one.prefill) for one in targets]),
        decode_reversals=reversals([(one.at_s, one.decode) for one in targets]),
        changes=len(targets) - 1,
    )


def reversals(counts: Sequence[tuple[float, int]]) -> int:
    """The most turns, from up to down or back, within any hour of (when, how many)."""
    turns: list[float] = []
    went = 0
    for (_, before), (at_s, after) in pairwise(counts):
        way = (after > before) - (after < before)
        if way and went and way != went:
            turns.append(at_s)
        went = way or went
    return max((sum(at_s <= one < at_s + HOUR_S for one in turns) for at_s in turns), default=0)
