"""What a user may set about decode workers."""

from typing import Annotated

from annotated_types import Ge, Le, Lt
from pydantic import NonNegativeFloat, model_validator

from twostroke.decode_worker.preemption import Preemption
from twostroke.protocol.settings import Count, Interval
from twostroke.worker.config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """Bounds of one step, and the worker's housekeeping."""

    max_step_tokens: Count = 512
    """Tokens of one step: one for each running request, the rest for prompts computed here."""
    max_batch: Count = 256
    """Requests in one step."""
    tpot_safety: Annotated[float, Ge(0.01), Le(1)] = 0.9
    """Of the time per token that a request was promised, what its steps may be planned to take."""
    max_stall_s: Interval | None = None
    """How long prompts may make a step whose requests were promised nothing; null: by the step's costs."""
    stall_factor: Annotated[float, Ge(1)] | None = None
    """How many times as long prompts may make such a step; null: `max_stall_s` alone counts."""
    min_chunk_tokens: Count = 8
    """Of prompts that a step computes beside decodes, whatever time they take."""
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01
    """Share of the blocks that admission leaves free, for running requests to grow into."""
    preemption: Preemption = "auto"
    """What becomes of a request's KV where blocks run out; auto: by estimated cost."""
    swap_gib: NonNegativeFloat = 0.0
    """Host memory for KV of such requests; 0: all are computed again."""
    run_ahead: bool = True
    """Schedule a step while the one before it runs, so that the engine never waits for it."""
    router_wait_s: Interval = 30.0
    """Where a transfer has failed, and the router says nothing for so long, compute here."""

    @model_validator(mode="after")
    def _check_steps_and_swap(self) -> "DecodeConfig":
        if self.max_step_tokens < self.max_batch:
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} must be at least max_batch ({self.max_batch}): else a step "
                "could not give every running request its token"
            )
        if self.preemption == "swap" and self.swap_gib == 0:
            raise ValueError("preemption: swap has no memory, since swap_gib is 0: raise that")
        if self.preemption == "recompute" and self.swap_gib > 0:
            raise ValueError(
                f"swap_gib: {self.swap_gib:g} is never used with preemption recompute: make that auto or swap, or "
                "leave swap_gib out"
            )
        return self
