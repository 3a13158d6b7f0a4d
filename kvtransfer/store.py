"""What a transfer needs to know of a KV cache."""

from typing import Protocol


class KVStore(Protocol):
    """Block storage in host memory, layer by layer. Live: `model/kv_cache.py`; simulated: tests/simulation.

    A block of a layer is contiguous: K and V of all heads (ARCHITECTURE: [num_blocks, 2, heads, block_size, dim]).
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""

    @property
    def fingerprint(self) -> str:
        """Of model and layout. Two stores can exchange blocks only where these are equal."""

    def layer_bytes(self, layer: int) -> memoryview:
        """A writable view of uint8 [num_blocks * block_bytes]; block b begins at b * block_bytes."""
