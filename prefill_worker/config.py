"""What a user may set about prefill workers."""

from dataclasses import dataclass, field

from twostroke.protocol.errors import ConfigError
from twostroke.worker.queue_order import QueuePolicy
from twostroke.worker.token_server import TokenServerConfig


@dataclass(frozen=True)
class PrefillConfig:
    """Bounds of one step, and the worker's housekeeping. Raises ConfigError for values that can't work."""

    max_step_tokens: int = 2048  # prompt tokens of one step, over all prompts that share it
    max_batch: int = 32  # prompts in one step
    max_waiting: int = 1024  # prompts that wait for their first step; more are refused with status 429
    queue: QueuePolicy = "edf"  # whose turn it is within a priority: least time left, fewest tokens, or first come
    pull_wait_s: float = 0.5  # a prompt waits so long for another worker to offer its beginning
    min_pull_tokens: int = 64  # an offer that would spare fewer is declined: they are computed as quickly
    max_step_s: float = 60.0  # a step that takes longer is stuck, and the worker unhealthy
    integrity_interval_s: float = 10.0  # an idle worker checks its block accounting at most this often
    token_channel: TokenServerConfig = field(default_factory=TokenServerConfig)

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_batch", "max_waiting", "min_pull_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"prefill.{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("pull_wait_s", "max_step_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"prefill.{name} is {getattr(self, name)}: it must be above 0")
