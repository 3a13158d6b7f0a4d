"""The policy, called in time and remembered between calls: `serve_policy.py` without Ray. Pure but for its log.

What it keeps may be lost, as when Serve's controller starts anew: then it begins anew, counts from there, and a role
shrinks again once the policy has seen as much as it wants to see before.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from twostroke.cluster.autoscaling.samples import Counted, Reason, RouterSample, ScalingDecision, count, scaling_signals
from twostroke.cluster.autoscaling.scaling_decision import PolicyMemory, decide
from twostroke.cluster.config.autoscaling import AutoscalingConfig
from twostroke.protocol.stats import Role
from twostroke.router.observe.scaling import RoleScaling, Scaling

LOOK_S = 1.0
"""Seconds between two samples. The policy knows arrivals by the second and decides every `interval_s`."""

STALE_S = 30.0
"""A router that has told nothing for so long is not counted on; without any there is no decision."""

_log = logging.getLogger("ray.serve")  # its records go to the log of Serve's controller


@dataclass(frozen=True)
class ScalingOrder:
    """Configuration of the autoscaler. It travels in the options of the deployments."""

    config: AutoscalingConfig
    gpus_each: Mapping[Role, float]
    roles: tuple[Role, ...]  # that there are


@dataclass(frozen=True)
class ScalingView:
    """ScalingState of the application that Serve's controller sees at one moment."""

    samples: Mapping[str, RouterSample]  # by router, as they told last
    routers: Collection[str]  # that run
    targets: Mapping[Role, int]  # workers of each deployment
    at_s: float  # of a monotonic clock
    now: float  # seconds since 1970, for people


@dataclass(frozen=True)
class ScalingState:
    """ScalingState that is kept between calls."""

    counted: Counted
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    told_s: float | None = None  # when a router was last heard of
    scaling: Scaling | None = None


def is_due(looked_s: float | None, at_s: float) -> bool:
    """Return whether the next sample is due."""
    return looked_s is None or at_s - looked_s >= LOOK_S


def take_sample(before: ScalingState | None, view: ScalingView, order: ScalingOrder) -> tuple[ScalingState, bool]:
    """Take a sample; return the new state, and whether it brought a decision, which is then in `scaling`."""
    state = before or ScalingState(Counted(begun_s=view.at_s), told_s=view.at_s)
    counted = count(state.counted, view.samples, view.routers, view.at_s)
    state = replace(state, counted=counted)
    heard = counted.heard_since(view.at_s - STALE_S)
    fresh = {router: one for router, one in view.samples.items() if router in heard}
    if not fresh:
        return _blind(state, view), False
    targets = _role_targets(state.scaling, view)
    signals = scaling_signals(fresh, counted, targets, order.gpus_each)
    decision, memory = decide(signals, state.memory, order.config)
    state = replace(state, memory=memory, told_s=view.at_s)
    if Reason.BETWEEN in (decision.prefill_reason, decision.decode_reason):
        return state, False
    return replace(state, scaling=_scaling(state.scaling, decision, view, order, targets)), True


def _role_targets(last: Scaling | None, view: ScalingView) -> Mapping[Role, int]:
    """Return the workers that there are to be of each role: as decided last, if that is what Serve keeps to."""
    if last is not None and last.homes == view.targets:
        return last.targets
    return view.targets


def home_targets(targets: Mapping[Role, int], homes: Mapping[Role, int]) -> dict[Role, int]:
    """Return the workers of each deployment by which there are as many of each role, with the fewest starts and ends.

    `homes` are those there are; the others change their roles.
    """
    missing = sum(targets.values()) - sum(homes.values())
    result = dict(homes)
    for role, target in targets.items():
        gap = target - homes[role]
        change = min(missing, gap) if missing > 0 else max(missing, gap)
        if gap * missing > 0:
            result[role] += change
            missing -= change
    return result


def _blind(state: ScalingState, view: ScalingView) -> ScalingState:
    """No router tells anything: everything stays as it is. Said once."""
    if state.told_s is not None and view.at_s - state.told_s >= STALE_S:
        _log.warning("autoscaling: no router has told of demand for %g s: the number of workers stays", STALE_S)
        return replace(state, told_s=None)
    return state


def _scaling(
    before: Scaling | None,
    decision: ScalingDecision,
    view: ScalingView,
    order: ScalingOrder,
    targets: Mapping[Role, int],
) -> Scaling:
    """The decision as it is told to everybody; changes of the `targets` of before are logged."""
    roles: dict[Role, RoleScaling] = {}
    changed_at: float | None
    change: str | None
    decisions = {} if before is None else dict(before.decisions)
    for role in order.roles:
        target, reason = _of(decision, role)
        if target != targets[role]:
            _log.info("autoscaling: %s workers from %d to %d (%s)", role, targets[role], target, reason)
            changed_at, change = view.now, str(reason)
        elif before is not None and role in before.roles:
            changed_at, change = before.roles[role].changed_at, before.roles[role].change
        else:
            changed_at, change = None, None
        roles[role] = RoleScaling(target, str(reason), changed_at, change)
        decisions[role] = dict(Counter(decisions.get(role, {})) + Counter([str(reason)]))
    homes = None
    if order.config.change_roles:
        homes = home_targets({role: one.target for role, one in roles.items()}, view.targets)
    return Scaling(view.now, roles, decision.demand, decisions, homes)


def _of(decision: ScalingDecision, role: Role) -> tuple[int, Reason]:
    if role == "prefill":
        return decision.prefill, decision.prefill_reason
    return decision.decode, decision.decode_reason
