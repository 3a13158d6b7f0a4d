"""Links between two processes of one machine, joined over a unix socket: what shm and cuda_ipc have in common.

The socket has an abstract name: nothing is left in the file system. The name goes over the authenticated control
connection; a guest must show the one-time token that went with it, and either side belong to the same user.
"""

import asyncio
import hmac
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence

from twostroke.kvtransfer.link import DataLink, LinkParams
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.transports.link_thread import LinkThread, receive_exactly
from twostroke.protocol.errors import ConnectionLost

TOKEN_BYTES = 32
_READY = b"\x01"
_BACKLOG = 16
_PREFIX = b"\0twostroke-kv-"
_NAME_BYTES = 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class LocalTarget(ABC):
    """The receiving end of a link between processes of one machine: the only one that copies."""

    def __init__(self, connected: socket.socket, thread_name: str, on_close: Callable[[DataLink], None]):
        self._thread = LinkThread(connected, thread_name)
        self._on_close = on_close

    async def open(self, timeout_s: float) -> None:
        """Agree with the peer on its memory. Raises ConnectionLost; the link has to be closed then, too."""
        await self._thread.call(self._open, timeout_s)

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        raise ConnectionLost("this end of the link only receives")

    @abstractmethod
    async def receive(self, segments: Sequence[Segment], seal: int) -> bool: ...

    @abstractmethod
    async def discard(self, num_units: int) -> None: ...

    async def close(self) -> None:
        await self._thread.close()
        self._unmap()
        self._on_close(self)

    def _open(self, timeout_s: float) -> None:
        connection = self._thread.socket
        connection.settimeout(timeout_s)
        self._map(connection)
        connection.sendall(_READY)
        connection.settimeout(None)

    @abstractmethod
    def _map(self, connection: socket.socket) -> None:
        """Receive the description of the peer's memory, and make it readable here. On the link's thread."""

    @abstractmethod
    def _unmap(self) -> None:
        """Let go of the peer's memory; harmless where there is none."""


class LocalSource(ABC):
    """The sending end: says which units to read, and what they must amount to."""

    def __init__(self, connecting: socket.socket, thread_name: str, on_close: Callable[[DataLink], None]):
        self._thread = LinkThread(connecting, thread_name)
        self._on_close = on_close

    async def open(self, address: bytes, token: bytes, timeout_s: float) -> None:
        """Connect, and agree with the peer on our memory. Raises as LocalTarget's."""
        await self._thread.call(self._open, address, token, timeout_s)

    @abstractmethod
    async def send(self, segments: Sequence[Segment], seal: int) -> None: ...

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        raise ConnectionLost("this end of the link only sends")

    async def discard(self, num_units: int) -> None:
        raise ConnectionLost("this end of the link only sends")

    async def close(self) -> None:
        await self._thread.close()
        self._on_close(self)

    def _open(self, address: bytes, token: bytes, timeout_s: float) -> None:
        connection = self._thread.socket
        connection.settimeout(timeout_s)
        connection.connect(address)
        if not is_same_user(connection):
            raise ConnectionLost("the peer belongs to another user")
        connection.sendall(token)
        self._describe(connection)
        receive_exactly(connection, len(_READY))
        connection.settimeout(None)

    @abstractmethod
    def _describe(self, connection: socket.socket) -> None:
        """Tell the peer how to read our memory. On the link's thread."""


class LocalPendingLink:
    """A listening socket that waits for one guest with the right token and user."""

    def __init__(
        self,
        listener: socket.socket,
        name: bytes,
        join_timeout_s: float,
        make_link: Callable[[socket.socket], LocalTarget],
        on_close: Callable[["LocalPendingLink"], None],
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
        self._pending: set[LocalPendingLink] = set()

    async def prepare(self, host: str, cut: Cut) -> LocalPendingLink:
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
            raise ConnectionLost(f"can't listen for a peer on this machine: {error}") from error
        listener.setblocking(False)

        def make_link(guest: socket.socket) -> LocalTarget:
            link = self._make_target(guest, cut, self._links.discard)
            self._links.add(link)
            return link

        pending = LocalPendingLink(listener, name, self._join_timeout_s, make_link, self._pending.discard)
        self._pending.add(pending)
        return pending

    async def join(self, params: LinkParams, cut: Cut) -> LocalSource:
        self._check(cut)
        name, token = (self._unhex(params.get(key)) for key in ("name", "token"))
        try:
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # The least that the system grants, a few chunks' messages: with room for hundreds, a long prompt's chunks
            # would all be announced before the target copies the first, and a short prompt's wait behind them.
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
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
