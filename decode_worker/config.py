"""Settings of decode workers."""

from pydantic import NonNegativeFloat, model_validator

from twostroke.protocol.settings import Count, TokenCount
from twostroke.worker.config import PreemptionMode, WorkerConfig


class DecodeConfig(WorkerConfig):
    """Settings of decode workers: the bounds of a step, preemption and swap."""

    max_step_tokens: TokenCount = 512
    """Tokens of one step, at least `max_batch`: one for each running request, the rest for prompts computed here.
    Larger ones end those prompts sooner, and space the running streams' tokens out."""
    max_batch: Count = 256
    """Requests in one step, at most `max_step_tokens`. Fewer for shorter times between tokens."""
    preemption: PreemptionMode = "auto"
    """Treatment of a preempted request's KV where blocks run out: dropped and computed again later (`recompute`), or
    copied to host memory and back (`swap`). auto: whichever costs less time by this worker's own rates; without
    `swap_gib` it is always `recompute`."""
    swap_gib: NonNegativeFloat = 0.0
    """Host memory for KV of preempted requests, of each rank; 0: all is computed again. It is pinned where workers have
    GPUs. Not with `preemption: recompute`, and needed for `swap`."""

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
