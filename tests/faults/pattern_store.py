"""A KV cache without a model: its bytes are a function of (transfer, layer, position), its memory can be shared.

And what else the worker processes and their parent agree on.
"""

import numpy as np
from numpy.typing import NDArray

from twostroke.kvtransfer.config import TransferConfig
from twostroke.model.cache.kv_cache import make_shared_memory
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import SampledToken

SECRET = b"a secret of these tests"
LAYOUT = KVLayout(
    model="patterns", dtype="float32", num_layers=4, num_kv_heads=2, head_dim=64, block_size=16
)  # 16 KiB a block
NUM_BLOCKS = 192
CONFIG = TransferConfig(lease_s=0.5, progress_s=1.0, max_chunk_bytes=40 * LAYOUT.block_bytes)


class PatternStore:
    """A SharedStore, and the book of who owns its blocks."""

    layout = LAYOUT
    rank = 0
    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        self._layer_bytes = NUM_BLOCKS * LAYOUT.block_bytes
        self.memory_fd, self._memory = make_shared_memory(LAYOUT.num_layers * self._layer_bytes)
        self._free = list(range(NUM_BLOCKS))

    # --- what kvtransfer sees ---

    def layer_offset(self, layer: int) -> int:
        return layer * self._layer_bytes

    def layer_bytes(self, layer: int) -> memoryview:
        start = self.layer_offset(layer)
        return memoryview(self._memory)[start : start + self._layer_bytes]

    # --- blocks ---

    @property
    def num_owned(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """The blocks that were freed last come first: what a zombie might still write into is in use at once."""
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks are wanted, {len(self._free)} are free")
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        return taken

    def release(self, block_ids: list[int]) -> None:
        if set(block_ids) & set(self._free):
            raise ValueError("a block is freed twice")
        self._free += block_ids

    # --- bytes ---

    def fill(self, seed: int, block_ids: list[int]) -> None:
        for layer in range(LAYOUT.num_layers):
            self._blocks(layer)[block_ids] = pattern(seed, layer, len(block_ids))

    def count_wrong_bytes(self, seed: int, block_ids: list[int]) -> int:
        """Return how many bytes of these blocks are not those of transfer `seed`."""
        return sum(
            int(np.count_nonzero(self._blocks(layer)[block_ids] != pattern(seed, layer, len(block_ids))))
            for layer in range(LAYOUT.num_layers)
        )

    def flip(self, layer: int, block_id: int) -> None:
        """Flip a bit in the middle of a block; a second time undoes the first."""
        self._blocks(layer)[block_id, LAYOUT.block_bytes // 2] ^= 1

    def _blocks(self, layer: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.layer_bytes(layer), np.uint8).reshape(NUM_BLOCKS, -1)


def pattern(seed: int, layer: int, num_blocks: int) -> NDArray[np.uint8]:
    """uint8 [num_blocks, block_bytes]: what transfer `seed` carries in `layer`."""
    drawn = np.random.default_rng((seed, layer)).bytes(num_blocks * LAYOUT.block_bytes)
    return np.frombuffer(drawn, np.uint8).reshape(num_blocks, -1)


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // LAYOUT.block_size)


def token_of(seed: int) -> SampledToken:
    """The first token that transfer `seed` commits."""
    return SampledToken(seed % 1000)
