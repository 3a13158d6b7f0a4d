"""KV over TCP: scatter/gather straight between sockets and blocks, over several streams where that pays.

A chunk is cut into parts, one for each stream, by a rule that both sides know; the parts of successive chunks follow
each other on their streams. Each stream has a thread, which moves its part (`sendmsg`, `recvmsg_into`) and digests it.

How the two ends find each other: the receiving side listens on an address of its own for one peer, which shows the
one-time token that it was told on the authenticated control connection, on every stream. The bytes that follow are
neither authenticated nor encrypted: the KV network is trusted not to alter them on purpose; digests find accidents.

Why a zombie can do no harm: all it can do is fill sockets. Which bytes go where is the receiving side's to say, and
once its link is closed nobody reads them.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import xxhash

from twostroke.kvtransfer.link import DIGEST_BYTES, LinkParams
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.store import HostStore
from twostroke.kvtransfer.transports.host_units import BATCH_BYTES, HostWire, count_units, split_segments
from twostroke.kvtransfer.transports.link_thread import LinkThread
from twostroke.protocol.errors import ConnectionLost

MIN_PART_BYTES = 512 * 1024  # with smaller parts another stream costs more than it brings
STREAMS = 4
LOCAL_STREAMS = 1  # within one machine, where a single one keeps the cores of both ends busy
TOKEN_BYTES = 32
MAX_STREAMS = 64

_GREETING = struct.Struct(f"{TOKEN_BYTES}sBB")  # token, the stream's index, how many streams there are
_ACCEPTED = b"\x01"
_BACKLOG = 128
_IOV_MAX = 1024  # views in one system call; the kernel's limit
_SO_MAX_PACING_RATE = 47  # of Linux, not among the socket module's names

R = TypeVar("R")


class TcpTransport:
    """Makes TcpLinks for one rank.

    A link has at most `streams` connections, and `local_streams` where both ends are on one machine: there a single one
    keeps both ends' cores busy. The smaller of both sides' numbers counts.
    """

    name = "tcp"

    def __init__(
        self,
        store: HostStore,
        *,
        join_timeout_s: float = 10.0,
        streams: int = STREAMS,
        local_streams: int = LOCAL_STREAMS,
        max_bytes_per_s: int | None = None,
    ):
        """`max_bytes_per_s` is what one link sends at most; None: as much as goes."""
        self._store = store
        self._join_timeout_s = join_timeout_s
        self._limits = StreamLimits(streams, local_streams)
        self._max_bytes_per_s = max_bytes_per_s
        self._pending: set[TcpPendingLink] = set()
        self._links: set[TcpLink] = set()

    async def prepare(self, host: str, cut: Cut) -> "TcpPendingLink":
        """Raises ConnectionLost where `host` is not an address of this machine."""
        try:
            family, address = await _resolve(host, 0)
            listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConnectionLost(f"can't listen on {host}: {error}") from error
        listener.setblocking(False)
        pending = TcpPendingLink(
            listener,
            host,
            self._limits,
            self._join_timeout_s,
            lambda connected: self._make_link(connected, cut),
            on_end=self._pending.discard,
        )
        self._pending.add(pending)
        return pending

    async def join(self, params: LinkParams, cut: Cut) -> "TcpLink":
        connected = await connect_streams(params, self._limits, self._join_timeout_s)
        if self._max_bytes_per_s is not None:
            for each in connected:
                _pace(each, max(1, self._max_bytes_per_s // len(connected)))
        return self._make_link(connected, cut)

    async def close(self) -> None:
        await asyncio.gather(*(pending.close() for pending in tuple(self._pending)))
        await asyncio.gather(*(link.close() for link in tuple(self._links)))

    def _make_link(self, connected: Sequence[socket.socket], cut: Cut) -> "TcpLink":
        link = TcpLink(connected, self._store, cut, self._links.discard)
        self._links.add(link)
        return link


class TcpLink:
    """A DataLink over connected sockets, which it owns."""

    def __init__(
        self, connected: Sequence[socket.socket], store: HostStore, cut: Cut, on_close: Callable[["TcpLink"], None]
    ):
        self._streams = [TcpStream(each, HostWire(store, cut)) for each in connected]
        self._unit_bytes = cut.unit_bytes
        self._on_close = on_close
        self._is_broken = False

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        with self._unbroken():
            await _all([part.thread.start(part.send, *own) for part, own in self._parts(segments, seal)])

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        with self._unbroken():
            parts = self._parts(segments, seal)
            return all(await _all([part.thread.start(part.receive, *own) for part, own in parts]))

    async def discard(self, num_units: int) -> None:
        with self._unbroken():
            streams = zip(self._streams, pairwise(self._bounds(num_units)), strict=False)
            await _all(
                [each.thread.start(each.discard, (end - first) * self._unit_bytes) for each, (first, end) in streams]
            )

    async def close(self) -> None:
        self._break_off()
        await asyncio.gather(*(stream.thread.close() for stream in self._streams))
        self._on_close(self)

    def _bounds(self, num_units: int) -> list[int]:
        """Where the streams' parts of a chunk begin, and the last one's end. Both sides come to the same."""
        count = min(len(self._streams), max(1, num_units * self._unit_bytes // MIN_PART_BYTES), max(1, num_units))
        return [num_units * i // count for i in range(count + 1)]

    def _parts(
        self, segments: Sequence[Segment], seal: int
    ) -> list[tuple["TcpStream", tuple[list[Segment], int, int]]]:
        """For each stream that carries a part of the chunk: its units, their bytes, and the seed of its digest.

        The seeds differ, so that parts don't pass for each other either.
        """
        bounds = self._bounds(count_units(segments))
        return [
            (stream, (own, (end - first) * self._unit_bytes, (seal + i) % 2**64))
            for i, (stream, own, (first, end)) in enumerate(
                zip(self._streams, split_segments(segments, bounds[:-1]), pairwise(bounds), strict=False)
            )
        ]

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Raises ConnectionLost where the link is broken. An error or a cancellation within breaks it."""
        if self._is_broken:
            raise ConnectionLost("the link is closed")
        try:
            yield
        except OSError as error:
            self._break_off()
            raise ConnectionLost(f"the link broke: {error}") from error
        except BaseException:
            self._break_off()
            raise

    def _break_off(self) -> None:
        self._is_broken = True
        for stream in self._streams:
            stream.thread.break_off()


