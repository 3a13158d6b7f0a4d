"""How fast a role may follow its need: up at once, down when it is sure that the load has gone."""

from dataclasses import dataclass, replace

from twostroke.cluster.autoscaling.config import AutoscalingConfig, RoleLimits
from twostroke.cluster.autoscaling.demand import Need
from twostroke.cluster.autoscaling.reasons import Reason
from twostroke.cluster.autoscaling.signals import RoleSignals
from twostroke.protocol.step_costs import StepCosts

HOUR_S = 3600.0
FIRST_STARTUP_S = 30.0
"""What a worker is thought to take from its order to its first request until one has shown."""


@dataclass(frozen=True)
class RoleMemory:
    """What is remembered of one role."""

    changed_s: float | None = None  # when its number was last changed, or the policy began
    went_up: bool | None = None  # which way; None: not yet
    reversals: tuple[float, ...] = ()  # when it went the other way, of the last hour
    ordered_s: float | None = None  # since when more workers were asked for than run
    startup_s: float = FIRST_STARTUP_S
    costs: StepCosts | None = None  # the last known: workers that are all new, or gone, tell none

    def seen(self, role: RoleSignals, now_s: float) -> "RoleMemory":
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
class Wish:
    """What a role would have if there were no other."""

    workers: int
    reason: Reason


@dataclass(frozen=True)
class Needs:
    """Of one role: `least` is that of a somewhat larger load, so that what was given back isn't missed at once."""

    need: Need
    least: Need
    idle: bool  # nothing came in the window, and nothing is there


def wish(
    role: RoleSignals, needs: Needs, limits: RoleLimits, memory: RoleMemory, config: AutoscalingConfig, now_s: float
) -> Wish:
    """The number that this role alone would have now."""
    if role.target < limits.min:
        return Wish(limits.min, Reason.BELOW_MIN)
    if role.target > limits.max:
        return Wish(limits.max, Reason.ABOVE_MAX)
    if not needs.need.known:
        return _blind(role, needs, limits)
    wanted = max(limits.min, needs.need.workers)
    if wanted > role.target:
        if role.target == limits.max:
            return Wish(limits.max, Reason.LIMIT)
        backlog = needs.need.from_backlog and needs.need.now > needs.need.lately
        return Wish(min(wanted, limits.max), Reason.BACKLOG if backlog else Reason.DEMAND)
    least = max(limits.min, needs.least.workers)
    if least >= role.target:
        return Wish(role.target, Reason.STEADY)
    if needs.idle:
        return Wish(least, Reason.IDLE)
    held = _held(role, memory, config, now_s)
    return Wish(role.target, held) if held else Wish(least, Reason.SPARE)


def _blind(role: RoleSignals, needs: Needs, limits: RoleLimits) -> Wish:
    """Nobody knows what steps cost: one more while more wait than there are workers, none less while anything comes."""
    if needs.idle and role.target > limits.min:
        return Wish(limits.min, Reason.IDLE)
    if role.queued_requests > role.running and role.running == role.target < limits.max:
        return Wish(role.target + 1, Reason.COSTS_UNKNOWN)
    return Wish(role.target, Reason.STEADY)


def _held(role: RoleSignals, memory: RoleMemory, config: AutoscalingConfig, now_s: float) -> Reason | None:
    """Why this role may not shrink now."""
    since_s = now_s - (memory.changed_s if memory.changed_s is not None else now_s)
    if since_s < config.cooldown_s:
        # A change that takes longer than a cooldown, as where no machine can be had, is no reason to wait for ever.
        return Reason.PENDING if role.running != role.target else Reason.COOLDOWN
    # One more reversal now, and another when it turns out to be wrong.
    if memory.went_up and len(memory.reversals) + 2 > config.reversals_per_hour:
        return Reason.REVERSALS
    return None
