"""The autoscaler as Ray Serve's controller calls it: ten times a second, with what it knows of each deployment.

`joint_policy` is the policy of the application: `autoscaling_policy: {policy_function: ...}` in Serve's config file.
What it is told of our own configuration is in the options of the deployments, which come with each context, so it is
said in one place only. Serve ships this module by value: what others share must not live in it.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingContext

from twostroke.cluster.autoscaling.decision_watch import publish
from twostroke.cluster.autoscaling.samples import RouterSample
from twostroke.cluster.autoscaling.scaling_state import ScalingOrder, ScalingState, ScalingView, is_due, take_sample
from twostroke.protocol.settings import from_plain
from twostroke.protocol.stats import Role

POLICY_FUNCTION = "twostroke.cluster.autoscaling.serve_policy:joint_policy"
MISSING_POLICY = "twostroke.cluster.autoscaling.serve_policy:MissingPolicy"

DEPLOYMENTS: Mapping[Role, str] = {"prefill": "PrefillWorker", "decode": "DecodeWorker"}
ROUTER = "Router"
_STATE, _LOOKED = "state", "looked_s"
_COMPLAIN_S = 60.0

_log = logging.getLogger("ray.serve")

Contexts = dict[DeploymentID, AutoscalingContext]
Decisions = dict[DeploymentID, int]
States = dict[DeploymentID, dict[str, Any]]


def joint_policy(contexts: Contexts) -> tuple[Decisions, States]:
    """An application-level policy. Deployments without a decision keep what they have, as all do between decisions."""
    named = {deployment.name: context for deployment, context in contexts.items()}
    decode, router = named.get(DEPLOYMENTS["decode"]), named.get(ROUTER)
    if decode is None or router is None:  # the application is being built up or taken down
        return {}, {}
    kept = decode.policy_state
    at_s = time.monotonic()
    if not is_due(kept.get(_LOOKED), at_s):
        return {}, {decode.deployment_id: kept}
    state: ScalingState | None = kept.get(_STATE)
    decisions: Decisions = {}
    try:  # what is raised here would keep Serve from looking after any of its applications
        state, has_decided = _look(state, named, at_s)
        if has_decided and state.scaling is not None:
            replicas = state.scaling.replicas
            decisions = {named[DEPLOYMENTS[role]].deployment_id: count for role, count in replicas.items()}
            publish(str(decode.app_name), state.scaling)  # last: what nobody is told of holds all the same
    except Exception:
        outcome = "nobody is told of a decision" if decisions else "a decision failed, the number of workers stays"
        _log.exception("autoscaling: %s", outcome)
    return decisions, {decode.deployment_id: {_STATE: state, _LOOKED: at_s}}


def _look(
    state: ScalingState | None, named: Mapping[str, AutoscalingContext], at_s: float
) -> tuple[ScalingState, bool]:
    """Run `take_sample` on what Serve knows."""
    decode, router = named[DEPLOYMENTS["decode"]], named[ROUTER]
    order = msgspec.convert(decode.config.policy.policy_kwargs["order"], ScalingOrder, dec_hook=from_plain)
    targets = {role: named[name].target_num_replicas for role, name in DEPLOYMENTS.items() if name in named}
    routers = {replica.unique_id for replica in router.running_replicas}
    return take_sample(
        state, ScalingView(router_samples(router.raw_metrics or {}), routers, targets, at_s, time.time()), order
    )


def router_samples(raw_metrics: Mapping[str, Mapping[Any, Any]]) -> dict[str, RouterSample]:
    """Return each router's newest sample, from time series by name and replica. Serve's own averages would blur
    counters."""
    numbers: dict[str, dict[str, float]] = {}
    for name, series in raw_metrics.items():
        for replica, points in series.items():
            known = [point for point in points if point.value is not None]
            if known:
                numbers.setdefault(replica.unique_id, {})[name] = known[-1].value
    return {
        router: RouterSample(values["uptime_s"], values) for router, values in numbers.items() if "uptime_s" in values
    }  # the others have told of nothing but their requests under way, which Serve counts by itself


class MissingPolicy:
    """The policy of each deployment, which has no say where the application has its own; it leaves all as it is."""

    def __init__(self, order: dict[str, Any]):
        """`order` is a ScalingOrder, for `joint_policy` to read."""
        self._complained_s: float | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now = time.monotonic()
        if self._complained_s is None or now - self._complained_s > _COMPLAIN_S:
            self._complained_s = now
            _log.error(
                "autoscaling is enabled, but nobody decides: the application in Serve's config file lacks "
                "autoscaling_policy: {policy_function: '%s'}",
                POLICY_FUNCTION,
            )
        return context.target_num_replicas, {}
