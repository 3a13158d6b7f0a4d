"""KV between processes of one machine with one copy: the target reads the source's cache, and writes into its own.

The source hands its cache over once, as a read-only descriptor (shared_pool.py). From then on a chunk is a short
message over a unix socket: the ids of the source's units, int32, and the digest of their bytes. The target copies those
units, batch by batch, from the source's blocks into its own, and digests what it copies on the way: in memory of its
own, so that nobody changes it between digest and block. Heads and block sizes may differ; KV that is encoded on its way
goes by another transport.

Why a zombie can do no harm: the source never maps the target's cache, so whatever it does after its lease, it writes
nothing there. Only the target's own thread writes into the target's blocks, for a transfer that the target still holds
blocks for. What it reads after the source has given a block to somebody else doesn't fit the digest, or belongs to a
transfer that has ended.
"""

import hmac
import socket
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from twostroke.kvtransfer.link import DIGEST_BYTES, DataLink
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.store import SharedStore
from twostroke.kvtransfer.transports.host_units import BATCH_BYTES, HostUnits, HostWire, count_units, split_segments
from twostroke.kvtransfer.transports.link_thread import receive_exactly
from twostroke.kvtransfer.transports.local import LocalSource, LocalTarget, LocalTransport
from twostroke.kvtransfer.transports.shared_pool import PeerPool, receive_pool, send_pool
from twostroke.protocol.errors import ConnectionLost

_ID_BYTES = 4


class ShmTransport(LocalTransport):
    """Makes shm links for one rank of a worker."""

    name = "shm"

    def __init__(self, store: SharedStore, *, join_timeout_s: float = 10.0):
        super().__init__(join_timeout_s)
        self._store = store

    def _make_target(self, connected: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]) -> "ShmTarget":
        return ShmTarget(connected, self._store, cut, on_close)

    def _make_source(self, connecting: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]) -> "ShmSource":
        return ShmSource(connecting, self._store, cut, on_close)


class ShmSource(LocalSource):
    """The sending end."""

    def __init__(self, connecting: socket.socket, store: SharedStore, cut: Cut, on_close: Callable[[DataLink], None]):
        super().__init__(connecting, "kv-shm", on_close)
        self._store = store
        self._cut = cut
        self._wire = HostWire(store, cut)

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        await self._thread.call(self._send, segments, seal)

    def _describe(self, connection: socket.socket) -> None:
        send_pool(connection, self._store, self._cut)

    def _send(self, segments: Sequence[Segment], seal: int) -> None:
        """The ids of units and the digest of their bytes, as they are now."""
        ids = array("i")
        for segment in segments:
            ids.extend(segment.unit_ids)
        digest = xxhash.xxh3_128(seed=seal)
        for batch in self._wire.outgoing(segments):
            for view in batch:
                digest.update(view)
        self._thread.socket.sendall(ids.tobytes() + digest.digest())


class ShmTarget(LocalTarget):
    """The receiving end, and the owner of the mapping."""

    def __init__(self, connected: socket.socket, store: SharedStore, cut: Cut, on_close: Callable[[DataLink], None]):
        super().__init__(connected, "kv-shm", on_close)
        self._cut = cut
        self._units = HostUnits(store, cut)
        self._batch_units = max(1, BATCH_BYTES // self._units.unit_bytes)
        self._batch = np.empty(self._batch_units * self._units.unit_bytes, np.uint8)
        self._pool: PeerPool | None = None  # from `open` to `close`

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        return await self._thread.call(self._receive, segments, seal)

    async def discard(self, num_units: int) -> None:
        await self._thread.call(self._read_chunk, num_units)

    def _map(self, connection: socket.socket) -> None:
        self._pool = receive_pool(connection, self._cut)

    def _unmap(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _read_chunk(self, num_units: int) -> tuple[list[int], bytes]:
        """The ids of the peer's units, and their digest."""
        received = receive_exactly(self._thread.socket, num_units * _ID_BYTES + DIGEST_BYTES)
        return memoryview(received)[:-DIGEST_BYTES].cast("i").tolist(), bytes(received[-DIGEST_BYTES:])

    def _receive(self, segments: Sequence[Segment], seal: int) -> bool:
        peer_ids, expected = self._read_chunk(count_units(segments))
        if self._pool is None:
            raise ConnectionLost("the link is not open")
        theirs, at = [], 0
        for segment in segments:
            end = at + len(segment.unit_ids)
            theirs.append(Segment(segment.layer, tuple(peer_ids[at:end])))
            at = end
        self._pool.check(theirs)
        digest = xxhash.xxh3_128(seed=seal)
        self._copy(self._pool.units, theirs, segments, digest)
        return hmac.compare_digest(digest.digest(), expected)

    def _copy(
        self, units: HostUnits, theirs: Sequence[Segment], ours: Sequence[Segment], digest: xxhash.xxh3_128
    ) -> None:
        """From the peer's units into our own, and through the digest."""
        starts = range(0, count_units(ours), self._batch_units)
        for source, target in zip(split_segments(theirs, starts), split_segments(ours, starts), strict=True):
            batch = self._batch[: count_units(target) * self._units.unit_bytes]
            units.pack(source, batch)
            digest.update(batch.data)
            self._units.unpack(target, batch)
