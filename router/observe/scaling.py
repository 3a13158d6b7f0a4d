"""How many workers there are to be, as the autoscaler decided last: what a router tells of it to people and Prometheus.

Routers decide nothing of this. They are told what was decided (`cluster/autoscaling/decision_watch.py`), and pass
it on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.protocol.stats import Role

_PREFIX = "twostroke:autoscaling_"


class RoleScaling(msgspec.Struct, frozen=True):
    """What was decided for one role."""

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

    @property
    def targets(self) -> dict[Role, int]:
        """How many workers of each role there are to be."""
        return {role: of_role.target for role, of_role in self.roles.items()}


LastScaling = Callable[[], Scaling | None]


def never_scaled() -> Scaling | None:
    """Where the number of workers is fixed."""
    return None


def scaling_status(scaling: Scaling, running: Mapping[Role, int], now: float) -> dict[str, Any]:
    """What GET /status says. `running` are the workers that can take requests, `now` is in seconds since 1970."""
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


class ScalingCollector(Collector):
    """The series of the autoscaler; without one they are there, and empty."""

    def __init__(self, last: LastScaling):
        self._last = last

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to check names against: reasons come with decisions

    def collect(self) -> Iterable[Metric]:
        target = GaugeMetricFamily(_PREFIX + "target", "Workers that there are to be.", labels=["role"])
        decided_at = GaugeMetricFamily(
            _PREFIX + "last_decision_timestamp_seconds", "When the autoscaler decided last, since 1970."
        )
        decisions = CounterMetricFamily(
            _PREFIX + "decisions", "Decisions, most of which leave a role as it is.", labels=["role", "reason"]
        )
        demand = GaugeMetricFamily(_PREFIX + "demand", "What the last decision came from.", labels=["quantity"])
        scaling = self._last()
        if scaling is not None:
            decided_at.add_metric((), scaling.decided_at)
            for role, one in scaling.roles.items():
                target.add_metric((role,), one.target)
            for role, reasons in scaling.decisions.items():
                for reason, count in reasons.items():
                    decisions.add_metric((role, reason), count)
            for quantity, value in scaling.demand.items():
                demand.add_metric((quantity,), value)
        return target, decided_at, decisions, demand
