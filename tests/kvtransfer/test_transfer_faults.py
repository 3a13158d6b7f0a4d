"""Sender and receiver together, when something goes wrong: the transfer fails on both sides, its neighbours don't.

Peers that listen to nothing: nobody waits for them for longer than a lease.

Processes that are killed, or stopped for longer than a lease: tests/faults.
"""

import asyncio
import time
from typing import Any

import pytest

from tests.rigs.delegate import Delegate
from tests.rigs.kv_faulty_pair import (
    EACH,
    NUM_TOKENS,
    assert_a_transfer_works,
    begin,
    begin_and_finish,
    faulty_pair,
    finish,
    get_to,
)
from tests.rigs.kv_pair import SECRET, D, fails, make_pair, settle
from tests.rigs.raw_source import RawPeer, raw_peer
from twostroke.kvtransfer import sender as sender_side
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.lifecycle import SenderState
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Message, Offer, Ping
from twostroke.protocol.network import Connection, Handler, Listener, TcpNetwork
from twostroke.protocol.requests import Address

# --- damage, and links that break ---


@EACH
async def test_a_damaged_chunk_ends_its_transfer_and_the_next_one_has_a_fresh_link(transport: str) -> None:
    async with faulty_pair(transport) as (pair, source, target):
        source.spoils = 1
        out, incoming = begin_and_finish(pair)
        await fails(incoming.verified(), out.done(), match="chunk (0 )?was damaged on its way")
        assert source.log == ["spoilt a chunk"]
        assert pair.receiver.stats.digest_failures == 1
        assert (pair.receiver.stats.failed, pair.receiver.stats.given_up) == (1, 0)
        await settle(lambda: not pair.sender._tasks)
        await assert_a_transfer_works(pair)
        assert source.num_links == target.num_links == 2
        assert source.num_closed == target.num_closed == 1


@pytest.mark.parametrize("side", ["source", "target"])
@EACH
async def test_a_link_that_breaks_ends_all_transfers_on_it_and_the_next_one_has_a_fresh_one(
    transport: str, side: str
) -> None:
    async with faulty_pair(transport) as (pair, source, target):
        broken = source if side == "source" else target
        await assert_a_transfer_works(pair, (10, 11))
        broken.breaks = 1
        transfers = [begin(pair, f"r{index}", (4 + 2 * index, 5 + 2 * index)) for index in range(3)]
        for out, _ in transfers:
            finish(out)
        for out, incoming in transfers:
            await fails(out.done(), incoming.verified())
        assert broken.log == ["broke a link"]
        await settle(lambda: not pair.sender._tasks)
        await assert_a_transfer_works(pair)
        assert source.num_links == target.num_links == 2
        assert source.num_closed == target.num_closed == 1


async def test_a_link_that_can_not_be_joined_is_the_next_time_another_transports() -> None:
    async with faulty_pair(("tcp", "torch_distributed")) as (pair, source, _):
        source.refusals = 1
        out, incoming = begin_and_finish(pair)
        await fails(out.done(), match="the tcp link can't be joined: the peer can't be reached")
        await fails(incoming.verified())
        assert source.log == ["refused a join"]
        assert pair.sender.stats.links_lost == 1
        await settle(lambda: not pair.sender._tasks)
        await assert_a_transfer_works(pair)
        (report,) = pair.sender.links()
        assert report.transport == "torch_distributed"
        assert "tcp: a link by it broke or could not be joined" in report.missing
        await pair.sender.close()
        await assert_a_transfer_works(pair, (22, 23))
        assert [report.transport for report in pair.sender.links()] == ["tcp"], "it is tried again"


async def test_a_link_that_stands_in_for_a_better_one_ends_after_a_while_for_that_to_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender_side, "SECOND_BEST_S", 0.0)
    async with faulty_pair(("tcp", "torch_distributed")) as (pair, source, _):
        source.refusals = 1
        out, incoming = begin_and_finish(pair)
        await fails(out.done(), incoming.verified())
        await settle(lambda: not pair.sender._tasks)
        out, incoming = begin(pair, "second", (6, 7))
        await settle(lambda: bool(pair.sender.links()))
        (report,) = pair.sender.links()
        assert report.transport == "torch_distributed", "kept while a transfer is on it"
        finish(out)
        await asyncio.gather(out.done(), incoming.verified())
        await settle(lambda: not pair.sender._tasks)
        await assert_a_transfer_works(pair, (22, 23))
        assert [report.transport for report in pair.sender.links()] == ["tcp"]
        assert pair.sender.stats.links_lost == 1, "the first alone"


