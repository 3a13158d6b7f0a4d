"""Which blocks of a prompt may be sent next. Pure: no I/O, no clock."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one layer; indices into the request's block table."""

    layer: int
    first_block: int
    num_blocks: int


class ChunkPlan:
    """Every block of every layer exactly once, but for the skipped ones, and none before it is full.

    Nothing is cut into runs before it is asked for: what becomes ready while the link is busy, or the grant is late,
    goes in as few runs as the cap allows.
    """

    def __init__(
        self, *, num_layers: int, num_tokens: int, block_size: int, num_ready_tokens: int, max_run_blocks: int
    ):
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._max_run_blocks = max_run_blocks
        self.num_blocks = -(-num_tokens // block_size)
        self._ready = [self._full_blocks(num_ready_tokens)] * num_layers  # blocks, from the first on
        self._taken = [0] * num_layers
        self._waiting = deque(range(num_layers) if self._ready[0] else ())  # layers with ready blocks, in order

    def _full_blocks(self, num_tokens: int) -> int:
        return self.num_blocks if num_tokens == self._num_tokens else num_tokens // self._block_size

    def add_ready(self, layer: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `layer` are in the blocks. Raises ValueError for more than there are."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"{num_tokens} tokens are ready of {self._num_tokens}")
        ready = self._full_blocks(num_tokens)
        before, taken = self._ready[layer], self._taken[layer]
        self._ready[layer] = max(before, ready)
        if before <= taken < ready:
            self._waiting.append(layer)

    def skip(self, num_blocks: int) -> None:
        """The peer has the first `num_blocks`. Before the first run only. Raises ValueError for more than there are."""
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(f"{num_blocks} blocks are skipped of {self.num_blocks}")
        self._taken = [num_blocks] * len(self._taken)
        self._waiting = deque(layer for layer in self._waiting if self._ready[layer] > num_blocks)

    def next_run(self) -> BlockRun | None:
        """Takes the next run; None where no block is ready now."""
        if not self._waiting:
            return None
        layer = self._waiting[0]
        first = self._taken[layer]
        count = min(self._ready[layer] - first, self._max_run_blocks)
        self._taken[layer] = first + count
        if first + count >= self._ready[layer]:
            self._waiting.popleft()
        return BlockRun(layer, first, count)

    @property
    def all_ready(self) -> bool:
        """Every block of every layer holds its KV."""
        return all(ready == self.num_blocks for ready in self._ready)

    @property
    def all_taken(self) -> bool:
        """Every block of every layer was taken or skipped."""
        return all(taken == self.num_blocks for taken in self._taken)
