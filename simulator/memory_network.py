"""Connections in memory, on virtual time: seeded latency, order kept, messages really encoded, loss on demand.

Each process of a simulation has a host name and its own view of the network, so that a fault can part two hosts. What
is under way arrives in no process's context: it does so although its sender, or its receiver, stands still
(virtual_loop.py).
"""

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Sequence

from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Message, decode_message, encode_message
from twostroke.protocol.network import Handler
from twostroke.protocol.requests import Address

HIGH_WATER_BYTES = 64 * 1024
KERNEL_BYTES = 16 * 1024
"""Bytes that a peer's kernel accepts although nobody reads them."""

Trace = Callable[[str], None]

Mangle = Callable[["MemoryConnection", Message], Sequence[Message]]
"""Replacement of a message by a misbehaving process: none, others, or more."""


class MemoryConnection:
    """One end of a connection."""

    def __init__(self, fabric: "MemoryFabric", host: str, peer_host: str):
        self.host = host
        self.peer_host = peer_host
        self.peer: MemoryConnection = self  # set by whoever makes the pair
        self.opened_s = asyncio.get_running_loop().time()
        self._fabric = fabric
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._flying_bytes = 0
        self._last_arrival = 0.0
        self._lost: str | None = None  # nothing is sent or received any more
        self._is_cut = False
        self._peer_ended = False  # what came before the end can still be received
        self._changed: list[asyncio.Future[None]] = []

    @property
    def was_cut(self) -> bool:
        return self._is_cut

    @property
    def unsent_bytes(self) -> int:
        return max(0, self._flying_bytes + self.peer._inbox_bytes - KERNEL_BYTES)

    def send(self, message: Message) -> None:
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        mangle = self._fabric.mangle
        for one in (message,) if mangle is None else mangle(self, message):
            payload = encode_message(one)
            if self._fabric.trace is not None:
                self._fabric.trace(f"{self.host} -> {self.peer_host} {one}")
            self._flying_bytes += len(payload)
            self._later(self._arrive, payload)

    async def drain(self) -> None:
        while self.unsent_bytes > HIGH_WATER_BYTES:
            await self._change()
        if self._lost is not None:
            raise ConnectionLost(self._lost)

    async def receive(self) -> Message:
        while not self._inbox:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            if self._peer_ended:
                raise ConnectionLost("the peer has closed the connection")
            await self._change()
        payload = self._inbox.popleft()
        self._inbox_bytes -= len(payload)
        self.peer._wake()
        return decode_message(payload)

    async def close(self) -> None:
        if self._lost is None:
            self._lose("the connection was closed here")
            self._later(self._end_peer)

    def cut(self) -> None:
        """The network fails between the two ends: what is under way is lost. Each learns of it in its own time."""
        if not self._is_cut:
            self._is_cut = self.peer._is_cut = True
            loop = asyncio.get_running_loop()
            for end in (self, self.peer):
                loop.call_later(self._fabric.latency(), end._notice_cut, context=contextvars.Context())

    def _notice_cut(self) -> None:
        if self._lost is None:
            self._lose("the connection was cut")

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self._inbox.clear()
        self._inbox_bytes = 0
        self._fabric.connections.pop(self, None)
        self._wake()
        self.peer._wake()

    def _later(self, action: Callable[..., None], *args: object) -> None:
        """Do `action` when a message sent now arrives; never before what was sent earlier."""
        loop = asyncio.get_running_loop()
        # Timers of the very same moment fire in no certain order.
        self._last_arrival = max(self._last_arrival + 1e-7, loop.time() + self._fabric.latency())
        loop.call_at(self._last_arrival, self._land, action, args, context=contextvars.Context())

    def _land(self, action: Callable[..., None], args: tuple[object, ...]) -> None:
        held = self._fabric.held_between(self.host, self.peer_host)
        if held is None:
            action(*args)
        else:
            held.append(lambda: action(*args))

    def _arrive(self, payload: bytes) -> None:
        self._flying_bytes -= len(payload)
        if not self._is_cut and self.peer._lost is None:
            self.peer._inbox.append(payload)
            self.peer._inbox_bytes += len(payload)
            self.peer._wake()

    def _end_peer(self) -> None:
        if not self._is_cut:
            self.peer._peer_ended = True
            self.peer._wake()

    async def _change(self) -> None:
        changed = asyncio.get_running_loop().create_future()
        self._changed.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class MemoryListener:
    """Runs a handler for every connection."""

    def __init__(self, fabric: "MemoryFabric", address: Address, handler: Handler):
        self._fabric = fabric
        self._address = address
        self._handler = handler
        self._context = contextvars.copy_context()  # the listening process's
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def address(self) -> Address:
        return self._address

    def accept(self, connection: MemoryConnection) -> None:
        task = asyncio.get_running_loop().create_task(
            self._serve(connection), name=f"handler at {self._address}", context=self._context.copy()
        )
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def close(self) -> None:
        if self._fabric.listeners.get(self._address) is self:
            del self._fabric.listeners[self._address]
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, connection: MemoryConnection) -> None:
        try:
            await self._handler(connection)
        finally:
            await connection.close()


