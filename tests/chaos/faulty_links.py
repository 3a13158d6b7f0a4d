"""Transports whose links are cut, damage, delay and hold up chunks of KV, and tell of each that its digest refuses."""

import asyncio
from collections.abc import Callable, Sequence

from tests.chaos.faulty_network import Barrier, Waiting
from tests.chaos.orders import Harm
from tests.rigs.proxy import Proxy
from twostroke.kvtransfer.link import DataLink, LinkParams, PendingLink, Transport
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.protocol.requests import Address

LEAST_BYTES = 512
"""What is shorter is no KV: the words with which a link is joined."""


class LinkFaults:
    """What is wrong with all links of this worker now."""

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
        """As a proxy's `Mangle`."""
        harm = self._harms.take(lambda _: True) if len(data) >= LEAST_BYTES else None
        if harm is None:
            return data
        if harm == "cut":
            return None
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class FaultyTransport:
    """A Transport over `inner`. Its TCP links go through proxies in the sending worker's process."""

    def __init__(self, inner: Transport, faults: LinkFaults):
        self.name = inner.name
        self._inner = inner
        self._faults = faults

    async def prepare(self, host: str, cut: Cut) -> PendingLink:
        return _FaultyPending(await self._inner.prepare(host, cut), self._faults)

    async def join(self, params: LinkParams, cut: Cut) -> DataLink:
        if self.name != "tcp":
            return FaultyLink(await self._inner.join(params, cut), self._faults)
        proxy = Proxy()
        proxy.mangle = self._faults.mangle
        address = await proxy.start()
        proxy.upstream.set_result(Address(str(params["host"]), int(params["port"])))
        try:
            link = await self._inner.join({**params, "host": address.host, "port": address.port}, cut)
        except BaseException:
            await proxy.close()
            raise
        return FaultyLink(link, self._faults, proxy)

    async def close(self) -> None:
        await self._inner.close()


class _FaultyPending:
    def __init__(self, inner: PendingLink, faults: LinkFaults):
        self._inner = inner
        self._faults = faults

    @property
    def params(self) -> LinkParams:
        return self._inner.params

    async def established(self) -> DataLink:
        return FaultyLink(await self._inner.established(), self._faults)

    async def close(self) -> None:
        await self._inner.close()


class FaultyLink:
    """A DataLink over `inner`. Calls are carried out in the order in which they are made, held up or not."""

    def __init__(self, inner: DataLink, faults: LinkFaults, proxy: Proxy | None = None):
        self._inner = inner
        self._faults = faults
        self._proxy = proxy
        self._turns = asyncio.Lock()

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        async with self._turns:
            await self._faults.barrier.passed()
            if self._faults.delay_s:
                self._faults.delayed += 1
                await asyncio.sleep(self._faults.delay_s)
            sending = asyncio.ensure_future(self._inner.send(segments, seal))
            await asyncio.sleep(0)  # it has its place in the link's order now
        await sending

    async def receive(self, segments: Sequence[Segment], seal: int) -> bool:
        async with self._turns:
            receiving = asyncio.ensure_future(self._inner.receive(segments, seal))
            await asyncio.sleep(0)
        is_intact = await receiving
        if not is_intact:
            self._faults.on_refused()
        return is_intact

    async def discard(self, num_units: int) -> None:
        await self._inner.discard(num_units)

    async def close(self) -> None:
        await self._inner.close()
        if self._proxy is not None:
            await self._proxy.close()
