"""The joint policy of prefill and decode workers: a sample at the system and what it remembers in, a decision out.

The same code decides in the simulation (`tests/simulation/autoscaling`) and live (`serve_policy.py`). Nothing here does
I/O, reads a clock or knows Ray. A role follows its need up at once, and down when it is sure that the load has gone.
Both roles share the GPUs: where these don't suffice, the role that is further from its need gets the next one.
"""

import math
from dataclasses import dataclass, field, replace

from twostroke.cluster.autoscaling.demand import (
    NONE,
    SETTLE_S,
    History,
    RoleDemand,
    Window,
    aggregated_demand,
    decode_demand,
    prefill_demand,
)
from twostroke.cluster.autoscaling.samples import Reason, RoleSignals, ScalingDecision, Signals
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.protocol.stats import StepCosts

HOUR_S = 3600.0
FIRST_STARTUP_S = 30.0
"""Assumed start-up time of a worker, in seconds, until one has been measured."""


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one role."""

    changed_s: float | None = None  # when its number was last changed, or the policy began
    went_up: bool | None = None  # which way; None: not yet
    reversals: tuple[float, ...] = ()  # when it went the other way, of the last hour
    ordered_s: float | None = None  # since when more workers were asked for than run
    startup_s: float = FIRST_STARTUP_S
    costs: StepCosts | None = None  # the last known: workers that are all new, or gone, tell none

    def updated(self, role: RoleSignals, now_s: float) -> "RoleMemory":
        """Notices that ordered workers have come, and how long that took."""
        memory = self if self.changed_s is not None else replace(self, changed_s=now_s)
        if memory.ordered_s is not None and role.running >= role.target:
            took_s = now_s - memory.ordered_s
            memory = replace(memory, ordered_s=None, startup_s=(memory.startup_s + took_s) / 2)
        costs = role.costs or memory.costs
        return replace(memory, costs=costs, reversals=tuple(at for at in memory.reversals if at > now_s - HOUR_S))

    def changed(self, before: int, after: int, now_s: float) -> "RoleMemory":
        """The number of workers is another from now on, or the same."""
        if after == before:
            return self
        up = after > before
        turned = self.went_up is not None and up != self.went_up
        return replace(
            self,
            changed_s=now_s,
            went_up=up,
            reversals=(*self.reversals, now_s) if turned else self.reversals,
            ordered_s=now_s if up and self.ordered_s is None else self.ordered_s if up else None,
        )


@dataclass(frozen=True)
class RoleTarget:
    """Number of workers that a role would have if it were alone, with the reason."""

    workers: int
    reason: Reason


@dataclass(frozen=True)
class RoleNeeds:
    """Demand of one role. `least` is that of a slightly larger load, so that a worker that was given back is not
    missed at once."""

    need: RoleDemand
    least: RoleDemand
    idle: bool  # nothing came in the window, and nothing is there


def role_target(
    role: RoleSignals, needs: RoleNeeds, limits: RoleLimits, memory: RoleMemory, config: AutoscalingConfig, now_s: float
) -> RoleTarget:
    """The number that this role alone would have now."""
    if role.target < limits.min:
        return RoleTarget(limits.min, Reason.BELOW_MIN)
    if role.target > limits.max:
        return RoleTarget(limits.max, Reason.ABOVE_MAX)
    if not needs.need.known:
        return _blind(role, needs, limits)
    wanted = max(limits.min, needs.need.workers)
    if wanted > role.target:
        if role.target == limits.max:
            return RoleTarget(limits.max, Reason.LIMIT)
        backlog = needs.need.from_backlog and needs.need.now > needs.need.lately
        return RoleTarget(min(wanted, limits.max), Reason.BACKLOG if backlog else Reason.DEMAND)
    least = max(limits.min, needs.least.workers)
    if least >= role.target:
        return RoleTarget(role.target, Reason.STEADY)
    if needs.idle:
        return RoleTarget(least, Reason.IDLE)
    reason = _held(role, memory, config, now_s)
    return RoleTarget(role.target, reason) if reason else RoleTarget(least, Reason.SPARE)


def _blind(role: RoleSignals, needs: RoleNeeds, limits: RoleLimits) -> RoleTarget:
    """Decide without step costs: add a worker while more requests wait than workers run, drop none while any comes."""
    if needs.idle and role.target > limits.min:
        return RoleTarget(limits.min, Reason.IDLE)
    if role.queued_requests > role.running and role.running == role.target < limits.max:
        return RoleTarget(role.target + 1, Reason.COSTS_UNKNOWN)
    return RoleTarget(role.target, Reason.STEADY)


def _held(role: RoleSignals, memory: RoleMemory, config: AutoscalingConfig, now_s: float) -> Reason | None:
    """Return why this role may not shrink now, or None."""
    since_s = now_s - (memory.changed_s if memory.changed_s is not None else now_s)
    if since_s < config.cooldown_s:
        # A change that takes longer than a cooldown, as where no machine can be had, is no reason to wait for ever.
        return Reason.PENDING if role.running != role.target else Reason.COOLDOWN
    # One more reversal now, and another when it turns out to be wrong.
    if memory.went_up and len(memory.reversals) + 2 > config.reversals_per_hour:
        return Reason.REVERSALS
    return None


WORTH_MOVING = 1.2
"""A GPU changes roles only where the worse served role is then served by so much better: a restart costs something."""


def role_changes(decision: ScalingDecision, signals: Signals) -> int:
    """Return how many workers a decision has change from decode to prefill; negative: the other way."""
    p, d = decision.prefill - signals.prefill.target, decision.decode - signals.decode.target
    if p > 0 > d:
        return min(p, -d)
    return -min(-p, d) if d > 0 > p else 0


@dataclass(frozen=True)
class Claim:
    """Current, wanted and allowed number of workers of a role."""

    has: int
    needs: int  # what the load needs
    wants: int  # what it is to have if the GPUs suffice: not less than it has while it may not shrink
    limits: RoleLimits
    gpus_each: float


def share(prefill: Claim, decode: Claim, budget: float | None) -> tuple[int, int]:
    """(prefill, decode) workers within `budget` GPUs (workers where neither role has GPUs).

    Requests pass both roles one after the other, so what is served in time is the lesser of has / needs of the two:
    each GPU goes where that is least. The minima are kept, whatever they cost.
    """
    if budget is None or _gpus(prefill, decode, prefill.wants, decode.wants) <= budget + 1e-9:
        return prefill.wants, decode.wants
    best = _filled_up(prefill, decode, budget)
    now = (_clamped(prefill, prefill.has), _clamped(decode, decode.has))
    if _gpus(prefill, decode, *now) > budget + 1e-9:
        return best
    gives = best[0] < now[0] or best[1] < now[1]
    if gives and _served_share(prefill, decode, best) < WORTH_MOVING * _served_share(prefill, decode, now):
        return now
    return best


def _filled_up(prefill: Claim, decode: Claim, budget: float) -> tuple[int, int]:
    """Share the budget from the minima up, one worker at a time for the role that is served worse."""
    p, d = prefill.limits.min, decode.limits.min
    if p == 0 and prefill.needs > 0 and _gpus(prefill, decode, 1, d) <= budget + 1e-9:
        p = 1  # none at all would be served worst
    while True:
        may_p = p < min(prefill.limits.max, max(prefill.needs, p)) and (
            _gpus(prefill, decode, p + 1, d) <= budget + 1e-9
        )
        may_d = d < min(decode.limits.max, max(decode.needs, d)) and (_gpus(prefill, decode, p, d + 1) <= budget + 1e-9)
        if not may_p and not may_d:
            return p, d
        if may_p and (not may_d or p * decode.needs <= d * prefill.needs):
            p += 1
        else:
            d += 1


def _served_share(prefill: Claim, decode: Claim, workers: tuple[int, int]) -> float:
    return min(workers[0] / max(1, prefill.needs), workers[1] / max(1, decode.needs), 1.0)


def _clamped(claim: Claim, workers: int) -> int:
    return min(max(workers, claim.limits.min), claim.limits.max)


def _gpus(prefill: Claim, decode: Claim, p: int, d: int) -> float:
    if prefill.gpus_each <= 0 and decode.gpus_each <= 0:
        return float(p + d)
    return p * prefill.gpus_each + d * decode.gpus_each


MARGIN = 1.05
"""A role shrinks only to what would serve so many times the load."""


@dataclass(frozen=True)
class PolicyMemory:
    """Memory of the policy between decisions. It begins empty."""

    history: History = field(default_factory=History)
    decided_s: float | None = None
    prefill: RoleMemory = field(default_factory=RoleMemory)
    decode: RoleMemory = field(default_factory=RoleMemory)


def decide(signals: Signals, memory: PolicyMemory, config: AutoscalingConfig) -> tuple[ScalingDecision, PolicyMemory]:
    """Decide how many workers each role should have now.

    Call it about once a second, so that arrivals are known by the second. It makes a new decision every `interval_s`;
    in between the targets stay.
    """
    now_s = signals.at_s
    memory = replace(
        memory,
        history=memory.history.updated(signals, config.cooldown_s),
        prefill=memory.prefill.updated(signals.prefill, now_s),
        decode=memory.decode.updated(signals.decode, now_s),
    )
    if memory.decided_s is not None and 0 <= now_s - memory.decided_s < config.interval_s - 1e-6:
        kept = ScalingDecision(signals.prefill.target, signals.decode.target, Reason.BETWEEN, Reason.BETWEEN)
        return kept, memory
    decision = _decision(_with_known_costs(signals, memory), memory, config)
    to_prefill = 0
    if config.change_roles:  # what is neither a start nor an end is no change of a role's number
        to_prefill = role_changes(decision, signals)
    return decision, replace(
        memory,
        decided_s=now_s,
        prefill=memory.prefill.changed(signals.prefill.target + to_prefill, decision.prefill, now_s),
        decode=memory.decode.changed(signals.decode.target - to_prefill, decision.decode, now_s),
    )


def _with_known_costs(signals: Signals, memory: PolicyMemory) -> Signals:
    """Costs that no worker tells now are those last told; with no prefill worker ever, those of the decode workers."""
    decode = signals.decode.costs or memory.decode.costs
    prefill = signals.prefill.costs or memory.prefill.costs or (None if signals.prefill.running else decode)
    return replace(
        signals, prefill=replace(signals.prefill, costs=prefill), decode=replace(signals.decode, costs=decode)
    )


def _decision(signals: Signals, memory: PolicyMemory, config: AutoscalingConfig) -> ScalingDecision:
    window = memory.history.window()
    idle = _idle(signals, memory.history, config)
    more = replace(signals, prefill=signals.prefill.times(MARGIN), decode=signals.decode.times(MARGIN))
    needs = _joint_needs(signals, window, memory, config)
    least = _joint_needs(more, window.times(MARGIN), memory, config)
    prefill, decode = (RoleNeeds(*both, idle) for both in zip(needs, least, strict=True))
    p = role_target(signals.prefill, prefill, config.prefill, memory.prefill, config, signals.at_s)
    d = role_target(signals.decode, decode, config.decode, memory.decode, config, signals.at_s)
    if config.change_roles:
        p, d = _with_role_changes(signals, p, d, prefill, decode, config)
    claims = (
        Claim(signals.prefill.target, _needed(prefill.need, p), p.workers, config.prefill, signals.prefill.gpus_each),
        Claim(signals.decode.target, _needed(decode.need, d), d.workers, config.decode, signals.decode.gpus_each),
    )
    counts = share(*claims, config.budget)
    gave = (counts[0] < min(p.workers, claims[0].has), counts[1] < min(d.workers, claims[1].has))
    reasons = (_reason(p, claims[0].has, counts[0], gave[1]), _reason(d, claims[1].has, counts[1], gave[0]))
    return ScalingDecision(*counts, *reasons, demand=_numbers(signals, window, memory, prefill, decode))


def _with_role_changes(
    signals: Signals, p: RoleTarget, d: RoleTarget, prefill: RoleNeeds, decode: RoleNeeds, config: AutoscalingConfig
) -> tuple[RoleTarget, RoleTarget]:
    """Have a role give the other one what that lacks and it can spare itself, however lately it has changed.

    Nothing is lost by it, as the worker can change back at once: so it waits for no cooldown.
    """
    if count := _workers_to_change(signals.prefill, p, prefill, config.prefill, signals.decode, d):
        return RoleTarget(signals.prefill.target - count, Reason.GIVEN), d
    if count := _workers_to_change(signals.decode, d, decode, config.decode, signals.prefill, p):
        return p, RoleTarget(signals.decode.target - count, Reason.GIVEN)
    return p, d


def _workers_to_change(
    giver: RoleSignals, own: RoleTarget, needs: RoleNeeds, limits: RoleLimits, taker: RoleSignals, taken: RoleTarget
) -> int:
    """Return how many of the giver's workers are to change their role, beyond those that it gives back anyway."""
    if not needs.need.known or own.workers < giver.target:
        return 0
    least = max(limits.min, needs.least.workers)
    return max(0, min(taken.workers - taker.target, giver.target - least))


