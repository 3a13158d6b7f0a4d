"""What a user may set about the way of a sequence through the workers."""

from dataclasses import dataclass

from protocol.errors import ConfigError


@dataclass(frozen=True)
class PipelineConfig:
    """How patient the router is, in seconds, and when prefixes are pulled. Raises ConfigError for what can't work."""

    retries: int = 3  # attempts after the first, when decode workers are lost
    retry_wait_s: float = 10.0  # a begun request waits so long for a worker to come back
    retry_poll_s: float = 0.1
    reuse_wait_s: float = 0.5  # before a worker that failed the request gets it again, where there is no other
    reply_grace_s: float = 1.0  # between a call's end and its last tokens, or the other way round
    prefill_failed_repeat_s: float = 0.25  # until the decode worker is heard of: it may not know the request yet
    pulls: bool = True  # prefill workers fetch the prompt's beginning from whoever computed it before
    pull_min_tokens: int = 128  # where that spares so many at least
    prefix_index_pieces: int = 65536  # pieces of 32 tokens of which the router remembers who holds them

    def __post_init__(self) -> None:
        for name in ("pull_min_tokens", "prefix_index_pieces"):
            if getattr(self, name) < 1:
                raise ConfigError(f"router.{name} is {getattr(self, name)}: it must be at least 1")
