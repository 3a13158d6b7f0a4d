"""Data links in memory: bytes take virtual time, and are read and written bit by bit, as on a real link.

So blocks that are freed while a link still reads or writes them show up as wrong tokens.
"""

import asyncio
from collections.abc import Callable, Sequence

from kvtransfer.link import LinkParams
from protocol.errors import ConnectionLost
from tests.simulation.fake_model import FakeStore

ESTABLISH_S = 5.0

Damage = Callable[[bytearray], None]
"""May change bytes under way."""


class _Pipe:
    """Bytes from one host to another, in order."""

    def __init__(self, source: str, target: str):
        self.hosts = frozenset((source, target))
        self.is_broken = False
        self.buffer = bytearray()
        self._waiting: asyncio.Future[None] | None = None

    def check(self) -> None:
        if self.is_broken:
            raise ConnectionLost("the data link is broken")

    def push(self, data: bytes) -> None:
        self.buffer += data
        self._wake()

    async def pull(self, num_bytes: int) -> bytes:
        while len(self.buffer) < num_bytes:
            self.check()
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self.check()
        data = bytes(self.buffer[:num_bytes])
        del self.buffer[:num_bytes]
        return data

    def break_off(self) -> None:
        self.is_broken = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class MemoryLink:
    """One end of a pipe, on one store."""

    def __init__(self, fabric: "LinkFabric", pipe: _Pipe, store: FakeStore):
        self._fabric = fabric
        self._pipe = pipe
        self._store = store

    async def send(self, layer: int, block_ids: Sequence[int]) -> None:
        self._pipe.check()
        size = self._store.block_bytes
        memory = self._store.layer_bytes(layer)
        data = bytearray()
        middle = len(block_ids) // 2
        try:
            for half in (block_ids[:middle], block_ids[middle:]):
                if half:
                    await asyncio.sleep(len(half) * size / self._fabric.bytes_per_s)
                self._store.touch(half, "a link reads")
                for block_id in half:
                    data += memory[block_id * size : (block_id + 1) * size]
        except asyncio.CancelledError:
            self._pipe.break_off()
            raise
        self._pipe.check()
        self._fabric.damage(data)
        asyncio.get_running_loop().call_later(self._fabric.delay_s, self._pipe.push, bytes(data))

    async def receive(self, layer: int, block_ids: Sequence[int]) -> None:
        size = self._store.block_bytes
        memory = self._store.layer_bytes(layer)
        middle = len(block_ids) // 2
        try:
            data = await self._pipe.pull(len(block_ids) * size)
            for first, half in ((0, block_ids[:middle]), (middle, block_ids[middle:])):
                if half:
                    await asyncio.sleep(len(half) * size / self._fabric.bytes_per_s)
                    self._pipe.check()
                self._store.touch(half, "a link writes")
                for index, block_id in enumerate(half, first):
                    memory[block_id * size : (block_id + 1) * size] = data[index * size : (index + 1) * size]
        except asyncio.CancelledError:
            self._pipe.break_off()
            raise

    async def discard(self, num_bytes: int) -> None:
        try:
            await self._pipe.pull(num_bytes)
        except asyncio.CancelledError:
            self._pipe.break_off()
            raise

    async def close(self) -> None:
        self._pipe.break_off()


class _PendingMemoryLink:
    def __init__(self, fabric: "LinkFabric", host: str, store: FakeStore):
        self._fabric = fabric
        self._store = store
        self._token = fabric.next_token()
        self.host = host
        self.joined: asyncio.Future[_Pipe] = asyncio.get_running_loop().create_future()
        fabric.pending[self._token] = self

    @property
    def params(self) -> LinkParams:
        return {"token": self._token}

    async def established(self) -> MemoryLink:
        try:
            async with asyncio.timeout(ESTABLISH_S):
                pipe = await asyncio.shield(self.joined)
        except TimeoutError as error:
            raise ConnectionLost("the peer did not join the data link in time") from error
        return MemoryLink(self._fabric, pipe, self._store)

    async def close(self) -> None:
        self._fabric.pending.pop(self._token, None)
        if self.joined.done():
            self.joined.result().break_off()


class LinkFabric:
    """All hosts' data links."""

    def __init__(self, *, bytes_per_s: float, delay_s: float = 0.0003, damage: Damage = lambda _: None):
        self.bytes_per_s = bytes_per_s
        self.delay_s = delay_s
        self.damage = damage
        self.pending: dict[int, _PendingMemoryLink] = {}
        self.pipes: list[_Pipe] = []
        self._tokens = 0

    def next_token(self) -> int:
        self._tokens += 1
        return self._tokens

    def cut(self, host: str, other: str | None = None) -> int:
        """Break all links of `host`, or those to `other` alone; returns how many."""
        hit = [
            pipe
            for pipe in self.pipes
            if host in pipe.hosts and (other is None or other in pipe.hosts) and not pipe.is_broken
        ]
        for pipe in hit:
            pipe.break_off()
        return len(hit)


class MemoryTransport:
    """One host's Transport."""

    name = "memory"

    def __init__(self, fabric: LinkFabric, host: str, store: FakeStore):
        self._fabric = fabric
        self._host = host
        self._store = store

    async def prepare(self, host: str) -> _PendingMemoryLink:
        return _PendingMemoryLink(self._fabric, self._host, self._store)

    async def join(self, params: LinkParams) -> MemoryLink:
        await asyncio.sleep(self._fabric.delay_s)
        pending = self._fabric.pending.pop(int(params["token"]), None)
        if pending is None:
            raise ConnectionLost("nobody has prepared this link")
        pipe = _Pipe(self._host, pending.host)
        self._fabric.pipes.append(pipe)
        pending.joined.set_result(pipe)
        return MemoryLink(self._fabric, pipe, self._store)

    async def close(self) -> None:
        self._fabric.cut(self._host)
