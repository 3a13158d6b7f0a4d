"""How the two ends of a TCP link find each other: a listening socket, a one-time token, one connection a stream.

The receiving side listens on an address of its own for one peer, which shows the token that it was told on the
authenticated control connection, on every stream. The bytes that follow are neither authenticated nor encrypted: the KV
network is trusted not to alter them on purpose; digests find accidents.
"""

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass

from twostroke.kvtransfer.link import LinkParams
from twostroke.protocol.errors import ConnectionLost

TOKEN_BYTES = 32
MAX_STREAMS = 64
_GREETING = struct.Struct(f"{TOKEN_BYTES}sBB")  # token, the stream's index, how many streams there are
_ACCEPTED = b"\x01"
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many connections a link may have."""

    between_machines: int
    within_one: int

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for count in (self.between_machines, self.within_one):
            if not 1 <= count <= MAX_STREAMS:
                raise ValueError(f"a link has from 1 to {MAX_STREAMS} streams, not {count}")


class TcpDoor:
    """Listens for one peer, until all its streams have come."""

    def __init__(self, listener: socket.socket, limits: StreamLimits, join_timeout_s: float):
        self._listener = listener
        self._limits = limits
        self._join_timeout_s = join_timeout_s
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._port = int(listener.getsockname()[1])
        self._guests: dict[int, socket.socket] = {}  # by the stream's index
        self._num_streams: int | None = None  # as the first that came says
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    @classmethod
    async def open(cls, host: str, limits: StreamLimits, join_timeout_s: float) -> "TcpDoor":
        """Raises ConnectionLost where `host` is not an address of this machine."""
        try:
            family, address = await _resolve(host, 0)
            listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConnectionLost(f"can't listen on {host}: {error}") from error
        listener.setblocking(False)
        return cls(listener, limits, join_timeout_s)

    @property
    def params(self) -> LinkParams:
        return {
            "port": self._port,
            "token": self._token.hex(),
            "streams": self._limits.between_machines,
            "local_streams": self._limits.within_one,
        }

    async def connected(self) -> list[socket.socket]:
        """The peer's connections, in the order of streams; they are the caller's. Raises ConnectionLost."""
        try:
            async with asyncio.timeout(self._join_timeout_s):
                await self._complete.wait()
        except TimeoutError as error:
            raise ConnectionLost(f"the peer did not join the link within {self._join_timeout_s:g} s") from error
        await self._stop()
        if len(self._guests) != self._num_streams:
            raise ConnectionLost("the link was given up")
        streams = [self._guests[index] for index in range(len(self._guests))]
        self._guests = {}
        return streams

    async def close(self) -> None:
        """Send away who has come, unless `connected` has handed it over."""
        await self._stop()
        while self._guests:
            self._guests.popitem()[1].close()
        self._complete.set()

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
        is_admitted = False
        try:
            guest.setblocking(False)
            async with asyncio.timeout(self._join_timeout_s):
                greeting = await _receive_exactly(guest, _GREETING.size)
                token, index, count = _GREETING.unpack(greeting)
                if hmac.compare_digest(token, self._token) and self._is_expected(index, count):
                    self._num_streams = count
                    self._guests[index] = guest
                    is_admitted = True
                    await asyncio.get_running_loop().sock_sendall(guest, _ACCEPTED)
                    if len(self._guests) == count:
                        self._complete.set()
        except (OSError, TimeoutError):  # a stranger that left again, or a peer, whose link then breaks
            pass
        finally:
            if not is_admitted:
                guest.close()

    def _is_expected(self, index: int, count: int) -> bool:
        """Each stream comes once, and all of them say how many there are."""
        most = max(self._limits.between_machines, self._limits.within_one)
        return index not in self._guests and index < count <= most and self._num_streams in (None, count)


async def connect_streams(params: LinkParams, limits: StreamLimits, join_timeout_s: float) -> list[socket.socket]:
    """Connect to the peer's door with every stream; the connections are the caller's. Raises ConnectionLost."""
    host, port, token = params.get("host"), params.get("port"), params.get("token")
    most, most_within = params.get("streams"), params.get("local_streams")
    if (
        not isinstance(host, str)
        or not isinstance(port, int)
        or not isinstance(token, str)
        or not isinstance(most, int)
        or not isinstance(most_within, int)
    ):
        raise ConnectionLost("the peer's link parameters are not those of tcp")
    try:
        shown = bytes.fromhex(token)
    except ValueError as error:
        raise ConnectionLost("the peer's link token is not hexadecimal") from error
    if min(most, most_within) < 1:
        raise ConnectionLost("the peer's link has no streams")
    connections: list[socket.socket] = []
    try:
        async with asyncio.timeout(join_timeout_s):
            family, address = await _resolve(host, port)
            connections.append(await _connect(family, address))
            if _is_within_one_machine(connections[0]):
                count = min(most_within, limits.within_one)
            else:
                count = min(most, limits.between_machines)
            while len(connections) < count:
                connections.append(await _connect(family, address))
            loop = asyncio.get_running_loop()
            for index, connection in enumerate(connections):
                await loop.sock_sendall(connection, _GREETING.pack(shown, index, count))
            for connection in connections:
                await _receive_exactly(connection, len(_ACCEPTED))
    except BaseException as error:
        for connection in connections:
            connection.close()
        if isinstance(error, OSError | TimeoutError):
            raise ConnectionLost(f"can't join the link at {host}:{port}: {error}") from error
        raise
    return connections


async def _connect(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, address)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _is_within_one_machine(connected: socket.socket) -> bool:
    return bool(connected.getsockname()[0] == connected.getpeername()[0])


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
