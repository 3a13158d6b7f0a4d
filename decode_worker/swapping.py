"""What a worker does with host memory for preempted requests: its blocks, whom it pays for, and what it has cost."""

from twostroke.decode_worker.preemption import Preemption, PreemptionPolicy, Rate
from twostroke.decode_worker.swapped_blocks import SwappedBlocks
from twostroke.model.block_pool import BlockPool
from twostroke.model.worker_numbers import NO_SWAPS, HostBlocks, SwapNumbers


class Swapping:
    """`space` is the engine's, None where there is none; `block_size` is in tokens, that of the cache."""

    def __init__(self, space: HostBlocks | None, mode: Preemption, block_size: int):
        self._space = space
        self._policy = PreemptionPolicy(mode, 0 if space is None else space.block_bytes)
        pool = None if space is None else BlockPool(space.num_blocks, block_size)
        self.pools = () if pool is None else (pool,)
        self.blocks = SwappedBlocks(pool, self._policy)

    def step_ended(self, num_prompt_tokens: int, prompts_s: float) -> None:
        """Learn what computing and copying cost, from a step that has run; `prompts_s` is its prompts' part."""
        if num_prompt_tokens:
            self._policy.computing.count(num_prompt_tokens, prompts_s)
        if self._space is not None:
            self._policy.copying = Rate(self._space.num_bytes, self._space.seconds)

    def numbers(self, num_swaps: int) -> SwapNumbers:
        """For statistics; `num_swaps` are the requests that have been swapped out."""
        if self._space is None:
            return NO_SWAPS
        return SwapNumbers(num_swaps, self._space.num_bytes, self._space.seconds, self.blocks.owned_blocks)
