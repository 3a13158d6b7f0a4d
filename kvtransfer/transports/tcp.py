"""KV over TCP: scatter/gather straight between sockets and blocks, over several streams where that pays.

A chunk is cut into parts, one for each stream, by a rule that both sides know; the parts of successive chunks follow
each other on their streams. Large parts are moved on their stream's thread (the interpreter's lock is free meanwhile);
small chunks are tried at once on the event loop, where a thread's round trip would cost more than the copy.

Why a zombie can do no harm: all it can do is fill sockets. Which bytes go where is the receiving side's to say, and
once its link is closed nobody reads them.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from socket import SOL_SOCKET, socket
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.host_units import HostUnits, count_units, split_segments
from twostroke.kvtransfer.host_wire import make_host_wire
from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.link import LinkParams
from twostroke.kvtransfer.store import HostStore
from twostroke.kvtransfer.transports.tcp_door import StreamLimits, TcpDoor, connect_streams
from twostroke.kvtransfer.transports.tcp_stream import TcpStream, is_intact
from twostroke.protocol.errors import ConnectionLost

if TYPE_CHECKING:
    from twostroke.kvtransfer.socket_pump import SocketPump

INLINE_BYTES = 64 * 1024
MIN_PART_BYTES = 512 * 1024  # with smaller parts another stream costs more than it brings
STREAMS = 4
LOCAL_STREAMS = 1  # within one machine, where a single one keeps the cores of both ends busy

_SO_MAX_PACING_RATE = 47  # of Linux, not among the socket module's names

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Part:
    """What one stream carries of a chunk."""

    stream: TcpStream
    first_unit: int
    num_units: int
    seed: int  # of its digest: parts don't pass for each other either


class TcpLink:
    """A DataLink over connected sockets, which it owns. Each has a pump of its own, or none has."""

    def __init__(
        self,
        connected: Sequence[socket],
        pumps: Sequence["SocketPump | None"],
        store: HostStore,
        cut: Cut,
        on_close: Callable[["TcpLink"], None],
    ):
        self._streams = [
            TcpStream(each, make_host_wire(store, cut), pump) for each, pump in zip(connected, pumps, strict=True)
        ]
        self._has_pumps = None not in pumps
        self._units = HostUnits(store, cut)
        self._cut = cut
        self._on_close = on_close
        self._is_broken = False

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        with self._unbroken():
            parts = self._parts(count_units(segments), seal)
            first = parts[0].stream
            if self._is_inline(parts):
                rest = first.try_send(self._units.views(segments), seal)
                if rest:
                    await _all([first.thread.start(first.send_rest, rest)])
            elif self._has_pumps:
                blocks = self._blocks(segments, parts)
                await _all([part.stream.thread.start(part.stream.send_blocks, *own) for part, own in blocks])
            else:
                units = self._segments(segments, parts)
                await _all([part.stream.thread.start(part.stream.send, *own) for part, own in units])

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        with self._unbroken():
            parts = self._parts(count_units(segments), seal)
            first = parts[0].stream
            if self._is_inline(parts):
                views, trailer = self._units.views(segments), memoryview(bytearray(DIGEST_BYTES))
                rest = first.try_receive([*views, trailer])
                if rest:
                    await _all([first.thread.start(first.receive_rest, rest)])
                return is_intact(views, trailer, seal)
            if self._has_pumps:
                blocks = self._blocks(segments, parts)
                return all(
                    await _all([part.stream.thread.start(part.stream.receive_blocks, *own) for part, own in blocks])
                )
            units = self._segments(segments, parts)
            return all(await _all([part.stream.thread.start(part.stream.receive, *own) for part, own in units]))

    async def discard(self, num_units: int) -> None:
        with self._unbroken():
            parts = self._parts(num_units, 0)
            unit_bytes = self._cut.unit_bytes
            await _all([part.stream.thread.start(part.stream.discard, part.num_units * unit_bytes) for part in parts])

    async def close(self) -> None:
        self._break_off()
        await asyncio.gather(*(stream.thread.close() for stream in self._streams))
        self._on_close(self)

    # --- inside ---

    def _parts(self, num_units: int, seal: int) -> list[_Part]:
        """How a chunk of so many units is cut. Both sides come to the same."""
        count = min(len(self._streams), max(1, num_units * self._cut.unit_bytes // MIN_PART_BYTES), max(1, num_units))
        bounds = [num_units * i // count for i in range(count + 1)]
        return [
            _Part(stream, bounds[i], bounds[i + 1] - bounds[i], (seal + i) % 2**64)
            for i, stream in enumerate(self._streams[:count])
        ]

    def _is_inline(self, parts: Sequence[_Part]) -> bool:
        """Small enough for the event loop, with nothing to be packed, and nothing before it on its stream."""
        is_small = parts[0].num_units * self._cut.unit_bytes <= INLINE_BYTES
        return is_small and self._cut.is_whole_blocks and parts[0].stream.thread.is_idle

    def _blocks(
        self, segments: Sequence[Segment], parts: Sequence[_Part]
    ) -> list[tuple[_Part, tuple[NDArray[np.int64], int]]]:
        """Where each part's blocks lie. Raises ValueError for blocks that the store has not."""
        addresses = self._units.addresses(segments)
        return [(part, (addresses[part.first_unit : part.first_unit + part.num_units], part.seed)) for part in parts]

    def _segments(
        self, segments: Sequence[Segment], parts: Sequence[_Part]
    ) -> list[tuple[_Part, tuple[list[Segment], int, int]]]:
        """Each part's units."""
        split = split_segments(segments, [part.first_unit for part in parts])
        return [
            (part, (own, part.num_units * self._cut.unit_bytes, part.seed))
            for part, own in zip(parts, split, strict=True)
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


def _pace(connected: socket, bytes_per_s: int) -> None:
    """Have the kernel send no faster; on any interface, loopback included."""
    connected.setsockopt(SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s))


