"""What becomes of the KV of a request that gives way: computed again later, or kept in host memory meanwhile. Pure.

Who gives way says worker/queue_order.py. Here is what it pays to keep, whose KV is in which blocks of host memory, and
what that has cost. A job's host blocks are taken when it gives way, and go back when its KV is in the cache again, or
when it ends. The engine copies.
"""

from typing import Literal, Protocol

from twostroke.decode_worker.jobs import DecodeJob, SwappedKV
from twostroke.model.step import BlockCopy
from twostroke.protocol.kv_layout import NO_BLOCK
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.scheduler import Swap

Preemption = Literal["recompute", "swap", "auto"]


class HostBlocks(Protocol):
    """What a worker sees of its swap space (model/cache/swap_space.py): that of rank 0."""

    num_blocks: int
    block_bytes: int  # of all layers
    num_bytes: int  # counter: copied, both ways
    seconds: float  # counter


class Swapping:
    """Host memory for KV of preempted requests: its blocks, and what copying and computing cost.

    `space` is the engine's, None where there is none; `block_size` is in tokens, that of the cache.
    """

    def __init__(self, space: HostBlocks | None, mode: Preemption, block_size: int):
        self._space = space
        self._mode = mode
        self.pool = None if space is None else BlockPool(space.num_blocks, block_size)
        self._computed_tokens = 0  # of prompts
        self._computing_s = 0.0

    def swap_out(self, job: DecodeJob) -> Swap[DecodeJob] | None:
        """Take host blocks for all KV of a job, whose own blocks must stay until it is copied. None: better not."""
        if self._space is None or self.pool is None or job.request.reading is not None or job.sequence.awaits_copy:
            return None  # what was read off the KV that is kept would be read no more
        sequence = job.sequence
        table = sequence.block_ids[: -(-sequence.num_computed // sequence.block_size) * sequence.groups.count]
        blocks = tuple([block_id for block_id in table if block_id != NO_BLOCK])
        if not 0 < len(blocks) <= self.pool.free_blocks or not self._pays(
            self._space, sequence.num_computed, len(blocks)
        ):
            return None
        host_blocks = self.pool.allocate(len(blocks))
        there = iter(host_blocks)
        host_table = tuple([NO_BLOCK if block_id == NO_BLOCK else next(there) for block_id in table])
        job.swapped = SwappedKV(host_table, sequence.num_computed)
        job.is_copying = True
        return Swap(job, BlockCopy(True, blocks, tuple(host_blocks)))

    def swap_in(self, job: DecodeJob, pool: BlockPool) -> Swap[DecodeJob] | None:
        """Bring a job's KV back into its new blocks, but for what it found in the prefix cache. None: that was all."""
        swapped, sequence = job.swapped, job.sequence
        if swapped is None:
            return None
        if sequence.num_computed >= swapped.num_computed:
            self.release(job)
            return None
        first = sequence.num_computed // sequence.block_size * sequence.groups.count  # what is cached are whole rows
        sequence.expect(pool, swapped.num_computed, keeps_prefix=False)
        here = sequence.block_ids[first : len(swapped.block_ids)]
        pairs = [pair for pair in zip(here, swapped.block_ids[first:], strict=True) if NO_BLOCK not in pair]
        sequence.receives(pool, swapped.num_computed)
        job.is_copying = True
        blocks, host_blocks = zip(*pairs, strict=True)
        return Swap(job, BlockCopy(False, blocks, host_blocks))

    def release(self, job: DecodeJob) -> None:
        """Give the job's host blocks back. Harmless where it has none."""
        swapped, job.swapped = job.swapped, None
        if swapped is not None and self.pool is not None:
            self.pool.release(swapped.block_ids)

    def step_ended(self, num_prompt_tokens: int, prompts_s: float) -> None:
        """Learn what computing costs, from a step that has run; `prompts_s` is its prompts' part."""
        if num_prompt_tokens:
            self._computed_tokens += num_prompt_tokens
            self._computing_s += prompts_s

    def _pays(self, space: HostBlocks, num_tokens: int, num_blocks: int) -> bool:
        """Whether to copy so many tokens in so many blocks; `auto` takes what costs less time by the rates so far.

        While no rate of computing is known, requests are computed again, and while none of copying is, they are
        swapped: which makes both known.
        """
        if self._mode != "auto":
            return self._mode == "swap"
        if not self._computing_s:
            return False
        if not space.seconds:
            return True
        computing_s = num_tokens * self._computing_s / self._computed_tokens
        copying_s = 2 * num_blocks * space.block_bytes * space.seconds / space.num_bytes  # there and back
        return copying_s < computing_s
