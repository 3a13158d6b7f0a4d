"""Transfers that somebody ends: aborted, cancelled or closed at every state, from either side."""

import asyncio

import pytest
from faulty_pair import EACH, NUM_TOKENS, assert_a_transfer_works, begin, faulty_pair, finish, get_to
from faulty_transports import FaultyTransport
from transfer_harness import TOKEN, Pair, make_pair, settle

from twostroke.kvtransfer.incoming import IncomingTransfer
from twostroke.kvtransfer.outgoing import OutgoingTransfer
from twostroke.kvtransfer.rules.lifecycle import ReceiverState, SenderState
from twostroke.protocol.errors import TransferFailed


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
