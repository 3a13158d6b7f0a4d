"""Sender and receiver together, when something goes wrong: the transfer fails on both sides, its neighbours don't."""

import asyncio

import pytest
from faulty_pair import (
    EACH,
    NUM_TOKENS,
    assert_a_transfer_works,
    assert_whole,
    begin,
    faulty_pair,
    finish,
    get_to,
    hello,
)
from transfer_harness import FAST, SECRET, TOKEN, D, P, make_pair, settle

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.rules.lifecycle import ReceiverState, SenderState
from twostroke.protocol.errors import ConnectionLost, TransferFailed
from twostroke.protocol.messages import KVWelcome, LinkReady, LinkWanted, Ping, Welcome
from twostroke.protocol.network import Connection, TcpNetwork
from twostroke.protocol.requests import mint_ticket

# --- damage, and links that break ---


@EACH
async def test_a_damaged_chunk_is_sent_again_on_the_same_link(transport: str) -> None:
    async with faulty_pair(transport) as (pair, source, _):
        source.spoils = 1
        out, incoming = begin(pair)
        finish(out)
        assert await incoming.verified() == TOKEN
        await out.done()
        assert source.log == ["spoilt a chunk"]
        assert pair.receiver.stats.digest_failures == pair.sender.stats.retries == 1
        assert source.num_links == 1
        assert pair.sender.stats.links_lost == 0
        assert_whole(pair)
        await assert_a_transfer_works(pair)


@EACH
async def test_a_chunk_that_is_damaged_twice_goes_over_another_link(transport: str) -> None:
    async with faulty_pair(transport) as (pair, source, _):
        source.spoils = 2
        out, incoming = begin(pair)
        finish(out)
        assert await incoming.verified() == TOKEN
        await out.done()
        assert source.log == ["spoilt a chunk"] * 2
        assert source.num_links == 2
        assert source.num_closed == 1
        assert pair.sender.stats.retries == 2
        assert_whole(pair)
        await assert_a_transfer_works(pair)


async def test_the_other_link_is_by_another_transport_where_there_is_one() -> None:
    async with faulty_pair(("memory_fast", "memory_slow")) as (pair, source, _):
        source.spoils = 2
        out, incoming = begin(pair)
        finish(out)
        assert await incoming.verified() == TOKEN
        await out.done()
        assert [report.transport for report in pair.sender.links()] == ["memory_slow"]
        assert_whole(pair)


async def test_a_chunk_that_is_damaged_three_times_ends_its_transfer_alone() -> None:
    async with faulty_pair() as (pair, source, _):
        source.spoils = 3
        out, incoming = begin(pair)
        finish(out)
        for waiting in (incoming.verified(), out.done()):
            with pytest.raises(TransferFailed, match="chunk 0 was damaged or lost on its way 3 times"):
                await waiting
        assert pair.receiver.stats.digest_failures == 3
        assert (pair.receiver.stats.failed, pair.receiver.stats.given_up) == (1, 0)
        await assert_a_transfer_works(pair)


@pytest.mark.parametrize("side", ["source", "target"])
@EACH
async def test_what_a_broken_link_has_not_brought_comes_over_another(transport: str, side: str) -> None:
    async with faulty_pair(transport) as (pair, source, target):
        broken = source if side == "source" else target
        await assert_a_transfer_works(pair, (10, 11))
        broken.breaks = 1
        transfers = [begin(pair, f"r{index}", (4 + 2 * index, 5 + 2 * index)) for index in range(3)]
        for out, _ in transfers:
            finish(out)
        for out, incoming in transfers:
            assert await incoming.verified() == TOKEN
            await out.done()
        assert broken.log == ["broke a link"]
        assert pair.sender.stats.retries >= 1
        assert source.num_links == target.num_links == 2
        for blocks in ((4, 5), (6, 7), (8, 9)):
            assert_whole(pair, blocks)
        await assert_a_transfer_works(pair)
        assert len(pair.sender._tasks) == 1, "the connection stood all the while"


async def test_a_link_that_breaks_after_the_commit_is_replaced_and_the_transfer_still_comes_whole() -> None:
    async with faulty_pair() as (pair, source, target):
        target.gate.shut()
        out, incoming = begin(pair)
        finish(out)
        await get_to(out, SenderState.COMMITTED)
        target.breaks = 1
        target.gate.open.set()
        assert await incoming.verified() == TOKEN
        await out.done()
        assert target.log == ["broke a link"]
        assert source.num_links == 2
        assert_whole(pair)


async def test_a_link_that_can_not_be_joined_is_replaced_by_another_transport() -> None:
    async with faulty_pair(("memory_fast", "memory_slow")) as (pair, source, _):
        source.refusals = 1
        out, incoming = begin(pair)
        finish(out)
        assert await incoming.verified() == TOKEN
        await out.done()
        assert source.log == ["refused a join"]
        assert [report.transport for report in pair.sender.links()] == ["memory_slow"]
        assert pair.sender.stats.links_lost == 1
        assert_whole(pair)


async def test_a_link_that_can_not_be_prepared_is_another_transports() -> None:
    async with faulty_pair(("memory_fast", "memory_slow")) as (pair, _, target):
        target.prepare_refusals = 1
        out, incoming = begin(pair)
        finish(out)
        await incoming.verified()
        await out.done()
        assert [report.transport for report in pair.sender.links()] == ["memory_slow"]