class MemoryFabric:
    """All hosts' network."""

    def __init__(self, seed: int, *, typical_latency_s: float = 0.0005, trace: Trace | None = None):
        self._draw = random.Random(seed)
        self._typical_latency_s = typical_latency_s
        self._ports = iter(range(1024, 65536))
        self._parted: set[frozenset[str]] = set()
        self._held: dict[frozenset[str], list[Callable[[], None]]] = {}  # what has got stuck between silenced hosts
        self._audible: dict[frozenset[str], asyncio.Future[None]] = {}
        self.slowness = 1.0  # latencies are so many times what they are else
        self.trace = trace
        self.mangle: Mangle | None = None
        self.listeners: dict[Address, MemoryListener] = {}
        self.connections: dict[MemoryConnection, None] = {}

    def at(self, host: str, port: int | None = None) -> "MemoryNetwork":
        """The network as seen from `host`, whose one listener has this port, or a new one."""
        return MemoryNetwork(self, host, port)

    def latency(self) -> float:
        """Seconds of one message: mostly near the typical, now and then fifty times it."""
        stretch = 50.0 if self._draw.random() < 0.02 else 1.0
        return self.slowness * self._typical_latency_s * stretch * (0.2 + self._draw.random())

    def new_address(self, host: str) -> Address:
        return Address(host, next(self._ports))

    def cut(self, host: str, other: str | None = None) -> int:
        """Break all connections of `host`, or those to `other` alone; returns how many."""
        hit = [
            connection
            for connection in self.connections
            if connection.host == host and (other is None or connection.peer_host == other)
        ]
        for connection in hit:
            connection.cut()
        return len(hit)

    def part(self, host: str, other: str) -> None:
        """Cut, and let neither connect to the other until `join`."""
        self._parted.add(frozenset((host, other)))
        self.cut(host, other)

    def join(self, host: str, other: str) -> None:
        """End a partition."""
        self._parted.discard(frozenset((host, other)))

    def silence(self, host: str, other: str) -> None:
        """Let nothing get from one to the other until `end_silence`; neither end of a connection is told."""
        pair = frozenset((host, other))
        self._held.setdefault(pair, [])
        self._audible.setdefault(pair, asyncio.get_running_loop().create_future())

    def end_silence(self, host: str, other: str) -> None:
        """End a silence: what was held back arrives now, in order. It does nothing where there is no silence."""
        pair = frozenset((host, other))
        if pair in self._held:
            held = self._held.pop(pair)
            self._audible.pop(pair).set_result(None)
            for land in held:
                land()

    def held_between(self, host: str, other: str) -> list[Callable[[], None]] | None:
        """Return the queue for what would arrive now; None where nothing is in its way."""
        return self._held.get(frozenset((host, other))) if self._held else None

    async def audible(self, host: str, other: str) -> None:
        """Return once something can get from one to the other."""
        while (silenced := self._audible.get(frozenset((host, other)))) is not None:
            await asyncio.shield(silenced)

    def remove(self, host: str) -> None:
        """The host has crashed."""
        self.cut(host)
        for address in [address for address in self.listeners if address.host == host]:
            del self.listeners[address]

    def connect(self, host: str, address: Address) -> MemoryConnection:
        """Raises ConnectionLost where nobody listens."""
        listener = self.listeners.get(address)
        if listener is None or frozenset((host, address.host)) in self._parted:
            raise ConnectionLost(f"nobody listens on {address}")
        near, far = MemoryConnection(self, host, address.host), MemoryConnection(self, address.host, host)
        near.peer, far.peer = far, near
        self.connections[near] = self.connections[far] = None
        listener.accept(far)
        return near


class MemoryNetwork:
    """One host's Network."""

    def __init__(self, fabric: MemoryFabric, host: str, port: int | None):
        self._fabric = fabric
        self._host = host
        self._port = port
        self.is_dead = False

    async def connect(self, address: Address) -> MemoryConnection:
        await asyncio.sleep(self._fabric.latency())
        await self._fabric.audible(self._host, address.host)
        if self.is_dead:
            raise ConnectionLost("a crashed process connects to nobody")
        return self._fabric.connect(self._host, address)

    async def listen(self, host: str, handler: Handler) -> MemoryListener:
        address = self._fabric.new_address(self._host) if self._port is None else Address(self._host, self._port)
        listener = MemoryListener(self._fabric, address, handler)
        self._fabric.listeners[listener.address] = listener
        return listener
