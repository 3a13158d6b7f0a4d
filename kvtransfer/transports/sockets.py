"""Links over sockets: how their two ends find each other, and the thread that blocks on each socket.

The receiving side opens a LinkListener: a listening socket for one peer. Its address and a one-time token are sent on
the authenticated control connection, and the peer shows the token on every connection of the link. On a unix socket
both sides must also belong to the same user.
"""

import asyncio
import contextlib
import hmac
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Annotated, Any, Generic, ParamSpec, TypeVar

import msgspec

from twostroke.kvtransfer.link import LinkEnd, LinkParams
from twostroke.kvtransfer.timeouts import finish, within
from twostroke.protocol.errors import ConnectionLost

TOKEN_BYTES = 32

_GREETING = struct.Struct(f"{TOKEN_BYTES}sBB")  # token, the connection's index, how many connections there are
_ACCEPTED = b"\x01"
_MAX_UNADMITTED = 128
"""Connections that may wait for their admission at once."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

L = TypeVar("L", bound=LinkEnd)
P = TypeVar("P")
A = ParamSpec("A")
R = TypeVar("R")
E = TypeVar("E", bound="SocketEnd")

_Calls = SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None]

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


def read_params(params: LinkParams, kind: type[P], transport: str) -> P:
    """Convert the peer's link parameters to a transport's own type. Raises ConnectionLost where they do not fit."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise ConnectionLost(f"the peer's link parameters are not those of {transport}: {error}") from error


class SocketTransport(Generic[L]):
    """The listeners and links of one rank."""

    def __init__(self, join_timeout_s: float):
        self.join_timeout_s = join_timeout_s
        self.links: set[L] = set()
        self.listeners: set[LinkListener[Any]] = set()

    async def opened(self, end: E) -> E:
        """Open an end of a link and return it. It is closed where that fails."""
        self.links.add(end)  # type: ignore[arg-type]
        try:
            await end.open(self.join_timeout_s)
        except BaseException:
            await finish(end.close())  # the connection is lost with the link, and cancels this
            raise
        return end

    async def close(self) -> None:
        await asyncio.gather(*(listener.close() for listener in tuple(self.listeners)))
        await asyncio.gather(*(link.close() for link in tuple(self.links)))


async def listen_on(host: str) -> socket.socket:
    """Listen on a free port of `host`. Raises ConnectionLost where that is not an address of this machine."""
    try:
        family, address = await _resolve(host, 0)
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConnectionLost(f"can't listen on {host}: {error}") from error


async def dial_host(host: str, port: int, token: bytes, *, most: int, join_timeout_s: float) -> list[socket.socket]:
    """Connect to the peer's listener by its name or address, like `dial`."""
    try:
        family, address = await _resolve(host, port)
    except OSError as error:
        raise ConnectionLost(f"can't join the link at {host}: {error}") from error
    return await dial(family, address, token, most=most, join_timeout_s=join_timeout_s)


async def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Resolve an address. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = infos[0]
    return family, (str(address[0]), int(address[1]))


