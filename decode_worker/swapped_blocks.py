"""Whose KV is in which blocks of host memory. Pure: it says what is to be copied, and the engine copies.

A job's host blocks are taken when it gives way, and go back when its KV is in the cache again, or when it ends.
"""

from decode_worker.jobs import DecodeJob, Swap, SwappedKV
from model.block_pool import BlockPool
from model.step import BlockCopy


class SwappedBlocks:
    """Accounts for the blocks of `pool`; None where there is no host memory to swap to."""

    def __init__(self, pool: BlockPool | None):
        self._pool = pool

    @property
    def free_blocks(self) -> int:
        return 0 if self._pool is None else self._pool.free_blocks

    @property
    def owned_blocks(self) -> int:
        """Blocks that hold a job's KV: 0 on an idle worker."""
        return 0 if self._pool is None else self._pool.owned_blocks

    def swap_out(self, job: DecodeJob) -> Swap:
        """Take host blocks for all KV of a job, whose own blocks must stay until it is copied. Raises OutOfBlocks."""
        if self._pool is None:
            raise ValueError("there is no host memory to swap to")
        sequence = job.sequence
        num_blocks = num_blocks_with_kv(job, self._pool.block_size)
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


def num_blocks_with_kv(job: DecodeJob, block_size: int) -> int:
    """Of the job's blocks, those that hold KV of its tokens."""
    return -(-job.sequence.num_computed // block_size)
