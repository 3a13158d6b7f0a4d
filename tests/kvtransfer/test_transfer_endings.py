"""Transfers that somebody ends: aborted, cancelled or closed at every state, from either side.

What a source or a target refuses: tickets, layouts and hellos that do not fit, and prefixes that are not there.
"""

import asyncio

import pytest
from msgspec.structs import replace

from tests.rigs.kv_faulty_pair import (
    EACH,
    NUM_TOKENS,
    FaultyTransport,
    assert_a_transfer_works,
    begin,
    begin_and_finish,
    faulty_pair,
    finish,
    get_to,
)
from tests.rigs.kv_pair import TOKEN, BytesStore, D, P, Pair, fails, make_pair, reach, settle
from twostroke.kvtransfer.lifecycle import ReceiverState, SenderState
from twostroke.kvtransfer.transfer import IncomingTransfer, OutgoingTransfer
from twostroke.protocol.messages import Hello, KVHello, Refuse
from twostroke.protocol.requests import Peer


async def drive_to(
    state: SenderState, pair: Pair, source: FaultyTransport, target: FaultyTransport
) -> tuple[OutgoingTransfer, IncomingTransfer | None]:
    """A transfer that rests in `state` on the sender's side."""
    if state is SenderState.OFFERING:  # the connection's task has not taken its first step
        return pair.sender.begin_transfer(pair.ticket(), NUM_TOKENS, [0, 1], 0), None
    if state is SenderState.OFFERED:
        out, incoming = pair.sender.begin_transfer(pair.ticket(), NUM_TOKENS, [0, 1], 0), None
    elif state is SenderState.GRANTED:
        out, incoming = begin(pair)
    elif state in (SenderState.SENDING, SenderState.FINISHING):
        source.gate.shut()
        out, incoming = begin(pair)
        finish(out, commits=state is SenderState.FINISHING)
        await source.gate.entered.wait()
    else:
        target.gate.shut()
        out, incoming = begin_and_finish(pair)
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
        pairs = incoming.pairs if incoming is not None else {}
        out.abort("the client left")
        out.abort("and again")
        if incoming is not None:
            await settle(lambda: pairs[0].state in (ReceiverState.ABORTING, ReceiverState.ABORTED))
        source.gate.open.set()
        target.gate.open.set()
        await fails(out.done(), match="the client left")
        if incoming is None:
            incoming = pair.receiver.expect_transfer(out.ticket, [4, 5], NUM_TOKENS, 0)
        await fails(incoming.verified(), match=r"the client left|given the transfer up")
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
        await fails(incoming.verified(), match="cancelled")
        await fails(out.done(), match="gave up: the worker cancelled")
        await assert_a_transfer_works(pair)


@pytest.mark.parametrize("state", [SenderState.GRANTED, SenderState.COMMITTED])
async def test_a_source_keeps_its_blocks_until_the_target_that_reads_them_has_heard_of_its_abort(
    state: SenderState,
) -> None:
    """Bytes of the blocks' next request would pass for damage, and the link would be given up."""
    async with faulty_pair("shm") as (pair, _, target):
        target.gate.shut()
        out, incoming = begin(pair)
        finish(out, commits=state is SenderState.COMMITTED)
        await target.gate.entered.wait()  # it is about to read
        await get_to(out, state)
        rank_pair = incoming.pairs[0]
        out.abort("the client left")
        assert not out.ended
        await fails(out.done(), match="the client left")
        assert not rank_pair.takes_chunks
        pair.source.fill(9)  # somebody else's now
        target.gate.open.set()
        await fails(incoming.verified(), match="the client left")
        await assert_a_transfer_works(pair)
        assert (target.num_links, pair.sender.stats.links_lost) == (1, 0)
        assert pair.receiver.stats.digest_failures == 0


async def test_the_offer_of_a_cancelled_transfer_is_refused_when_it_arrives() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect_transfer(ticket, [4, 5], NUM_TOKENS, 0)
        await incoming.cancel()
        out = pair.sender.begin_transfer(ticket, NUM_TOKENS, [0, 1], 0)
        await fails(out.done(), match="given the request up already")


async def test_an_end_is_not_undone_by_an_abort() -> None:
    async with make_pair() as pair:
        out, incoming = begin_and_finish(pair)
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
        out, incoming = begin_and_finish(pair)
        await target.gate.entered.wait()
        assert incoming.pairs[0].state is ReceiverState.RECEIVING
        cancel = asyncio.create_task(incoming.cancel())
        await asyncio.wait([cancel], timeout=0.03)
        assert not cancel.done()
        target.gate.open.set()
        await cancel
        pair.target.fill(9)  # somebody else's now
        before = pair.target.copy()
        await fails(out.done())
        await assert_a_transfer_works(pair)  # all that was under way has been taken off the link
        for layer in range(3):
            assert pair.target.block(layer, 4) == before[layer][4 * 96 : 5 * 96]
            assert pair.target.block(layer, 5) == before[layer][5 * 96 : 6 * 96]