class LinkListener(Generic[L]):
    """A PendingLink: listens for one peer with the right token, until all its connections are made."""

    def __init__(
        self,
        transport: SocketTransport[Any],
        listener: socket.socket,
        token: bytes,
        params: LinkParams,
        make_link: Callable[[list[socket.socket]], Awaitable[L]],
        *,
        most: int,
    ):
        """Accepts at most `most` connections. `make_link` owns those that it gets."""
        listener.setblocking(False)
        transport.listeners.add(self)
        self._transport = transport
        self._listener = listener
        self._token = token
        self.params = params
        self._make_link = make_link
        self._most = most
        self._connections: dict[int, socket.socket] = {}  # by their index
        self._num_connections: int | None = None  # announced by the first
        self._fault = "the link was given up"
        self._settled = asyncio.Event()  # all are made, or none will be
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def established(self) -> L:
        await within(self._transport.join_timeout_s, self._settled.wait(), "joining the link")
        await self._stop()
        if len(self._connections) != self._num_connections:
            raise ConnectionLost(self._fault)
        connections = [self._connections[index] for index in range(len(self._connections))]
        self._connections = {}
        return await self._make_link(connections)

    async def close(self) -> None:
        """Close the connections, unless `established` has made a link of them."""
        await self._stop()
        while self._connections:
            self._connections.popitem()[1].close()
        self._settled.set()

    async def _stop(self) -> None:
        """Stop listening."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._transport.listeners.discard(self)

    def _accept(self) -> None:
        """Accept one connection.

        The listener is watched here because `loop.sock_accept` raises within the loop, and loses the connection, where
        one is made in the moment that the wait for it is cancelled.
        """
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # the peer has left again
            return
        except OSError as error:  # out of descriptors
            asyncio.get_running_loop().remove_reader(self._listener)
            self._fault = f"no connection can be accepted: {error}"
            self._settled.set()
            return
        if len(self._tasks) >= _MAX_UNADMITTED or not is_trusted(connection):
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._admit(connection))
        self._tasks.add(task)
        task.add_done_callback(partial(self._admission_ended, connection))

    def _admission_ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        """Close a connection that was not admitted; a task cancelled at its start can't do that itself."""
        self._tasks.discard(task)
        if connection not in self._connections.values():
            connection.close()

    async def _admit(self, connection: socket.socket) -> None:
        """Admit a connection that shows the token. Several wait at once, so an unknown one does not delay the peer."""
        try:
            connection.setblocking(False)
            async with asyncio.timeout(self._transport.join_timeout_s):
                token, index, count = _GREETING.unpack(await _receive_exactly(connection, _GREETING.size))
                if hmac.compare_digest(token, self._token) and self._is_expected(index, count):
                    self._num_connections = count
                    self._connections[index] = connection
                    await asyncio.get_running_loop().sock_sendall(connection, _ACCEPTED)
                    if len(self._connections) == count:
                        self._settled.set()
        except OSError:  # an unknown connection that left or was slow, or the peer, whose link then breaks
            pass

    def _is_expected(self, index: int, count: int) -> bool:
        """Return True for the first connection of an index, where all announce the same number."""
        return index not in self._connections and index < count <= self._most and self._num_connections in (None, count)


async def dial(
    family: socket.AddressFamily, address: Any, token: bytes, *, most: int, join_timeout_s: float
) -> list[socket.socket]:
    """Connect to the peer's listener: once within a machine, where one keeps both ends' cores busy, else `most` times.

    The connections belong to the caller. Raises ConnectionLost.
    """
    connections: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(join_timeout_s):
            count = 1
            while len(connections) < count:
                connection = socket.socket(family, socket.SOCK_STREAM)
                connections.append(connection)
                connection.setblocking(False)
                await loop.sock_connect(connection, address)
                count = 1 if is_within_one_machine(connection) else most
            if not is_trusted(connections[0]):
                raise ConnectionLost("the peer belongs to another user")
            for index, connection in enumerate(connections):
                await loop.sock_sendall(connection, _GREETING.pack(token, index, count))
            for connection in connections:
                await _receive_exactly(connection, len(_ACCEPTED))
    except BaseException as error:
        for connection in connections:
            connection.close()
        if isinstance(error, OSError):
            raise ConnectionLost(f"can't join the link: {error!r}") from error
        raise
    return connections


def is_within_one_machine(connected: socket.socket) -> bool:
    """Return True where both ends of a connection are on this machine."""
    if connected.family == socket.AF_UNIX:
        return True
    return bool(connected.getsockname()[0] == connected.getpeername()[0])


def is_trusted(connected: socket.socket) -> bool:
    """Return True where the process at the other end of a unix socket belongs to our user: the kernel says so.

    Other sockets are not checked; their peers show the token alone.
    """
    if connected.family != socket.AF_UNIX:
        return True
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


