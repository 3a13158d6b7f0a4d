"""Sender and receiver together, when something goes wrong: the transfer fails on both sides, its neighbours don't."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from faulty_transports import FaultyTransport
from transfer_harness import FAST, SECRET, TOKEN, BytesStore, D, P, Pair, make_pair, reach, settle

from kvtransfer.config import TransferConfig
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.lifecycle import ReceiverState, SenderState
from kvtransfer.link import Transport
from kvtransfer.outgoing import OutgoingTransfer
from protocol.errors import ConnectionLost, TransferFailed
from protocol.messages import Hello, KVHello, KVWelcome, LinkReady, LinkWanted, Ping, Refuse, Welcome
from protocol.network import Connection
from protocol.tcp_network import TcpNetwork
from protocol.tickets import Peer, mint_ticket

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


# --- aborts, at every state, from either side ---


async def drive_to(
    state: SenderState, pair: Pair, source: FaultyTransport, target: FaultyTransport
) -> tuple[OutgoingTransfer, IncomingTransfer | None]:
    """A transfer that rests in `state` on the sender's side."""
    if state is SenderState.OFFERING:  # the connection's task has not taken its first step
        return pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0), None
    if state is SenderState.OFFERED:
        out, incoming = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0), None
    elif state is SenderState.GRANTED:
        out, incoming = begin(pair)
    elif state in (SenderState.SENDING, SenderState.FINISHING):
        source.gate.shut()
        out, incoming = begin(pair)
        finish(out, commits=state is SenderState.FINISHING)
        await source.gate.entered.wait()
    else:
        target.gate.shut()
        out, incoming = begin(pair)
        finish(out)
        await target.gate.entered.wait()
    await get_to(out, state)
    return out, incoming


OPEN_STATES = [
    SenderState.OFFERING,
    SenderState.OFFERED,
    SenderState.GRANTED,
    SenderState.SENDING,
    SenderState.FINISHING,
    SenderState.COMMITTED,
]


@pytest.mark.parametrize("state", OPEN_STATES)
async def test_the_source_may_abort_in_every_state(state: SenderState) -> None:
    async with faulty_pair() as (pair, source, target):
        out, incoming = await drive_to(state, pair, source, target)
        out.abort("the client left")
        out.abort("and again")
        if incoming is not None:
            await settle(lambda: incoming.lanes[0].state in (ReceiverState.ABORTING, ReceiverState.ABORTED))
        source.gate.open.set()
        target.gate.open.set()
        with pytest.raises(TransferFailed, match="the client left"):
            await out.done()
        if incoming is None:
            incoming = pair.receiver.expect(out.ticket, [4, 5], NUM_TOKENS, 0)
        with pytest.raises(TransferFailed, match=r"the client left|given the transfer up"):
            await incoming.verified()
        await assert_a_transfer_works(pair)
        assert pair.sender.stats.failed == pair.receiver.stats.failed == 1
        assert pair.sender.stats.given_up == pair.receiver.stats.given_up == 1


@pytest.mark.parametrize("state", OPEN_STATES[2:])
async def test_the_target_may_cancel_in_every_state(state: SenderState) -> None:
    async with faulty_pair() as (pair, source, target):
        out, incoming = await drive_to(state, pair, source, target)
        assert incoming is not None
        cancels = [asyncio.create_task(incoming.cancel()) for _ in range(2)]
        source.gate.open.set()
        target.gate.open.set()
        await asyncio.gather(*cancels)
        assert incoming.ended
        with pytest.raises(TransferFailed, match="cancelled"):
            await incoming.verified()
        with pytest.raises(TransferFailed, match="gave up: the target cancelled"):
            await out.done()
        await assert_a_transfer_works(pair)


async def test_a_transfer_that_is_cancelled_before_its_offer_is_refused_when_it_comes() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0)
        await incoming.cancel()
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="given the request up already"):
            await out.done()


async def test_an_end_is_not_undone_by_an_abort() -> None:
    async with make_pair() as pair:
        out, incoming = begin(pair)
        finish(out)
        await incoming.verified()
        await out.done()
        out.abort("too late")
        await incoming.cancel()
        await out.done()
        assert await incoming.verified() == TOKEN
        assert (pair.sender.stats.done, pair.sender.stats.failed) == (1, 0)


