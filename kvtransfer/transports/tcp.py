"""KV over one TCP socket per pair of workers: scatter/gather straight between the sockets and the blocks.

The receiving side listens on an address of its own for one peer, which shows the one-time token that it was told on the
authenticated control connection. The bytes themselves are neither authenticated nor encrypted: the KV network is
trusted not to alter them on purpose; digests find accidents.

Blocking calls on a thread per link move large chunks (the interpreter's lock is free meanwhile); small ones are tried
at once on the event loop, where a thread's round trip would cost more than the copy.
"""

import asyncio
import contextlib
import hmac
import itertools
import secrets
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.block_views import block_views
from kvtransfer.link import LinkParams
from kvtransfer.store import KVStore
from protocol.errors import ConnectionLost

IOV_MAX = 1024  # views in one system call; the kernel's limit
INLINE_BYTES = 64 * 1024
TOKEN_BYTES = 32
_ACCEPTED = b"\x01"
_DISCARD_BYTES = 1024 * 1024
_BACKLOG = 16


class TcpLink:
    """A DataLink over a connected socket, which it owns."""

    def __init__(self, connected: socket.socket, store: KVStore, on_close: Callable[["TcpLink"], None]):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(True)
        self._socket = connected
        self._store = store
        self._on_close = on_close
        self._thread = ThreadPoolExecutor(1, "kv-tcp")
        self._busy: asyncio.Future[None] | None = None
        self._broken = False

    async def send(self, layer: int, block_ids: Sequence[int]) -> None:
        await self._move(deque(block_views(self._store, layer, block_ids)), self._send)

    async def receive(self, layer: int, block_ids: Sequence[int]) -> None:
        await self._move(deque(block_views(self._store, layer, block_ids)), self._receive)

    async def discard(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _DISCARD_BYTES)))
        while num_bytes:
            count = min(num_bytes, len(scratch))
            await self._move(deque([scratch[:count]]), self._receive)
            num_bytes -= count

    async def close(self) -> None:
        self._break()
        if self._busy is not None:
            await asyncio.wait([self._busy])
            self._busy.exception()  # it was told to whoever waited
        self._thread.shutdown()
        self._socket.close()
        self._on_close(self)

    def _break(self) -> None:
        """Wake the thread, if it is in a call, with an error."""
        self._broken = True
        with contextlib.suppress(OSError):  # the peer was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _move(self, views: deque[memoryview], call: Callable[[list[memoryview], int], int]) -> None:
        """Fill or empty `views`. Raises ConnectionLost; the link is broken then, as it is after a cancellation."""
        if self._broken:
            raise ConnectionLost("the link is closed")
        try:
            if sum(view.nbytes for view in itertools.islice(views, IOV_MAX)) <= INLINE_BYTES:
                with contextlib.suppress(BlockingIOError):
                    _pump(views, call, socket.MSG_DONTWAIT)
                    return
            loop = asyncio.get_running_loop()
            self._busy = loop.run_in_executor(self._thread, _pump, views, call, 0)
            await asyncio.shield(self._busy)
            self._busy = None
        except OSError as error:
            self._break()
            raise ConnectionLost(f"the link broke: {error}") from error
        except BaseException:
            self._break()
            raise

    def _send(self, views: list[memoryview], flags: int) -> int:
        return self._socket.sendmsg(views, (), flags)

    def _receive(self, views: list[memoryview], flags: int) -> int:
        received = self._socket.recvmsg_into(views, 0, flags | (0 if flags else socket.MSG_WAITALL))[0]
        if received == 0:
            raise ConnectionResetError("the peer closed it")
        return received


def _pump(views: deque[memoryview], call: Callable[[list[memoryview], int], int], flags: int) -> None:
    """Move bytes until no view is left; what is moved is taken off `views`. Raises OSError."""
    while views:
        moved = call(list(itertools.islice(views, IOV_MAX)), flags)
        while views and moved >= views[0].nbytes:
            moved -= views.popleft().nbytes
        if moved:
            views[0] = views[0][moved:]


