"""A network and transports that pass the points of `injection`: at each message, and around and amid each chunk.

In the middle of a chunk is once a number of its bytes has gone over this process's sockets.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable, Sequence

from tests.faults.census import socket_inodes
from tests.faults.injection import Fault, Faults
from tests.rigs.delegate import Delegate, with_links
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import DataLink, LinkParams, PendingLink, Transport, chunk_seed
from twostroke.protocol.messages import Chunk, Hello, Message, Offer, Welcome
from twostroke.protocol.network import Connection, Handler, Listener, Network
from twostroke.protocol.requests import Address, Peer

_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; the kernel itself paces, on loopback too
_ACKED_AND_RECEIVED = struct.Struct("<QQ")
_ACKED_AT = 120  # of tcpi_bytes_acked in struct tcp_info; tcpi_bytes_received follows
_TICK_S = 0.0002
PACE_BYTES_S = 20_000_000  # a chunk of 256 KiB takes 13 ms: time enough to be in its middle
SEND_BUFFER_BYTES = 64 * 1024


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


class FaultyConnection(Delegate):
    """A Connection that passes a point before and after each message."""

    def __init__(self, inner: Connection, faults: Faults, network: FaultyNetwork, own: Peer):
        super().__init__(inner)
        self._faults = faults
        self._network = network
        self._own = own
        self._other = Peer("", 0)

    def send(self, message: Message) -> None:
        kind, transfer_id = type(message).__name__, transfer_of(message)
        if isinstance(message, Hello):
            self._other = message.receiver
        elif isinstance(message, Chunk):
            self._network.chunks[chunk_seed(message, self._own, self._other)] = message, self._other
        fault = self._faults.due(f"before send {kind}", transfer_id)
        if fault is not None and fault.action == "drop":
            return
        self._inner.send(message)
        if fault is not None and fault.action == "repeat":
            self._inner.send(message)
        self._faults.due(f"after send {kind}", transfer_id)

    async def receive(self) -> Message:
        while True:
            message = await self._inner.receive()
            fault = self._faults.due(f"received {type(message).__name__}", transfer_of(message))
            if fault is None or fault.action != "drop":
                return message


def transfer_of(message: Message) -> bytes | None:
    if isinstance(message, Offer):
        return message.ticket.transfer_id
    if isinstance(message, Hello | Welcome):
        return None
    transfer_id = getattr(message, "transfer_id", None)
    return transfer_id if isinstance(transfer_id, bytes) else None


class FaultyTransport(Delegate):
    """A Transport whose links pass a point before and after each chunk."""

    def __init__(self, inner: Transport, faults: Faults, network: FaultyNetwork, own: Peer):
        super().__init__(inner)
        self.faults = faults
        self.network = network
        self.own = own

    async def prepare(self, host: str, shard: KVShard) -> PendingLink:
        before = set(socket_inodes())
        pending = await self._inner.prepare(host, shard)
        return with_links(pending, lambda link: FaultyLink(link, self, set(socket_inodes()) - before))

    async def join(self, params: LinkParams, shard: KVShard) -> DataLink:
        before = set(socket_inodes())
        if self.faults.via_port is not None:
            self.faults.report(event="joining", port=params["port"])
            params = {**params, "port": self.faults.via_port}
            self.faults.via_port = None
        return FaultyLink(await self._inner.join(params, shard), self, set(socket_inodes()) - before)


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

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        fault = await self._faults.passed("before send")
        self._watch("during send")
        if self._kept is not None:
            kept, self._kept = self._kept, None
            await asyncio.gather(self._inner.send(segments, seed), self._inner.send(*kept))
        elif fault is None:
            await self._inner.send(segments, seed)
        elif fault.action == "swap":
            self._kept = segments, seed
        elif fault.action == "cut":
            cut_unix_socket(self._inodes, fault.num_bytes)
            self._faults.fired(fault)
            await self._inner.send(segments, seed)
        elif fault.action == "truncate":
            await self._inner.send(without_last_unit(segments), seed)
        elif fault.action == "stale epoch":
            await self._inner.send(segments, self._seal_of_last_epoch(seed))
        elif fault.action == "repeat":
            await asyncio.gather(self._inner.send(segments, seed), self._inner.send(segments, seed))
        else:
            await self._inner.send(segments, seed)
        fault = await self._faults.passed("after send")
        if fault is not None and fault.action == "flip":
            self._faults.flipped = segments[-1].layer, segments[-1].unit_ids[-1]
            self._faults.store.flip(*self._faults.flipped)
            self._faults.fired(fault)

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        async with self._turns:  # calls stay in order, whoever is held up
            await self._faults.passed("before receive")
            self._watch("during receive")
            receiving = asyncio.ensure_future(self._inner.receive(segments, seed))
        has_right_checksum = await receiving
        await self._faults.passed("after receive")
        return has_right_checksum

    async def close(self) -> None:
        for watch in self._watches:
            watch.stop()
        await self._inner.close()

    def _watch(self, at: str) -> None:
        fault = self._faults.due(at)
        if fault is not None:
            self._watches.append(ByteWatch(self._inodes, fault, self._faults.fired))

    def _seal_of_last_epoch(self, seed: int) -> int:
        chunk, target = self._transport.network.chunks[seed]
        own = self._transport.own
        return chunk_seed(chunk, Peer(own.worker_id, own.epoch - 1), target)


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


class ByteWatch:
    """Slows down what the TCP sockets among `inodes` send, and calls `act()`, on a thread of its own,
    once `num_bytes` more have gone either way. Bytes that have come and were not read yet are among these."""

    def __init__(self, inodes: set[int], fault: Fault, fired: Callable[[Fault], None]):
        self._sockets = contextlib.ExitStack()
        self._tcp = [self._sockets.enter_context(each) for each in _tcp_sockets(inodes)]
        for each in self._tcp:
            each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", PACE_BYTES_S))
            # What the kernel has taken it sends on, though the process is stopped or dead.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._due = self._moved() - sum(_num_unread(each) for each in self._tcp) + fault.num_bytes
        self._fault = fault
        self._fired = fired
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="byte watch")
        self._thread.start()

    def _cut(self) -> None:
        """Break all of the sockets, as a lost network would."""
        for each in self._tcp:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with self._sockets:
            while not self._stopped.wait(_TICK_S):
                if self._moved() >= self._due:
                    if self._fault.action == "cut":
                        self._cut()
                    self._fired(self._fault)
                    break
            for each in self._tcp:
                each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", 0xFFFFFFFF))

    def _moved(self) -> int:
        moved = 0
        for each in self._tcp:
            moved += sum(
                _ACKED_AND_RECEIVED.unpack_from(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), _ACKED_AT)
            )
        return moved


def _num_unread(tcp: socket.socket) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(tcp, termios.FIONREAD, bytes(4)))
    return int(count)


def _tcp_sockets(inodes: set[int]) -> list[socket.socket]:
    """Descriptors of our own for the connected TCP sockets among these."""
    found = []
    for inode, descriptor in socket_inodes().items():
        if inode in inodes:
            each = socket.socket(fileno=os.dup(descriptor))
            connected = False
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                with contextlib.suppress(OSError):
                    each.getpeername()
                    connected = True
            if connected:
                found.append(each)
            else:
                each.close()
    return found
