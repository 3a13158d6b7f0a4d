"""What a user may set about the way of a sequence through the workers."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from twostroke.protocol.settings import Interval
from twostroke.router.health.poison import SuspectsConfig
from twostroke.router.health.worker_records import EjectionConfig
from twostroke.router.routing.chooser import PathConfig


class PipelineConfig(PathConfig):
    """How patient the router is, in seconds, beside how it chooses workers."""

    request_timeout_s: PositiveFloat = 600.0
    """A request that takes longer fails."""
    retries: NonNegativeInt = 5
    """Attempts in a row, after the first, that bring the request no further."""
    retry_budget: NonNegativeFloat = 0.2
    """Of the live traffic: retries after refusals and failures of workers that live."""
    retry_floor: NonNegativeInt = 10
    """Of those within 10 s, however little traffic there is."""
    retry_first_s: NonNegativeFloat = 0.05
    """Pause before the second retry of a request; doubles from retry to retry."""
    retry_most_s: NonNegativeFloat = 1.0
    """Such a pause at most."""
    retry_wait_s: NonNegativeFloat = 20.0
    """A begun request waits so long for a worker to come back."""
    retry_poll_s: Interval = 0.1
    reuse_wait_s: NonNegativeFloat = 0.5
    """Before a worker that failed the request gets it again, where there is no other."""
    reply_grace_s: NonNegativeFloat = 1.0
    """Between a call's end and its last tokens, or the other way round."""
    prefill_failed_repeat_s: Interval = 0.25
    """Until the decode worker is heard of: it may not know the request yet."""
    ejection: EjectionConfig = Field(default_factory=EjectionConfig)
    suspects: SuspectsConfig = Field(default_factory=SuspectsConfig)

    @model_validator(mode="after")
    def _check_pauses(self) -> "PipelineConfig":
        if self.retry_first_s > self.retry_most_s:
            raise ValueError(
                f"retry_first_s: {self.retry_first_s:g} must be at most retry_most_s ({self.retry_most_s:g})"
            )
        return self