@EACH
async def test_cancel_waits_for_the_receive_under_way_and_nothing_is_written_afterwards(transport: str) -> None:
    async with faulty_pair(transport) as (pair, _, target):
        target.gate.shut()
        out, incoming = begin(pair)
        finish(out)
        await target.gate.entered.wait()
        assert incoming.lanes[0].state is ReceiverState.RECEIVING
        cancel = asyncio.create_task(incoming.cancel())
        await asyncio.wait([cancel], timeout=0.03)
        assert not cancel.done()
        target.gate.open.set()
        await cancel
        pair.target.fill(9)  # somebody else's now
        before = pair.target.copy()
        with pytest.raises(TransferFailed):
            await out.done()
        await assert_a_transfer_works(pair)  # all that was under way has been taken off the link
        for layer in range(3):
            assert pair.target.block(layer, 4) == before[layer][4 * 96 : 5 * 96]
            assert pair.target.block(layer, 5) == before[layer][5 * 96 : 6 * 96]


@EACH
async def test_closing_the_receiver_during_a_receive_ends_it_before_close_returns(transport: str) -> None:
    async with faulty_pair(transport) as (pair, source, _):
        source.gate.shut()  # the chunk is announced, and its bytes never come
        out, incoming = begin(pair)
        finish(out)
        await settle(lambda: incoming.lanes[0].state is ReceiverState.RECEIVING)
        await pair.receiver.close()
        assert incoming.ended
        with pytest.raises(TransferFailed, match="target is closing"):
            await incoming.verified()
        source.gate.open.set()
        with pytest.raises(TransferFailed):
            await out.done()
        assert pair.target.copy() == [bytes(32 * 96)] * 3


async def test_closing_the_sender_ends_transfers_whose_connection_was_not_even_begun() -> None:
    async with make_pair() as pair:
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        await pair.sender.close()
        with pytest.raises(TransferFailed, match="the source is closing"):
            await out.done()


async def test_closing_the_sender_ends_its_transfers_though_who_closes_it_is_cancelled() -> None:
    async with make_pair() as pair:
        outs: list[OutgoingTransfer] = []

        async def open_and_close() -> None:
            outs.append(pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0))
            await pair.sender.close()  # before the connection's task has begun

        closing = asyncio.create_task(open_and_close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert outs[0].ended


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_link_that_is_joined_while_its_target_closes_is_closed_too(num_turns: int) -> None:
    async with faulty_pair() as (pair, _, target):
        begin(pair)
        await settle(lambda: target.num_links == 1)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await pair.receiver.close()
        assert target.num_closed == 1


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


# --- prefixes that are not there ---


async def test_a_source_that_has_nothing_tells_a_target_that_waits() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0)
        pair.sender.decline(ticket, "nothing is cached")
        with pytest.raises(TransferFailed, match="gave up: nothing is cached"):
            await incoming.verified()
        await assert_a_transfer_works(pair)


async def test_a_source_that_has_nothing_tells_a_target_that_has_not_asked_its_receiver_yet() -> None:
    async with make_pair() as pair:
        heard: list[bytes] = []
        pair.receiver.on_offer = heard.append
        ticket = pair.ticket()
        assert not pair.receiver.has_offer(ticket)
        pair.sender.decline(ticket, "nothing is cached")
        await settle(lambda: heard == [ticket.transfer_id])
        assert pair.receiver.has_offer(ticket)
        assert pair.receiver.offered_tokens(ticket.transfer_id) is None
        with pytest.raises(TransferFailed, match="given the transfer up already"):
            await pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0).verified()
        with pytest.raises(ValueError, match="made out to"):
            pair.sender.decline(pair.ticket(source=Peer("prefill-9", 1)), "not mine")


async def test_an_offer_that_waits_tells_its_tokens_until_it_is_withdrawn() -> None:
    async with make_pair() as pair:
        heard: list[bytes] = []
        pair.receiver.on_offer = heard.append
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        transfer_id = out.ticket.transfer_id
        await settle(lambda: heard == [transfer_id])
        assert pair.receiver.offered_tokens(transfer_id) == NUM_TOKENS
        out.abort("the client left")
        await settle(lambda: pair.receiver.offered_tokens(transfer_id) is None)
        assert pair.receiver.has_offer(out.ticket)


