"""How many requests a second a mode serves within an SLO, by measurement and by simulation, and where the modes swap
places. A mode holds a rate where 90% of all requests meet both times.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec

from twostroke.loadtests.capacity import at_rate
from twostroke.loadtests.plan import SLO, Fixed, Plan
from twostroke.loadtests.report.estimates import Estimate, share
from twostroke.loadtests.report.figures import read_observations
from twostroke.loadtests.run_folder import Record
from twostroke.planning.agreement import simulated
from twostroke.planning.modes import Counts, Fleet, Mode
from twostroke.worker.profile import WorkerProfile

TARGET = 0.9
REQUESTS = 120  # of a simulated run
LEAST_TTFTS = 12.0
PRECISION = 0.08  # of a simulated capacity
MOST_DOUBLINGS = 12
LENGTHS = (64, 256, 1024, 4096, 16384)  # of prompts, up to the context


class Point(msgspec.Struct, frozen=True):
    """One run."""

    rate: float
    met: int
    requests: int

    @property
    def attainment(self) -> Estimate:
        """With its interval."""
        found = share(self.met, self.requests)
        return Estimate(0.0) if found is None else found


def point_of(records: Sequence[Record], plan: Plan, rate: float) -> Point:
    """What of a run met the plan's SLO, its warm-up left out; who was refused, or failed, did not."""
    seen = read_observations(records)
    inside = seen.scheduled_s >= plan.warm_up_s
    met = inside & seen.met_ttft(plan.slo) & seen.met_tpot(plan.slo)
    return Point(rate, int(met.sum()), int(inside.sum()))


def simulated_point(plan: Plan, fleet: Fleet, rate: float, requests: int = REQUESTS) -> Point:
    """A simulated run at this rate, of about so many requests, and of LEAST_TTFTS promised TTFTs at least.

    In a shorter one a queue that grows without end would not have grown beyond the promise.
    """
    seconds = max(requests / rate, LEAST_TTFTS * (plan.slo.ttft_s or 0.0))
    asked = msgspec.structs.replace(at_rate(plan, rate), seconds=seconds, warm_up_s=0.0)
    return point_of(simulated(asked, fleet), asked, rate)


Heard = Callable[[float, Point], None]


def simulated_capacity(
    plan: Plan, fleet: Fleet, first: float, requests: int = REQUESTS, heard: Heard | None = None
) -> float:
    """The highest rate that the simulation holds; 0 where it holds none above a 4,000th of `first`.

    Doubles or halves from `first`, then halves the logarithm's interval. `heard` is told of each rate that is tried.
    """

    def holds(rate: float) -> bool:
        point = simulated_point(plan, fleet, rate, requests)
        if heard is not None:
            heard(rate, point)
        return point.attainment.value >= TARGET

    low = high = first
    if holds(first):
        for _ in range(MOST_DOUBLINGS):
            low, high = high, high * 2
            if not holds(high):
                break
        else:
            return high
    else:
        for _ in range(MOST_DOUBLINGS):
            low, high = low / 2, low
            if holds(low):
                break
        else:
            return 0.0
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return math.sqrt(low * high)


def measured_capacity(points: Sequence[Point]) -> Estimate | None:
    """Where the measured attainment falls below the target, between two rates by a straight line.

    The interval is where those of the attainments do. None where no rate, or every rate, holds: then only a bound is
    known.
    """
    ordered = sorted(points, key=lambda one: one.rate)
    value = _crossing([(one.rate, one.attainment.value) for one in ordered])
    if value is None:
        return None
    low = _crossing([(one.rate, one.attainment.low or 0.0) for one in ordered])
    high = _crossing([(one.rate, one.attainment.high or 0.0) for one in ordered])
    return Estimate(value, low or (0.0 if low is None else low), ordered[-1].rate if high is None else high)


def _crossing(curve: Sequence[tuple[float, float]]) -> float | None:
    for (rate, share_here), (next_rate, share_there) in pairwise(curve):
        if share_here >= TARGET > share_there:
            return rate + (next_rate - rate) * (share_here - TARGET) / (share_here - share_there)
    return None


