"""Whose KV is in which blocks of host memory. Pure: it says what is to be copied, and the engine copies.

A job's host blocks are taken when it gives way, and go back when its KV is in the cache again, or when it ends.
"""

from twostroke.decode_worker.jobs import DecodeJob, Swap, SwappedKV
from twostroke.decode_worker.preemption import PreemptionPolicy
from twostroke.model.block_pool import BlockPool
from twostroke.model.step import BlockCopy


class SwappedBlocks:
    """Accounts for the blocks of `pool`, which `policy` gives to whom it pays for; None: there is no host memory."""

    def __init__(self, pool: BlockPool | None, policy: PreemptionPolicy):
        self._pool = pool
        self._policy = policy

    @property
    def owned_blocks(self) -> int:
        """Blocks that hold a job's KV: 0 on an idle worker."""
        return 0 if self._pool is None else self._pool.owned_blocks

    def swap_out(self, job: DecodeJob) -> Swap | None:
        """Take host blocks for all KV of a job, whose own blocks must stay until it is copied. None: better not."""
        if self._pool is None:
            return None
        sequence = job.sequence
        num_blocks = -(-sequence.num_computed // self._pool.block_size)
        if not self._policy.should_swap(sequence.num_computed, num_blocks, self._pool.free_blocks):
            return None
        job.swapped = SwappedKV(tuple(self._pool.allocate(num_blocks)), sequence.num_computed)
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
        if swapped is not None and self._pool is not None:
            self._pool.release(swapped.block_ids)
