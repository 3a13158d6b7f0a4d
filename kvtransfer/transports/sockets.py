"""Links over sockets: how their two ends find each other, and the thread that blocks on each socket.

The receiving side opens a door: a listening socket of its own for one peer. Where it is and a one-time token are told
on the authenticated control connection, and the peer shows the token on every connection of the link. On a unix socket
either side must also belong to the same user.
"""

import asyncio
import contextlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Annotated, Any, Generic, ParamSpec, TypeVar

import msgspec

from twostroke.kvtransfer.link import LinkEnd, LinkParams
from twostroke.kvtransfer.timeouts import within
from twostroke.protocol.errors import ConnectionLost

TOKEN_BYTES = 32

_GREETING = struct.Struct(f"{TOKEN_BYTES}sBB")  # token, the connection's index, how many connections there are
_ACCEPTED = b"\x01"
_MAX_STRANGERS = 128
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

L = TypeVar("L", bound=LinkEnd)
P = TypeVar("P")
A = ParamSpec("A")
R = TypeVar("R")

_Calls = SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None]

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


def read_params(params: LinkParams, kind: type[P], transport: str) -> P:
    """The peer's link parameters as a transport's own type. Raises ConnectionLost where they are none of it."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise ConnectionLost(f"the peer's link parameters are not those of {transport}: {error}") from error


class SocketTransport(Generic[L]):
    """Has the doors and links of one rank."""

    def __init__(self, join_timeout_s: float):
        self.join_timeout_s = join_timeout_s
        self.links: set[L] = set()
        self.doors: set[LinkListener[Any]] = set()

    async def close(self) -> None:
        await asyncio.gather(*(door.close() for door in tuple(self.doors)))
        await asyncio.gather(*(link.close() for link in tuple(self.links)))


class LinkListener(Generic[L]):
    """A PendingLink: listens for one peer with the right token, until all its connections have come."""

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
        """Lets `most` connections in at most. `make_link` owns those that it gets."""
        listener.setblocking(False)
        transport.doors.add(self)
        self._transport = transport
        self._listener = listener
        self._token = token
        self.params = params
        self._make_link = make_link
        self._most = most
        self._guests: dict[int, socket.socket] = {}  # by the connection's index
        self._num_guests: int | None = None  # as the first that came says
        self._fault = "the link was given up"
        self._settled = asyncio.Event()  # all have come, or nobody will
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(listener, self._let_in)

    async def established(self) -> L:
        await within(self._transport.join_timeout_s, self._settled.wait(), "the peer's way to the link")
        await self._stop()
        if len(self._guests) != self._num_guests:
            raise ConnectionLost(self._fault)
        guests = [self._guests[index] for index in range(len(self._guests))]
        self._guests = {}
        return await self._make_link(guests)

    async def close(self) -> None:
        """Send away who has come, unless `established` has made a link of them."""
        await self._stop()
        while self._guests:
            self._guests.popitem()[1].close()
        self._settled.set()

    async def _stop(self) -> None:
        """Stop listening."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._transport.doors.discard(self)

    def _let_in(self) -> None:
        """Accept one guest.

        The listener is watched here because `loop.sock_accept` raises within the loop, and loses the guest, where one
        comes in the moment that the wait for it is cancelled.
        """
        try:
            guest, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # the guest has left again
            return
        except OSError as error:  # out of descriptors
            asyncio.get_running_loop().remove_reader(self._listener)
            self._fault = f"no guest can be let in: {error}"
            self._settled.set()
            return
        if len(self._tasks) >= _MAX_STRANGERS or not is_trusted(guest):
            guest.close()
            return
        task = asyncio.get_running_loop().create_task(self._admit(guest))
        self._tasks.add(task)
        task.add_done_callback(partial(self._admitted_or_not, guest))

    def _admitted_or_not(self, guest: socket.socket, task: asyncio.Task[None]) -> None:
        """Close the guest whose admission has ended without success; a task cancelled at its start can't do that."""
        self._tasks.discard(task)
        if guest not in self._guests.values():
            guest.close()

    async def _admit(self, guest: socket.socket) -> None:
        """Let `guest` in if it shows the token; strangers wait beside each other, so none holds up the peer."""
        try:
            guest.setblocking(False)
            async with asyncio.timeout(self._transport.join_timeout_s):
                token, index, count = _GREETING.unpack(await _receive_exactly(guest, _GREETING.size))
                if hmac.compare_digest(token, self._token) and self._is_expected(index, count):
                    self._num_guests = count
                    self._guests[index] = guest
                    await asyncio.get_running_loop().sock_sendall(guest, _ACCEPTED)
                    if len(self._guests) == count:
                        self._settled.set()
        except OSError:  # a stranger that left again or was slow, or a peer, whose link then breaks
            pass

    def _is_expected(self, index: int, count: int) -> bool:
        """Each connection comes once, and all of them say how many there are."""
        return index not in self._guests and index < count <= self._most and self._num_guests in (None, count)


async def knock(
    family: socket.AddressFamily, address: Any, token: bytes, *, most: int, join_timeout_s: float
) -> list[socket.socket]:
    """Connect to the peer's door: once within a machine, where one connection keeps both ends' cores busy, else `most`.

    The connections are the caller's. Raises ConnectionLost.
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
    """Whether both ends of a connection are on this machine."""
    if connected.family == socket.AF_UNIX:
        return True
    return bool(connected.getsockname()[0] == connected.getpeername()[0])


def is_trusted(connected: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket belongs to our user: the kernel says so, not the peer.

    Of other sockets it says nothing; their peers show the token alone.
    """
    if connected.family != socket.AF_UNIX:
        return True
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


async def _receive_exactly(connected: socket.socket, num_bytes: int) -> bytes:
    """Raises OSError where the peer leaves before. Not a byte more is read: a descriptor may come with the next."""
    received = b""
    while len(received) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(connected, num_bytes - len(received))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        received += part
    return received


@dataclass(frozen=True, slots=True)
class Rest(Generic[R]):
    """What is left of a call once its first part has returned: a wait for a device."""

    finish: Callable[[], R]


class LinkThread:
    """Owns a connected socket and the thread that blocks on it.

    A call whose function returns a Rest ends on a second thread, which takes them in their order: so the first one can
    launch the next call's work while a device is still at this one's.
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
        """`function(*args, **kwargs)` on the thread, after all calls made before.

        The Rest that it may return is carried out even where the link has broken meanwhile: what was launched has ended
        when this returns.

        Raises ConnectionLost for an OSError, for a RuntimeError (CUDA's errors are such), and once the link is broken.
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
        with contextlib.suppress(OSError):  # the peer was quicker, or we are not connected yet
            self.socket.shutdown(socket.SHUT_RDWR)

    async def close(self, last: Callable[[], None] | None = None) -> None:
        """When this returns no call is under way, and none will be: after the `last`, which is made on the thread."""
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
            except BaseException as error:  # it belongs to whoever waits
                failure = error
            if isinstance(result, Rest):
                self._finish_later(result, future)
                del item, function, future, result
                continue
            with contextlib.suppress(RuntimeError):  # the loop was closed over our heads: nobody waits
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
            future.exception()  # whoever made the call may have been cancelled


def receive_exactly(connected: socket.socket, num_bytes: int) -> bytearray:
    """Blocks. Raises OSError where the peer leaves before."""
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = connected.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the peer closed it")
        view = view[count:]
    return received
