"""What a user may set about decode workers."""

from dataclasses import dataclass
from typing import ClassVar

from twostroke.decode_worker.preemption import Preemption
from twostroke.protocol.errors import ConfigError
from twostroke.worker.worker import WorkerConfig


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """Bounds of one step, and the worker's housekeeping. Raises ConfigError for values that can't work."""

    section: ClassVar[str] = "decode"

    max_step_tokens: int = 512  # tokens of one step: one for each running request, the rest for prompts computed here
    max_batch: int = 256  # requests in one step
    tpot_safety: float = 0.9  # of the time per token that a request was promised, what its steps may be planned to take
    max_stall_s: float | None = None  # how long prompts may make a step whose requests were promised nothing
    stall_factor: float | None = None  # how many times as long prompts may make it; None, of both: by the step's costs
    min_chunk_tokens: int = 8  # of prompts that a step computes beside decodes, whatever time they take
    watermark: float = 0.01  # share of the blocks that admission leaves free, for running requests to grow into
    preemption: Preemption = "auto"  # what becomes of a request's KV where blocks run out; auto: by estimated cost
    swap_gib: float = 0.0  # host memory for KV of such requests; 0: all are computed again
    run_ahead: bool = True  # schedule a step while the one before it runs, so that the engine never waits for it
    router_wait_s: float = 30.0  # where a transfer has failed, and the router says nothing for so long, compute here

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_least(1, "min_chunk_tokens")
        self._check_least(0, "swap_gib")
        self._check_above_0("router_wait_s")
        if self.max_stall_s is not None:
            self._check_above_0("max_stall_s")
        if self.stall_factor is not None:
            self._check_least(1, "stall_factor")
        if self.max_step_tokens < self.max_batch:
            raise ConfigError(
                f"decode.max_step_tokens is {self.max_step_tokens}, less than decode.max_batch {self.max_batch}: "
                "a step could not give every running request its token"
            )
        if not 0 < self.tpot_safety <= 1:
            raise ConfigError(f"decode.tpot_safety is {self.tpot_safety}: it must be above 0 and at most 1")
        if self.preemption == "swap" and self.swap_gib == 0:
            raise ConfigError("decode.preemption is swap, but decode.swap_gib 0 leaves no memory for it: raise it")
        if self.preemption == "recompute" and self.swap_gib > 0:
            raise ConfigError(
                f"decode.swap_gib is {self.swap_gib:g}, but decode.preemption recompute never uses it: make that auto "
                "or swap, or leave swap_gib out"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"decode.watermark is {self.watermark}: it must be at least 0 and less than 1")
