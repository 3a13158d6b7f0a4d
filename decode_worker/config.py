"""What a user may set about decode workers."""

from dataclasses import dataclass, field

from twostroke.decode_worker.preemption import Preemption
from twostroke.protocol.errors import ConfigError
from twostroke.worker.queue_order import QueuePolicy
from twostroke.worker.token_server import TokenServerConfig


@dataclass(frozen=True)
class DecodeConfig:
    """Bounds of one step, and the worker's housekeeping. Raises ConfigError for values that can't work."""

    max_step_tokens: int = 512  # tokens of one step: one for each running request, the rest for prompts computed here
    max_batch: int = 256  # requests in one step
    max_waiting: int = 1024  # requests that wait for blocks or a prefill worker; more are refused with status 429
    queue: QueuePolicy = "edf"  # whose turn it is within a priority: least time left, fewest tokens, or first come
    tpot_safety: float = 0.9  # of the time per token that a request was promised, what its steps may be planned to take
    stall_factor: float = 1.75  # how many times as long prompts may make a step whose requests were promised nothing
    min_chunk_tokens: int = 8  # of prompts that a step computes beside decodes, whatever time they take
    watermark: float = 0.01  # share of the blocks that admission leaves free, for running requests to grow into
    preemption: Preemption = "auto"  # what becomes of a request's KV where blocks run out; auto: by estimated cost
    swap_gib: float = 0.0  # host memory for KV of such requests; 0: all are computed again
    run_ahead: bool = True  # schedule a step while the one before it runs, so that the engine never waits for it
    router_wait_s: float = 30.0  # where a transfer has failed, and the router says nothing for so long, compute here
    pull_wait_s: float = 0.5  # a prompt waits so long for another worker to offer its beginning
    min_pull_tokens: int = 64  # an offer that would spare fewer is declined: they are computed as quickly
    max_step_s: float = 60.0  # a step that takes longer is stuck, and the worker unhealthy
    integrity_interval_s: float = 10.0  # an idle worker checks its block accounting at most this often
    token_channel: TokenServerConfig = field(default_factory=TokenServerConfig)

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_waiting", "min_chunk_tokens", "min_pull_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"decode.{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_step_tokens < self.max_batch:
            raise ConfigError(
                f"decode.max_step_tokens is {self.max_step_tokens}, less than decode.max_batch {self.max_batch}: "
                "a step could not give every running request its token"
            )
        for name in ("router_wait_s", "pull_wait_s", "max_step_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"decode.{name} is {getattr(self, name)}: it must be above 0")
        if not 0 < self.tpot_safety <= 1:
            raise ConfigError(f"decode.tpot_safety is {self.tpot_safety}: it must be above 0 and at most 1")
        if not self.stall_factor >= 1:
            raise ConfigError(f"decode.stall_factor is {self.stall_factor}: it must be at least 1")
        if self.swap_gib < 0:
            raise ConfigError(f"decode.swap_gib is {self.swap_gib}: it must be at least 0")
        if self.preemption == "swap" and self.swap_gib == 0:
            raise ConfigError("decode.preemption is swap, but decode.swap_gib 0 leaves no memory for it: raise it")
        if self.preemption == "recompute" and self.swap_gib > 0:
            raise ConfigError(
                f"decode.swap_gib is {self.swap_gib:g}, but decode.preemption recompute never uses it: make that auto "
                "or swap, or leave swap_gib out"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"decode.watermark is {self.watermark}: it must be at least 0 and less than 1")
