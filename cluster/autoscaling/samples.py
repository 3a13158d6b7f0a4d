"""The policy's input and output: the state of the system, put together from what the routers report. Pure.

The load is counted as it arrives. Each router counts its own arrivals, and these numbers add up. All routers report the
same workers, so the report of the router that reaches most of them counts, and of those the newest. A router that has
been silent for a while may still report workers and queues that are gone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import NamedTuple

from twostroke.protocol.stats import Role, StepCosts


class Reason(StrEnum):
    """One for each role and decision."""

    # More workers
    DEMAND = "demand"  # what arrives, and what of late arrived, needs more
    BACKLOG = "backlog"  # what waits would not be worked off in time
    BELOW_MIN = "below_min"  # fewer than the configuration allows
    COSTS_UNKNOWN = "costs_unknown"  # requests wait, and nobody knows yet how long steps take: one more
    TAKEN = "taken"  # the other role could spare one

    # Fewer
    SPARE = "spare"  # the last `cooldown_s` would have been served by fewer
    IDLE = "idle"  # nothing came for `cooldown_s`
    GIVEN = "given"  # the other role needs it more
    ABOVE_MAX = "above_max"  # more than the configuration or the budget allows

    # As many
    STEADY = "steady"  # as many as are needed
    COOLDOWN = "cooldown"  # fewer would do, but the last change was less than `cooldown_s` ago
    REVERSALS = "reversals"  # fewer would do, but this role has gone down and up too often in the last hour
    PENDING = "pending"  # fewer would do, but the last change is still under way
    LIMIT = "limit"  # more are needed than `max` allows
    BUDGET = "budget"  # more are needed than the budget allows
    BETWEEN = "between"  # the next decision is not due yet


class Arrived(NamedTuple):
    """Counters since the routers started, of all that came, the refused included: demand isn't what was served.

    A counter that falls, as when a router ends, counts as one that stood still.
    """

    requests: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0  # of these, found in a prefix cache
    prompt_pairs: float = 0.0  # sum of n (p + n / 2), n new tokens after p cached: attention's part of a prompt's time
    output_tokens: float = 0.0  # of the answers that have ended
    ended: float = 0.0  # requests whose answers have ended

    def since(self, before: "Arrived") -> "Arrived":
        """Return what has arrived since `before`."""
        return Arrived(*(max(0.0, now - then) for now, then in zip(self, before, strict=True)))

    def plus(self, more: "Arrived") -> "Arrived":
        """Both together."""
        return Arrived(*(one + other for one, other in zip(self, more, strict=True)))


@dataclass(frozen=True)
class RoleSignals:
    """The workers of one role together."""

    running: int  # that can take requests: neither starting nor draining
    target: int  # asked for last; another number than `running`: a change is under way
    gpus_each: float = 0.0
    costs: StepCosts | None = None  # of a typical worker, fitted to warm steps alone; None: nobody knows yet
    queued_requests: int = 0
    queued_tokens: int = 0  # prompt tokens still to be computed
    num_decoding: int = 0
    context_tokens: int = 0  # of those
    owned_tokens: int = 0  # room in KV blocks that requests hold
    total_tokens: int = 0  # all room in KV blocks
    max_batch: int = 256  # requests in one step of a worker
    step_tokens: int = 2048  # prompt tokens in one step of a worker

    def times(self, factor: float) -> "RoleSignals":
        """Return the signals with this many times the requests."""
        return replace(
            self, queued_tokens=round(factor * self.queued_tokens), owned_tokens=round(factor * self.owned_tokens)
        )


@dataclass(frozen=True)
class Signals:
    """One sample at the system."""

    at_s: float  # of a monotonic clock
    arrived: Arrived
    prefill: RoleSignals
    decode: RoleSignals
    ttft_s: float | None = None  # the tightest promise among the SLO classes that are asked for; None: none
    tpot_s: float | None = None


@dataclass(frozen=True)
class ScalingDecision:
    """Number of workers that each role should have, with reasons."""

    prefill: int
    decode: int
    prefill_reason: Reason
    decode_reason: Reason
    demand: dict[str, float] = field(default_factory=dict)  # the numbers it came from, for people


LATE_S = 5.0
"""Behind the sample that was heard last: what is older says nothing of the workers where others tell. Samples are
delayed by no more, either, or the delay is taken for time that has passed."""


@dataclass(frozen=True)
class RouterSample:
    """One router's numbers (`router/slo/classes.py`), which have no moment in them: clocks differ, and are set."""

    uptime_s: float  # since the router began, by its own monotonic clock
    numbers: Mapping[str, float]

    @property
    def num_workers(self) -> float:
        """Return how many workers the router can reach."""
        return self.numbers.get("prefill.running", 0.0) + self.numbers.get("decode.running", 0.0)


