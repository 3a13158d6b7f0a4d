"""Data links in memory: bytes take virtual time, and are read and written bit by bit, as on a real link.

Two kinds. A `memory` link is a stream, like TCP: the source reads its blocks and pushes bytes. A `memory_pull` link is
like shared memory: the source says where its units lie, with a digest of what they hold, and the target reads the
source's store itself when it receives. On both, blocks that are freed while a link still touches them show up: in the
store's list of violations, or as wrong tokens.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import CHECKSUM_BYTES, LinkParams, Transport
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Reach
from twostroke.protocol.requests import Peer
from twostroke.simulator.memory_network import MemoryNetwork
from twostroke.simulator.memory_store import FakeStore, Grip, SpoilingPool

KINDS = ("memory_pull", "memory")  # as real workers prefer them

Damage = Callable[[bytearray], None]
"""May change bytes under way, in number too."""


@dataclass(frozen=True)
class Parts:
    """Cache and transports of one rank of a simulated worker."""

    store: FakeStore
    pool: SpoilingPool
    network: MemoryNetwork
    transports: Transports
    sender: KVSender
    receiver: KVReceiver

    async def close(self) -> None:
        """End all that moves KV; harmless for what a worker has ended already."""
        await self.sender.close()
        await self.receiver.close()
        await self.transports.close()


def parts_around(
    store: FakeStore,
    peer: Peer,
    network: MemoryNetwork,
    links: "LinkFabric",
    config: TransferConfig,
    secret: bytes,
    kinds: tuple[str, ...] = KINDS,
) -> Parts:
    """All that the worker `peer` needs besides an engine, around its store. `kinds` are the links that it can make."""
    by_name: dict[str, Transport] = {kind: MemoryTransport(links, peer.worker_id, store, kind) for kind in kinds}
    transports = Transports(by_name, Reach(kinds, "one machine", "cpu"))
    clock = asyncio.get_running_loop().time
    sender = KVSender(peer=peer, store=store, network=network, transports=transports, config=config, clock=clock)
    receiver = KVReceiver(
        peer=peer, store=store, network=network, transports=transports, config=config, clock=clock, secret=secret
    )
    return Parts(store, SpoilingPool(store, clock), network, transports, sender, receiver)


@dataclass(frozen=True, slots=True)
class _ChunkPiece:
    """Some units of a chunk, all in one layer, and who may touch their blocks."""

    layer: int
    unit_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    grip: Grip


@dataclass(frozen=True, slots=True)
class _Pointers:
    """Pointers that travel on a pull link in place of bytes."""

    store: FakeStore
    shard: KVShard
    segments: tuple[Segment, ...]
    digest: bytes


_Held = list[bytearray | _Pointers]


class _Pipe:
    """Ordered stream from one host to another: bytes, and the pointers between them."""

    def __init__(self, fabric: "LinkFabric", source: str, target: str):
        self.hosts = (source, target)
        self.is_broken = False
        self.is_rotten = False  # every piece that goes through it is damaged
        self.held: _Held | None = None  # a chunk that lets the next one pass
        self.unread_bytes = 0  # under way, or arrived and not taken
        self._fabric = fabric
        self._bytes = bytearray()
        self._pointers: deque[_Pointers] = deque()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._last_arrival = 0.0

    def check(self) -> None:
        if self.is_broken:
            raise ConnectionLost("the data link is broken")

    def damage(self, data: bytearray) -> None:
        """Damage bytes on their way."""
        self._fabric.damage(data)
        if self.is_rotten and data:
            data[0] ^= 1

    async def push(self, data: bytearray) -> None:
        """Send bytes; waits while the peer takes none."""
        while self.unread_bytes > self._fabric.window_bytes:
            self.check()
            await self._change()
        self.check()
        self.damage(data)
        self.unread_bytes += len(data)
        self._later(self._arrive, data)

    def point(self, pointers: _Pointers) -> None:
        self.check()
        self._later(self._pointers.append, pointers)

    async def pull(self, num_bytes: int) -> bytes:
        while len(self._bytes) < num_bytes:
            self.check()
            await self._change()
        self.check()
        data = bytes(self._bytes[:num_bytes])
        del self._bytes[:num_bytes]
        self.unread_bytes -= num_bytes
        self._wake()
        return data

    async def next_pointers(self) -> _Pointers:
        while not self._pointers:
            self.check()
            await self._change()
        self.check()
        return self._pointers.popleft()

    def break_off(self) -> None:
        if not self.is_broken:
            self.is_broken = True
            self._fabric.pipes.pop(self, None)
            self._wake()

    def _arrive(self, data: bytearray) -> None:
        self._bytes += data

    def _later(self, arrive: Callable[..., None], what: object) -> None:
        """Never before what was sent earlier; and whatever the sending process does meanwhile."""
        loop = asyncio.get_running_loop()
        self._last_arrival = max(self._last_arrival + 1e-7, loop.time() + self._fabric.next_delay_s())
        self._fabric.wake_watchers()

        def land() -> None:
            arrive(what)
            self._wake()

        loop.call_at(self._last_arrival, land, context=contextvars.Context())

    async def _change(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)


class MemoryLink:
    """One end of a pipe, on one store. Calls take their turn; each touches its blocks in two halves, time between."""

    max_chunk_bytes = None
    shortfall = None

    def __init__(self, transport: "MemoryTransport", pipe: _Pipe, store: FakeStore, shard: KVShard, *, is_pull: bool):
        self._transport = transport
        self._fabric = transport.fabric
        self._pipe = pipe
        self._store = store
        self._shard = shard
        self._is_pull = is_pull
        self._turn = asyncio.Lock()
        transport.open_links[self] = None

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        pieces = self._pieces(segments)
        digest = xxhash.xxh3_128(seed=self._fabric.resealed.get(seed, seed))
        with self._broken_by_cancellation():
            async with self._turn:
                held, self._pipe.held = self._pipe.held, None
                holding = self._fabric.take_swap() if held is None else None
                for piece in pieces:
                    await self._transfer_time(len(piece.unit_ids))
                    self._pipe.check()
                    self._store.touch(piece.blocks, "a link reads", piece.grip)
                    data = self._store.read_units(piece.layer, piece.unit_ids, self._shard)
                    digest.update(data)
                    if not self._is_pull:
                        await self._push(bytearray(data), holding)
                if self._is_pull:
                    await self._push(_Pointers(self._store, self._shard, tuple(segments), digest.digest()), holding)
                else:
                    await self._push(bytearray(digest.digest()), holding)
                self._pipe.held = holding
                for late in held or ():
                    await self._push(late, None)

    async def _push(self, what: "bytearray | _Pointers", holding: "_Held | None") -> None:
        if holding is not None:
            holding.append(what)
        elif isinstance(what, bytearray):
            await self._pipe.push(what)
        else:
            self._pipe.point(what)

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        pieces = self._pieces(segments)
        with self._broken_by_cancellation():
            async with self._turn:
                return await (self._pull_into(pieces, seed) if self._is_pull else self._read_into(pieces, seed))

    async def discard(self, num_units: int) -> None:
        with self._broken_by_cancellation():
            async with self._turn:
                if self._is_pull:
                    await self._pipe.next_pointers()
                else:
                    left = num_units * self._shard.unit_bytes + CHECKSUM_BYTES
                    while left:  # in parts: the sender may wait for room
                        part = min(left, self._fabric.window_bytes)
                        await self._pipe.pull(part)
                        left -= part

    async def close(self) -> None:
        self._transport.open_links.pop(self, None)
        self._pipe.break_off()

    async def _read_into(self, pieces: Sequence[_ChunkPiece], seed: int) -> bool:
        digest = xxhash.xxh3_128(seed=seed)
        for piece in pieces:
            data = await self._pipe.pull(len(piece.unit_ids) * self._shard.unit_bytes)
            await self._transfer_time(len(piece.unit_ids))
            self._write(piece, data)
            digest.update(data)
        return await self._pipe.pull(CHECKSUM_BYTES) == digest.digest()

    async def _pull_into(self, pieces: Sequence[_ChunkPiece], seed: int) -> bool:
        pointers = await self._pipe.next_pointers()
        theirs = [(segment.layer, unit_id) for segment in pointers.segments for unit_id in segment.unit_ids]
        if len(theirs) != sum(len(piece.unit_ids) for piece in pieces):
            return False
        digest, done = xxhash.xxh3_128(seed=seed), 0
        for piece in pieces:
            await self._transfer_time(len(piece.unit_ids))
            # The source's blocks may be another request's by now: the digest tells.
            places = theirs[done : done + len(piece.unit_ids)]
            done += len(places)
            data = bytearray().join(
                pointers.store.read_units(layer, (unit_id,), pointers.shard) for layer, unit_id in places
            )
            self._pipe.damage(data)
            data = data[: len(places) * self._shard.unit_bytes].ljust(len(places) * self._shard.unit_bytes)
            self._write(piece, data)
            digest.update(data)
        return digest.digest() == pointers.digest

    def _write(self, piece: _ChunkPiece, data: bytes | bytearray) -> None:
        self._pipe.check()
        self._store.touch_to_write(piece.blocks, "a link writes", piece.grip)
        self._store.write_units(piece.layer, piece.unit_ids, self._shard, data)

    def _pieces(self, segments: Sequence[Segment]) -> list[_ChunkPiece]:
        """Halves of the segments. Their blocks' owners are those of now: whoever calls has been let in."""
        pieces: list[_ChunkPiece] = []
        for segment in segments:
            middle = len(segment.unit_ids) // 2
            for unit_ids in (segment.unit_ids[:middle], segment.unit_ids[middle:]):
                if unit_ids:
                    blocks = tuple(sorted({unit_id // self._shard.units_per_block for unit_id in unit_ids}))
                    pieces.append(_ChunkPiece(segment.layer, unit_ids, blocks, self._store.grip(blocks)))
        return pieces

    async def _transfer_time(self, num_units: int) -> None:
        await asyncio.sleep(num_units * self._shard.unit_bytes / self._fabric.bytes_per_s)

    @contextmanager
    def _broken_by_cancellation(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self._pipe.break_off()
            raise


class _PendingMemoryLink:
    def __init__(self, transport: "MemoryTransport", store: FakeStore, shard: KVShard, *, is_pull: bool):
        self._transport = transport
        self._fabric = transport.fabric
        self._store = store
        self._shard = shard
        self._is_pull = is_pull
        self._token = self._fabric.next_token()
        self._is_handed_over = False
        self.host = transport.host
        self.joined: asyncio.Future[_Pipe] = asyncio.get_running_loop().create_future()
        self._fabric.pending[self._token] = self

    @property
    def params(self) -> LinkParams:
        return {"token": self._token}

    async def established(self) -> MemoryLink:
        try:
            async with asyncio.timeout(self._fabric.establish_s):
                pipe = await asyncio.shield(self.joined)
        except TimeoutError as error:
            raise ConnectionLost("the peer did not join the data link in time") from error
        self._is_handed_over = True
        return MemoryLink(self._transport, pipe, self._store, self._shard, is_pull=self._is_pull)

    async def close(self) -> None:
        self._fabric.pending.pop(self._token, None)
        if self.joined.done() and not self._is_handed_over:
            self.joined.result().break_off()


class LinkFabric:
    """All hosts' data links."""

    def __init__(
        self,
        *,
        bytes_per_s: float,
        delay_s: float = 0.0003,
        window_bytes: int = 65536,
        establish_s: float = 5.0,
        damage: Damage = lambda _: None,
    ):
        self.bytes_per_s = bytes_per_s
        self.delay_s = delay_s
        self.window_bytes = window_bytes  # what a stream holds that nobody has read
        self.establish_s = establish_s
        self.damage = damage
        self.stalls_s: list[float] = []  # what comes next takes so much longer
        self.resealed: dict[int, int] = {}  # seals that sources put in the place of others
        self.chunks_to_swap = 0  # so many of the next chunks change places with those after them
        self.chunks_swapped = 0
        self.pending: dict[int, _PendingMemoryLink] = {}
        self.pipes: dict[_Pipe, None] = {}  # those that stand
        self._parted: set[frozenset[str]] = set()
        self._watchers: list[asyncio.Future[None]] = []
        self._tokens = 0

    async def traffic(self) -> None:
        """Return when something is sent on any link."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def next_delay_s(self) -> float:
        return self.delay_s + (self.stalls_s.pop() if self.stalls_s else 0.0)

    def take_swap(self) -> _Held | None:
        """Return the staging buffer of the next chunk if it has to wait for the one after it, else None."""
        if self.chunks_to_swap == 0:
            return None
        self.chunks_to_swap -= 1
        self.chunks_swapped += 1
        return []

    def next_token(self) -> int:
        self._tokens += 1
        return self._tokens

    def cut(self, host: str, other: str | None = None) -> int:
        """Break all links of `host`, or those to `other` alone; returns how many."""
        hit = [pipe for pipe in self.pipes if host in pipe.hosts and (other is None or other in pipe.hosts)]
        for pipe in hit:
            pipe.break_off()
        return len(hit)

    def part(self, host: str, other: str) -> int:
        """Cut, and let no link be joined between the two until `join`; returns how many were cut."""
        self._parted.add(frozenset((host, other)))
        return self.cut(host, other)

    def join(self, host: str, other: str) -> None:
        """End a partition."""
        self._parted.discard(frozenset((host, other)))

    def connect(self, host: str, token: int) -> _Pipe:
        """Raises ConnectionLost where nobody has prepared a link with this token, or its maker can't be reached."""
        pending = self.pending.get(token)
        if pending is None or frozenset((host, pending.host)) in self._parted:
            raise ConnectionLost("nobody has prepared this link")
        del self.pending[token]
        pipe = _Pipe(self, host, pending.host)
        self.pipes[pipe] = None
        pending.joined.set_result(pipe)
        return pipe


class MemoryTransport:
    """One rank's Transport of one kind."""

    def __init__(self, fabric: LinkFabric, host: str, store: FakeStore, name: str):
        self.name = name
        self.fabric = fabric
        self.host = host
        self.open_links: dict[MemoryLink, None] = {}  # that nobody has closed yet
        self._store = store

    async def prepare(self, host: str, shard: KVShard) -> _PendingMemoryLink:
        return _PendingMemoryLink(self, self._store, shard, is_pull=self.name == "memory_pull")

    async def join(self, params: LinkParams, shard: KVShard) -> MemoryLink:
        await asyncio.sleep(self.fabric.delay_s)
        pipe = self.fabric.connect(self.host, int(params["token"]))
        return MemoryLink(self, pipe, self._store, shard, is_pull=self.name == "memory_pull")

    async def close(self) -> None:
        for link in tuple(self.open_links):
            await link.close()
