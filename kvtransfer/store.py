"""What a transfer needs to know of a KV cache."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


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


@runtime_checkable
class DeviceStore(KVStore, Protocol):
    """A cache in a GPU's memory: its bytes can't be viewed from the host (`layer_bytes` raises TypeError)."""

    @property
    def device(self) -> str:
        """As torch names it, `cuda:0`."""

    def layer_tensor(self, layer: int) -> Any:
        """The layer's torch tensor, [num_blocks, ...], contiguous."""

    def read_blocks(self, layer: int, block_ids: Sequence[int]) -> memoryview:
        """A host copy of these blocks, uint8 [len(block_ids) * block_bytes]: what digests are computed from."""