def _joint_needs(
    signals: Signals, window: Window, memory: PolicyMemory, config: AutoscalingConfig
) -> tuple[RoleDemand, RoleDemand]:
    """Decode workers see arrivals as prefill workers let them through, so prefill is planned first."""
    if config.prefill.max == 0:
        return NONE, aggregated_demand(signals, window, config, memory.decode.startup_s)
    prefill = prefill_demand(signals, window, config, memory.prefill.startup_s)
    workers = max(signals.prefill.target, min(prefill.workers, config.prefill.max))
    decode = decode_demand(signals, window, config, memory.decode.startup_s, workers)
    if config.prefill.min == 0 and prefill.known and prefill.load <= config.spare * max(1, decode.workers):
        prefill = replace(prefill, now=0, lately=0)  # so little that decode workers compute it in the time to spare
    return prefill, decode


def _idle(signals: Signals, history: History, config: AutoscalingConfig) -> bool:
    there = (signals.prefill, signals.decode)
    busy = any(role.num_decoding or role.queued_requests or role.queued_tokens for role in there)
    return (
        not busy
        and not any(sample.arrived.requests for sample in history.samples)
        and signals.at_s - history.began_s >= config.cooldown_s
    )


def _needed(need: RoleDemand, own: RoleTarget) -> int:
    """Return the demand by which a role shares in the budget: its need, or its own target where the need is unknown."""
    return need.workers if need.known else own.workers