async def _receive_exactly(connected: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly `num_bytes`: a descriptor may come with the next byte. Raises OSError where the peer leaves."""
    received = b""
    while len(received) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(connected, num_bytes - len(received))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        received += part
    return received


@dataclass(frozen=True, slots=True)
class Rest(Generic[R]):
    """The rest of a call whose first part has returned: a wait for a device."""

    finish: Callable[[], R]


class LinkThread:
    """Owns a connected socket and the thread that blocks on it.

    A call whose function returns a Rest ends on a second thread, which finishes them in order. So the first thread can
    launch the next call's work while a device still works on this one's.
    """

    def __init__(self, connected: socket.socket, name: str):
        connected.setblocking(True)
        self.socket = connected
        self._loop = asyncio.get_running_loop()
        self._calls: _Calls = SimpleQueue()
        self._rests: _Calls = SimpleQueue()
        self._under_way: set[asyncio.Future[Any]] = set()
        self._broken = False
        self._thread = threading.Thread(target=self._work, args=(self._calls,), name=name, daemon=True)
        self._finishing: threading.Thread | None = None  # from the first Rest on
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        return self._broken

    async def call(self, function: Callable[A, R | Rest[R]], /, *args: A.args, **kwargs: A.kwargs) -> R:
        """Run `function(*args, **kwargs)` on the thread, after all calls made before.

        The Rest that it may return is carried out even where the link has broken meanwhile, so all work that was
        launched has ended when this returns.

        Raises ConnectionLost for an OSError, for a RuntimeError (like CUDA's errors), and once the link is broken.
        A cancellation breaks it too.
        """

        def checked() -> R | Rest[R]:
            self._check()  # once more: the link may have broken while this waited for its turn
            return function(*args, **kwargs)

        self._check()
        future: asyncio.Future[R] = self._loop.create_future()
        self._under_way.add(future)
        self._calls.put((checked, future))
        try:
            return await asyncio.shield(future)
        except (OSError, RuntimeError) as error:
            self.break_off()
            raise ConnectionLost(f"the link broke: {error}") from error
        except BaseException:
            self.break_off()
            raise

    def break_off(self) -> None:
        """Wake the thread, if it is in a call on the socket, with an error. Later calls are refused."""
        self._broken = True
        with contextlib.suppress(OSError):  # the peer has closed it already, or it is not connected yet
            self.socket.shutdown(socket.SHUT_RDWR)

    async def close(self, last: Callable[[], None] | None = None) -> None:
        """End all calls for good, then make the `last` call on the thread."""
        self.break_off()
        if self._under_way:
            await asyncio.wait(self._under_way)
        if last is not None and self._thread.is_alive():
            future: asyncio.Future[None] = self._loop.create_future()
            self._under_way.add(future)
            self._calls.put((last, future))
            await asyncio.wait([future])
        for thread, calls in ((self._thread, self._calls), (self._finishing, self._rests)):
            if thread is not None:
                calls.put(None)
                thread.join()
        self.socket.close()

    def _check(self) -> None:
        if self._broken:
            raise ConnectionLost("the link is closed")

    def _work(self, calls: _Calls) -> None:
        while (item := calls.get()) is not None:
            function, future = item
            result: Any = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as error:  # raised to the caller
                failure = error
            if isinstance(result, Rest):
                self._finish_later(result, future)
                del item, function, future, result
                continue
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._settle, future, result, failure)
            del item, function, future, result, failure  # not kept alive by a thread that waits

    def _finish_later(self, rest: Rest[Any], future: asyncio.Future[Any]) -> None:
        if self._finishing is None:
            name = f"{self._thread.name}-rest"
            self._finishing = threading.Thread(target=self._work, args=(self._rests,), name=name, daemon=True)
            self._finishing.start()
        self._rests.put((rest.finish, future))

    def _settle(self, future: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
        self._under_way.discard(future)
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
            future.exception()  # marks it as retrieved: the caller may have been cancelled


class SocketEnd(ABC):
    """One end of a link that has one socket and one LinkThread."""

    def __init__(self, thread: LinkThread, on_close: Callable[[Any], None]):
        self.thread = thread
        self._on_close = on_close

    async def open(self, timeout_s: float) -> None:
        """Agree with the peer on what is read. Raises ConnectionLost; the link has to be closed then, too."""
        await self.thread.call(self._open_in_time, timeout_s)

    async def close(self) -> None:
        await self.thread.close(self._let_go)
        self._on_close(self)

    def _open_in_time(self, timeout_s: float) -> None:
        self.thread.socket.settimeout(timeout_s)
        self._open(timeout_s)
        self.thread.socket.settimeout(None)

    @abstractmethod
    def _open(self, timeout_s: float) -> None:
        """Do this end's part of `open`, on the link's thread, over a socket that times out."""

    def _let_go(self) -> None:  # noqa: B027 (most ends hold nothing)
        """Let go of what the link holds: its last call, on its thread, also where it never opened."""


def receive_exactly(connected: socket.socket, num_bytes: int) -> bytearray:
    """Receive exactly `num_bytes`, blocking. Raises OSError where the peer leaves before."""
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = connected.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the peer closed it")
        view = view[count:]
    return received