@EACH
async def test_closing_the_receiver_during_a_receive_ends_it_before_close_returns(transport: str) -> None:
    async with faulty_pair(transport) as (pair, source, _):
        source.gate.shut()  # the chunk is announced, and its bytes never come
        out, incoming = begin_and_finish(pair)
        await settle(lambda: incoming.pairs[0].state is ReceiverState.RECEIVING)
        await pair.receiver.close()
        assert incoming.ended
        await fails(incoming.verified(), match="target is closing")
        source.gate.open.set()
        await fails(out.done())
        assert pair.target.copy() == [bytes(32 * 96)] * 3


async def test_closing_the_sender_ends_transfers_whose_connection_was_not_even_begun() -> None:
    async with make_pair() as pair:
        out = pair.sender.begin_transfer(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        await pair.sender.close()
        await fails(out.done(), match="the source is closing")


async def test_closing_the_sender_ends_its_transfers_though_the_closing_task_is_cancelled() -> None:
    async with make_pair() as pair:
        outs: list[OutgoingTransfer] = []

        async def open_and_close() -> None:
            outs.append(pair.sender.begin_transfer(pair.ticket(), NUM_TOKENS, [0, 1], 0))
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


# --- prefixes that are not there ---


async def test_a_source_without_kv_declines_to_a_target_that_waits() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect_transfer(ticket, [4, 5], NUM_TOKENS, 0)
        pair.sender.decline_transfer(ticket, "nothing is cached")
        await fails(incoming.verified(), match="gave up: nothing is cached")
        await assert_a_transfer_works(pair)


async def test_a_source_without_kv_declines_before_its_target_expects_the_transfer() -> None:
    async with make_pair() as pair:
        heard: list[bytes] = []
        pair.receiver.on_offer = heard.append
        ticket = pair.ticket()
        assert not pair.receiver.has_offer(ticket)
        pair.sender.decline_transfer(ticket, "nothing is cached")
        await settle(lambda: heard == [ticket.transfer_id])
        assert pair.receiver.has_offer(ticket)
        assert pair.receiver.offered_tokens(ticket.transfer_id) is None
        await fails(
            pair.receiver.expect_transfer(ticket, [4, 5], NUM_TOKENS, 0).verified(),
            match="given the transfer up already",
        )
        with pytest.raises(ValueError, match="made out to"):
            pair.sender.decline_transfer(pair.ticket(source=Peer("prefill-9", 1)), "not mine")


async def test_an_offer_that_waits_has_its_tokens_until_it_is_withdrawn() -> None:
    async with make_pair() as pair:
        heard: list[bytes] = []
        pair.receiver.on_offer = heard.append
        out = pair.sender.begin_transfer(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        transfer_id = out.ticket.transfer_id
        await settle(lambda: heard == [transfer_id])
        assert pair.receiver.offered_tokens(transfer_id) == NUM_TOKENS
        out.abort("the client left")
        await settle(lambda: pair.receiver.offered_tokens(transfer_id) is None)
        assert pair.receiver.has_offer(out.ticket)


# --- tickets, epochs, fingerprints ---


async def test_another_layout_is_refused_with_both_values_and_the_transfers_say_so() -> None:
    source = BytesStore(dtype="float16")
    async with make_pair(source=source, target=BytesStore(dtype="float32")) as pair:
        out = pair.sender.begin_transfer(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        await fails(out.done(), match="the KV dtype differs: float16 at the source, float32 at the target")


LAYOUT = BytesStore().layout
KV = KVHello(LAYOUT, 0, "raw", reach("tcp"))


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (
            Hello(P, Peer("decode-0", 23), KV),
            "you look for decode-0 of epoch 17, and this is decode-0 of epoch 16",
        ),
        (
            Hello(P, Peer("decode-9", 22), KV),
            "you look for decode-9 of epoch 16, and this is decode-0 of epoch 16",
        ),
        (
            Hello(P, D, replace(KV, layout=replace(LAYOUT, model="g"))),
            "the model differs: g at the source, f at the target",
        ),
        (
            Hello(P, D, replace(KV, layout=replace(LAYOUT, tp_size=2, num_kv_heads=2))),
            "the number of KV heads differs: 2 at the source, 1 at the target",
        ),
        (Hello(P, D, replace(KV, reach=reach("other"))), "the source offers other, the target tcp"),
        *(
            (Hello(P, D, replace(KV, rank=rank)), f"rank {rank} of 1 has nothing for rank 0 of 1")
            for rank in (-1, 1, 1 << 40)
        ),
        (Hello(P, D), "this is no token channel"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_both_values(hello: Hello, text: str) -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(hello)
        refusal = await connection.receive()
        assert isinstance(refusal, Refuse)
        assert text in refusal.reason
        await connection.close()
