"""KV over TCP: scatter/gather directly between sockets and blocks, over several streams between machines.

A chunk is cut into parts, one for each stream, by a rule that both sides know; the parts of successive chunks follow
each other on their streams. Each stream has a thread, which moves its part (`sendmsg`, `recvmsg_into`) and digests it.

The two ends find each other through a LinkListener (sockets.py). The bytes that follow are neither authenticated nor
encrypted: the KV network is trusted not to alter them on purpose; checksums find accidents.

A source that wakes after its lease can do no harm: it can only fill sockets. The receiving side decides which bytes go
where, and once its link is closed nothing reads them.
"""

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash

from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import CHECKSUM_BYTES, HostStore, LinkParams
from twostroke.kvtransfer.transports.host_units import BATCH_BYTES, HostWire, count_units, split_segments
from twostroke.kvtransfer.transports.sockets import (
    TOKEN_BYTES,
    LinkListener,
    LinkThread,
    SocketTransport,
    Token,
    dial_host,
    listen_on,
    read_params,
)
from twostroke.protocol.errors import ConnectionLost

MIN_PART_BYTES = 512 * 1024  # with smaller parts another stream costs more than it gains
STREAMS = 4

_IOV_MAX = 1024  # views in one system call; the kernel's limit
_SO_MAX_PACING_RATE = 47  # of Linux, not among the socket module's names

R = TypeVar("R")


class _TcpParams(msgspec.Struct):
    """LinkParams of a TCP link."""

    host: str
    port: int
    token: Token
    streams: Annotated[int, msgspec.Meta(ge=1)]


