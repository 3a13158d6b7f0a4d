"""A worker's network and links with faults.

Connections can be held up, cut and tampered with while the worker uses them; links are cut, damage, delay and hold up
chunks of KV, and tell of each that its digest refuses.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tests.chaos.orders import Harm, Side, Tamper
from tests.rigs.delegate import Delegate, with_links
from tests.rigs.proxy import Proxy
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import DataLink, LinkParams, PendingLink, Transport
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Hello, Message
from twostroke.protocol.network import Connection, Handler, Listener, Network
from twostroke.protocol.requests import Address

OrderT = TypeVar("OrderT")

CONNECT_S = 5.0  # as long as live TCP tries


class Barrier:
    """Stands in the way to one side while it is closed, and counts what it has held up."""

    def __init__(self) -> None:
        self.held = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._on_open: list[Callable[[], None]] = []

    @property
    def is_closed(self) -> bool:
        return not self._opened.is_set()

    def close(self) -> None:
        self.held = 0
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()
        for flush in self._on_open:
            flush()
        self._on_open.clear()

    def call_when_open(self, flush: Callable[[], None]) -> None:
        self._on_open.append(flush)

    async def passed(self) -> None:
        """Wait until nothing stands in the way."""
        if self.is_closed:
            self.held += 1
            await self._opened.wait()


class Waiting(Generic[OrderT]):
    """Orders that wait for something to harm."""

    def __init__(self) -> None:
        self._orders: list[tuple[OrderT, asyncio.Event]] = []

    async def carried_out(self, order: OrderT, patience_s: float) -> int:
        """Returns 1 once `take` gave the order to something, and 0 where nothing came in time."""
        entry = order, asyncio.Event()
        self._orders.append(entry)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(entry[1].wait(), patience_s)
        if entry in self._orders:
            self._orders.remove(entry)
        return int(entry[1].is_set())

    def take(self, fits: Callable[[OrderT], bool]) -> OrderT | None:
        """The first order that fits; it is carried out with that."""
        for entry in self._orders:
            if fits(entry[0]):
                self._orders.remove(entry)
                entry[1].set()
                return entry[0]
        return None


class FaultyNetwork(Delegate):
    """A Network over `inner`. Whom a connection leads to is known by its Hello."""

    def __init__(self, inner: Network):
        super().__init__(inner)
        self.barriers: dict[Side, Barrier] = {"routers": Barrier(), "workers": Barrier()}
        self.connections: set[FaultyConnection] = set()
        self._tampering = Waiting[Tamper]()

    async def connect(self, address: Address) -> Connection:
        """Workers connect to workers alone."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self.barriers["workers"].passed()
        except TimeoutError:
            raise ConnectionLost(f"no answer from {address}: a partition") from None
        return FaultyConnection(await self._inner.connect(address), self, "workers")

    async def listen(self, host: str, handler: Handler) -> Listener:
        async def handle(connection: Connection) -> None:
            faulty = FaultyConnection(connection, self, None)
            try:
                await handler(faulty)
            finally:
                self.connections.discard(faulty)

        return await self._inner.listen(host, handle)

    async def cut(self, side: Side) -> int:
        """Close all connections with that side; returns how many there were."""
        victims = [connection for connection in self.connections if connection.side == side]
        await asyncio.gather(*(victim.close() for victim in victims))
        return len(victims)

    async def tamper(self, order: Tamper, patience_s: float) -> int:
        """Returns 1 once a message was tampered with, and 0 where none came in time."""
        return await self._tampering.carried_out(order, patience_s)

    def copies(self, message: Message) -> int:
        """Return how often this message should be sent."""
        order = self._tampering.take(lambda order: order.message == type(message).__name__)
        return 1 if order is None else 2 if order.trick == "repeat" else 0


