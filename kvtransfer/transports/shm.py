"""KV between processes of one machine with one copy: the target reads the source's cache, and writes into its own.

The source hands its cache over once, as a read-only descriptor of its memfd, and says how its layers lie in it. The
target believes none of it: it maps the memory, read-only, once it has seen that the file can't shrink (to read beyond
the end of a mapped file is a SIGBUS), and that everything described is inside.

The target copies a chunk batch by batch, from the source's blocks into its own, and digests what it copies on the way:
in memory of its own, so that nothing changes it between digest and block. Heads and block sizes may differ; KV that is
encoded on its way goes by another transport. Of the link around this, and of zombies: see local.py.
"""

import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.link import SharedStore
from twostroke.kvtransfer.transports.host_units import BATCH_BYTES, HostUnits, HostWire, count_units, split_segments
from twostroke.kvtransfer.transports.local import (
    LocalTransport,
    PoolDescription,
    receive_description,
    send_description,
)
from twostroke.protocol.errors import ConnectionLost, ProtocolError


class ShmTransport(LocalTransport):
    """Makes shm links for one rank of a worker."""

    name = "shm"

    def __init__(self, store: SharedStore, *, join_timeout_s: float = 10.0):
        super().__init__(join_timeout_s)
        self._store = store

    def _source_memory(self, cut: Cut) -> "ShmSource":
        return ShmSource(self._store, cut)

    def _target_memory(self, cut: Cut) -> "ShmTarget":
        return ShmTarget(self._store, cut)


class ShmPool(PoolDescription, frozen=True):
    """The source's cache."""

    layer_offsets: tuple[int, ...]  # bytes


class ShmSource:
    """A SourceMemory."""

    def __init__(self, store: SharedStore, cut: Cut):
        self._store = store
        self._cut = cut
        self._wire = HostWire(store, cut)

    def describe(self, connected: socket.socket) -> None:
        send_pool(connected, self._store, self._cut)

    def digest(self, segments: Sequence[Segment], seal: int) -> bytes:
        digest = xxhash.xxh3_128(seed=seal)
        for batch in self._wire.outgoing(segments):
            for view in batch:
                digest.update(view)
        return digest.digest()


class ShmTarget:
    """A TargetMemory, and the owner of the mapping."""

    def __init__(self, store: SharedStore, cut: Cut):
        self._cut = cut
        self._units = HostUnits(store, cut)
        self._batch_units = max(1, BATCH_BYTES // self._units.unit_bytes)
        self._batch = np.empty(self._batch_units * self._units.unit_bytes, np.uint8)
        self._pool: PeerPool | None = None  # from `map` to `unmap`

    def map(self, connected: socket.socket) -> int:
        self._pool = receive_pool(connected, self._cut)
        return self._pool.num_units

    def copy(self, peer_ids: NDArray[np.int32], segments: Sequence[Segment], seal: int) -> bytes:
        if self._pool is None:
            raise ConnectionLost("the link is not open")
        ids, theirs, at = peer_ids.tolist(), [], 0
        for segment in segments:
            end = at + len(segment.unit_ids)
            theirs.append(Segment(segment.layer, tuple(ids[at:end])))
            at = end
        digest = xxhash.xxh3_128(seed=seal)
        self._copy(self._pool.units, theirs, segments, digest)
        return digest.digest()

    def unmap(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _copy(
        self, units: HostUnits, theirs: Sequence[Segment], ours: Sequence[Segment], digest: xxhash.xxh3_128
    ) -> None:
        """Copy the peer's units into this side's, and through the digest."""
        starts = range(0, count_units(ours), self._batch_units)
        for source, target in zip(split_segments(theirs, starts), split_segments(ours, starts), strict=True):
            batch = self._batch[: count_units(target) * self._units.unit_bytes]
            units.pack(source, batch)
            digest.update(batch.data)
            self._units.unpack(target, batch)


def send_pool(connected: socket.socket, store: SharedStore, cut: Cut) -> None:
    """Let the peer read `store`. Raises OSError, or ValueError where the store is closed or too large."""
    offsets = tuple(store.layer_offset(layer) for layer in range(cut.num_tensors))
    send_description(
        connected,
        ShmPool(cut.layout, cut.rank, store.num_blocks, cut.first_head, cut.num_heads, cut.unit_tokens, offsets),
    )
    # Reopened, not duplicated: a duplicate would be as writable as ours.
    read_only = os.open(f"/proc/self/fd/{store.memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(connected, [b"\0"], [read_only])
    finally:
        os.close(read_only)


def receive_pool(connected: socket.socket, cut: Cut) -> "PeerPool":
    """Map what the peer's `send_pool` sends; `cut` is our end of the lane.

    Raises OSError where descriptors or memory are exhausted, and ProtocolError for a pool that is not what was agreed.
    """
    pool, peer_cut = receive_description(connected, ShmPool, cut)
    if len(pool.layer_offsets) != peer_cut.num_tensors:
        raise ProtocolError(f"the peer places {len(pool.layer_offsets)} of its {peer_cut.num_tensors} layers")
    head, descriptors, flags, _ = socket.recv_fds(connected, 1, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not head:
            raise ConnectionResetError("the peer closed it")
        if flags & socket.MSG_CTRUNC:  # the kernel had to drop the descriptor
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(descriptors) != 1:
            raise ProtocolError("the peer sent no descriptor of its cache")
        size = os.fstat(descriptors[0]).st_size
        layer_bytes = pool.num_blocks * pool.layout.block_bytes
        if min(pool.layer_offsets) < 0 or max(pool.layer_offsets) + layer_bytes > size:
            raise ProtocolError(f"the peer's layers are not all within its {size} bytes of memory")
        _check_seals(descriptors[0])
        mapping = mmap.mmap(descriptors[0], size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return PeerPool(mapping, pool, peer_cut)


def _check_seals(descriptor: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("the peer's cache is not a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer's cache could shrink while we read it")


class PeerPool:
    """The source's cache, mapped read-only. It lives until `close`, whatever becomes of the source."""

    def __init__(self, mapping: mmap.mmap, pool: ShmPool, cut: Cut):
        self._mapping = mapping
        self._memory = memoryview(mapping)
        layer_bytes = pool.num_blocks * pool.layout.block_bytes
        self._layers = [self._memory[start : start + layer_bytes] for start in pool.layer_offsets]
        self.num_units = pool.num_blocks * cut.units_per_block
        self.num_blocks = pool.num_blocks
        self.units = HostUnits(self, cut)

    def layer_bytes(self, layer: int) -> memoryview:
        """Read-only uint8 [num_blocks * block_bytes] of the peer's layer."""
        return self._layers[layer]

    def close(self) -> None:
        """Unmap. Nothing may be reading."""
        self.units.release()
        for layer in self._layers:
            layer.release()
        self._memory.release()
        self._mapping.close()
