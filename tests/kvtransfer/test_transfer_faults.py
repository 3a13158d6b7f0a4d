"""Sender and receiver together, when something goes wrong: the transfer fails on both sides, its neighbours don't."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from faulty_transports import FaultyTransport
from transfer_harness import FAST, SECRET, TOKEN, BytesStore, D, P, Pair, make_pair, settle

from kvtransfer.config import TransferConfig
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.lifecycle import ReceiverState, SenderState
from kvtransfer.link import Transport
from kvtransfer.outgoing import OutgoingTransfer
from protocol.errors import ConnectionLost, TransferFailed
from protocol.messages import Hello, Ping, Refuse, Welcome
from protocol.network import Connection
from protocol.tcp_network import TcpNetwork
from protocol.tickets import Peer, mint_ticket

BOTH = pytest.mark.parametrize("transport", ["tcp", "torch_distributed"])
NUM_TOKENS = 8


@contextlib.asynccontextmanager
async def faulty_pair(
    transport: str = "tcp", config: TransferConfig = FAST
) -> AsyncIterator[tuple[Pair, FaultyTransport, FaultyTransport]]:
    """A pair, with the transports of sender and receiver."""
    source, target = BytesStore(), BytesStore()
    source.fill(1)
    made: list[FaultyTransport] = []

    def wrap(store: BytesStore) -> Callable[[Transport], Transport]:
        def wrapped(inner: Transport) -> Transport:
            made.append(FaultyTransport(inner, store))
            return made[-1]

        return wrapped

    async with make_pair(
        transport, source=source, target=target, config=config, wrap_source=wrap(source), wrap_target=wrap(target)
    ) as pair:
        try:
            yield pair, made[0], made[1]
        finally:
            for faulty in made:
                faulty.gate.open.set()
                faulty.join_gate.open.set()


def begin(
    pair: Pair, request_id: str = "r", blocks: tuple[int, int] = (4, 5)
) -> tuple[OutgoingTransfer, IncomingTransfer]:
    ticket = pair.ticket(request_id)
    incoming = pair.receiver.expect(ticket, list(blocks), NUM_TOKENS, 0)
    return pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0), incoming


def finish(out: OutgoingTransfer, num_layers: int = 3) -> None:
    for layer in range(num_layers):
        out.layer_ready(layer, NUM_TOKENS)
    out.commit(TOKEN)


async def assert_a_transfer_works(pair: Pair, blocks: tuple[int, int] = (20, 21)) -> None:
    """And takes the connection and link that stand."""
    out, incoming = begin(pair, "another", blocks)
    finish(out)
    assert await incoming.verified() == TOKEN
    await out.done()
    for layer in range(3):
        assert pair.target.block(layer, blocks[1]) == pair.source.block(layer, 1)


async def reach(sender: OutgoingTransfer, state: SenderState) -> None:
    await settle(lambda: sender.state is state)


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
    elif state is SenderState.SENDING:
        source.gate.shut()
        out, incoming = begin(pair)
        finish(out)
        await source.gate.entered.wait()
    else:
        target.gate.shut()
        out, incoming = begin(pair)
        finish(out)
        await target.gate.entered.wait()
    await reach(out, state)
    return out, incoming


OPEN_STATES = [
    SenderState.OFFERING,
    SenderState.OFFERED,
    SenderState.GRANTED,
    SenderState.SENDING,
    SenderState.COMMITTED,
]


@pytest.mark.parametrize("state", OPEN_STATES)
async def test_the_prefill_worker_may_abort_in_every_state(state: SenderState) -> None:
    async with faulty_pair() as (pair, source, target):
        out, incoming = await drive_to(state, pair, source, target)
        out.abort("the client left")
        out.abort("and again")
        if incoming is not None:
            await settle(lambda: incoming.state in (ReceiverState.ABORTING, ReceiverState.ABORTED))
        source.gate.open.set()
        target.gate.open.set()
        with pytest.raises(TransferFailed, match="the client left"):
            await out.done()
        if incoming is None:
            incoming = pair.receiver.expect(out.ticket, [4, 5], NUM_TOKENS, 0)
            if state is SenderState.OFFERING:  # never offered: only the decode worker's own deadline could end it
                await incoming.cancel()
                await assert_a_transfer_works(pair)
                return
        with pytest.raises(TransferFailed, match=r"the client left|given the transfer up"):
            await incoming.verified()
        await assert_a_transfer_works(pair)
        assert pair.sender.stats.failed == pair.receiver.stats.failed == 1


@pytest.mark.parametrize("state", OPEN_STATES[2:])
async def test_the_decode_worker_may_cancel_in_every_state(state: SenderState) -> None:
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
        with pytest.raises(TransferFailed, match="gave up: the decode worker cancelled"):
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


@BOTH
async def test_cancel_waits_for_the_receive_under_way_and_nothing_is_written_afterwards(transport: str) -> None:
    async with faulty_pair(transport) as (pair, _, target):
        target.gate.shut()
        out, incoming = begin(pair)
        finish(out)
        await target.gate.entered.wait()
        assert incoming.state is ReceiverState.RECEIVING
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


@BOTH
async def test_closing_the_receiver_during_a_receive_ends_it_before_close_returns(transport: str) -> None:
    async with faulty_pair(transport) as (pair, source, _):
        source.gate.shut()  # the chunk is announced, and its bytes never come
        out, incoming = begin(pair)
        finish(out)
        await settle(lambda: incoming.state is ReceiverState.RECEIVING)
        await pair.receiver.close()
        assert incoming.ended
        with pytest.raises(TransferFailed, match="decode worker is closing"):
            await incoming.verified()
        source.gate.open.set()
        with pytest.raises(TransferFailed):
            await out.done()
        assert pair.target.copy() == [bytes(32 * 96)] * 3


async def test_closing_the_sender_ends_transfers_whose_connection_was_not_even_begun() -> None:
    async with make_pair() as pair:
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        await pair.sender.close()
        with pytest.raises(TransferFailed, match="prefill worker is closing"):
            await out.done()


# --- damage ---


@BOTH
async def test_a_flipped_byte_is_found_and_counted(transport: str) -> None:
    async with faulty_pair(transport) as (pair, _, target):
        target.flips = 1
        out, incoming = begin(pair)
        finish(out)
        with pytest.raises(TransferFailed, match="damaged"):
            await incoming.verified()
        with pytest.raises(TransferFailed, match="damaged"):
            await out.done()
        assert pair.receiver.stats.digest_failures == 1
        assert pair.receiver.stats.failed == 1
        await assert_a_transfer_works(pair)


# --- tickets, epochs, fingerprints ---


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("signature", "signature is wrong"),
        ("other decode epoch", "epoch 63 of decode worker decode-0"),
        ("other decode worker", "names decode worker decode-1"),
    ],
)
async def test_a_ticket_that_is_forged_or_made_out_to_others_fails_at_the_decode_worker(fault: str, text: str) -> None:
    async with make_pair() as pair:
        ticket = {
            "signature": pair.ticket(secret=b"another secret"),
            "other decode epoch": pair.ticket(decode=Peer("decode-0", 99)),
            "other decode worker": pair.ticket(decode=Peer("decode-1", 22)),
        }[fault]
        with pytest.raises(TransferFailed, match=text):
            await pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0).verified()
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match=r"signature is wrong|and this is decode-0 of epoch 16"):
            await out.done()


async def test_a_prefill_worker_does_not_use_another_ones_ticket() -> None:
    async with make_pair() as pair:
        out = pair.sender.open(pair.ticket(prefill=Peer("prefill-0", 12)), NUM_TOKENS, [0, 1], 0)
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
    source = BytesStore(fingerprint="dtype=float16")
    async with make_pair(source=source, target=BytesStore(fingerprint="dtype=float32")) as pair:
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="dtype=float16, and ours is dtype=float32"):
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
        assert first.state is SenderState.OFFERED


# --- silence and losses ---


async def test_a_grant_that_never_comes_ends_with_the_lease_on_both_sides() -> None:
    async with make_pair(config=TransferConfig(progress_s=0.1)) as pair:
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        finish(out)
        with pytest.raises(TransferFailed, match=r"no request came|did not grant"):
            await out.done()
        incoming = pair.receiver.expect(out.ticket, [4, 5], NUM_TOKENS, 0)
        with pytest.raises(
            TransferFailed, match=r"given the transfer up already|gave up: the decode worker did not grant"
        ):
            await incoming.verified()


async def test_a_prefill_worker_without_progress_is_given_up() -> None:
    async with make_pair(config=TransferConfig(progress_s=0.1), sender_config=FAST) as pair:
        out, incoming = begin(pair)
        with pytest.raises(TransferFailed, match="no progress"):
            await incoming.verified()
        with pytest.raises(TransferFailed, match="no progress"):
            await out.done()


async def test_an_unreachable_decode_worker_fails_the_transfer_and_the_next_one_tries_again() -> None:
    async with make_pair() as pair:
        await pair.receiver.close()
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="no answer from"):
            await out.done()
        address = await pair.receiver.start("127.0.0.1")
        pair.address = address
        await assert_a_transfer_works(pair)


async def test_a_lost_connection_is_built_again_by_the_next_transfer() -> None:
    async with make_pair() as pair:
        await assert_a_transfer_works(pair)
        out, _ = begin(pair)
        await reach(out, SenderState.GRANTED)
        await pair.receiver.close()
        with pytest.raises(TransferFailed):
            await out.done()
        pair.address = await pair.receiver.start("127.0.0.1")
        await assert_a_transfer_works(pair)


async def receive_pings(connection: Connection) -> None:
    while True:
        assert await connection.receive() == Ping()


async def test_a_silent_prefill_worker_loses_its_connection_and_its_transfers() -> None:
    async with make_pair(config=TransferConfig(lease_s=0.15)) as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(Hello(P, D, "f", "tcp"))
        assert isinstance(await connection.receive(), Welcome)
        with pytest.raises(ConnectionLost):
            await receive_pings(connection)
        await connection.close()


async def test_a_silent_decode_worker_loses_its_transfers() -> None:
    link_ended = asyncio.Event()

    async def welcome_and_fall_silent(connection: Connection) -> None:
        await connection.receive()
        pending = await pair.transports[1].prepare("127.0.0.1")
        connection.send(Welcome(D, pending.params))
        link = await pending.established()
        try:
            await link.receive(0, [0])
        except ConnectionLost:
            link_ended.set()
        finally:
            await link.close()

    async with make_pair(config=TransferConfig(lease_s=0.15)) as pair:
        listener = await TcpNetwork(SECRET).listen("127.0.0.1", welcome_and_fall_silent)
        ticket = mint_ticket(SECRET, "r", P, D, listener.address)
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="silent for"):
            await out.done()
        await link_ended.wait()
        await listener.close()


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (Hello(P, Peer("decode-0", 23), "f", "tcp"), "decode-0 of epoch 17, and this is decode-0 of epoch 16"),
        (Hello(P, Peer("decode-9", 22), "f", "tcp"), "decode-9 of epoch 16, and this is decode-0 of epoch 16"),
        (Hello(P, D, "g", "tcp"), "your KV layout is g, and ours is f"),
        (Hello(P, D, "f", "shm"), "your transport is shm, and ours is tcp"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_both_values(hello: Hello, text: str) -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(hello)
        assert await connection.receive() == Refuse(("you look for " if "epoch" in text else "") + text)
        await connection.close()
