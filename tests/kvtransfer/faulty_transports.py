"""Transports that misbehave on command."""

import asyncio
from collections.abc import Sequence

from kvtransfer.link import DataLink, LinkParams, PendingLink, Transport
from kvtransfer.store import KVStore


class Gate:
    """Holds up a link's calls: `entered` is set when one has come, which goes on after `release`."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    def shut(self) -> None:
        self.open.clear()
        self.entered.clear()

    async def passed(self) -> None:
        self.entered.set()
        await self.open.wait()


class FaultyTransport:
    """Wraps a transport: its links wait at `gate` before each send or receive, and flip a byte after each receive where
    `flips` is set."""

    def __init__(self, inner: Transport, store: KVStore):
        self.inner = inner
        self.store = store
        self.name = inner.name
        self.gate = Gate()
        self.join_gate = Gate()
        self.flips = 0

    async def prepare(self, host: str) -> PendingLink:
        return _FaultyPending(await self.inner.prepare(host), self)

    async def join(self, params: LinkParams) -> DataLink:
        await self.join_gate.passed()
        return _FaultyLink(await self.inner.join(params), self)

    async def close(self) -> None:
        await self.inner.close()


class _FaultyPending:
    def __init__(self, inner: PendingLink, transport: FaultyTransport):
        self._inner = inner
        self._transport = transport

    @property
    def params(self) -> LinkParams:
        return self._inner.params

    async def established(self) -> DataLink:
        return _FaultyLink(await self._inner.established(), self._transport)

    async def close(self) -> None:
        await self._inner.close()


class _FaultyLink:
    def __init__(self, inner: DataLink, transport: FaultyTransport):
        self._inner = inner
        self._transport = transport

    async def send(self, layer: int, block_ids: Sequence[int]) -> None:
        await self._transport.gate.passed()
        await self._inner.send(layer, block_ids)

    async def receive(self, layer: int, block_ids: Sequence[int]) -> None:
        await self._transport.gate.passed()
        await self._inner.receive(layer, block_ids)
        if self._transport.flips:
            self._transport.flips -= 1
            at = block_ids[-1] * self._transport.store.block_bytes
            self._transport.store.layer_bytes(layer)[at] ^= 1

    async def discard(self, num_bytes: int) -> None:
        await self._inner.discard(num_bytes)

    async def close(self) -> None:
        await self._inner.close()
