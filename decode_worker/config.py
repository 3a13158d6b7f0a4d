"""Settings of decode workers."""

from typing import Annotated

from annotated_types import Ge, Le, Lt
from pydantic import NonNegativeFloat, model_validator

from twostroke.protocol.settings import Count, Interval
from twostroke.worker.config import WorkerConfig
from twostroke.worker.scheduling.preemption import PreemptionMode


class DecodeConfig(WorkerConfig):
    """Settings of decode workers: the batch, prompts beside decodes, preemption and swap."""

    max_step_tokens: Count = 512
    """Tokens of one step, at least `max_batch`: one for each running request, the rest for prompts computed here.
    Larger ones end those prompts sooner, and space the running streams' tokens out."""
    max_batch: Count = 256
    """Requests in one step, at most `max_step_tokens`. Fewer for shorter times between tokens."""
    tpot_safety: Annotated[float, Ge(0.01), Le(1)] = 0.9
    """Share of the promised time per token that a step is planned to take at most. Less where streams miss their
    promise, more to fill batches further."""
    max_stall_s: Interval | None = None
    """Longest step, in seconds, with prompts beside streams without a TPOT promise. Lower it for smoother streams,
    raise it to compute prompts sooner. null, where `stall_factor` is null too: the time of a step with 384 prompt
    tokens by the worker's own step costs, within 0.05 s (which GPUs keep to) and 0.25 s (on CPUs), and never less than
    1.75 times the step's time without prompts."""
    stall_factor: Annotated[float, Ge(1)] | None = None
    """`max_stall_s` as a multiple of the step's time without prompts. Where both are set, the tighter one counts; null:
    only `max_stall_s` does."""
    min_chunk_tokens: Count = 8
    """Prompt tokens that a step computes beside streams however long it takes, so that prompts always progress."""
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01
    """Share of the blocks that is left free on admission, for running requests to grow into. Raise it where requests
    are preempted often."""
    preemption: PreemptionMode = "auto"
    """Treatment of a preempted request's KV where blocks run out: dropped and computed again later (`recompute`), or
    copied to host memory and back (`swap`). auto: whichever costs less time by this worker's own rates; without
    `swap_gib` it is always `recompute`."""
    swap_gib: NonNegativeFloat = 0.0
    """Host memory for KV of preempted requests, of each rank; 0: all is computed again. It is pinned where workers have
    GPUs. Not with `preemption: recompute`, and needed for `swap`."""
    run_ahead: bool = True
    """Schedule a step while the one before it runs (behind prompts, shortly before their step's expected end), so that
    the engine never waits for the event loop. Without it, requests that have just arrived join one step sooner."""
    router_wait_s: Interval = 30.0
    """Seconds after a failed KV transfer in which its router decides about the request; without a decision the decode
    worker computes the prompt then. For a transfer that has not begun it waits as long as the router lives."""

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