class TcpPendingLink:
    """A door that waits for one peer with the right token, on all its streams."""

    def __init__(
        self,
        door: TcpDoor,
        host: str,
        make_link: Callable[[Sequence[socket]], TcpLink],
        on_end: Callable[["TcpPendingLink"], None],
    ):
        self._door = door
        self._host = host
        self._make_link = make_link
        self._on_end = on_end

    @property
    def params(self) -> LinkParams:
        return {"host": self._host, **self._door.params}

    async def established(self) -> TcpLink:
        link = self._make_link(await self._door.connected())
        self._on_end(self)
        return link

    async def close(self) -> None:
        await self._door.close()
        self._on_end(self)


class TcpTransport:
    """Makes TcpLinks for one rank.

    A link has at most `streams` connections, and `local_streams` where both ends are on one machine: there a single one
    keeps both ends' cores busy. The smaller of both sides' numbers counts. Loads numba, which takes a second.
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
        # Now, not with the first link: it may have to be compiled, which takes longer than a peer waits.
        from twostroke.kvtransfer.socket_pump import make_socket_pump

        self._make_pump = make_socket_pump
        self._store = store
        self._join_timeout_s = join_timeout_s
        self._limits = StreamLimits(streams, local_streams)
        self._max_bytes_per_s = max_bytes_per_s
        self._pending: set[TcpPendingLink] = set()
        self._links: set[TcpLink] = set()

    async def prepare(self, host: str, cut: Cut) -> TcpPendingLink:
        """Raises ConnectionLost where `host` is not an address of this machine."""
        door = await TcpDoor.open(host, self._limits, self._join_timeout_s)
        pending = TcpPendingLink(
            door, host, lambda connected: self._make_link(connected, cut), on_end=self._pending.discard
        )
        self._pending.add(pending)
        return pending

    async def join(self, params: LinkParams, cut: Cut) -> TcpLink:
        connected = await connect_streams(params, self._limits, self._join_timeout_s)
        if self._max_bytes_per_s is not None:
            for each in connected:
                _pace(each, max(1, self._max_bytes_per_s // len(connected)))
        return self._make_link(connected, cut)

    async def close(self) -> None:
        await asyncio.gather(*(pending.close() for pending in tuple(self._pending)))
        await asyncio.gather(*(link.close() for link in tuple(self._links)))

    def _make_link(self, connected: Sequence[socket], cut: Cut) -> TcpLink:
        pumps = [self._make_pump(cut.unit_bytes) if cut.is_whole_blocks else None for _ in connected]
        link = TcpLink(connected, pumps, self._store, cut, self._links.discard)
        self._links.add(link)
        return link
