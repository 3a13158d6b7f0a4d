"""What a user may set about the way of a sequence through the workers."""

from dataclasses import dataclass, field

from twostroke.protocol.errors import ConfigError
from twostroke.router.health.ejection import EjectionConfig
from twostroke.router.health.poison import SuspectsConfig
from twostroke.router.routing.chooser import Policy


@dataclass(frozen=True)
class PipelineConfig:
    """How patient the router is, in seconds, and when prefixes are pulled. Raises ConfigError for what can't work."""

    request_timeout_s: float = 600.0  # a request that takes longer fails
    retries: int = 5  # attempts in a row, after the first, that bring the request no further
    retry_budget: float = 0.2  # of the live traffic: retries after refusals and failures of workers that live
    retry_floor: int = 10  # of those within 10 s, however little traffic there is
    retry_first_s: float = 0.05  # pause before the second retry of a request; doubles from retry to retry
    retry_most_s: float = 1.0  # such a pause at most
    retry_wait_s: float = 20.0  # a begun request waits so long for a worker to come back
    retry_poll_s: float = 0.1
    reuse_wait_s: float = 0.5  # before a worker that failed the request gets it again, where there is no other
    reply_grace_s: float = 1.0  # between a call's end and its last tokens, or the other way round
    prefill_failed_repeat_s: float = 0.25  # until the decode worker is heard of: it may not know the request yet
    pulls: bool = True  # prefill workers fetch the prompt's beginning from whoever computed it before
    pull_min_tokens: int = 128  # where that spares so many at least
    policy: Policy = "kv_aware"  # how workers are chosen
    decodes_alone: bool = True  # decode workers compute prompts themselves where that is quicker
    index_blocks: int = 2_000_000  # of which the router remembers who holds them
    expected_s: float = 5.0  # what its decisions lead to is counted on so long before the workers have told of it
    ejection: EjectionConfig = field(default_factory=EjectionConfig)
    suspects: SuspectsConfig = field(default_factory=SuspectsConfig)

    def __post_init__(self) -> None:
        for name in ("pull_min_tokens", "index_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"router.{name} is {getattr(self, name)}: it must be at least 1")
        if self.retry_first_s > self.retry_most_s:
            raise ConfigError(
                f"router.retry_first_s is {self.retry_first_s:g}: it must not be over router.retry_most_s, "
                f"{self.retry_most_s:g}"
            )
        if self.request_timeout_s <= 0:
            raise ConfigError(f"router.request_timeout_s is {self.request_timeout_s:g}: it must be above 0")
