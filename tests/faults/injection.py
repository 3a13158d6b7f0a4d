"""Faults inside a worker's process, put into what a worker is given anyway: its network and its transports.

A fault is armed for a point that a worker passes, by the parent's command, and fires once when the worker passes it.
Points are messages (`before send Offer`, `after send Grant`, `received Commit`), a link's calls (`before send`,
`after send`, `before receive`, `after receive`; `during send`, `during receive`: once some bytes have moved), and those
within a transport (sabotage.py).
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from byte_watch import ByteWatch
from census import socket_inodes
from pattern_store import PatternStore

from kvtransfer.digest import chunk_seal
from kvtransfer.layout import Cut, Segment
from kvtransfer.link import DataLink, LinkParams, PendingLink, Transport
from protocol.messages import Chunk, Hello, Message, Offer, Welcome
from protocol.network import Connection, Handler, Listener, Network
from protocol.tickets import Address, Peer

Action = Literal[
    "freeze",
    "wait",
    "drop",
    "repeat",
    "flip",
    "unflip",
    "cut",
    "truncate",
    "swap",
    "stale epoch",
    "EMFILE",
    "ENOMEM",
    "ENOSPC",
]

LIMIT_S = 30.0
"""For what never comes in a good run."""


@dataclass
class Fault:
    """What happens where, and to which transfer; `skip` passages before it are let through, then `times` are not."""

    at: str
    action: Action
    transfer_id: str | None = None  # hexadecimal; None: whichever comes
    skip: int = 0
    times: int = 1
    num_bytes: int = 0  # for `during ...`: fires once so many have moved


@dataclass
class Faults:
    """Those that are armed in this process."""

    report: Callable[..., None]
    store: PatternStore
    armed: list[Fault] = field(default_factory=list)
    via_port: int | None = None  # of a proxy that the next link is joined through
    flipped: tuple[int, int] = (0, 0)  # layer and block
    _let_go: asyncio.Event = field(default_factory=asyncio.Event)  # these two end an action `wait`
    _let_thread_go: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # links have threads

    def due(self, at: str, transfer_id: bytes | None = None) -> Fault | None:
        """The fault that fires here and now, if any. Reported, unless it is one that takes its own time to fire."""
        fault = self._take(at, transfer_id)
        if fault is not None and not at.startswith(("during send", "during receive")):
            self.fired(fault)
        return fault

    def _take(self, at: str, transfer_id: bytes | None) -> Fault | None:
        with self._lock:
            for fault in self.armed:
                if fault.at != at or (transfer_id is not None and fault.transfer_id not in (None, transfer_id.hex())):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                if not fault.times:
                    self.armed.remove(fault)
                if fault.action == "wait":  # before anybody can hear of it
                    self._let_go.clear()
                    self._let_thread_go.clear()
                return fault
        return None

    def fired(self, fault: Fault) -> None:
        self.report(event="fired", at=fault.at, action=fault.action)
        if fault.action == "freeze":
            freeze()

    async def passed(self, at: str) -> Fault | None:
        """As `due`, for points where the event loop may wait."""
        fault = self.due(at)
        if fault is not None and fault.action == "wait":
            await self._let_go.wait()
        return fault

    def resume(self) -> None:
        """Let whatever waits go on."""
        self._let_go.set()
        self._let_thread_go.set()

    def wait_blocking(self) -> None:
        """Hold a link's thread until the parent lets it go on."""
        if not self._let_thread_go.wait(LIMIT_S):
            raise TimeoutError("nobody let this fault go on")


def freeze() -> None:
    """Stop this whole process, right here, until somebody continues it or kills it."""
    # Sent to this thread, so that it does not run on while the kernel looks for one to deliver the signal to.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


# --- the network ---


class FaultyNetwork:
    """A Network whose connections pass the points of their messages."""

    def __init__(self, inner: Network, faults: Faults, own: Peer):
        self._inner = inner
        self._faults = faults
        self._own = own
        self.chunks: dict[int, tuple[Chunk, Peer]] = {}  # sent to whom, by their seals

    async def connect(self, address: Address) -> Connection:
        return FaultyConnection(await self._inner.connect(address), self._faults, self, self._own)

    async def listen(self, host: str, handler: Handler) -> Listener:
        async def handle(connection: Connection) -> None:
            await handler(FaultyConnection(connection, self._faults, self, self._own))

        return await self._inner.listen(host, handle)


class FaultyConnection:
    """A Connection that passes a point before and after each message."""

    def __init__(self, inner: Connection, faults: Faults, network: FaultyNetwork, own: Peer):
        self._inner = inner
        self._faults = faults
        self._network = network
        self._own = own
        self._other = Peer("", 0)

    @property
    def unsent_bytes(self) -> int:
        return self._inner.unsent_bytes

    def send(self, message: Message) -> None:
        kind, transfer_id = type(message).__name__, transfer_of(message)
        if isinstance(message, Hello):
            self._other = message.receiver
        elif isinstance(message, Chunk):
            self._network.chunks[chunk_seal(message, self._own, self._other)] = message, self._other
        fault = self._faults.due(f"before send {kind}", transfer_id)
        if fault is not None and fault.action == "drop":
            return
        self._inner.send(message)
        if fault is not None and fault.action == "repeat":
            self._inner.send(message)
        self._faults.due(f"after send {kind}", transfer_id)

    async def drain(self) -> None:
        await self._inner.drain()

    async def receive(self) -> Message:
        while True:
            message = await self._inner.receive()
            fault = self._faults.due(f"received {type(message).__name__}", transfer_of(message))
            if fault is not None and fault.action == "unflip":
                self._faults.store.flip(*self._faults.flipped)
            if fault is None or fault.action != "drop":
                return message

    async def close(self) -> None:
        await self._inner.close()


def transfer_of(message: Message) -> bytes | None:
    if isinstance(message, Offer):
        return message.ticket.transfer_id
    if isinstance(message, Hello | Welcome):
        return None
    transfer_id = getattr(message, "transfer_id", None)
    return transfer_id if isinstance(transfer_id, bytes) else None


# --- links ---


class FaultyTransport:
    """A Transport whose links pass a point before and after each chunk."""

    def __init__(self, inner: Transport, faults: Faults, network: FaultyNetwork, own: Peer):
        self.name = inner.name
        self.faults = faults
        self.network = network
        self.own = own
        self._inner = inner

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

    async def close(self) -> None:
        await self._inner.close()


class _FaultyPending:
    def __init__(self, inner: PendingLink, transport: FaultyTransport, sockets_before: set[int]):
        self._inner = inner
        self._transport = transport
        self._before = sockets_before

    @property
    def params(self) -> LinkParams:
        return self._inner.params

    async def established(self) -> DataLink:
        return FaultyLink(await self._inner.established(), self._transport, set(socket_inodes()) - self._before)

    async def close(self) -> None:
        await self._inner.close()


class FaultyLink:
    """A DataLink that passes a point before, during and after each chunk."""

    def __init__(self, inner: DataLink, transport: FaultyTransport, inodes: set[int]):
        self._inner = inner
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

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        async with self._turns:  # calls stay in order, whoever is held up
            await self._faults.passed("before receive")
            self._watch("during receive")
            receiving = asyncio.ensure_future(self._inner.receive(segments, seal))
        is_intact = await receiving
        await self._faults.passed("after receive")
        return is_intact

    async def discard(self, num_units: int) -> None:
        await self._inner.discard(num_units)

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
