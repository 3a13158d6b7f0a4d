"""The paged KV cache: one tensor a layer, [num_blocks, 2 (K, V), heads of this rank, block_size, head_dim].

A block of a layer is contiguous, and within it each head's keys and values are: what a transfer moves is one piece.
Which block belongs to whom is the block pool's business, not ours. LayerAnnouncer tells of layers whose KV is in the
cache while a GPU computes on: the step's thread waits for none of them.
"""

import logging
import mmap
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from twostroke.model.cache.memory import gibibytes
from twostroke.model.cache.shared_memory import NoRoom, NoSharedMemory, SharedMemory
from twostroke.model.config import ModelConfig
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import KVLayout

logger = logging.getLogger(__name__)


class KVCache:
    """Block storage of all layers on one rank, zeros at first; what `kvtransfer` calls a KVStore.

    Zeros, not garbage: masked positions are multiplied by 0, and 0 * NaN is NaN.
    """

    def __init__(self, tensors: list[Tensor], layout: KVLayout, rank: int):
        self.tensors = tensors
        self.layout = layout
        self.rank = rank
        self.num_layers = layout.num_layers
        self.num_blocks: int = tensors[0].shape[0]
        self.block_size = layout.block_size  # tokens
        self.block_bytes = layout.block_bytes  # of one layer on this rank

    def close(self) -> None:
        """Let go of the memory; it is freed with the last tensor on it."""
        self.tensors = []


class HostKVCache(KVCache):
    """A cache in ordinary host memory: a HostStore."""

    def layer_bytes(self, layer: int) -> memoryview:
        """A writable view of uint8 [num_blocks * block_bytes]."""
        return self.tensors[layer].view(torch.uint8).reshape(-1).numpy().data


class SharedKVCache(HostKVCache):
    """A cache in host memory that processes of this machine can map and read: a SharedStore."""

    def __init__(self, tensors: list[Tensor], layout: KVLayout, rank: int, memory: SharedMemory, layer_stride: int):
        super().__init__(tensors, layout, rank)
        self._memory = memory
        self._layer_stride = layer_stride

    @property
    def memory_fd(self) -> int:
        """Of the memfd that holds all layers. Raises ValueError once the cache is closed."""
        return self._memory.fd

    def layer_offset(self, layer: int) -> int:
        """Where a layer begins in the memfd, in bytes: on a page."""
        return layer * self._layer_stride

    def close(self) -> None:
        super().close()
        self._memory.close()


class DeviceKVCache(KVCache):
    """A cache in a GPU's memory: a DeviceStore."""

    @property
    def device(self) -> str:
        """As torch names it, `cuda:0`."""
        return str(self.tensors[0].device)

    def layer_tensor(self, layer: int) -> Tensor:
        return self.tensors[layer]


def make_kv_cache(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    model_digest: str,
    tp_size: int = 1,
    rank: int = 0,
) -> KVCache:
    """A rank's cache on `device`; on CPUs one that others can map, where the system has memfds.

    Raises ConfigError where the host has too little memory, and ValueError for a rank outside of `tp_size`.
    """
    if not 0 <= rank < tp_size:
        raise ValueError(f"rank {rank} is not one of {tp_size}")
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout(
        model_digest, name, config.num_layers, config.num_kv_heads, config.head_dim, block_size, tp_size=tp_size
    )
    shape = (num_blocks, 2, layout.heads_per_rank, block_size, config.head_dim)
    if device.type != "cpu":
        return DeviceKVCache(_zeros(layout, shape, dtype, device), layout, rank)
    try:
        return _shared_cache(layout, rank, shape, dtype)
    except NoSharedMemory as error:
        logger.warning("the KV cache can't be shared with other processes, so KV goes to them over sockets: %s", error)
    try:
        return HostKVCache(_zeros(layout, shape, dtype, device), layout, rank)
    except RuntimeError as error:  # torch's own word for it
        raise _too_little(layout, num_blocks, error) from error


def _zeros(layout: KVLayout, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]


def _shared_cache(layout: KVLayout, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> SharedKVCache:
    """Raises NoSharedMemory or ConfigError."""
    layer_bytes = shape[0] * layout.block_bytes
    stride = -(-layer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = SharedMemory(stride * layout.num_layers)
    except NoRoom as error:
        raise _too_little(layout, shape[0], error) from error
    tensors = [
        torch.frombuffer(memory.memory, dtype=dtype, count=layer_bytes // dtype.itemsize, offset=layer * stride)
        for layer in range(layout.num_layers)
    ]
    return SharedKVCache([tensor.view(shape) for tensor in tensors], layout, rank, memory, stride)


def _too_little(layout: KVLayout, num_blocks: int, error: Exception) -> ConfigError:
    size = gibibytes(num_blocks * layout.block_bytes * layout.num_layers)
    return ConfigError(f"no memory for a KV cache of {size}: use a smaller KV cache ({error})")


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, tp_size: int = 1) -> int:
    """Bytes that one block takes on a rank, in all layers together."""
    heads = max(1, config.num_kv_heads // tp_size)
    return 2 * config.num_layers * heads * config.head_dim * block_size * dtype.itemsize


class Event(Protocol):
    """As torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until what was launched before the event was recorded is done, without the interpreter's lock."""


class LayerAnnouncer:
    """Calls `on_layer(i)` on a thread of its own, in order, each once layer i's event has come.

    A context: when it is left, every call has been made, and the thread has ended. An error of a call, or of the
    device, is raised there, after which no further layer is announced.
    """

    def __init__(self, on_layer: Callable[[int], None], begin: Callable[[], None] = lambda: None):
        """`begin` is called first on the new thread: a thread has a current GPU of its own."""
        self._on_layer = on_layer
        self._begin = begin
        self._layers: SimpleQueue[tuple[int, Event] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="layer-announcer")

    def __enter__(self) -> "LayerAnnouncer":
        self._thread.start()
        return self

    def announce(self, layer: int, event: Event) -> None:
        """`event` was recorded after the launch that writes the layer's KV."""
        self._layers.put((layer, event))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._layers.put(None)
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _work(self) -> None:
        try:
            self._begin()
        except BaseException as failure:
            self._failure = failure
        while (item := self._layers.get()) is not None:
            layer, event = item
            if self._failure is not None:
                continue
            try:
                event.synchronize()
                self._on_layer(layer)
            except BaseException as failure:  # it belongs to the step
                self._failure = failure