async def _all(calls: Sequence[asyncio.Future[R]]) -> list[R]:
    """All results, or the first error. A cancellation leaves the calls to the streams' `close`."""
    gathered = asyncio.gather(*calls)
    gathered.add_done_callback(_retrieve)
    return await asyncio.shield(gathered)


def _retrieve(gathered: asyncio.Future[list[R]]) -> None:
    """An error of calls that nobody awaits any more has nobody left to be told to."""
    if not gathered.cancelled():
        gathered.exception()


class TcpStream:
    """Owns a connected socket and, in `thread`, the thread that blocks on it, which the other methods belong to.

    A part of a chunk is its units' bytes and then their digest, which is computed batch by batch while the bytes are
    hot: the sender's just before they go to the kernel, the receiver's just after they came from it. The methods block,
    and raise OSError, ConnectionLost or ValueError.
    """

    def __init__(self, connected: socket.socket, wire: HostWire):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.thread = LinkThread(connected, "kv-tcp")
        self._socket = connected
        self._wire = wire

    def send(self, segments: Sequence[Segment], num_bytes: int, seed: int) -> None:
        """Send units, `num_bytes` on the wire, and their digest."""
        digest = xxhash.xxh3_128(seed=seed)
        for batch in self._wire.outgoing(segments):
            for view in batch:
                digest.update(view)
                num_bytes -= view.nbytes
            if num_bytes == 0:
                batch.append(memoryview(digest.digest()))
            self._move(batch, self._socket.sendmsg)

    def receive(self, segments: Sequence[Segment], num_bytes: int, seed: int) -> bool:
        """Receive units into their places; whether their digest holds."""
        digest = xxhash.xxh3_128(seed=seed)
        trailer = memoryview(bytearray(DIGEST_BYTES))
        for batch in self._wire.incoming(segments):
            num_bytes -= sum(view.nbytes for view in batch)
            self._move([*batch, trailer] if num_bytes == 0 else batch, self._read)
            for view in batch:
                digest.update(view)
        return bool(digest.digest() == trailer)

    def discard(self, num_bytes: int) -> None:
        """Receive units and their digest into nowhere."""
        left = num_bytes + DIGEST_BYTES
        scratch = memoryview(bytearray(min(left, BATCH_BYTES)))
        while left:
            count = min(left, len(scratch))
            self._move([scratch[:count]], self._read)
            left -= count

    def _move(self, views: Sequence[memoryview], call: Callable[[list[memoryview]], int]) -> None:
        """Empty or fill `views`, with as many calls as that takes."""
        left = list(views)
        while left:
            if self.thread.is_broken:
                raise ConnectionLost("the link is closed")
            moved = call(left[:_IOV_MAX])
            done = 0
            while done < len(left) and moved >= left[done].nbytes:
                moved -= left[done].nbytes
                done += 1
            del left[:done]
            if moved:
                left[0] = left[0][moved:]

    def _read(self, views: Sequence[memoryview]) -> int:
        received = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if received == 0:
            raise ConnectionResetError("the peer closed it")
        return received


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


class TcpPendingLink:
    """Listens for one peer with the right token, until all its streams have come."""

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        limits: StreamLimits,
        join_timeout_s: float,
        make_link: Callable[[Sequence[socket.socket]], TcpLink],
        on_end: Callable[["TcpPendingLink"], None],
    ):
        self._listener = listener
        self._host = host
        self._limits = limits
        self._join_timeout_s = join_timeout_s
        self._make_link = make_link
        self._on_end = on_end
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._port = int(listener.getsockname()[1])
        self._guests: dict[int, socket.socket] = {}  # by the stream's index
        self._num_streams: int | None = None  # as the first that came says
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    @property
    def params(self) -> LinkParams:
        return {
            "host": self._host,
            "port": self._port,
            "token": self._token.hex(),
            "streams": self._limits.between_machines,
            "local_streams": self._limits.within_one,
        }

    async def established(self) -> TcpLink:
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
        return self._make_link(streams)

    async def close(self) -> None:
        """Send away who has come, unless `established` has made a link of them."""
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
        self._on_end(self)

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


def _pace(connected: socket.socket, bytes_per_s: int) -> None:
    """Have the kernel send no faster; on any interface, loopback included."""
    connected.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s))
