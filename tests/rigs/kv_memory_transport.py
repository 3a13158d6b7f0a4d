"""Links within one process, by queues: for tests of what drives links."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import ClassVar

import xxhash

from twostroke.kvtransfer.link import HostStore, LinkParams
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.protocol.errors import ConnectionLost


class Wire:
    """What is between two ends: chunks in order, each with its digest; None once either end is closed."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[tuple[bytes, int] | None] = asyncio.Queue()
        self.joined = asyncio.Event()
        self.is_broken = False

    def cut(self) -> None:
        self.is_broken = True
        self.chunks.put_nowait(None)


class MemoryLink:
    """A DataLink; how units become bytes is its transport's."""

    def __init__(self, wire: Wire, transport: "MemoryTransport", cut: Cut):
        self.wire = wire
        self._transport = transport
        self._cut = cut
        self._turn = asyncio.Lock()  # calls are carried out in order

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        async with self._turn:
            self._check()
            data = b"".join(self._transport.pack(segment, self._cut) for segment in segments)
            self.wire.chunks.put_nowait((data, xxhash.xxh3_128_intdigest(data, seal)))

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        async with self._turn:
            data, digest = await self._next()
            at = 0
            for segment in segments:
                end = at + len(segment.unit_ids) * self._cut.unit_bytes
                self._transport.unpack(segment, self._cut, data[at:end])
                at = end
            return at == len(data) and xxhash.xxh3_128_intdigest(data, seal) == digest

    async def discard(self, num_units: int) -> None:
        async with self._turn:
            data, _ = await self._next()
            if len(data) != num_units * self._cut.unit_bytes:
                raise ConnectionLost("out of step")

    async def close(self) -> None:
        self.wire.cut()

    def _check(self) -> None:
        if self.wire.is_broken:
            raise ConnectionLost("the link is closed")

    async def _next(self) -> tuple[bytes, int]:
        chunk = await self.wire.chunks.get()
        if chunk is None:
            self.wire.chunks.put_nowait(None)
            raise ConnectionLost("the link broke")
        return chunk


class MemoryPendingLink:
    def __init__(self, number: int, wire: Wire, link: MemoryLink):
        self._wire = wire
        self._link = link
        self.params: LinkParams = {"number": number}

    async def established(self) -> MemoryLink:
        await self._wire.joined.wait()
        return self._link

    async def close(self) -> None:
        self._wire.cut()


class MemoryTransport:
    """Transports of one process see each other."""

    _wires: ClassVar[dict[int, Wire]] = {}
    _numbers: ClassVar["itertools.count[int]"] = itertools.count()

    def __init__(self, store: HostStore, name: str = "memory"):
        self.name = name
        self._store = store

    async def prepare(self, host: str, cut: Cut) -> MemoryPendingLink:
        number, wire = next(self._numbers), Wire()
        self._wires[number] = wire
        return MemoryPendingLink(number, wire, self.make_link(wire, cut))

    async def join(self, params: LinkParams, cut: Cut) -> MemoryLink:
        wire = self._wires.pop(int(params["number"]))
        wire.joined.set()
        return self.make_link(wire, cut)

    def make_link(self, wire: Wire, cut: Cut) -> MemoryLink:
        return MemoryLink(wire, self, cut)

    async def close(self) -> None:
        pass

    def pack(self, segment: Segment, cut: Cut) -> bytes:
        """The units' bytes: whole blocks."""
        layer, size = self._store.layer_bytes(segment.layer), cut.unit_bytes
        return b"".join(layer[unit * size : (unit + 1) * size] for unit in segment.unit_ids)

    def unpack(self, segment: Segment, cut: Cut, data: bytes) -> None:
        """Put them into place."""
        layer, size = self._store.layer_bytes(segment.layer), cut.unit_bytes
        for index, unit in enumerate(segment.unit_ids):
            layer[unit * size : (unit + 1) * size] = data[index * size : (index + 1) * size]
