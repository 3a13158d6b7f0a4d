"""KV between GPUs of one machine, or two workers on one GPU: the target's kernel reads the source's cache, one copy.

As shm, with GPU memory in place of a memfd: the source hands handles of its cache's layers over once (local.py). One
launch at the target copies a chunk's units from the source's blocks straight into its own and digests them on the way;
one at the source digests them where they lie.

The handles are those of torch (`UntypedStorage._share_cuda_`), sent as plain fields, never pickled. So:
- The cache has to be ordinary cudaMalloc memory: expandable segments off (`missing`), one tensor a layer, and not
  from a pool of a CUDA graph.
- The source shares each layer once, and tells all targets the same handles: torch counts every handle made, and waits
  for the GPU from about a thousand on. So the count that torch keeps of them is given back by the first target that
  closes its link, and nothing but the worker itself keeps the cache, which lives as long as its engine.
- When the source's process dies, its memory stays mapped at the target until the link closes. What of it is read then
  is refused by its checksum, or belongs to a transfer whose lease has ended.
- The target unmaps on the link's thread and stream: torch waits there for the current stream's work, holding the
  interpreter's lock, and the event loop's current stream is the engine's.
- Both compile what a rank pair launches before the link is joined, where the worker has not at its start.
- Launches don't wait for each other: a second thread learns how each chunk ended, by an event behind it, while the next
  ones are queued on the link's stream. A link is closed, and memory unmapped, once all of them have ended.

Not confirmed on hardware.
"""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import DeviceStore
from twostroke.kvtransfer.transports.device_units import (
    DeviceQueue,
    DeviceUnits,
    unit_places,
    warm_up_source,
    warm_up_target,
)
from twostroke.kvtransfer.transports.local import (
    LocalTransport,
    PoolDescription,
    receive_description,
    send_description,
)
from twostroke.kvtransfer.transports.sockets import Rest
from twostroke.model.cuda.kernels.kv_units import address_tensor, copy_and_digest_units, digest_units
from twostroke.protocol.errors import ConnectionLost, ProtocolError

_WORD_BYTES = 8


class LayerHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The handle of one layer's memory by `_share_cuda_`, and the layer's offset in it."""

    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    layer_offset_bytes: int


class DevicePool(PoolDescription, frozen=True):
    """The source's cache."""

    layers: tuple[LayerHandle, ...]


def share_layer(tensor: torch.Tensor) -> LayerHandle:
    """A handle for one other process. Raises RuntimeError where the memory can't be shared."""
    storage: Any = tensor.untyped_storage()
    _, handle, num_bytes, offset, counter, counter_offset, *_ = storage._share_cuda_()
    inside = int(tensor.storage_offset()) * tensor.element_size()
    return LayerHandle(handle, num_bytes, offset, counter, counter_offset, inside)


def open_layer(shared: LayerHandle, device: torch.device) -> torch.UntypedStorage:
    """The peer's memory, mapped for our own device until the storage is dropped. Raises RuntimeError.

    The peer's device need not be visible to this process: CUDA opens handles of memory of any device. Torch is told to
    wait for no event, which would be that device's: what is read was computed before it was announced.
    """
    opened: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        shared.handle,
        shared.num_bytes,
        shared.offset_bytes,
        shared.counter,
        shared.counter_offset,
        b"",
        False,
    )
    return opened


def missing() -> str | None:
    """Return what keeps this process from sharing its cache with others; None: nothing."""
    if not torch.cuda.is_available():
        return "a CUDA device"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return f"memory that other processes can map: take expandable_segments out of {name}"
    return None


class CudaIpcTransport(LocalTransport):
    """Makes cuda_ipc links for one rank of a worker."""

    name = "cuda_ipc"

    def __init__(self, store: DeviceStore, *, join_timeout_s: float = 10.0):
        super().__init__(join_timeout_s)
        self._store = store
        self._shared: tuple[LayerHandle, ...] = ()  # once for all links
        self._sharing = threading.Lock()

    def handles(self) -> tuple[LayerHandle, ...]:
        """Return the handles of all layers. On any thread. Raises RuntimeError where the memory can't be shared."""
        with self._sharing:
            if not self._shared:
                num_tensors = self._store.layout.groups_of(self._store.rank).num_tensors
                tensors = map(self._store.layer_tensor, range(num_tensors))
                self._shared = tuple(share_layer(tensor) for tensor in tensors)
            return self._shared

    def _check(self, shard: KVShard) -> None:
        super()._check(shard)
        if unit_places(shard).head_bytes % _WORD_BYTES:
            raise ConnectionLost(
                f"cuda_ipc moves words of {_WORD_BYTES} bytes, which this rank pair's heads are not made of"
            )

    def _source_memory(self, shard: KVShard) -> "CudaIpcSource":
        return CudaIpcSource(self._store, shard, self.handles)

    def _target_memory(self, shard: KVShard) -> "CudaIpcTarget":
        return CudaIpcTarget(self._store, shard)


