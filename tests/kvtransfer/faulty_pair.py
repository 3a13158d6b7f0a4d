"""A sender and a receiver with transports that can be harmed, and the steps of a transfer between them."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from faulty_transports import FaultyTransport
from transfer_harness import FAST, TOKEN, BytesStore, D, P, Pair, make_pair, reach, settle

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.incoming import IncomingTransfer
from twostroke.kvtransfer.link import Transport
from twostroke.kvtransfer.outgoing import OutgoingTransfer
from twostroke.kvtransfer.rules.lifecycle import SenderState
from twostroke.protocol.messages import Hello, KVHello
from twostroke.protocol.requests import Peer

EACH = pytest.mark.parametrize("transport", ["memory", "tcp", "torch_distributed"])
NUM_TOKENS = 8


@contextlib.asynccontextmanager
async def faulty_pair(
    transport: str | Sequence[str] = "memory", config: TransferConfig = FAST
) -> AsyncIterator[tuple[Pair, FaultyTransport, FaultyTransport]]:
    """A pair, with the transports of sender and receiver."""
    source, target = BytesStore(), BytesStore()
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
    incoming = pair.receiver.expect(ticket, list(blocks), NUM_TOKENS, 0)
    return pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0), incoming


def finish(out: OutgoingTransfer, num_layers: int = 3, *, commits: bool = True) -> None:
    for layer in range(num_layers):
        out.layer_ready(layer, NUM_TOKENS)
    if commits:
        out.commit(TOKEN)


def assert_whole(pair: Pair, blocks: tuple[int, int] = (4, 5)) -> None:
    for layer in range(3):
        assert [pair.target.block(layer, block) for block in blocks] == [pair.source.block(layer, b) for b in (0, 1)]


async def assert_a_transfer_works(pair: Pair, blocks: tuple[int, int] = (20, 21)) -> None:
    """And takes the connection and link that stand."""
    out, incoming = begin(pair, "another", blocks)
    finish(out)
    assert await incoming.verified() == TOKEN
    await out.done()
    assert_whole(pair, blocks)


def hello(pair: Pair, *, receiver: Peer = D, names: Sequence[str] = ("memory",), **fields: Any) -> Hello:
    """As the pair's sender says it; `fields` replace those of its layout."""
    layout = msgspec.structs.replace(pair.source.layout, **fields)
    return Hello(P, receiver, KVHello(layout, 0, "raw", reach(*names)))


async def get_to(sender: OutgoingTransfer, state: SenderState) -> None:
    await settle(lambda: sender.lanes[0].state is state)
