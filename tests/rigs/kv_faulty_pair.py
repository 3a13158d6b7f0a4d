"""Transports that misbehave on command.

A sender and a receiver with transports that can be harmed, and the steps of a transfer between them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.rigs.delegate import with_links
from tests.rigs.kv_links import SharedBytesStore
from tests.rigs.kv_pair import FAST, TOKEN, BytesStore, Pair, make_pair, settle
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.lifecycle import SenderState
from twostroke.kvtransfer.link import DataLink, LinkParams, PendingLink, Transport
from twostroke.kvtransfer.transfer import IncomingTransfer, OutgoingTransfer
from twostroke.protocol.errors import ConnectionLost


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
    """Wraps a transport: its links wait at `gate` before each send or receive, and do wrong while a count is left.

    What was done is counted in `log`, so that a test can tell that its fault has happened.
    """

    def __init__(self, inner: Transport, link_type: "type[FaultyLink] | None" = None):
        self.inner = inner
        self.name = inner.name
        self.link_type = link_type or FaultyLink
        self.gate = Gate()
        self.join_gate = Gate()
        self.close_gate = Gate()
        self.spoils = 0  # sends whose digest is wrong
        self.breaks = 0  # sends or receives that find the link broken, and break it
        self.refusals = 0  # joins that fail
        self.prepare_refusals = 0
        self.log: list[str] = []
        self.num_links = 0
        self.num_closed = 0

    async def prepare(self, host: str, shard: KVShard) -> PendingLink:
        if self.prepare_refusals:
            self.prepare_refusals -= 1
            raise ConnectionLost("it can't be prepared here")
        return with_links(await self.inner.prepare(host, shard), lambda link: self.link_type(link, self))

    async def join(self, params: LinkParams, shard: KVShard) -> DataLink:
        await self.join_gate.passed()
        if self.refusals:
            self.refusals -= 1
            self.log.append("refused a join")
            raise ConnectionLost("the peer can't be reached")
        return self.link_type(await self.inner.join(params, shard), self)

    async def close(self) -> None:
        await self.inner.close()


class FaultyLink:
    """A link of a FaultyTransport."""

    max_chunk_bytes = None
    shortfall = None

    def __init__(self, inner: DataLink, transport: FaultyTransport):
        self._inner = inner
        self._transport = transport
        self._order = asyncio.Lock()  # a gate must not change the order of calls
        transport.num_links += 1

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        async with self._order:
            await self._transport.gate.passed()
            await self._break()
            if self._transport.spoils:
                self._transport.spoils -= 1
                self._transport.log.append("spoilt a chunk")
                seed ^= 1
            await self._inner.send(segments, seed)

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        async with self._order:
            await self._transport.gate.passed()
            await self._break()
            return await self._inner.receive(segments, seed)

    async def discard(self, num_units: int) -> None:
        async with self._order:
            await self._inner.discard(num_units)

    async def close(self) -> None:
        await self._transport.close_gate.passed()
        await self._inner.close()
        self._transport.num_closed += 1

    async def _break(self) -> None:
        if self._transport.breaks:
            self._transport.breaks -= 1
            self._transport.log.append("broke a link")
            await self._inner.close()
            raise ConnectionLost("cut")


EACH = pytest.mark.parametrize("transport", ["tcp", "torch_distributed"])
NUM_TOKENS = 8


@contextlib.asynccontextmanager
async def faulty_pair(
    transport: str | Sequence[str] = "tcp", config: TransferConfig = FAST
) -> AsyncIterator[tuple[Pair, FaultyTransport, FaultyTransport]]:
    """A pair, with the transports of sender and receiver."""
    store = SharedBytesStore if transport == "shm" else BytesStore
    source, target = store(), store()
    source.fill(1)
    made: list[FaultyTransport] = []

    def wrap(inner: Transport) -> Transport:
        made.append(FaultyTransport(inner))
        return made[-1]

    async with make_pair(
        transport, source=source, target=target, config=config, wrap_source=wrap, wrap_target=wrap
    ) as pair:
        try:
            yield pair, made[0], made[len(made) // 2]
        finally:
            for faulty in made:
                faulty.gate.open.set()
                faulty.join_gate.open.set()
                faulty.close_gate.open.set()


def begin(
    pair: Pair, request_id: str = "r", blocks: tuple[int, int] = (4, 5)
) -> tuple[OutgoingTransfer, IncomingTransfer]:
    ticket = pair.ticket(request_id)
    incoming = pair.receiver.expect_transfer(ticket, list(blocks), NUM_TOKENS, 0)
    return pair.sender.begin_transfer(ticket, NUM_TOKENS, [0, 1], 0), incoming


def finish(out: OutgoingTransfer, num_layers: int = 3, *, commits: bool = True) -> None:
    for layer in range(num_layers):
        out.layer_ready(layer, NUM_TOKENS)
    if commits:
        out.commit(TOKEN)


def begin_and_finish(pair: Pair) -> tuple[OutgoingTransfer, IncomingTransfer]:
    """A transfer of which everything is ready, and committed."""
    out, incoming = begin(pair)
    finish(out)
    return out, incoming


def assert_whole(pair: Pair, blocks: tuple[int, int] = (4, 5)) -> None:
    for layer in range(3):
        assert [pair.target.block(layer, block) for block in blocks] == [pair.source.block(layer, b) for b in (0, 1)]


async def assert_a_transfer_works(pair: Pair, blocks: tuple[int, int] = (20, 21)) -> None:
    """Assert that a transfer works, over the connection and link that stand."""
    out, incoming = begin(pair, "another", blocks)
    finish(out)
    assert await incoming.verified() == TOKEN
    await out.done()
    assert_whole(pair, blocks)


async def get_to(sender: OutgoingTransfer, state: SenderState) -> None:
    await settle(lambda: sender.pairs[0].state is state)