class Flip(msgspec.Struct, frozen=True):
    """From `at` on another mode serves more."""

    what: str  # prompt_tokens, or rate
    at: float
    before: Mode
    after: Mode


def best_of(capacities: Mapping[Mode, float]) -> Mode | None:
    """The first of the best; None where no mode holds any rate."""
    best = max(capacities, key=lambda mode: capacities[mode], default=None)
    return best if best is not None and capacities[best] > 0 else None


def flips_of(what: str, swept: Sequence[tuple[float, Mapping[Mode, float]]], near: float = 0.02) -> list[Flip]:
    """Where the best changes along a sweep; a lead of less than `near` changes nothing."""
    found: list[Flip] = []
    leader: Mode | None = None
    for at, values in swept:
        best = best_of(values)
        if best is None:
            continue
        if leader is None:
            leader = best
        elif best != leader and values[best] > values.get(leader, 0.0) * (1 + near):
            found.append(Flip(what, at, leader, best))
            leader = best
    return found


def by_length(
    plan: Plan, fleets: Sequence[Fleet], answer_tokens: int, first: float, say: Callable[[str], None]
) -> list[tuple[float, dict[Mode, float]]]:
    """Simulated capacities by the length of prompts that are all alike, with answers of the workload's mean.

    The promised TTFT is the workload's, so that very long prompts are held by no mode.
    """
    swept: list[tuple[float, dict[Mode, float]]] = []
    for tokens in LENGTHS:
        if tokens + answer_tokens > plan.max_context:
            break
        asked = msgspec.structs.replace(plan, workload=Fixed(tokens, answer_tokens))
        found = {one.mode: simulated_capacity(asked, one, first, REQUESTS // 2) for one in fleets}
        swept.append((float(tokens), found))
        say(f"prompts of {tokens}: " + ", ".join(f"{mode} {rate:.3g}/s" for mode, rate in found.items()))
        first = max(found.values()) or first
    return swept


def by_rate(
    plan: Plan, fleets: Sequence[Fleet], rates: Sequence[float], say: Callable[[str], None]
) -> list[tuple[float, dict[Mode, float]]]:
    """Simulated attainment of the workload by its rate."""
    swept: list[tuple[float, dict[Mode, float]]] = []
    for rate in rates:
        found = {one.mode: simulated_point(plan, one, rate).attainment.value for one in fleets}
        swept.append((rate, found))
        say(f"{rate:.3g}/s: " + ", ".join(f"{mode} {value:.0%} met" for mode, value in found.items()))
    return swept


SLO_SCALES = (0.5, 1.0, 2.0, 4.0)
HOUR_S = 3600.0


def by_ratio(
    plan: Plan, profile: WorkerProfile, workers: int, first: float
) -> tuple[list[tuple[int, int, float]], float]:
    """Simulated capacity of every split of so many workers, each on a machine of its own, and of all aggregated."""
    own = msgspec.structs.replace(profile, beside=None)
    split: list[tuple[int, int, float]] = []
    for prefill in range(1, workers):
        counts = Counts(prefill, workers - prefill)
        rate = simulated_capacity(plan, Fleet("disaggregated", counts, own), first)
        split.append((counts.prefill, counts.decode, rate))
        first = rate or first
    return split, simulated_capacity(plan, Fleet("aggregated", Counts(0, workers), own), first)


def cost_by_slo(plan: Plan, fleet: Fleet, answer_tokens: int, first: float) -> list[tuple[float, float]]:
    """Worker-hours of a million tokens of answers at the mode's capacity, by the SLO's scale; scales held by no rate
    are left out."""
    found: list[tuple[float, float]] = []
    workers = fleet.counts.prefill + fleet.counts.decode
    for scale in reversed(SLO_SCALES):  # the laxest first: what holds there bounds what holds elsewhere
        times = (None if one is None else one * scale for one in (plan.slo.ttft_s, plan.slo.tpot_s))
        rate = simulated_capacity(msgspec.structs.replace(plan, slo=SLO(*times)), fleet, first, REQUESTS // 2)
        if rate > 0:
            found.append((scale, workers / (rate * answer_tokens * HOUR_S) * 1e6))
            first = rate
    return found[::-1]
