"""Transports whose links pass a point of `injection` before, during and after each chunk."""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any

from byte_watch import ByteWatch
from census import socket_inodes
from faulty_network import FaultyNetwork
from injection import Faults

from tests.rigs.delegate import Delegate
from twostroke.kvtransfer.link import DataLink, LinkParams, PendingLink, Transport, chunk_seal
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.protocol.requests import Peer


class FaultyTransport(Delegate):
    """A Transport whose links pass a point before and after each chunk."""

    def __init__(self, inner: Transport, faults: Faults, network: FaultyNetwork, own: Peer):
        super().__init__(inner)
        self.faults = faults
        self.network = network
        self.own = own

    async def prepare(self, host: str, cut: Cut) -> PendingLink:
        before = set(socket_inodes())
        return _FaultyPending(await self._inner.prepare(host, cut), self, before)

    async def join(self, params: LinkParams, cut: Cut) -> DataLink:
        before = set(socket_inodes())
        if self.faults.via_port is not None:
            self.faults.report(event="joining", port=params["port"])
            params = {**params, "port": self.faults.via_port}
            self.faults.via_port = None
        return FaultyLink(await self._inner.join(params, cut), self, set(socket_inodes()) - before)


class _FaultyPending(Delegate):
    def __init__(self, inner: PendingLink, transport: FaultyTransport, sockets_before: set[int]):
        super().__init__(inner)
        self._transport = transport
        self._before = sockets_before

    async def established(self) -> DataLink:
        return FaultyLink(await self._inner.established(), self._transport, set(socket_inodes()) - self._before)


class FaultyLink(Delegate):
    """A DataLink that passes a point before, during and after each chunk."""

    def __init__(self, inner: DataLink, transport: FaultyTransport, inodes: set[int]):
        super().__init__(inner)
        self._transport = transport
        self._faults = transport.faults
        self._inodes = inodes
        self._kept: tuple[Sequence[Segment], int] | None = None  # the chunk that the next one overtakes
        self._watches: list[ByteWatch] = []
        self._turns = asyncio.Lock()

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        fault = await self._faults.passed("before send")
        self._watch("during send")
        if self._kept is not None:
            kept, self._kept = self._kept, None
            await asyncio.gather(self._inner.send(segments, seal), self._inner.send(*kept))
        elif fault is None:
            await self._inner.send(segments, seal)
        elif fault.action == "swap":
            self._kept = segments, seal
        elif fault.action == "cut":
            cut_unix_socket(self._inodes, fault.num_bytes)
            self._faults.fired(fault)
            await self._inner.send(segments, seal)
        elif fault.action == "truncate":
            await self._inner.send(without_last_unit(segments), seal)
        elif fault.action == "stale epoch":
            await self._inner.send(segments, self._seal_of_last_epoch(seal))
        elif fault.action == "repeat":
            await asyncio.gather(self._inner.send(segments, seal), self._inner.send(segments, seal))
        else:
            await self._inner.send(segments, seal)
        fault = await self._faults.passed("after send")
        if fault is not None and fault.action == "flip":
            self._faults.flipped = segments[-1].layer, segments[-1].unit_ids[-1]
            self._faults.store.flip(*self._faults.flipped)
            self._faults.fired(fault)

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        async with self._turns:  # calls stay in order, whoever is held up
            await self._faults.passed("before receive")
            self._watch("during receive")
            receiving = asyncio.ensure_future(self._inner.receive(segments, seal))
        is_intact = await receiving
        await self._faults.passed("after receive")
        return is_intact

    async def close(self) -> None:
        for watch in self._watches:
            watch.stop()
        await self._inner.close()

    def _watch(self, at: str) -> None:
        fault = self._faults.due(at)
        if fault is not None:
            self._watches.append(ByteWatch(self._inodes, fault.num_bytes, self._act_on, fault))

    def _act_on(self, watch: ByteWatch, fault: Any) -> None:
        """On the watch's thread."""
        if fault.action == "cut":
            watch.cut()
        self._faults.fired(fault)

    def _seal_of_last_epoch(self, seal: int) -> int:
        chunk, target = self._transport.network.chunks[seal]
        own = self._transport.own
        return chunk_seal(chunk, Peer(own.worker_id, own.epoch - 1), target)


def without_last_unit(segments: Sequence[Segment]) -> list[Segment]:
    last = segments[-1]
    rest = [Segment(last.layer, last.unit_ids[:-1])] if len(last.unit_ids) > 1 else []
    return [*segments[:-1], *rest]


def cut_unix_socket(inodes: set[int], num_bytes: int) -> None:
    """Break the shm link's socket after so many bytes of its next message: zeros, ids of unit 0."""
    for inode, descriptor in socket_inodes().items():
        if inode in inodes:
            with socket.socket(fileno=os.dup(descriptor)) as link:
                if link.family == socket.AF_UNIX:
                    link.sendall(bytes(num_bytes))
                    link.shutdown(socket.SHUT_RDWR)
