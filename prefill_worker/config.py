"""What a user may set about prefill workers."""

from dataclasses import dataclass, field

from protocol.errors import ConfigError
from protocol.token_server import TokenServerConfig


@dataclass(frozen=True)
class PrefillConfig:
    """Bounds of one step, and the worker's housekeeping. Raises ConfigError for values that can't work."""

    max_step_tokens: int = 2048  # prompt tokens of one step, over all prompts that share it
    max_batch: int = 32  # prompts in one step
    max_waiting: int = 1024  # prompts that wait for their first step; more are refused with status 429
    max_step_s: float = 60.0  # a step that takes longer is stuck, and the worker unhealthy
    integrity_interval_s: float = 10.0  # an idle worker checks its block accounting at most this often
    token_channel: TokenServerConfig = field(default_factory=TokenServerConfig)

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_batch", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"prefill.{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_step_s <= 0:
            raise ConfigError(f"prefill.max_step_s is {self.max_step_s}: it must be above 0")
