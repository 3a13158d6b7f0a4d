"""KV between processes of one machine with one copy: the target reads the source's cache, and writes into its own.

The source hands its cache over once, as a read-only descriptor (shared_pool.py). From then on a chunk is a short
message over a unix socket: the ids of the source's units, int32, and the digest of their bytes. The target copies those
units straight from the source's blocks into its own, and compares the digest of what it has written. Heads and block
sizes may differ; KV that is encoded on its way goes by another transport.

Why a zombie can do no harm: the source never maps the target's cache, so whatever it does after its lease, it writes
nothing there. Only the target's own thread writes into the target's blocks, for a transfer that the target still holds
blocks for. What it reads after the source has given a block to somebody else doesn't fit the digest, or belongs to a
transfer that has ended.
"""

import fcntl
import hmac
import socket
import struct
import termios
from array import array
from collections.abc import Callable, Sequence

from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.fused_digest import BLOCK_BYTES, FusedDigest, can_be_fused
from twostroke.kvtransfer.host_units import UnitRuns, count_units
from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.link import DataLink
from twostroke.kvtransfer.run_digest import RunDigest, make_run_digest
from twostroke.kvtransfer.store import SharedStore
from twostroke.kvtransfer.transports.local import LocalSource, LocalTarget, LocalTransport
from twostroke.kvtransfer.transports.shared_pool import PeerPool, receive_exactly, receive_pool, send_pool
from twostroke.protocol.errors import ConnectionLost

HERE_BYTES = 512 * 1024  # copied in less time than it takes to hand the work to a thread and back
_INT = struct.Struct("i")
_ID_BYTES = 4


class ShmSource(LocalSource):
    """The sending end."""

    def __init__(self, connecting: socket.socket, store: SharedStore, cut: Cut, on_close: Callable[[DataLink], None]):
        super().__init__(connecting, "kv-shm", on_close)
        self._store = store
        self._cut = cut
        self._layers = [store.layer_bytes(layer) for layer in range(cut.layout.num_layers)]
        self._runs = UnitRuns(cut)
        self._digest = make_run_digest()

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        if self._thread.is_idle and count_units(segments) * self._runs.unit_bytes <= HERE_BYTES:
            rest = self._thread.call_here(self._try_send, segments, seal)
            if rest:
                await self._thread.call(self._thread.socket.sendall, rest)
        else:
            await self._thread.call(self._send, segments, seal)

    def _describe(self, connection: socket.socket) -> None:
        send_pool(connection, self._store, self._cut)

    def _try_send(self, segments: Sequence[Segment], seal: int) -> bytes:
        """Send a chunk as far as that doesn't block; what is left of its message is returned."""
        message = self._message(segments, seal)
        try:
            return message[self._thread.socket.send(message, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return message

    def _send(self, segments: Sequence[Segment], seal: int) -> None:
        self._thread.socket.sendall(self._message(segments, seal))

    def _message(self, segments: Sequence[Segment], seal: int) -> bytes:
        """The ids of units and the digest of their bytes, as they are now."""
        ids = array("i")
        self._digest.start(seal)
        for segment in segments:
            ids.extend(segment.unit_ids)
            offsets = self._runs.offsets(segment.unit_ids)
            self._digest.update(self._layers[segment.layer], offsets, self._runs.run_bytes)
        return ids.tobytes() + self._digest.result()


class ShmTarget(LocalTarget):
    """The receiving end, and the owner of the mapping."""

    def __init__(self, connected: socket.socket, store: SharedStore, cut: Cut, on_close: Callable[[DataLink], None]):
        super().__init__(connected, "kv-shm", on_close)
        self._cut = cut
        self._layers = [store.layer_bytes(layer) for layer in range(cut.layout.num_layers)]
        self._runs = UnitRuns(cut)
        self._digest: RunDigest | FusedDigest = make_run_digest()
        self._run_bytes = self._runs.run_bytes  # that both ends have
        self._pool: PeerPool | None = None  # from `open` to `close`

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        num_units = count_units(segments)
        if num_units * self._runs.unit_bytes <= HERE_BYTES and self._thread.is_idle and self._has_arrived(num_units):
            return self._thread.call_here(self._receive, segments, seal)
        return await self._thread.call(self._receive, segments, seal)

    async def discard(self, num_units: int) -> None:
        await self._thread.call(self._read_chunk, num_units)

    def _unmap(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _map(self, connection: socket.socket) -> None:
        self._pool = receive_pool(connection, self._cut)
        self._run_bytes = min(self._runs.run_bytes, self._pool.runs.run_bytes)
        if self._run_bytes % BLOCK_BYTES == 0 and can_be_fused():
            self._digest = FusedDigest()

    def _has_arrived(self, num_units: int) -> bool:
        """Whether a chunk's message is there, so that to read it won't block."""
        waiting = fcntl.ioctl(self._thread.socket, termios.FIONREAD, bytes(_INT.size))
        return bool(_INT.unpack(waiting)[0] >= num_units * _ID_BYTES + DIGEST_BYTES)

    def _read_chunk(self, num_units: int) -> tuple[memoryview, bytes]:
        """The ids of the peer's units, int32, and their digest."""
        received = receive_exactly(self._thread.socket, num_units * _ID_BYTES + DIGEST_BYTES)
        return memoryview(received)[:-DIGEST_BYTES].cast("i"), bytes(received[-DIGEST_BYTES:])

    def _receive(self, segments: Sequence[Segment], seal: int) -> bool:
        peer_ids, digest = self._read_chunk(count_units(segments))
        pool = self._pool
        if pool is None:
            raise ConnectionLost("the link is not open")
        pool.check(peer_ids)
        self._digest.start(seal)
        size = self._run_bytes
        at = 0
        for segment in segments:
            end = at + len(segment.unit_ids)
            own, peers = self._runs.offsets(segment.unit_ids, size), pool.runs.offsets(peer_ids[at:end], size)
            self._digest.copy(self._layers[segment.layer], own, pool.layer(segment.layer), peers, size)
            at = end
        return hmac.compare_digest(self._digest.result(), digest)


class ShmTransport(LocalTransport):
    """Makes shm links for one rank of a worker."""

    name = "shm"

    def __init__(self, store: SharedStore, *, join_timeout_s: float = 10.0):
        super().__init__(join_timeout_s)
        self._store = store

    def _make_target(self, connected: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]) -> ShmTarget:
        return ShmTarget(connected, self._store, cut, on_close)

    def _make_source(self, connecting: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]) -> ShmSource:
        return ShmSource(connecting, self._store, cut, on_close)
