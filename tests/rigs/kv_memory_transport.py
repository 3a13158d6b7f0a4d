"""Links within one process, by queues: for tests of what drives links."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import ClassVar

import xxhash

from twostroke.kvtransfer.link import HostStore, LinkParams
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.transports.host_units import HostUnits, count_units
from twostroke.protocol.errors import ConnectionLost


class Wire:
    """What is between two ends: chunks in order, each with its digest; None once either end is closed."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[tuple[bytearray, int] | None] = asyncio.Queue()
        self.joined = asyncio.Event()
        self.is_broken = False

    def cut(self) -> None:
        self.is_broken = True
        self.chunks.put_nowait(None)


class MemoryLink:
    """A DataLink."""

    def __init__(self, wire: Wire, store: HostStore, cut: Cut):
        self.wire = wire
        self._units = HostUnits(store, cut)
        self._cut = cut
        self._turn = asyncio.Lock()  # calls are carried out in order

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        async with self._turn:
            self._check()
            data = bytearray(count_units(segments) * self._cut.unit_bytes)
            self._units.pack(segments, memoryview(data))
            self.wire.chunks.put_nowait((data, xxhash.xxh3_128_intdigest(data, seal)))

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        async with self._turn:
            data, digest = await self._next()
            if len(data) == count_units(segments) * self._cut.unit_bytes:
                self._units.unpack(segments, memoryview(data))
                return xxhash.xxh3_128_intdigest(data, seal) == digest
            return False

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

    async def _next(self) -> tuple[bytearray, int]:
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

    def __init__(self, store: HostStore, name: str = "memory", link_type: type[MemoryLink] = MemoryLink):
        self.name = name
        self.link_type = link_type
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
        return self.link_type(wire, self._store, cut)

    async def close(self) -> None:
        pass