class CudaIpcSource:
    """A SourceMemory."""

    def __init__(self, store: DeviceStore, shard: KVShard, handles: Callable[[], tuple[LayerHandle, ...]]):
        self._store = store
        self._shard = shard
        self._handles = handles
        self._units = DeviceUnits(store, shard)
        self._queue = DeviceQueue(self._units.device)

    def describe(self, connected: socket.socket) -> None:
        shard, num_blocks, layers = self._shard, self._store.num_blocks, self._handles()
        warm_up_source(shard, self._queue, self._units.device)
        send_description(
            connected,
            DevicePool(
                shard.layout, shard.rank, num_blocks, shard.first_head, shard.num_heads, shard.unit_tokens, layers
            ),
        )

    def checksum(self, segments: Sequence[Segment], seed: int) -> Rest[bytes]:
        with self._queue():
            found = torch.empty(2, dtype=torch.int64, device=self._units.device)
            digest_units(self._units.places, self._units.addresses(segments), seed, found)
            return Rest(self._queue.later(found))


class CudaIpcTarget:
    """A TargetMemory, and the owner of the mapping."""

    def __init__(self, store: DeviceStore, shard: KVShard):
        self._shard = shard
        self._units = DeviceUnits(store, shard)
        self._queue = DeviceQueue(self._units.device)
        self._pool: PeerDevicePool | None = None  # from `map` to `unmap`

    def map(self, connected: socket.socket) -> int:
        pool, peer_shard = receive_description(connected, DevicePool, self._shard)
        warm_up_target(peer_shard, self._shard, self._queue, self._units.device)
        self._pool = PeerDevicePool(pool, peer_shard, self._units.device)
        return pool.num_blocks * peer_shard.units_per_block

    def copy(self, peer_ids: NDArray[np.int32], segments: Sequence[Segment], seed: int) -> Rest[bytes]:
        pool = self._pool
        if pool is None:
            raise ConnectionLost("the link is not open")
        with self._queue():
            peers = pool.addresses(segments, peer_ids)
            found = torch.empty(2, dtype=torch.int64, device=self._units.device)
            copy_and_digest_units(pool.places, peers, self._units.places, self._units.addresses(segments), seed, found)
            return Rest(self._queue.later(found))  # which comes after the copy

    def unmap(self) -> None:
        with self._queue():
            self._pool = None  # unmaps it


class PeerDevicePool:
    """The source's cache as this process sees it. Raises ProtocolError for one that is not what was agreed."""

    def __init__(self, pool: DevicePool, shard: KVShard, device: torch.device):
        self._device = device
        self.places = unit_places(shard)
        layer_bytes = pool.num_blocks * pool.layout.block_bytes
        if len(pool.layers) != shard.num_tensors:
            raise ProtocolError(f"the peer shares {len(pool.layers)} of its {shard.num_tensors} layers")
        for layer in pool.layers:
            if layer.layer_offset_bytes < 0 or layer.layer_offset_bytes + layer_bytes > layer.num_bytes:
                raise ProtocolError(f"a layer of the peer is not within its {layer.num_bytes} bytes of memory")
        self._storages = [open_layer(layer, device) for layer in pool.layers]
        tensors = [
            storage.data_ptr() + layer.layer_offset_bytes
            for storage, layer in zip(self._storages, pool.layers, strict=True)
        ]
        self._bases = {layer: tensors[shard.tensor_index(layer)] for layer in shard.layers}

    def addresses(self, segments: Sequence[Segment], peer_ids: NDArray[np.int32]) -> Tensor:
        """Return the addresses of the peer's units: int64 [units] on this side's device."""
        counts = [len(segment.unit_ids) for segment in segments]
        bases = np.repeat(np.array([self._bases[segment.layer] for segment in segments], np.int64), counts)
        return address_tensor(self.places.addresses(bases, peer_ids), self._device)
