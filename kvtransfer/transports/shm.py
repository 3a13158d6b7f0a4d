"""KV between processes of one machine with one copy: the target reads the source's cache, and writes into its own.

The source hands its cache over once, as a read-only descriptor (shared_pool.py). From then on a chunk is a short
message over a unix socket: the ids of the source's units, int32, and the digest of their bytes. The target copies those
units straight from the source's blocks into its own, and compares the digest of what it has written. Heads and block
sizes may differ; KV that is encoded on its way goes by another transport.

Why a zombie can do no harm: the source never maps the target's cache, so whatever it does after its lease, it writes
nothing there. Only the target's own thread writes into the target's blocks, for a transfer that the target still holds
blocks for. What it reads after the source has given a block to somebody else doesn't fit the digest, or belongs to a
transfer that has ended.

The socket has an abstract name: nothing is left in the file system. The name goes over the authenticated control
connection; a guest must show the one-time token that went with it, and either side belong to the same user.
"""

import asyncio
import fcntl
import hmac
import os
import secrets
import socket
import struct
import termios
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from kvtransfer.digest import DIGEST_BYTES
from kvtransfer.fused_digest import BLOCK_BYTES, FusedDigest, can_be_fused
from kvtransfer.host_units import UnitRuns, count_units
from kvtransfer.layout import Cut, Segment
from kvtransfer.link import DataLink, LinkParams
from kvtransfer.run_digest import RunDigest, make_run_digest
from kvtransfer.store import SharedStore
from kvtransfer.transports.link_thread import LinkThread
from kvtransfer.transports.shared_pool import PeerPool, receive_exactly, receive_pool, send_pool
from protocol.errors import ConnectionLost

TOKEN_BYTES = 32
HERE_BYTES = 512 * 1024  # copied in less time than it takes to hand the work to a thread and back
_READY = b"\x01"
_BACKLOG = 16
_PREFIX = b"\0twostroke-kv-"
_NAME_BYTES = 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_INT = struct.Struct("i")
_ID_BYTES = 4


class ShmSource:
    """The sending end: says which units to read, and what they must amount to."""

    def __init__(self, connecting: socket.socket, store: SharedStore, cut: Cut, on_close: Callable[[DataLink], None]):
        self._thread = LinkThread(connecting, "kv-shm")
        self._store = store
        self._cut = cut
        self._layers = [store.layer_bytes(layer) for layer in range(cut.layout.num_layers)]
        self._runs = UnitRuns(cut)
        self._digest = make_run_digest()
        self._on_close = on_close

    async def open(self, name: bytes, token: bytes, timeout_s: float) -> None:
        """Raises ConnectionLost; the link has to be closed then, too."""
        await self._thread.call(self._open, name, token, timeout_s)

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        if self._thread.is_idle and count_units(segments) * self._runs.unit_bytes <= HERE_BYTES:
            rest = self._thread.call_here(self._try_send, segments, seal)
            if rest:
                await self._thread.call(self._thread.socket.sendall, rest)
        else:
            await self._thread.call(self._send, segments, seal)

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        raise ConnectionLost("this end of the link only sends")

    async def discard(self, num_units: int) -> None:
        raise ConnectionLost("this end of the link only sends")

    async def close(self) -> None:
        await self._thread.close()
        self._on_close(self)

    def _open(self, name: bytes, token: bytes, timeout_s: float) -> None:
        connection = self._thread.socket
        connection.settimeout(timeout_s)
        connection.connect(name)
        if not is_same_user(connection):
            raise ConnectionLost("the peer belongs to another user")
        connection.sendall(token)
        send_pool(connection, self._store, self._cut)
        receive_exactly(connection, len(_READY))
        connection.settimeout(None)

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


class ShmTarget:
    """The receiving end: the only one that copies, and the owner of the mapping."""

    def __init__(self, connected: socket.socket, store: SharedStore, cut: Cut, on_close: Callable[[DataLink], None]):
        self._thread = LinkThread(connected, "kv-shm")
        self._cut = cut
        self._layers = [store.layer_bytes(layer) for layer in range(cut.layout.num_layers)]
        self._runs = UnitRuns(cut)
        self._digest: RunDigest | FusedDigest = make_run_digest()
        self._run_bytes = self._runs.run_bytes  # that both ends have
        self._pool: PeerPool | None = None  # from `open` to `close`
        self._on_close = on_close

    async def open(self, timeout_s: float) -> None:
        """Raises ConnectionLost; the link has to be closed then, too."""
        await self._thread.call(self._open, timeout_s)

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        raise ConnectionLost("this end of the link only receives")

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        num_units = count_units(segments)
        if num_units * self._runs.unit_bytes <= HERE_BYTES and self._thread.is_idle and self._has_arrived(num_units):
            return self._thread.call_here(self._receive, segments, seal)
        return await self._thread.call(self._receive, segments, seal)

    async def discard(self, num_units: int) -> None:
        await self._thread.call(self._read_chunk, num_units)

    async def close(self) -> None:
        await self._thread.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._on_close(self)

    def _open(self, timeout_s: float) -> None:
        connection = self._thread.socket
        connection.settimeout(timeout_s)
        self._pool = receive_pool(connection, self._cut)
        self._run_bytes = min(self._runs.run_bytes, self._pool.runs.run_bytes)
        if self._run_bytes % BLOCK_BYTES == 0 and can_be_fused():
            self._digest = FusedDigest()
        connection.sendall(_READY)
        connection.settimeout(None)

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