class RouterCounters(NamedTuple):
    """Numbers that a router told last."""

    uptime_s: float
    heard_s: float  # when it was first heard, by the listener's monotonic clock
    at_s: float  # on the time that the routers tell of, as `Counted.elapsed_s`
    arrived: Arrived


@dataclass(frozen=True)
class Counted:
    """The counters of all routers together, which go on growing where routers come and go."""

    begun_s: float  # by the listener's monotonic clock: nobody knows when what had arrived before did
    arrived: Arrived = field(default_factory=Arrived)
    # Of time that the routers have told of. A sample that comes late is not taken for a burst.
    elapsed_s: float = 0.0
    last: Mapping[str, RouterCounters] = field(default_factory=dict)  # of each router, by its replica's id

    def heard_since(self, at_s: float) -> set[str]:
        """Routers that have told something new after this moment of the listener's clock."""
        return {router for router, counters in self.last.items() if counters.heard_s > at_s}


def count(before: Counted, samples: Mapping[str, RouterSample], routers: Collection[str], now_s: float) -> Counted:
    """Add what has arrived meanwhile. `routers` are all that run, also those that have told nothing lately.

    `now_s` is the listener's monotonic clock. Time passes as the routers tell, each by its own clock: from the newest
    to the newest, since routers that tell out of step would add up to too much. A router is put where the others are
    when it is first heard.
    """
    last = {router: counters for router, counters in before.last.items() if router in routers}
    arrived = before.arrived
    for router, sample in samples.items():
        if router not in routers:
            continue
        known, now = last.get(router), _arrived(sample)
        if known is None:
            is_new = sample.uptime_s <= now_s - before.begun_s
            arrived = arrived.plus(now if is_new else Arrived())
            last[router] = RouterCounters(sample.uptime_s, now_s, before.elapsed_s, now)
        elif sample.uptime_s > known.uptime_s:
            arrived = arrived.plus(now.since(known.arrived))
            step_s = min(sample.uptime_s - known.uptime_s, now_s - known.heard_s + LATE_S)
            last[router] = RouterCounters(sample.uptime_s, now_s, known.at_s + step_s, now)
    elapsed_s = max((counters.at_s for counters in last.values()), default=0.0)
    return Counted(before.begun_s, arrived, max(before.elapsed_s, elapsed_s), last)


def scaling_signals(
    samples: Mapping[str, RouterSample],
    counted: Counted,
    targets: Mapping[Role, int],
    gpus_each: Mapping[Role, float],
) -> Signals:
    """One sample. `samples` are of routers that are counted, one at least; a role without a target has no workers."""
    heard_s = {router: counted.last[router].heard_s for router in samples}
    newest_s = max(heard_s.values())
    timely = (router for router in samples if heard_s[router] > newest_s - LATE_S)
    numbers = samples[max(timely, key=lambda router: (samples[router].num_workers, heard_s[router]))].numbers

    def role_signals(role: Role) -> RoleSignals:
        names = [one.name for one in fields(RoleSignals) if f"{role}.{one.name}" in numbers]
        named = {
            "running": 0,
            "target": targets.get(role, 0),
            **{name: int(numbers[f"{role}.{name}"]) for name in names},
        }
        return RoleSignals(**named, gpus_each=gpus_each.get(role, 0.0), costs=_costs(role, numbers))

    return Signals(
        at_s=counted.elapsed_s,
        arrived=counted.arrived,
        prefill=role_signals("prefill"),
        decode=role_signals("decode"),
        ttft_s=_tightest(samples, "ttft_s"),
        tpot_s=_tightest(samples, "tpot_s"),
    )


def _costs(role: Role, numbers: Mapping[str, float]) -> StepCosts | None:
    if f"{role}.base_s" not in numbers:
        return None
    return StepCosts(
        base_s=numbers[f"{role}.base_s"],
        token_s=numbers[f"{role}.token_s"],
        pair_s=numbers[f"{role}.pair_s"],
        row_s=numbers[f"{role}.row_s"],
        context_s=numbers[f"{role}.context_s"],
        num_samples=int(numbers[f"{role}.num_samples"]),
        experts_s=numbers.get(f"{role}.experts_s", 0.0),  # routers of before tell none
        expert_share=numbers.get(f"{role}.expert_share", 0.0),
    )


def _tightest(samples: Mapping[str, RouterSample], name: str) -> float | None:
    promised = [sample.numbers.get(name, 0.0) for sample in samples.values()]
    return min((one for one in promised if one > 0), default=None)


def _arrived(sample: RouterSample) -> Arrived:
    return Arrived(*(sample.numbers.get(name, 0.0) for name in Arrived._fields))
