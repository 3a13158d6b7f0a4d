"""What a transfer needs to know of one rank's KV cache."""

from typing import Any, Protocol, runtime_checkable

from twostroke.protocol.kv_layout import KVLayout


class KVStore(Protocol):
    """Block storage, layer by layer: [num_blocks, 2 (K, V), heads of this rank, block_size, head_dim], contiguous.

    Live: `model/cache/kv_cache.py`; simulated: tests/simulation. Which of the three kinds below a store
    is, is asked once, when a link is made.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def rank(self) -> int:
        """Of this cache among the worker's tensor-parallel ranks."""

    @property
    def num_blocks(self) -> int: ...


@runtime_checkable
class HostStore(KVStore, Protocol):
    """A cache in host memory."""

    def layer_bytes(self, layer: int) -> memoryview:
        """A writable view of uint8 [num_blocks * layout.block_bytes]; block b begins at b * layout.block_bytes."""


@runtime_checkable
class SharedStore(HostStore, Protocol):
    """A cache in host memory that another process can map: one file descriptor for all layers, one after the other."""

    @property
    def memory_fd(self) -> int:
        """Of a memfd. It stays the store's."""

    def layer_offset(self, layer: int) -> int:
        """Where a layer begins in it, in bytes."""


@runtime_checkable
class DeviceStore(KVStore, Protocol):
    """A cache in a GPU's memory: its bytes can't be viewed from the host."""

    @property
    def device(self) -> str:
        """As torch names it, `cuda:0`."""

    def layer_tensor(self, layer: int) -> Any:
        """The layer's torch tensor, [num_blocks, ...], contiguous."""