class LocalTarget(DataLink, Protocol):
    """The receiving end of a link between processes of one machine."""

    async def open(self, timeout_s: float) -> None:
        """Agree with the peer on its memory. Raises ConnectionLost; the link has to be closed then, too."""


class LocalSource(DataLink, Protocol):
    """The sending end."""

    async def open(self, name: bytes, token: bytes, timeout_s: float) -> None:
        """Connect, and agree with the peer on our memory. Raises as LocalTarget's."""


class ShmPendingLink:
    """A listening socket that waits for one guest with the right token and user."""

    def __init__(
        self,
        listener: socket.socket,
        name: bytes,
        join_timeout_s: float,
        make_link: Callable[[socket.socket], LocalTarget],
        on_close: Callable[["ShmPendingLink"], None],
    ):
        self._listener = listener
        self._name = name
        self._join_timeout_s = join_timeout_s
        self._make_link = make_link
        self._on_close = on_close
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._joined: asyncio.Future[LocalTarget] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    @property
    def params(self) -> LinkParams:
        return {"name": self._name.hex(), "token": self._token.hex()}

    async def established(self) -> LocalTarget:
        try:
            async with asyncio.timeout(self._join_timeout_s):
                link = await asyncio.shield(self._joined)
        except TimeoutError as error:
            raise ConnectionLost(f"the peer did not join the link within {self._join_timeout_s:g} s") from error
        await self._stop()
        try:
            await link.open(self._join_timeout_s)
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        await self._stop()
        if not self._joined.done():
            self._joined.cancel()
        elif not self._joined.cancelled() and self._joined.exception() is None:
            await self._joined.result().close()

    async def _stop(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        self._on_close(self)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                guest, _ = await loop.sock_accept(self._listener)
                if len(self._tasks) > _BACKLOG or not is_same_user(guest):
                    guest.close()
                else:
                    self._start(self._admit(guest))
        except OSError as error:  # out of descriptors
            if not self._joined.done():
                self._joined.set_exception(ConnectionLost(f"no guest can be let in: {error}"))

    async def _admit(self, guest: socket.socket) -> None:
        """Let `guest` in if it shows the token; strangers wait beside each other, so none holds up the peer."""
        admitted = False
        try:
            guest.setblocking(False)
            async with asyncio.timeout(self._join_timeout_s):
                shown = await _receive_token(guest)
            if hmac.compare_digest(shown, self._token) and not self._joined.done():
                self._joined.set_result(self._make_link(guest))
                admitted = True
        except (OSError, TimeoutError):  # a stranger that left again
            pass
        finally:
            if not admitted:
                guest.close()


class LocalTransport(ABC):
    """Makes links over unix sockets for one rank of a worker, between processes of one machine and one user."""

    name: str

    def __init__(self, join_timeout_s: float):
        self._join_timeout_s = join_timeout_s
        self._links: set[DataLink] = set()
        self._pending: set[ShmPendingLink] = set()

    async def prepare(self, host: str, cut: Cut) -> ShmPendingLink:
        self._check(cut)
        name = secrets.token_bytes(_NAME_BYTES)
        listener: socket.socket | None = None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(_PREFIX + name.hex().encode())
            listener.listen(_BACKLOG)
        except OSError as error:
            if listener is not None:
                listener.close()
            raise ConnectionLost(f"can't prepare shared memory: {error}") from error
        listener.setblocking(False)

        def make_link(guest: socket.socket) -> LocalTarget:
            link = self._make_target(guest, cut, self._links.discard)
            self._links.add(link)
            return link

        pending = ShmPendingLink(listener, name, self._join_timeout_s, make_link, self._pending.discard)
        self._pending.add(pending)
        return pending

    async def join(self, params: LinkParams, cut: Cut) -> LocalSource:
        self._check(cut)
        name, token = (self._unhex(params.get(key)) for key in ("name", "token"))
        try:
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionLost(f"can't join the link: {error}") from error
        link = self._make_source(connecting, cut, self._links.discard)
        self._links.add(link)
        try:
            await link.open(_PREFIX + name.hex().encode(), token, self._join_timeout_s)
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        await asyncio.gather(*(pending.close() for pending in tuple(self._pending)))
        await asyncio.gather(*(link.close() for link in tuple(self._links)))

    @abstractmethod
    def _make_target(self, connected: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]) -> LocalTarget: ...

    @abstractmethod
    def _make_source(
        self, connecting: socket.socket, cut: Cut, on_close: Callable[[DataLink], None]
    ) -> LocalSource: ...

    def _check(self, cut: Cut) -> None:
        """Raises ConnectionLost for KV that this transport can't move."""
        if cut.encoding != "raw":
            raise ConnectionLost(f"{self.name} moves KV as it is stored, not encoded as {cut.encoding}")

    def _unhex(self, value: str | int | None) -> bytes:
        if not isinstance(value, str):
            raise ConnectionLost(f"the peer's link parameters are not those of {self.name}")
        try:
            return bytes.fromhex(value)
        except ValueError as error:
            raise ConnectionLost("the peer's link parameters are not hexadecimal") from error


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


def is_same_user(connected: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket belongs to our user: the kernel says so, not the peer."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


async def _receive_token(guest: socket.socket) -> bytes:
    """Raises OSError where the guest leaves before. Not a byte more is read: a descriptor may come with the next."""
    shown = b""
    while len(shown) < TOKEN_BYTES:
        part = await asyncio.get_running_loop().sock_recv(guest, TOKEN_BYTES - len(shown))
        if not part:
            raise ConnectionResetError("the peer closed it")
        shown += part
    return shown