class TcpTransport(SocketTransport["TcpLink"]):
    """Makes TcpLinks for one rank.

    A link between machines has at most `streams` connections, from 1 to 64; the smaller of both sides' numbers counts.
    """

    name = "tcp"

    def __init__(
        self,
        store: HostStore,
        *,
        join_timeout_s: float = 10.0,
        streams: int = STREAMS,
        max_bytes_per_s: int | None = None,
    ):
        """`max_bytes_per_s` bounds what one link sends; None: no bound."""
        super().__init__(join_timeout_s)
        self._store = store
        self._streams = streams
        self._max_bytes_per_s = max_bytes_per_s

    async def prepare(self, host: str, shard: KVShard) -> "LinkListener[TcpLink]":
        """Listen on `host`. Raises ConnectionLost where it is not an address of this machine."""
        listener = await listen_on(host)
        params = _TcpParams(host, listener.getsockname()[1], secrets.token_bytes(TOKEN_BYTES), self._streams)

        async def make_link(connections: list[socket.socket]) -> TcpLink:
            return self._make_link(connections, shard)

        return LinkListener(self, listener, params.token, msgspec.to_builtins(params), make_link, most=self._streams)

    async def join(self, params: LinkParams, shard: KVShard) -> "TcpLink":
        theirs = read_params(params, _TcpParams, self.name)
        most = min(theirs.streams, self._streams)
        connected = await dial_host(
            theirs.host, theirs.port, theirs.token, most=most, join_timeout_s=self.join_timeout_s
        )
        if self._max_bytes_per_s is not None:
            for each in connected:
                _pace(each, max(1, self._max_bytes_per_s // len(connected)))
        return self._make_link(connected, shard)

    def _make_link(self, connected: Sequence[socket.socket], shard: KVShard) -> "TcpLink":
        link = TcpLink(connected, self._store, shard, self.links.discard)
        self.links.add(link)
        return link


class TcpLink:
    """A DataLink over connected sockets, which it owns."""

    max_chunk_bytes = None
    shortfall = None

    def __init__(
        self,
        connected: Sequence[socket.socket],
        store: HostStore,
        shard: KVShard,
        on_close: Callable[["TcpLink"], None],
    ):
        self._streams = [TcpStream(each, HostWire(store, shard)) for each in connected]
        self._unit_bytes = shard.unit_bytes
        self._on_close = on_close

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        await self._all(part.thread.call(part.send, *own) for part, own in self._parts(segments, seed))

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        return all(await self._all(part.thread.call(part.receive, *own) for part, own in self._parts(segments, seed)))

    async def discard(self, num_units: int) -> None:
        streams = zip(self._streams, pairwise(self._bounds(num_units)), strict=False)
        await self._all(
            each.thread.call(each.discard, (end - first) * self._unit_bytes) for each, (first, end) in streams
        )

    async def close(self) -> None:
        self._break_off()
        await asyncio.gather(*(stream.thread.close() for stream in self._streams))
        self._on_close(self)

    def _bounds(self, num_units: int) -> list[int]:
        """Return the bounds of the streams' parts of a chunk. Both sides compute the same."""
        count = min(len(self._streams), max(1, num_units * self._unit_bytes // MIN_PART_BYTES), max(1, num_units))
        return [num_units * i // count for i in range(count + 1)]

    def _parts(
        self, segments: Sequence[Segment], seed: int
    ) -> list[tuple["TcpStream", tuple[list[Segment], int, int]]]:
        """Yield for each stream that carries a part of the chunk its units, their bytes, and the seed of its checksum.

        The seeds differ, so that one part does not pass for another.
        """
        bounds = self._bounds(count_units(segments))
        return [
            (stream, (own, (end - first) * self._unit_bytes, (seed + i) % 2**64))
            for i, (stream, own, (first, end)) in enumerate(
                zip(self._streams, split_segments(segments, bounds[:-1]), pairwise(bounds), strict=False)
            )
        ]

    async def _all(self, calls: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
        """Return all streams' results. An error on one of them, and a cancellation, break them all."""
        try:
            return await asyncio.gather(*calls)
        except BaseException:
            self._break_off()
            raise

    def _break_off(self) -> None:
        for stream in self._streams:
            stream.thread.break_off()


class TcpStream:
    """Owns a connected socket and, in `thread`, the thread that blocks on it, which the other methods belong to.

    A part of a chunk is its units' bytes and then their checksum, which is computed batch by batch while the bytes are
    hot: the sender's just before they go to the kernel, the receiver's just after they came from it. The methods block,
    and raise OSError, ConnectionLost or ValueError.
    """

    def __init__(self, connected: socket.socket, wire: HostWire):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.thread = LinkThread(connected, "kv-tcp")
        self._socket = connected
        self._wire = wire

    def send(self, segments: Sequence[Segment], num_bytes: int, seed: int) -> None:
        """Send units, `num_bytes` on the wire, and their checksum."""
        checksum = xxhash.xxh3_128(seed=seed)
        for batch in self._wire.outgoing(segments):
            for view in batch:
                checksum.update(view)
                num_bytes -= view.nbytes
            if num_bytes == 0:
                batch.append(memoryview(checksum.digest()))
            self._move(batch, self._socket.sendmsg)

    def receive(self, segments: Sequence[Segment], num_bytes: int, seed: int) -> bool:
        """Receive units into their places; return whether their checksum is right."""
        checksum = xxhash.xxh3_128(seed=seed)
        trailer = memoryview(bytearray(CHECKSUM_BYTES))
        for batch in self._wire.incoming(segments):
            num_bytes -= sum(view.nbytes for view in batch)
            self._move([*batch, trailer] if num_bytes == 0 else batch, self._read)
            for view in batch:
                checksum.update(view)
        return bool(checksum.digest() == trailer)

    def discard(self, num_bytes: int) -> None:
        """Receive units and their checksum into nowhere."""
        left = num_bytes + CHECKSUM_BYTES
        scratch = memoryview(bytearray(min(left, BATCH_BYTES)))
        while left:
            count = min(left, len(scratch))
            self._move([scratch[:count]], self._read)
            left -= count

    def _move(self, views: Sequence[memoryview], call: Callable[[list[memoryview]], int]) -> None:
        """Send or fill all of `views`, with as many calls as needed."""
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


def _pace(connected: socket.socket, bytes_per_s: int) -> None:
    """Have the kernel send no faster; on any interface, loopback included."""
    connected.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s))
