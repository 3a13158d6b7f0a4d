"""What a user may set about decode workers."""

from typing import Annotated

from annotated_types import Ge, Le, Lt
from pydantic import NonNegativeFloat, model_validator

from twostroke.protocol.settings import Count, Interval
from twostroke.worker.config import WorkerConfig
from twostroke.worker.scheduling.preemption import PreemptionMode


class DecodeConfig(WorkerConfig):
    """Bounds of one step, and the worker's housekeeping."""

    max_step_tokens: Count = 512
    """Tokens of one step, at least `max_batch`: one for each running request, the rest for prompts computed here.
    Larger ones end such prompts sooner, and space the running streams' tokens out."""
    max_batch: Count = 256
    """Requests in one step, at most `max_step_tokens`. Fewer for shorter times between tokens."""
    tpot_safety: Annotated[float, Ge(0.01), Le(1)] = 0.9
    """Share of the promised time per token that a step is planned to take at most. Less where streams miss their
    promise, more to fill batches further."""
    max_stall_s: Interval | None = None
    """How long prompts computed beside streams that were promised nothing may make a step. Less for smoother streams,
    more to get prompts through sooner. null, where `stall_factor` is null too: what a step with 384 prompt tokens takes
    by the worker's own step costs, but 0.05 s at least (what GPUs keep to) and 0.25 s at most (on CPUs), and never less
    than 1.75 times what the step takes without prompts."""
    stall_factor: Annotated[float, Ge(1)] | None = None
    """`max_stall_s` in times of what the step takes without prompts. Where both are set, the tighter one counts; null:
    `max_stall_s` alone does."""
    min_chunk_tokens: Count = 8
    """Tokens of prompts that a step computes beside streams however long it takes, so that prompts always get on."""
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01
    """Share of the blocks that is left free on admission, for running requests to grow into. Raise it where requests
    are preempted often."""
    preemption: PreemptionMode = "auto"
    """What becomes of the youngest request's KV where blocks run out: dropped and computed again later, or copied to
    host memory and back. auto: what costs less time by this worker's own rates; without `swap_gib` it is always
    `recompute`."""
    swap_gib: NonNegativeFloat = 0.0
    """Host memory for KV of preempted requests, of each rank; 0: all is computed again. It is pinned where workers have
    GPUs. Not with `preemption: recompute`, and needed for `swap`."""
    run_ahead: bool = True
    """Whether a step is scheduled while the one before it runs, behind prompts shortly before their step's expected
    end, so that the engine never waits for the event loop. Without it, requests that have just come join one step
    sooner."""
    router_wait_s: Interval = 30.0
    """Where a KV transfer has failed, its router says what is to become of the request; should it say nothing for so
    long, the decode worker computes the prompt. For a transfer that has not begun it waits however long, as long as the
    router lives."""

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
