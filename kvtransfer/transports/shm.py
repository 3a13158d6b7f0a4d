"""KV between processes of one machine with one copy: the target reads the source's cache, and writes into its own.

The source hands its cache over once, as a read-only descriptor of its memfd, and says how its layers lie in it. The
target believes none of it: it maps the memory, read-only, once it has seen that the file can't shrink (to read beyond
the end of a mapped file is a SIGBUS), and that everything described is inside.

The target copies a chunk batch by batch, from the source's blocks into its own, and digests what it copies on the way:
in memory of its own, so that nothing changes it between checksum and block. Heads and block sizes may differ; KV that
is encoded on its way goes by another transport. Of the link around this, and of zombies: see local.py.
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

from twostroke.kvtransfer.layout import KVShard, Segment
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

    def _source_memory(self, shard: KVShard) -> "ShmSource":
        return ShmSource(self._store, shard)

    def _target_memory(self, shard: KVShard) -> "ShmTarget":
        return ShmTarget(self._store, shard)


class ShmPool(PoolDescription, frozen=True):
    """The source's cache."""

    layer_offsets: tuple[int, ...]  # bytes


class ShmSource:
    """A SourceMemory."""

    def __init__(self, store: SharedStore, shard: KVShard):
        self._store = store
        self._shard = shard
        self._wire = HostWire(store, shard)

    def describe(self, connected: socket.socket) -> None:
        send_pool(connected, self._store, self._shard)

    def checksum(self, segments: Sequence[Segment], seed: int) -> bytes:
        checksum = xxhash.xxh3_128(seed=seed)
        for batch in self._wire.outgoing(segments):
            for view in batch:
                checksum.update(view)
        return checksum.digest()


class ShmTarget:
    """A TargetMemory, and the owner of the mapping."""

    def __init__(self, store: SharedStore, shard: KVShard):
        self._shard = shard
        self._units = HostUnits(store, shard)
        self._batch_units = max(1, BATCH_BYTES // self._units.unit_bytes)
        self._batch = np.empty(self._batch_units * self._units.unit_bytes, np.uint8)
        self._pool: PeerPool | None = None  # from `map` to `unmap`

    def map(self, connected: socket.socket) -> int:
        self._pool = receive_pool(connected, self._shard)
        return self._pool.num_units

    def copy(self, peer_ids: NDArray[np.int32], segments: Sequence[Segment], seed: int) -> bytes:
        if self._pool is None:
            raise ConnectionLost("the link is not open")
        ids, theirs, at = peer_ids.tolist(), [], 0
        for segment in segments:
            end = at + len(segment.unit_ids)
            theirs.append(Segment(segment.layer, tuple(ids[at:end])))
            at = end
        checksum = xxhash.xxh3_128(seed=seed)
        self._copy(self._pool.units, theirs, segments, checksum)
        return checksum.digest()

    def unmap(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _copy(
        self, units: HostUnits, theirs: Sequence[Segment], ours: Sequence[Segment], checksum: xxhash.xxh3_128
    ) -> None:
        """Copy the peer's units into this side's, and through the checksum."""
        starts = range(0, count_units(ours), self._batch_units)
        for source, target in zip(split_segments(theirs, starts), split_segments(ours, starts), strict=True):
            batch = self._batch[: count_units(target) * self._units.unit_bytes]
            units.pack(source, batch)
            checksum.update(batch.data)
            self._units.unpack(target, batch)


def send_pool(connected: socket.socket, store: SharedStore, shard: KVShard) -> None:
    """Let the peer read `store`. Raises OSError, or ValueError where the store is closed or too large."""
    offsets = tuple(store.layer_offset(layer) for layer in range(shard.num_tensors))
    send_description(
        connected,
        ShmPool(
            shard.layout, shard.rank, store.num_blocks, shard.first_head, shard.num_heads, shard.unit_tokens, offsets
        ),
    )
    # Reopened, not duplicated: a duplicate would be as writable as ours.
    read_only = os.open(f"/proc/self/fd/{store.memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(connected, [b"\0"], [read_only])
    finally:
        os.close(read_only)


def receive_pool(connected: socket.socket, shard: KVShard) -> "PeerPool":
    """Map what the peer's `send_pool` sends; `shard` is our end of the rank pair.

    Raises OSError where descriptors or memory are exhausted, and ProtocolError for a pool that is not what was agreed.
    """
    pool, peer_shard = receive_description(connected, ShmPool, shard)
    if len(pool.layer_offsets) != peer_shard.num_tensors:
        raise ProtocolError(f"the peer places {len(pool.layer_offsets)} of its {peer_shard.num_tensors} layers")
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
    return PeerPool(mapping, pool, peer_shard)


def _check_seals(descriptor: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("the peer's cache is not a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer's cache could shrink while we read it")


class PeerPool:
    """The source's cache, mapped read-only. It lives until `close`, whatever becomes of the source."""

    def __init__(self, mapping: mmap.mmap, pool: ShmPool, shard: KVShard):
        self._mapping = mapping
        self._memory = memoryview(mapping)
        layer_bytes = pool.num_blocks * pool.layout.block_bytes
        self._layers = [self._memory[start : start + layer_bytes] for start in pool.layer_offsets]
        self.num_units = pool.num_blocks * shard.units_per_block
        self.num_blocks = pool.num_blocks
        self.units = HostUnits(self, shard)

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