async def test_a_link_that_can_not_be_prepared_is_another_transports() -> None:
    async with faulty_pair(("tcp", "torch_distributed")) as (pair, _, target):
        target.prepare_refusals = 1
        out, incoming = begin_and_finish(pair)
        await incoming.verified()
        await out.done()
        assert [report.transport for report in pair.sender.links()] == ["torch_distributed"]


@pytest.mark.parametrize("side", ["source", "target"])
@EACH
async def test_links_are_closed_though_the_closing_task_is_cancelled_twice(transport: str, side: str) -> None:
    async with faulty_pair(transport) as (pair, source, target):
        closed = source if side == "source" else target
        await assert_a_transfer_works(pair)
        out, incoming = begin(pair)
        await get_to(out, SenderState.GRANTED)
        closed.close_gate.shut()
        closing = asyncio.create_task(pair.sender.close() if side == "source" else pair.receiver.close())
        await closed.close_gate.entered.wait()
        for _ in range(6):
            closing.cancel()
            await asyncio.sleep(0)
        assert not closing.done()
        assert not (out if side == "source" else incoming).ended, "its link may still move bytes"
        closed.close_gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert closed.num_closed == closed.num_links == 1
        assert (out if side == "source" else incoming).ended


# --- silence and losses ---


async def test_an_unreachable_target_fails_the_transfer_and_the_next_one_tries_again() -> None:
    async with make_pair() as pair:
        await pair.receiver.close()
        out = pair.sender.begin_transfer(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        await fails(out.done(), match="no answer from")
        (address,) = await pair.receiver.start("127.0.0.1")
        pair.address = address
        await assert_a_transfer_works(pair)


class DeafConnection(Delegate):
    """The connection to a peer that reads nothing any more once `is_deaf`: what is sent to it piles up here."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.is_deaf = False
        self.num_sent = 0

    def send(self, message: Message) -> None:
        self.num_sent += not isinstance(message, Ping)
        self._inner.send(message)

    async def drain(self) -> None:
        if self.is_deaf:
            await asyncio.Event().wait()
        await self._inner.drain()


async def read_to_the_end(peer: RawPeer) -> None:
    while True:
        await peer.connection.receive()


class DeafNetwork:
    """A network of such connections, on this side of them."""

    def __init__(self) -> None:
        self._inner = TcpNetwork(SECRET)
        self.connections: list[DeafConnection] = []

    async def connect(self, address: Address) -> Connection:
        self.connections.append(DeafConnection(await self._inner.connect(address)))
        return self.connections[-1]

    async def listen(self, host: str, handler: Handler) -> Listener:
        async def handle(connection: Connection) -> None:
            self.connections.append(DeafConnection(connection))
            await handler(self.connections[-1])

        return await self._inner.listen(host, handle)


async def test_a_target_that_reads_no_messages_holds_a_sources_blocks_no_longer_than_a_lease() -> None:
    async with make_pair(config=TransferConfig(lease_s=0.3)) as pair:
        network = DeafNetwork()
        pair.network = network
        sender = pair.make_sender(config=TransferConfig(lease_s=0.3))
        ticket = pair.ticket()
        incoming = pair.receiver.expect_transfer(ticket, [4], 4, 0)
        out = sender.begin_transfer(ticket, 4, [1], 0)
        await settle(lambda: out.pairs[0].state is SenderState.GRANTED)
        network.connections[0].is_deaf = True
        for layer in range(3):
            out.layer_ready(layer, 4)
        await fails(out.done(), match="has taken no message")
        await fails(incoming.verified())
        await sender.close()


async def test_a_source_that_reads_no_answers_is_not_listened_to_until_it_does() -> None:
    network = DeafNetwork()
    async with make_pair() as pair:
        receiver = KVReceiver(
            peer=D,
            store=pair.target,
            network=network,
            transports=pair.transports[1],
            config=TransferConfig(lease_s=0.3),
            clock=time.monotonic,
            secret=SECRET,
        )
        (pair.address,) = await receiver.start("127.0.0.1")
        async with raw_peer(pair) as peer:
            connection = network.connections[0]
            connection.is_deaf, before = True, connection.num_sent
            for index in range(50):
                peer.connection.send(Offer(pair.ticket(str(index), secret=b"forged"), 12))
            with pytest.raises(ConnectionLost):
                await read_to_the_end(peer)
            assert connection.num_sent == before + 1
        await receiver.close()
