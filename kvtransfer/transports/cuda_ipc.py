"""KV between GPUs of one machine, or two workers on one GPU: the target's kernel reads the source's cache, one copy.

As shm, with GPU memory in place of a memfd: the source hands handles of its cache's layers over once; from then on a
chunk is the ids of its units, int32, and the digest of their bytes. One launch at the target copies those units from
the source's blocks straight into its own and digests them on the way; one at the source digests them where they lie.

The handles are those of torch (`UntypedStorage._share_cuda_`), sent as plain fields, never pickled. So:
- The cache has to be ordinary cudaMalloc memory: expandable segments off (`missing`), one tensor a layer, and not
  from a pool of a CUDA graph.
- The source's process owns the memory. Each handle holds a count that the target's mapping gives back when the link is
  closed; until then torch keeps freed memory of the source in limbo, so that a target never reads what was given to
  somebody else's tensor. When the source's process dies, its memory stays mapped at the target until the link closes.
- What of it is read then is refused by its digest, or belongs to a transfer whose lease has ended.

A zombie can do no harm, as in shm: the source has no handle of the target's memory.

Not confirmed on hardware.
"""

import functools
import hmac
import os
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch

from twostroke.kvtransfer.link import DIGEST_BYTES, DataLink
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.store import DeviceStore
from twostroke.kvtransfer.transports.device_units import DeviceQueue, DeviceUnits, places_of
from twostroke.kvtransfer.transports.host_units import count_units
from twostroke.kvtransfer.transports.link_thread import receive_exactly
from twostroke.kvtransfer.transports.local import LocalSource, LocalTarget, LocalTransport
from twostroke.kvtransfer.transports.shared_pool import (
    MAX_DESCRIPTION_BYTES,
    PoolDescription,
    checked_cut,
)
from twostroke.model.cuda.kernels.kv_units import address_tensor, copy_and_digest_units, digest_units
from twostroke.protocol.errors import ConnectionLost, ProtocolError

P = ParamSpec("P")
R = TypeVar("R")

_LENGTH = struct.Struct("<I")
_ID_BYTES = 4
_WORD_BYTES = 8


class LayerHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What `_share_cuda_` says of one layer's memory, and where in it the layer begins."""

    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool
    layer_offset_bytes: int


class DevicePool(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The source's cache."""

    description: PoolDescription  # whose layer offsets are those within the storages
    layers: tuple[LayerHandle, ...]


def share_layer(tensor: torch.Tensor) -> LayerHandle:
    """A handle for one other process. Raises RuntimeError where the memory can't be shared."""
    storage: Any = tensor.untyped_storage()
    _, handle, num_bytes, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    inside = int(tensor.storage_offset()) * tensor.element_size()
    return LayerHandle(handle, num_bytes, offset, counter, counter_offset, event, waits, inside)


def open_layer(shared: LayerHandle, device: torch.device) -> torch.UntypedStorage:
    """The peer's memory, mapped until the storage is dropped. Raises RuntimeError."""
    opened: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        shared.handle,
        shared.num_bytes,
        shared.offset_bytes,
        shared.counter,
        shared.counter_offset,
        shared.event,
        shared.waits_for_event,
    )
    return opened


def missing() -> str | None:
    """What this process lacks for its cache to be shared with others; None where nothing."""
    if not torch.cuda.is_available():
        return "a CUDA device"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return f"memory that other processes can map: take expandable_segments out of {name}"
    return None


class CudaIpcSource(LocalSource):
    """The sending end."""

    def __init__(self, connecting: socket.socket, store: DeviceStore, cut: Cut, on_close: Callable[[DataLink], None]):
        super().__init__(connecting, "kv-cuda-ipc", on_close)
        self._store = store
        self._cut = cut
        self._units = DeviceUnits(store, cut)
        self._queue = DeviceQueue(self._units.device)

    async def open(self, address: bytes, token: bytes, timeout_s: float) -> None:
        await self._thread.call(_mapped(self._open), address, token, timeout_s)

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        await self._thread.call(_mapped(self._send), segments, seal)

    def _describe(self, connection: socket.socket) -> None:
        cut, store = self._cut, self._store
        layers = tuple(share_layer(store.layer_tensor(layer)) for layer in range(cut.layout.num_layers))
        offsets = tuple(layer.layer_offset_bytes for layer in layers)
        described = msgspec.msgpack.encode(
            DevicePool(
                PoolDescription(cut.layout, store.num_blocks, offsets, cut.first_head, cut.num_heads, cut.unit_tokens),
                layers,
            )
        )
        connection.sendall(_LENGTH.pack(len(described)) + described)

    def _send(self, segments: Sequence[Segment], seal: int) -> None:
        ids = array("i")
        for segment in segments:
            ids.extend(segment.unit_ids)
        with self._queue():
            found = torch.empty(2, dtype=torch.int64, device=self._units.device)
            digest_units(self._units.places, self._units.addresses(segments), seal, found)
            digest = found.cpu().numpy().tobytes()
        self._thread.socket.sendall(ids.tobytes() + digest)


