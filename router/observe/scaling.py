"""The last decision of the autoscaler, as a router shows it to people and Prometheus.

Routers decide nothing of this. They are told what was decided (`cluster/autoscaling/decision_watch.py`), and pass
it on.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily as Counters
from prometheus_client.core import GaugeMetricFamily as Gauges
from prometheus_client.core import Metric

from twostroke.protocol.stats import Role
from twostroke.router.observe.metrics import family


class RoleScaling(msgspec.Struct, frozen=True):
    """The decision for one role."""

    target: int  # workers
    reason: str  # of the last decision; most of these leave the target as it is
    changed_at: float | None = None  # seconds since 1970; None: not changed since the autoscaler began
    change: str | None = None  # the reason of that


class Scaling(msgspec.Struct, frozen=True):
    """The last decision, and how many there have been."""

    decided_at: float  # seconds since 1970
    roles: dict[Role, RoleScaling]
    demand: dict[str, float]  # the numbers that it came from
    decisions: dict[Role, dict[str, int]]  # by reason, since the autoscaler began
    homes: dict[Role, int] | None = None
    """Workers of each deployment, some of which change their roles; None: each keeps the role of its deployment."""

    @property
    def replicas(self) -> dict[Role, int]:
        """Return the wanted workers of each deployment."""
        return self.targets if self.homes is None else self.homes

    @property
    def targets(self) -> dict[Role, int]:
        """Return the wanted workers of each role."""
        return {role: of_role.target for role, of_role in self.roles.items()}


Expected = Callable[[], Mapping[str, int]]
"""Returns the wanted replicas of each role, routers included."""

LastScaling = Callable[[], Scaling | None]
"""None where the number of workers is fixed."""


def scaling_status(scaling: Scaling, running: Mapping[Role, int], now: float) -> dict[str, Any]:
    """Return the part of GET /status. `running` counts workers that can take requests, `now` is seconds since 1970."""
    return {
        "age_s": round(max(0.0, now - scaling.decided_at), 1),
        "roles": {
            role: {
                "running": running.get(role, 0),
                "target": one.target,
                "reason": one.reason,
                "last_change": one.change,
                "changed_ago_s": None if one.changed_at is None else round(max(0.0, now - one.changed_at), 1),
            }
            for role, one in scaling.roles.items()
        },
        "demand": scaling.demand,
    }


def planned_families(expected: Mapping[str, int], scaling: Scaling | None) -> list[Metric]:
    """Return the series of wanted replicas and of the autoscaler, which are empty without one."""
    decided_at: dict[tuple[str, ...], float] = {} if scaling is None else {(): scaling.decided_at}
    scaling = scaling or Scaling(decided_at=0.0, roles={}, demand={}, decisions={})
    decisions: dict[tuple[str, ...], float] = {}
    for role, reasons in scaling.decisions.items():
        decisions |= {(role, reason): count for reason, count in reasons.items()}
    return [
        family(Gauges, "replicas_expected", "Replicas that there are to be.", ["role"], expected),
        family(Gauges, "autoscaling_target", "Workers that there are to be.", ["role"], scaling.targets),
        family(
            Gauges,
            "autoscaling_last_decision_timestamp_seconds",
            "When the autoscaler decided last, since 1970.",
            [],
            decided_at,
        ),
        family(
            Counters,
            "autoscaling_decisions",
            "Decisions, most of which leave a role as it is.",
            ["role", "reason"],
            decisions,
        ),
        family(Gauges, "autoscaling_demand", "What the last decision came from.", ["quantity"], scaling.demand),
    ]
