"""Settings of the way of a sequence through the workers."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from twostroke.protocol.settings import Interval
from twostroke.router.routing.chooser import PathConfig
from twostroke.router.worker_health import EjectionConfig, SuspectsConfig


class PipelineConfig(PathConfig):
    """Timeouts and retries, in seconds, beside the choice of workers."""

    moves: bool = True
    """Running streams go on at another worker with room where theirs drains, where its blocks run out, and where it is
    a prefill worker that gets prompts (docs/design/routing.md#streams-that-move)."""
    request_timeout_s: PositiveFloat = 600.0
    """A request that takes longer, from its arrival to its last token, fails with status 504, and its workers are
    told."""
    retries: NonNegativeInt = 5
    """Attempts in a row, after the first, that bring a request no further; a token of the decode worker's own starts
    the count anew."""
    retry_budget: NonNegativeFloat = 0.2
    """Share of the requests: retries after refusals, and after failures of workers that live, beyond which none are
    made. What a dead, unreachable or leaving worker had under way goes on elsewhere in any case."""
    retry_floor: NonNegativeInt = 10
    """Retries that are allowed within 10 s in any case, however little traffic there is."""
    retry_first_s: NonNegativeFloat = 0.05
    """Pause before a request's second retry, after a refusal before its first; doubles from retry to retry, and each is
    shortened at random by up to half. The first retry after a lost worker is at once: a client waits in the middle of
    its stream. At most `retry_most_s`."""
    retry_most_s: NonNegativeFloat = 1.0
    """Longest pause between a request's retries; at least `retry_first_s`."""
    retry_wait_s: NonNegativeFloat = 20.0
    """A begun request waits so long for a worker to come back. Longer where the only decode worker is tensor-parallel:
    its ranks take some 15 s on a small machine."""
    retry_poll_s: Interval = 0.1
    """Interval at which a request that waits for a worker looks for one."""
    reuse_wait_s: NonNegativeFloat = 0.5
    """Pause before a worker that failed a request gets it again, where there is no other."""
    reply_grace_s: NonNegativeFloat = 1.0
    """Longest time between the end of a worker's call and its last tokens, or the other way round."""
    prefill_failed_repeat_s: Interval = 0.25
    """Interval at which a decode worker is told that its prefill has failed, until it answers: it may not know the
    request yet."""
    ejection: EjectionConfig = Field(default_factory=EjectionConfig)
    suspects: SuspectsConfig = Field(default_factory=SuspectsConfig)

    @model_validator(mode="after")
    def _check_pauses(self) -> "PipelineConfig":
        if self.retry_first_s > self.retry_most_s:
            raise ValueError(
                f"retry_first_s: {self.retry_first_s:g} must be at most retry_most_s ({self.retry_most_s:g})"
            )
        return self
