"""The section `autoscaling`, and how many workers a role may have by it and by its own `replicas`, where it begins."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from twostroke.protocol.settings import Section
from twostroke.protocol.stats import Role


class RoleLimits(Section):
    """Limits of the number of workers of a role."""

    min: NonNegativeInt = 1
    """Workers, at most `max`; of decode workers at least 1. With no prefill worker decode workers compute the prompts
    themselves while little comes."""
    max: NonNegativeInt = 1
    """Workers that the machines have room for, at least `min`."""

    @model_validator(mode="after")
    def _check_limits(self) -> "RoleLimits":
        if self.min > self.max:
            raise ValueError(f"min: {self.min} must be from 0 to max, which is {self.max}")
        return self


class AutoscalingConfig(Section):
    """Number of workers, decided anew every few seconds from what arrives (docs/autoscaling.md). `prefill.replicas`
    and `decode.replicas` are the numbers to begin with and must lie between `min` and `max`. An aggregated server
    (`prefill.replicas: 0`) leaves `autoscaling.prefill` out."""

    enabled: bool = False
    """`false`: there are as many workers as `replicas` says."""
    prefill: RoleLimits = Field(default_factory=RoleLimits)
    decode: RoleLimits = Field(default_factory=RoleLimits)
    budget: PositiveFloat | None = None
    """GPUs that both roles may take together; workers, where they have no GPUs. null: the maxima."""
    interval_s: Annotated[float, Ge(0.5)] = 5.0
    """Seconds between decisions."""
    cooldown_s: NonNegativeFloat = 900.0
    """Window of scaling down, in seconds, at least `interval_s`. A role shrinks to what this window needed, at the
    earliest this long after its last change; at once when nothing arrived for so long, or when the budget goes to the
    other role. Longer for bursts, shorter for load that changes slowly; longer than a
    worker's start."""
    slack: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of the promised time to the first token for which prompts may wait. Less for more workers sooner."""
    attainment: Annotated[float, Gt(0), Le(1)] = 0.98
    """Share of the last `cooldown_s`' requests that fewer workers must have served in time for a role to shrink."""
    spare: Annotated[float, Ge(0), Lt(1)] = 0.15
    """Share of each role's capacity that is kept free."""
    change_roles: bool = True
    """A role that lacks workers takes those that the other one can spare by changing their roles, which takes a second,
    before any are started. Only with `router.roles: flexible`, and where workers of both roles have the same GPUs and
    ranks."""
    reversals_per_hour: Annotated[int, Ge(2)] = 2
    """Changes of direction per hour. A role shrinks only if shrinking and growing back would stay within this number:
    with 2, a role that shrank and grew back within the last hour does not shrink again."""

    @model_validator(mode="after")
    def _check_times(self) -> "AutoscalingConfig":
        if self.decode.min < 1:
            raise ValueError("decode.min: must be at least 1; only prefill workers may all go")
        if self.cooldown_s < self.interval_s:
            raise ValueError(f"cooldown_s: {self.cooldown_s} must be at least interval_s, which is {self.interval_s}")
        return self


class WorkerCounts(NamedTuple):
    """Numbers of workers of one role. All are equal where the number is fixed; `most` is 0 for an absent role."""

    least: int
    first: int  # to begin with
    most: int


def worker_counts(autoscaling: AutoscalingConfig, role: Role, replicas: int) -> WorkerCounts:
    """Return the numbers of a role that begins with this many replicas."""
    limits: RoleLimits = getattr(autoscaling, role)
    is_left_out = replicas == 0 and limits == RoleLimits()
    if not autoscaling.enabled or is_left_out:
        return WorkerCounts(replicas, replicas, replicas)
    return WorkerCounts(limits.min, replicas, limits.max)


def check_counts(
    autoscaling: AutoscalingConfig, counts: Mapping[Role, WorkerCounts], gpus_each: Mapping[Role, float]
) -> None:
    """Check that the numbers of workers do not contradict each other. Raises ValueError."""
    for role, (least, first, most) in counts.items():
        if not least <= first <= most:
            raise ValueError(
                f"{role}.replicas: {first}, where the autoscaler begins, must be from {least} (autoscaling.{role}.min) "
                f"to {most} (autoscaling.{role}.max)"
            )
    if not autoscaling.enabled or autoscaling.budget is None:
        return
    unit = "GPUs" if any(gpus_each.values()) else "workers"
    needed = sum(each.least * (gpus_each[role] or 1.0) for role, each in counts.items())
    if needed > autoscaling.budget:
        raise ValueError(
            f"autoscaling.budget: {autoscaling.budget:g} {unit} are fewer than the {needed:g} that both roles take "
            "at least (autoscaling.prefill.min, autoscaling.decode.min)"
        )