def _reason(own: RoleTarget, has: int, gets: int, other_gave: bool) -> Reason:
    if gets == own.workers:
        return Reason.TAKEN if other_gave and gets > has else own.reason
    if gets < has:
        return Reason.GIVEN if has <= own.workers or own.reason is not Reason.ABOVE_MAX else Reason.ABOVE_MAX
    if gets > has:
        return Reason.TAKEN if other_gave else own.reason
    return Reason.BUDGET


def _numbers(
    signals: Signals, window: Window, memory: PolicyMemory, prefill: RoleNeeds, decode: RoleNeeds
) -> dict[str, float]:
    count = window.count_of_last(SETTLE_S)
    span_s = float(window.span_s[-count:].sum()) or math.inf
    prompts_at = signals.prefill if signals.prefill.running else signals.decode
    return {
        "requests_per_s": float(window.requests[-count:].sum()) / span_s,
        "prompt_tokens_per_s": float(window.new_tokens[-count:].sum()) / span_s,
        "queued_tokens": float(prompts_at.queued_tokens),
        "output_tokens_per_request": window.mean_output or 0.0,
        "prefill_load": prefill.need.load,
        "prefill_now": float(prefill.need.now),
        "prefill_lately": float(prefill.need.lately),
        "prefill_startup_s": memory.prefill.startup_s,
        "decode_load": decode.need.load,
        "decode_now": float(decode.need.now),
        "decode_lately": float(decode.need.lately),
        "decode_startup_s": memory.decode.startup_s,
    }
