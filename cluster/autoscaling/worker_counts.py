"""How many workers a role may have: what its section and the section `autoscaling` say together."""

from collections.abc import Mapping
from typing import NamedTuple

from twostroke.cluster.autoscaling.config import AutoscalingConfig, RoleLimits
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import Role


class WorkerCounts(NamedTuple):
    """Of one role. All the same where the number is fixed; `most` is 0 where there is no such role."""

    least: int
    first: int  # to begin with
    most: int


def worker_counts(autoscaling: AutoscalingConfig, role: Role, replicas: int) -> WorkerCounts:
    """Of a role that begins with so many replicas."""
    limits: RoleLimits = getattr(autoscaling, role)
    is_left_out = replicas == 0 and limits == RoleLimits()
    if not autoscaling.enabled or is_left_out:
        return WorkerCounts(replicas, replicas, replicas)
    return WorkerCounts(limits.min, replicas, limits.max)


def check_counts(
    autoscaling: AutoscalingConfig, counts: Mapping[Role, WorkerCounts], gpus_each: Mapping[Role, float]
) -> None:
    """Raises ConfigError for numbers that contradict each other."""
    for role, (least, first, most) in counts.items():
        if not least <= first <= most:
            raise ConfigError(
                f"{role}.replicas: {first}, where the autoscaler begins, must be from {least} (autoscaling.{role}.min) "
                f"to {most} (autoscaling.{role}.max)"
            )
    if not autoscaling.enabled or autoscaling.budget is None:
        return
    unit = "GPUs" if any(gpus_each.values()) else "workers"
    needed = sum(each.least * (gpus_each[role] or 1.0) for role, each in counts.items())
    if needed > autoscaling.budget:
        raise ConfigError(
            f"autoscaling.budget: {autoscaling.budget:g} {unit} are fewer than the {needed:g} that both roles take "
            "at least (autoscaling.prefill.min, autoscaling.decode.min)"
        )