async def test_a_pair_that_loses_every_link_gives_its_transfers_up_after_some() -> None:
    config = TransferConfig(lease_s=20, progress_s=20, max_new_links=3)
    async with faulty_pair(config=config) as (pair, source, _):
        source.refusals = 1000
        out, incoming = begin(pair)
        finish(out)
        with pytest.raises(TransferFailed, match="3 links to the target were lost in 20 s"):
            await out.done()
        with pytest.raises(TransferFailed):
            await incoming.verified()
        assert source.log == ["refused a join"] * 4
        await settle(lambda: not pair.sender._tasks)
        source.refusals = 0
        await assert_a_transfer_works(pair)


async def test_a_target_does_not_take_more_links_than_it_would_ask_for() -> None:
    config = TransferConfig(lease_s=20, progress_s=20, max_new_links=2)
    async with make_pair(config=config) as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(hello(pair))
        assert isinstance(await connection.receive(), Welcome)
        for number in (1, 2):
            connection.send(LinkWanted(number, ()))
            ready = await connection.receive()
            assert isinstance(ready, LinkReady)
            assert ready.link == number
        connection.send(LinkWanted(3, ()))
        with pytest.raises(ConnectionLost):
            await connection.receive()
        await connection.close()


async def test_an_abort_during_a_retry_waits_for_its_bytes_and_ends_both_sides() -> None:
    async with faulty_pair() as (pair, source, target):
        source.spoils = 1
        out, incoming = begin(pair)
        target.gate.shut()
        finish(out)
        await get_to(out, SenderState.COMMITTED)
        source.gate.shut()
        target.gate.open.set()
        await get_to(out, SenderState.FINISHING)
        out.abort("the client left")
        assert out.lanes[0].state is SenderState.ABORTING
        await settle(lambda: incoming.lanes[0].state is ReceiverState.ABORTING)
        source.gate.open.set()
        for waiting in (out.done(), incoming.verified()):
            with pytest.raises(TransferFailed, match="the client left"):
                await waiting
        await assert_a_transfer_works(pair)


@pytest.mark.parametrize("side", ["source", "target"])
@EACH
async def test_links_are_closed_though_those_who_close_them_are_cancelled_twice(transport: str, side: str) -> None:
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


async def test_a_grant_that_never_comes_ends_with_the_lease_on_both_sides() -> None:
    async with make_pair(config=TransferConfig(progress_s=0.1)) as pair:
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        finish(out)
        with pytest.raises(TransferFailed, match=r"no request came|did not grant"):
            await out.done()
        incoming = pair.receiver.expect(out.ticket, [4, 5], NUM_TOKENS, 0)
        with pytest.raises(TransferFailed, match=r"given the transfer up already|gave up: the target did not grant"):
            await incoming.verified()


async def test_a_source_without_progress_is_given_up() -> None:
    async with make_pair(config=TransferConfig(progress_s=0.1), sender_config=FAST) as pair:
        out, incoming = begin(pair)
        with pytest.raises(TransferFailed, match="no progress"):
            await incoming.verified()
        with pytest.raises(TransferFailed, match="no progress"):
            await out.done()


async def test_an_unreachable_target_fails_the_transfer_and_the_next_one_tries_again() -> None:
    async with make_pair() as pair:
        await pair.receiver.close()
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="no answer from"):
            await out.done()
        (address,) = await pair.receiver.start("127.0.0.1")
        pair.address = address
        await assert_a_transfer_works(pair)


async def test_a_lost_connection_is_built_again_by_the_next_transfer() -> None:
    async with make_pair() as pair:
        await assert_a_transfer_works(pair)
        out, _ = begin(pair)
        await get_to(out, SenderState.GRANTED)
        await pair.receiver.close()
        with pytest.raises(TransferFailed):
            await out.done()
        (pair.address,) = await pair.receiver.start("127.0.0.1")
        await assert_a_transfer_works(pair)


async def receive_pings(connection: Connection) -> None:
    while True:
        assert await connection.receive() == Ping()


async def test_a_silent_source_loses_its_connection_and_its_transfers() -> None:
    async with make_pair(config=TransferConfig(lease_s=0.15)) as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(hello(pair))
        assert isinstance(await connection.receive(), Welcome)
        with pytest.raises(ConnectionLost):
            await receive_pings(connection)
        await connection.close()


async def test_a_silent_target_loses_its_transfers() -> None:
    link_ended = asyncio.Event()

    async def welcome_and_fall_silent(connection: Connection) -> None:
        await connection.receive()
        transport = pair.transports[1].by_name["memory"]
        pending = await transport.prepare("127.0.0.1", pair.target_cut)
        kv = KVWelcome(pair.target.layout, 0, "memory", "why", (), pending.params)
        connection.send(Welcome(D, kv))
        link = await pending.established()
        try:
            await link.discard(1)
        except ConnectionLost:
            link_ended.set()
        finally:
            await link.close()

    async with make_pair(config=TransferConfig(lease_s=0.15)) as pair:
        listener = await TcpNetwork(SECRET).listen("127.0.0.1", welcome_and_fall_silent)
        ticket = mint_ticket(SECRET, "r", P, D, (listener.address,))
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="silent for"):
            await out.done()
        await link_ended.wait()
        await listener.close()