class TcpPendingLink:
    """A listening socket that waits for one peer with the right token."""

    def __init__(
        self, listener: socket.socket, host: str, join_timeout_s: float, make_link: Callable[[socket.socket], TcpLink]
    ):
        self._listener = listener
        self._params: LinkParams = {"host": host, "port": int(listener.getsockname()[1])}
        self._join_timeout_s = join_timeout_s
        self._make_link = make_link
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._joined: asyncio.Future[TcpLink] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    @property
    def params(self) -> LinkParams:
        return {**self._params, "token": self._token.hex()}

    async def established(self) -> TcpLink:
        try:
            async with asyncio.timeout(self._join_timeout_s):
                link = await asyncio.shield(self._joined)
        except TimeoutError as error:
            raise ConnectionLost(f"the peer did not join the link within {self._join_timeout_s:g} s") from error
        await self._stop()
        return link

    async def close(self) -> None:
        await self._stop()
        if self._joined.done() and not self._joined.cancelled():
            await self._joined.result().close()
        self._joined.cancel()

    async def _stop(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            guest, _ = await loop.sock_accept(self._listener)
            if len(self._tasks) > _BACKLOG:
                guest.close()
            else:
                self._start(self._admit(guest))

    async def _admit(self, guest: socket.socket) -> None:
        """Let `guest` in if it shows the token; strangers wait beside each other, so none holds up the peer."""
        loop = asyncio.get_running_loop()
        admitted = False
        try:
            guest.setblocking(False)
            async with asyncio.timeout(self._join_timeout_s):
                shown = await _receive_exactly(guest, TOKEN_BYTES)
                if hmac.compare_digest(shown, self._token) and not self._joined.done():
                    await loop.sock_sendall(guest, _ACCEPTED)
                    if not self._joined.done():
                        self._joined.set_result(self._make_link(guest))
                        admitted = True
        except (OSError, TimeoutError):  # a stranger that left again
            pass
        finally:
            if not admitted:
                guest.close()


class TcpTransport:
    """Makes TcpLinks for one worker."""

    name = "tcp"

    def __init__(self, store: KVStore, *, join_timeout_s: float = 10.0):
        self._store = store
        self._join_timeout_s = join_timeout_s
        self._links: set[TcpLink] = set()

    async def prepare(self, host: str) -> TcpPendingLink:
        """Raises ConnectionLost where `host` is not an address of this machine."""
        try:
            family, address = await _resolve(host, 0)
            listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConnectionLost(f"can't listen on {host}: {error}") from error
        listener.setblocking(False)
        return TcpPendingLink(listener, host, self._join_timeout_s, self._make_link)

    async def join(self, params: LinkParams) -> TcpLink:
        host, port, token = params.get("host"), params.get("port"), params.get("token")
        if not isinstance(host, str) or not isinstance(port, int) or not isinstance(token, str):
            raise ConnectionLost("the peer's link parameters are not those of tcp")
        try:
            shown = bytes.fromhex(token)
        except ValueError as error:
            raise ConnectionLost("the peer's link token is not hexadecimal") from error
        loop = asyncio.get_running_loop()
        connecting: socket.socket | None = None
        try:
            async with asyncio.timeout(self._join_timeout_s):
                family, address = await _resolve(host, port)
                connecting = socket.socket(family, socket.SOCK_STREAM)
                connecting.setblocking(False)
                await loop.sock_connect(connecting, address)
                await loop.sock_sendall(connecting, shown)
                await _receive_exactly(connecting, len(_ACCEPTED))
            return self._make_link(connecting)
        except (OSError, TimeoutError) as error:
            if connecting is not None:
                connecting.close()
            raise ConnectionLost(f"can't join the link at {host}:{port}: {error}") from error
        except BaseException:
            if connecting is not None:
                connecting.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in tuple(self._links)))

    def _make_link(self, connected: socket.socket) -> TcpLink:
        link = TcpLink(connected, self._store, self._links.discard)
        self._links.add(link)
        return link


async def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = infos[0]
    return family, (str(address[0]), int(address[1]))


async def _receive_exactly(connected: socket.socket, num_bytes: int) -> bytes:
    """Raises OSError where the peer leaves before."""
    received = b""
    while len(received) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(connected, num_bytes - len(received))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        received += part
    return received