class CudaIpcTarget(LocalTarget):
    """The receiving end, and the owner of the mapping."""

    def __init__(self, connected: socket.socket, store: DeviceStore, cut: Cut, on_close: Callable[[DataLink], None]):
        super().__init__(connected, "kv-cuda-ipc", on_close)
        self._cut = cut
        self._units = DeviceUnits(store, cut)
        self._queue = DeviceQueue(self._units.device)
        self._pool: PeerDevicePool | None = None  # from `open` to `close`

    async def open(self, timeout_s: float) -> None:
        await self._thread.call(_mapped(self._open), timeout_s)

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        return await self._thread.call(_mapped(self._receive), segments, seal)

    async def discard(self, num_units: int) -> None:
        await self._thread.call(_mapped(self._read_chunk), num_units)

    def _unmap(self) -> None:
        self._pool = None  # unmaps it

    def _map(self, connection: socket.socket) -> None:
        (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
        if length > MAX_DESCRIPTION_BYTES:
            raise ProtocolError(f"the peer describes its cache in {length} bytes")
        try:
            pool = msgspec.msgpack.decode(receive_exactly(connection, length), type=DevicePool)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the peer's cache is not described as it must be: {error}") from error
        self._pool = PeerDevicePool(pool, self._cut, self._units.device)

    def _read_chunk(self, num_units: int) -> tuple[np.ndarray[Any, np.dtype[np.int32]], bytes]:
        """The ids of the peer's units, and their digest."""
        received = receive_exactly(self._thread.socket, num_units * _ID_BYTES + DIGEST_BYTES)
        return np.frombuffer(received, np.int32, num_units), bytes(received[-DIGEST_BYTES:])

    def _receive(self, segments: Sequence[Segment], seal: int) -> bool:
        peer_ids, digest = self._read_chunk(count_units(segments))
        pool = self._pool
        if pool is None:
            raise ConnectionLost("the link is not open")
        with self._queue():
            peers = address_tensor(pool.addresses(segments, peer_ids), self._units.device)
            found = torch.empty(2, dtype=torch.int64, device=self._units.device)
            copy_and_digest_units(pool.places, peers, self._units.places, self._units.addresses(segments), seal, found)
            written = found.cpu().numpy().tobytes()  # waits for the copy, too
        return hmac.compare_digest(written, digest)


class PeerDevicePool:
    """The source's cache as this process sees it. Raises ProtocolError for one that is not what was agreed."""

    def __init__(self, pool: DevicePool, cut: Cut, device: torch.device):
        description = pool.description
        self._cut = checked_cut(description, cut)
        self.places = places_of(self._cut)
        self._num_units = description.num_blocks * self._cut.units_per_block
        layer_bytes = description.num_blocks * description.layout.block_bytes
        if len(pool.layers) != description.layout.num_layers:
            raise ProtocolError(f"the peer shares {len(pool.layers)} of its {description.layout.num_layers} layers")
        for layer in pool.layers:
            if layer.layer_offset_bytes < 0 or layer.layer_offset_bytes + layer_bytes > layer.num_bytes:
                raise ProtocolError(f"a layer of the peer is not within its {layer.num_bytes} bytes of memory")
        self._storages = [open_layer(layer, device) for layer in pool.layers]
        self._bases = [
            storage.data_ptr() + layer.layer_offset_bytes
            for storage, layer in zip(self._storages, pool.layers, strict=True)
        ]

    def addresses(
        self, segments: Sequence[Segment], peer_ids: np.ndarray[Any, np.dtype[np.int32]]
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where the peer's units begin. Raises ProtocolError for units that the peer has not."""
        if peer_ids.size and not (peer_ids.min() >= 0 and peer_ids.max() < self._num_units):
            raise ProtocolError(f"the peer names units outside of its {self._num_units}")
        counts = [len(segment.unit_ids) for segment in segments]
        bases = np.repeat(np.array([self._bases[segment.layer] for segment in segments], np.int64), counts)
        return self.places.addresses(bases, peer_ids)


class CudaIpcTransport(LocalTransport):
    """Makes cuda_ipc links for one rank of a worker."""

    name = "cuda_ipc"

    def __init__(self, store: DeviceStore, *, join_timeout_s: float = 10.0):
        super().__init__(join_timeout_s)
        self._store = store

    def _check(self, cut: Cut) -> None:
        super()._check(cut)
        if places_of(cut).head_bytes % _WORD_BYTES:
            raise ConnectionLost(
                f"cuda_ipc moves words of {_WORD_BYTES} bytes, which this lane's heads are not made of"
            )

    def _make_target(self, connected: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]) -> CudaIpcTarget:
        return CudaIpcTarget(connected, self._store, cut, on_close)

    def _make_source(self, connecting: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]) -> CudaIpcSource:
        return CudaIpcSource(connecting, self._store, cut, on_close)


def _mapped(call: Callable[P, R]) -> Callable[P, R]:
    """The same call, with CUDA's errors (RuntimeErrors, all of them) as an OSError, which breaks the link."""

    @functools.wraps(call)
    def mapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise OSError(f"CUDA: {error}") from error

    return mapped