# --- tickets, epochs, fingerprints ---


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("signature", "signature is wrong"),
        ("other decode epoch", "the ticket's target is decode-0 in its epoch 63"),
        ("other decode worker", "the ticket's target is decode-1, not decode-0"),
    ],
)
async def test_a_ticket_that_is_forged_or_made_out_to_others_fails_at_the_target(fault: str, text: str) -> None:
    async with make_pair() as pair:
        ticket = {
            "signature": pair.ticket(secret=b"another secret"),
            "other decode epoch": pair.ticket(target=Peer("decode-0", 99)),
            "other decode worker": pair.ticket(target=Peer("decode-1", 22)),
        }[fault]
        with pytest.raises(TransferFailed, match=text):
            await pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0).verified()
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match=r"signature is wrong|and this is decode-0 of epoch 16"):
            await out.done()


async def test_a_source_does_not_use_another_ones_ticket() -> None:
    async with make_pair() as pair:
        out = pair.sender.open(pair.ticket(source=Peer("prefill-0", 12)), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="made out to"):
            await out.done()
        assert not pair.sender._tasks


async def test_a_ticket_is_good_for_one_transfer() -> None:
    async with make_pair() as pair:
        out, incoming = begin(pair)
        finish(out)
        await incoming.verified()
        await out.done()
        again = pair.receiver.expect(out.ticket, [8, 9], NUM_TOKENS, 0)
        with pytest.raises(TransferFailed, match="used before"):
            await again.verified()
        once_more = pair.sender.open(out.ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="used before"):
            await once_more.done()


async def test_another_layout_is_refused_with_both_values_and_the_transfers_say_so() -> None:
    source = BytesStore(dtype="float16")
    async with make_pair(source=source, target=BytesStore(dtype="float32")) as pair:
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="the KV dtype differs: float16 at the source, float32 at the target"):
            await out.done()


async def test_other_token_counts_fail_both_sides() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect(ticket, [4, 5], NUM_TOKENS - 1, 0)
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        for waiting in (incoming.verified(), out.done()):
            with pytest.raises(TransferFailed, match="8 tokens are offered, 7 expected"):
                await waiting
        await assert_a_transfer_works(pair)


async def test_too_many_offers_without_a_request_are_refused() -> None:
    async with make_pair(config=TransferConfig(max_pending_offers=1)) as pair:
        first = pair.sender.open(pair.ticket("a"), NUM_TOKENS, [0, 1], 0)
        second = pair.sender.open(pair.ticket("b"), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="too many offers"):
            await second.done()
        assert first.lanes[0].state is SenderState.OFFERED


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


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"receiver": Peer("decode-0", 23)},
            "you look for decode-0 of epoch 17, and this is decode-0 of epoch 16",
        ),
        (
            {"receiver": Peer("decode-9", 22)},
            "you look for decode-9 of epoch 16, and this is decode-0 of epoch 16",
        ),
        ({"model": "g"}, "the model differs: g at the source, f at the target"),
        ({"tp_size": 2, "num_kv_heads": 2}, "the number of KV heads differs: 2 at the source, 1 at the target"),
        ({"names": ("other",)}, "the source offers other, the target memory"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_both_values(fields: dict[str, Any], text: str) -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(hello(pair, **fields))
        refusal = await connection.receive()
        assert isinstance(refusal, Refuse)
        assert text in refusal.reason
        await connection.close()


@pytest.mark.parametrize("rank", [-1, 1, 1 << 40])
async def test_a_rank_that_has_nothing_for_this_one_is_refused(rank: int) -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(Hello(P, D, KVHello(pair.source.layout, rank, "raw", reach("memory"))))
        assert await connection.receive() == Refuse(f"rank {rank} of 1 has nothing for rank 0 of 1")
        await connection.close()


async def test_a_token_channels_hello_is_refused() -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(Hello(P, D))
        assert await connection.receive() == Refuse("this is no token channel")
        await connection.close()
