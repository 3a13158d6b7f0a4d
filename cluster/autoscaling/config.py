"""The section `autoscaling` of the configuration; `prefill.replicas` and `decode.replicas` say where to begin.

How many workers a role may have: what its section and the section `autoscaling` say together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import Role


@dataclass(frozen=True)
class RoleLimits:
    """How many workers a role may have. Raises ConfigError."""

    min: int = 1  # of prefill workers 0 is allowed: decode workers then read the prompts while there are few
    max: int = 1  # 0: the role is left out, which `prefill` may be
    ongoing: float = 8.0  # policy `separate`: requests a worker is to have at once, those that wait included

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise ConfigError(f"min: {self.min} must be from 0 to max, which is {self.max}")
        if self.ongoing <= 0:
            raise ConfigError(f"ongoing: {self.ongoing} must be above 0")


@dataclass(frozen=True)
class AutoscalingConfig:
    """When workers come and go. Raises ConfigError."""

    enabled: bool = False
    policy: Literal["joint", "separate"] = "joint"  # separate: each role by its own ongoing requests
    prefill: RoleLimits = field(default_factory=RoleLimits)
    decode: RoleLimits = field(default_factory=RoleLimits)
    budget: float | None = None  # GPUs of both roles together, or workers where they have none; None: the maxima
    interval_s: float = 5.0  # between decisions
    cooldown_s: float = 900.0  # a role shrinks to what the last so many seconds needed, so long after its last change
    slack: float = 0.5  # of the TTFT that is promised: so long may prompts wait
    attainment: float = 0.98  # share of requests of the last `cooldown_s` that as few workers would have served in time
    spare: float = 0.15  # of each role's capacity that is kept free
    reversals_per_hour: int = 2  # a role that went down and up so often does not shrink again for an hour

    def __post_init__(self) -> None:
        if self.policy not in ("joint", "separate"):
            raise ConfigError(f"policy: {self.policy!r} must be joint or separate")
        if self.decode.min < 1:
            raise ConfigError("decode.min: must be at least 1; only prefill workers may all go")
        if self.interval_s <= 0:
            raise ConfigError(f"interval_s: {self.interval_s} must be above 0")
        if self.cooldown_s < self.interval_s:
            raise ConfigError(f"cooldown_s: {self.cooldown_s} must be at least interval_s, which is {self.interval_s}")
        for name in ("slack", "attainment"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be above 0 and at most 1")
        if not 0 <= self.spare < 1:
            raise ConfigError(f"spare: {self.spare} must be from 0 to below 1")
        if self.reversals_per_hour < 2:
            raise ConfigError(f"reversals_per_hour: {self.reversals_per_hour} must be at least 2: once down, once up")
        if self.budget is not None and self.budget <= 0:
            raise ConfigError(f"budget: {self.budget} must be above 0; leave it out to have the maxima")


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
