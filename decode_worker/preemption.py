"""What becomes of the KV of a request that gives way: computed again later, or kept in host memory meanwhile. Pure.

Who gives way says worker/queue_order.py. Here is what it pays to keep, whose KV is in which blocks of host memory, and
what that has cost. A job's host blocks are taken when it gives way, and go back when its KV is in the cache again, or
when it ends. The engine copies.
"""

from dataclasses import dataclass
from typing import Literal

from twostroke.decode_worker.jobs import DecodeJob, Swap, SwappedKV
from twostroke.model.step import BlockCopy
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.numbers import HostBlocks, SwapNumbers

Preemption = Literal["recompute", "swap", "auto"]


@dataclass(slots=True)
class Rate:
    """What has been done in how much time, so far."""

    amount: float = 0.0
    seconds: float = 0.0

    def count(self, amount: float, seconds: float) -> None:
        """So much more was done."""
        self.amount += amount
        self.seconds += seconds

    def time_for(self, amount: float) -> float | None:
        """Seconds, at this rate; None while it isn't known."""
        return self.seconds * amount / self.amount if self.amount > 0 and self.seconds > 0 else None


class PreemptionPolicy:
    """Chooses by `mode`; `auto` takes what costs less time by the rates that its owner measures.

    While no rate of computing is known, requests are computed again, and while none of copying is, they are swapped:
    which makes both known.
    """

    def __init__(self, mode: Preemption, block_bytes: int):
        """`block_bytes` are of one block in all layers."""
        self._mode = mode
        self._block_bytes = block_bytes
        self.computing = Rate()  # prompt tokens
        self.copying = Rate()  # bytes, one way

    def should_swap(self, num_tokens: int, num_blocks: int, num_free_host_blocks: int) -> bool:
        """For a request with KV of so many tokens, in so many blocks; False where host memory has no room."""
        if self._mode == "recompute" or num_tokens == 0 or num_blocks > num_free_host_blocks:
            return False
        if self._mode == "swap":
            return True
        computing_s = self.computing.time_for(num_tokens)
        copying_s = self.copying.time_for(2.0 * num_blocks * self._block_bytes)  # there and back
        return computing_s is not None and (copying_s is None or copying_s < computing_s)


class Swapping:
    """Host memory for KV of preempted requests: its blocks, and what copying costs.

    `space` is the engine's, None where there is none; `block_size` is in tokens, that of the cache.
    """

    def __init__(self, space: HostBlocks | None, mode: Preemption, block_size: int):
        self._space = space
        self._policy = PreemptionPolicy(mode, 0 if space is None else space.block_bytes)
        self.pool = None if space is None else BlockPool(space.num_blocks, block_size)

    def swap_out(self, job: DecodeJob) -> Swap | None:
        """Take host blocks for all KV of a job, whose own blocks must stay until it is copied. None: better not."""
        if self.pool is None:
            return None
        sequence = job.sequence
        num_blocks = -(-sequence.num_computed // self.pool.block_size)
        if not self._policy.should_swap(sequence.num_computed, num_blocks, self.pool.free_blocks):
            return None
        job.swapped = SwappedKV(tuple(self.pool.allocate(num_blocks)), sequence.num_computed)
        job.is_copying = True
        return Swap(job, BlockCopy(True, tuple(sequence.block_ids[:num_blocks]), job.swapped.block_ids))

    def swap_in(self, job: DecodeJob) -> Swap | None:
        """Bring a job's KV back into its new blocks, but for what it found in the prefix cache. None: that was all."""
        swapped, sequence = job.swapped, job.sequence
        if swapped is None:
            return None
        if sequence.num_computed >= swapped.num_computed:
            self.release(job)
            return None
        first = sequence.num_computed // sequence.block_size  # what is cached are whole blocks
        sequence.num_computed = swapped.num_computed
        job.is_copying = True
        host_blocks = swapped.block_ids[first:]
        blocks = sequence.block_ids[first : first + len(host_blocks)]
        return Swap(job, BlockCopy(False, tuple(blocks), host_blocks))

    def release(self, job: DecodeJob) -> None:
        """Give the job's host blocks back. Harmless where it has none."""
        swapped, job.swapped = job.swapped, None
        if swapped is not None and self.pool is not None:
            self.pool.release(swapped.block_ids)

    def step_ended(self, num_prompt_tokens: int, prompts_s: float) -> None:
        """Learn what computing and copying cost, from a step that has run; `prompts_s` is its prompts' part."""
        if num_prompt_tokens:
            self._policy.computing.count(num_prompt_tokens, prompts_s)
        if self._space is not None:
            self._policy.copying = Rate(self._space.num_bytes, self._space.seconds)

    def numbers(self, num_swaps: int) -> SwapNumbers:
        """For statistics; `num_swaps` are the requests that have been swapped out."""
        if self._space is None or self.pool is None:
            return SwapNumbers()
        return SwapNumbers(num_swaps, self._space.num_bytes, self._space.seconds, self.pool.owned_blocks)