class FaultyConnection(Delegate):
    """A Connection that may be held up. What waits is sent, and received, when its barrier opens, in its order."""

    def __init__(self, inner: Connection, network: FaultyNetwork, side: Side | None):
        super().__init__(inner)
        self.side = side  # None: nobody has said hello yet
        self._network = network
        self._waiting: deque[Message] = deque()
        self._closed = asyncio.Event()
        network.connections.add(self)

    def send(self, message: Message) -> None:
        if self._closed.is_set():
            raise ConnectionLost("the connection is closed")
        barrier = self._barrier()
        for _ in range(self._network.copies(message)):
            if barrier is None:
                self._inner.send(message)
                continue
            barrier.held += 1
            if not self._waiting:
                barrier.call_when_open(self._flush)
            self._waiting.append(message)

    async def receive(self) -> Message:
        message = await self._inner.receive()
        if isinstance(message, Hello):
            self.side = "routers" if message.kv is None else "workers"
        barrier = self._barrier()
        if barrier is not None:
            await self._pass(barrier)
        return message

    async def close(self) -> None:
        self._closed.set()
        self._network.connections.discard(self)
        await self._inner.close()

    def _barrier(self) -> Barrier | None:
        """Return the barrier that is up now, or None."""
        if self.side is None:
            return None
        barrier = self._network.barriers[self.side]
        return barrier if barrier.is_closed else None

    async def _pass(self, barrier: Barrier) -> None:
        """Raises ConnectionLost where the connection is closed meanwhile."""
        passing = asyncio.ensure_future(barrier.passed())
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((passing, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            passing.cancel()
            closing.cancel()
        if self._closed.is_set():
            raise ConnectionLost("the connection is closed")

    def _flush(self) -> None:
        while self._waiting and not self._closed.is_set():
            try:
                self._inner.send(self._waiting.popleft())
            except ConnectionLost:
                self._waiting.clear()


LEAST_BYTES = 512
"""Smallest chunk of KV. What is shorter are the words with which a link is joined."""


class LinkFaults:
    """Faults of all links of this worker."""

    def __init__(self, barrier: Barrier, on_refused: Callable[[], None]):
        """`barrier` is the one between workers; `on_refused` hears of each chunk that came damaged."""
        self.barrier = barrier
        self.on_refused = on_refused
        self.delay_s = 0.0
        self.delayed = 0
        self._harms = Waiting[Harm]()

    async def harm(self, harm: Harm, patience_s: float) -> int:
        """Harm the next bytes on a TCP link; returns 1 once that has happened, and 0 where none came in time."""
        return await self._harms.carried_out(harm, patience_s)

    def mangle(self, _: int, data: bytes) -> bytes | None:
        """Mangle bytes, as a proxy's `Mangle`."""
        harm = self._harms.take(lambda _: True) if len(data) >= LEAST_BYTES else None
        if harm is None:
            return data
        if harm == "cut":
            return None
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class FaultyTransport(Delegate):
    """A Transport over `inner`. Its TCP links go through proxies in the sending worker's process."""

    def __init__(self, inner: Transport, faults: LinkFaults):
        super().__init__(inner)
        self._faults = faults

    async def prepare(self, host: str, shard: KVShard) -> PendingLink:
        return with_links(await self._inner.prepare(host, shard), lambda link: FaultyLink(link, self._faults))

    async def join(self, params: LinkParams, shard: KVShard) -> DataLink:
        if self.name != "tcp":
            return FaultyLink(await self._inner.join(params, shard), self._faults)
        proxy = Proxy()
        proxy.mangle = self._faults.mangle
        address = await proxy.start()
        proxy.upstream.set_result(Address(str(params["host"]), int(params["port"])))
        try:
            link = await self._inner.join({**params, "host": address.host, "port": address.port}, shard)
        except BaseException:
            await proxy.close()
            raise
        return FaultyLink(link, self._faults, proxy)


class FaultyLink(Delegate):
    """A DataLink over `inner`. Calls are carried out in the order in which they are made, held up or not."""

    def __init__(self, inner: DataLink, faults: LinkFaults, proxy: Proxy | None = None):
        super().__init__(inner)
        self._faults = faults
        self._proxy = proxy
        self._turns = asyncio.Lock()

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        async with self._turns:
            await self._faults.barrier.passed()
            if self._faults.delay_s:
                self._faults.delayed += 1
                await asyncio.sleep(self._faults.delay_s)
            sending = asyncio.ensure_future(self._inner.send(segments, seed))
            await asyncio.sleep(0)  # it has its place in the link's order now
        await sending

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        async with self._turns:
            receiving = asyncio.ensure_future(self._inner.receive(segments, seed))
            await asyncio.sleep(0)
        has_right_checksum = await receiving
        if not has_right_checksum:
            self._faults.on_refused()
        return has_right_checksum

    async def close(self) -> None:
        await self._inner.close()
        if self._proxy is not None:
            await self._proxy.close()
