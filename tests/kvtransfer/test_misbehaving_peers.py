"""A source that breaks the protocol, message by message, beside one that does not.

A target whose messages a source can make nothing of.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from tests.rigs.kv_pair import BLOCK_BYTES, SECRET, TOKEN, D, P, Pair, fails, make_pair, settle
from tests.rigs.raw_source import ANYBODY, NEIGHBOUR, RawPeer, announced, granted, raw_peer
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import chunk_seed
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.kv_layout import RankCut
from twostroke.protocol.messages import (
    Abort,
    Awaited,
    Chunk,
    Commit,
    Grant,
    Hello,
    KVWelcome,
    Message,
    Offer,
    Ping,
    Refuse,
    Run,
    StatsFrame,
    Verified,
    Welcome,
)
from twostroke.protocol.network import Connection, TcpNetwork
from twostroke.protocol.requests import Peer, Ticket, mint_ticket
from twostroke.protocol.stats import WorkerStats


@pytest.mark.parametrize(
    ("sequence", "runs", "text"),
    [
        (1, [Run(0, 1, 1)], "chunk 1 came in place of 0"),
        (-1, [Run(0, 1, 1)], "chunk -1 came in place of 0"),
        (0, [Run(3, 1, 1)], "there is no layer 3"),
        (0, [Run(-1, 1, 1)], "there is no layer -1"),
        (0, [Run(0, 1, 3)], "there are no units 1 to 4"),
        (0, [Run(0, -1, 2)], "there are no units -1 to 1"),
        (0, [Run(0, 1, 1), Run(1, 2, 2)], "there are no units 2 to 4"),
        (0, [Run(0, 0, 1)], "unit 0 of layer 0 was skipped in the grant"),
        (0, [Run(0, 1, 2), Run(0, 2, 1)], "units 2 to 3 of layer 0 came twice"),
    ],
)
async def test_a_chunk_that_can_not_be_ends_its_transfer_alone(sequence: int, runs: list[Run], text: str) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer, skip=4)
        good, good_waiting = await granted(pair, peer, "good", skip=4)
        await peer.send_chunk(ticket, sequence, *runs)
        answer = await peer.answer()
        assert isinstance(answer, Abort)
        assert text in answer.reason
        await fails(waiting, match=text)
        assert pair.target.copy() == [bytes(32 * BLOCK_BYTES)] * 3
        for layer in range(3):
            await peer.send_chunk(good, layer, Run(layer, 1, 2))
        peer.connection.send(Commit(good.transfer_id, 3, TOKEN))
        assert await peer.answer() == Verified(good.transfer_id), "the stream is still in step"
        assert await good_waiting == TOKEN


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (lambda transfer_id: announced(transfer_id, 1, Run(2, 0, 3)), "chunk 1 came after the commit"),
        (lambda transfer_id: Commit(transfer_id, 1, TOKEN), "committed 1 chunks"),
    ],
    ids=["chunk", "commit"],
)
async def test_nothing_may_follow_the_commit(more: Callable[[bytes], Message], text: str) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        chunk = announced(ticket.transfer_id, 0, *(Run(layer, 0, 3) for layer in range(2)))
        for message in (chunk, Commit(ticket.transfer_id, 1, TOKEN), more(ticket.transfer_id)):
            peer.connection.send(message)
        assert isinstance(await peer.answer(), Abort)
        await peer.send_bytes(chunk)  # a transfer that was given up ends with the chunk that is under way
        await fails(waiting, match=text)


async def test_an_offer_is_good_only_for_the_source_that_its_ticket_names() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket = pair.ticket(source=NEIGHBOUR)
        incoming = pair.receiver.expect_transfer(ticket, [4, 5, 6], 12, 0)
        peer.connection.send(Offer(ticket, 12))
        answer = await peer.answer()
        assert isinstance(answer, Abort)
        assert "the ticket's source is prefill-1, not prefill-0" in answer.reason
        peer.connection.send(Abort(ticket.transfer_id, "not yours"))
        restarted = pair.ticket(source=Peer(P.worker_id, P.epoch + 1))
        peer.connection.send(Offer(restarted, 12))
        answer = await peer.answer()
        assert isinstance(answer, Abort)
        assert "epoch" in answer.reason
        assert not incoming.ended


async def test_an_offer_is_good_only_for_the_rank_that_its_ticket_counts() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket = mint_ticket(SECRET, "r", P, D, (pair.address,), source_cut=RankCut(2))
        incoming = pair.receiver.expect_transfer(ticket, [4, 5, 6], 12, 0)
        peer.connection.send(Offer(ticket, 12))
        assert await peer.answer() == Grant(ticket.transfer_id, 0), "rank 0 has the one head"
        waiting = asyncio.create_task(incoming.verified())
        odd = mint_ticket(SECRET, "r", P, D, (pair.address,), source_cut=RankCut(0))
        await fails(
            pair.receiver.expect_transfer(odd, [7], 4, 0).verified(), match="0 ranks in 1 stages can't send to 1"
        )
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_no_peer_aborts_or_commits_the_transfer_of_another_connection() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer, raw_peer(pair) as other:
        ticket, waiting = await granted(pair, peer)
        other.connection.send(Abort(ticket.transfer_id, "not yours"))
        other.connection.send(Commit(ticket.transfer_id, 0, TOKEN))
        await other.send_chunk(ticket, 0, Run(0, 0, 3))
        await granted_and_done(pair, other, "theirs")
        for layer in range(3):
            await peer.send_chunk(ticket, layer, Run(layer, 0, 3))
        peer.connection.send(Commit(ticket.transfer_id, 3, TOKEN))
        assert await waiting == TOKEN


async def test_no_peer_declines_or_withdraws_the_transfer_of_another_source_before_it_is_expected() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer, raw_peer(pair, NEIGHBOUR) as other:
        heard: list[bytes] = []
        pair.receiver.on_offer = heard.append
        ticket = pair.ticket()
        other.connection.send(Abort(ticket.transfer_id, "not yours"))
        other.connection.send(Offer(ticket, 12))
        answer = await other.answer()
        assert isinstance(answer, Abort)
        assert "the ticket's source is prefill-0, not prefill-1" in answer.reason
        assert not pair.receiver.has_offer(ticket)
        peer.connection.send(Offer(ticket, 12))
        await settle(lambda: pair.receiver.has_offer(ticket))
        assert heard[-1:] == [ticket.transfer_id]
        other.connection.send(Abort(ticket.transfer_id, "not yours"))
        await granted_and_done(pair, other, "theirs", NEIGHBOUR)
        incoming = pair.receiver.expect_transfer(ticket, [4, 5, 6], 12, 0)
        assert await peer.answer() == Grant(ticket.transfer_id, 0)
        incoming.abort("enough")


async def granted_and_done(pair: Pair, peer: RawPeer, request_id: str, source: Peer = P) -> None:
    """A whole transfer: everything sent before it has been handled then."""
    ticket = pair.ticket(request_id, source)
    incoming = pair.receiver.expect_transfer(ticket, [10], 4, 0)
    peer.connection.send(Offer(ticket, 4))
    assert await peer.answer() == Grant(ticket.transfer_id, 0)
    await peer.send_chunk(ticket, 0, *(Run(layer, 0, 1) for layer in range(3)))
    peer.connection.send(Commit(ticket.transfer_id, 1, TOKEN))
    await incoming.verified()


@pytest.mark.parametrize(
    "message",
    [
        StatsFrame(WorkerStats()),
        Grant(ANYBODY, 0),
        Awaited(ANYBODY),
        Hello(P, D),
        Chunk(ANYBODY, 0, (), 0),
        Chunk(ANYBODY, 0, (Run(0, 0, 0),), 0),
        Chunk(ANYBODY, 0, (Run(0, 0, -1),), -BLOCK_BYTES),
        Chunk(ANYBODY, 0, (Run(0, 0, 2), Run(0, 2, -1)), BLOCK_BYTES),
        Chunk(ANYBODY, 0, (Run(0, 0, 1 << 40),), BLOCK_BYTES << 40),
        Chunk(ANYBODY, 0, (Run(0, 0, 1),), 2 * BLOCK_BYTES),
        Chunk(ANYBODY, 0, tuple(Run(0, unit, 1) for unit in range(4)), 4 * BLOCK_BYTES),
    ],
)
async def test_a_stream_that_can_not_be_trusted_is_closed_and_the_neighbour_goes_on(message: Message) -> None:
    async with make_pair() as pair:
        neighbour = pair.make_sender(peer=NEIGHBOUR)
        ticket = pair.ticket("neighbour", source=NEIGHBOUR)
        out = neighbour.begin_transfer(ticket, 4, [1], 0)
        async with raw_peer(pair) as peer:
            _, waiting = await granted(pair, peer)
            peer.connection.send(message)
            await fails(waiting, match=r"does not send|can't be")
            with pytest.raises(ConnectionLost):
                await peer.answer()
            with pytest.raises(ConnectionLost):
                await peer.link.discard(1)  # the link is closed too
        incoming = pair.receiver.expect_transfer(ticket, [9], 4, 0)
        for layer in range(3):
            out.layer_ready(layer, 4)
        out.commit(TOKEN)
        assert await incoming.verified() == TOKEN
        await out.done()
        await neighbour.close()


async def test_a_peer_that_announces_chunks_without_end_is_closed() -> None:
    async with make_pair(config=TransferConfig(max_queued_messages=8)) as pair, raw_peer(pair) as peer:
        _, waiting = await granted(pair, peer)
        for _ in range(20):
            peer.connection.send(announced(ANYBODY, 0, Run(0, 0, 1)))
        await fails(waiting, match="ahead of its bytes")


async def test_bytes_that_never_arrive_end_the_connection_within_a_lease_despite_pings() -> None:
    async with make_pair(config=TransferConfig(lease_s=0.2)) as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)

        async def ping() -> None:
            while True:
                peer.connection.send(Ping())
                await asyncio.sleep(0.02)

        pinging = asyncio.create_task(ping())
        peer.connection.send(announced(ticket.transfer_id, 0, Run(0, 0, 3)))
        await fails(waiting, match="receiving a chunk took longer than")
        with pytest.raises(ConnectionLost):
            await peer.link.discard(1)
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)


async def test_an_abort_is_heard_while_a_chunk_before_it_is_still_under_way() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        slow, slow_waiting = await granted(pair, peer)
        other, other_waiting = await granted(pair, peer, "other")
        chunk = announced(slow.transfer_id, 0, *(Run(layer, 0, 3) for layer in range(3)))
        peer.connection.send(chunk)
        peer.connection.send(Abort(other.transfer_id, "the client left"))
        await fails(other_waiting, match="the client left")
        assert not slow_waiting.done()
        await peer.send_bytes(chunk)
        peer.connection.send(Commit(slow.transfer_id, 1, TOKEN))
        assert await slow_waiting == TOKEN


@contextlib.asynccontextmanager
async def raw_target(pair: Pair, *answers: Any, pings: int = 0) -> AsyncIterator[Ticket]:
    """A target that grants, and after the commit sends `answers` (made of the transfer's id); a ticket for it.

    It says Ping so often before its Welcome.
    """

    async def serve(connection: Connection) -> None:
        await connection.receive()
        pending = await pair.transports[1].by_name["tcp"].prepare("127.0.0.1", pair.target_cut)
        kv = KVWelcome(pair.target.layout, 0, "tcp", "why", (), pending.params)
        for _ in range(pings):
            connection.send(Ping())
        connection.send(Welcome(D, kv))
        try:
            while True:
                message = await connection.receive()
                if isinstance(message, Offer):
                    connection.send(Grant(message.ticket.transfer_id, 0))
                if isinstance(message, Commit):
                    for answer in answers:
                        connection.send(answer(message.transfer_id))
                if isinstance(message, Abort):
                    connection.send(message)  # as every target does, so that the source keeps its blocks no longer
        except ConnectionLost:
            await pending.close()

    listener = await TcpNetwork(SECRET).listen("127.0.0.1", serve)
    yield mint_ticket(SECRET, "r", P, D, (listener.address,))
    await listener.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda transfer_id: Grant(transfer_id, 0), "GRANT can't happen"),
        (lambda transfer_id: Ping(), None),
    ],
)
async def test_a_targets_odd_answer_ends_the_transfer(answer: Any, text: str | None) -> None:
    async with make_pair() as pair, raw_target(pair, answer) as ticket:
        out = pair.sender.begin_transfer(ticket, 4, [1], 4)
        out.commit(TOKEN)
        if text is None:
            await settle(lambda: out.pairs[0].state.name == "COMMITTED")
            out.abort("enough")
        await fails(out.done(), match=text or "enough")


async def test_a_target_may_ping_before_its_welcome_and_answer_awaited_too_late_or_for_no_transfer() -> None:
    answers = [Awaited, lambda _: Awaited(b"nobody's"), Verified, Awaited]
    async with make_pair() as pair, raw_target(pair, *answers, pings=2) as ticket:
        out = pair.sender.begin_transfer(ticket, 4, [1], 4)
        out.commit(TOKEN)
        await out.done()


@pytest.mark.parametrize("field", ["sequence", "transfer", "epoch", "runs"])
async def test_bytes_of_another_chunk_do_not_pass_for_this_ones(field: str) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        chunk = announced(ticket.transfer_id, 0, Run(0, 0, 3))
        other = {
            "sequence": msgspec.structs.replace(chunk, sequence=1),
            "transfer": msgspec.structs.replace(chunk, transfer_id=ANYBODY),
            "runs": msgspec.structs.replace(chunk, runs=(Run(1, 0, 3),)),
        }.get(field, chunk)
        source = Peer(P.worker_id, P.epoch - 1) if field == "epoch" else P
        peer.connection.send(chunk)
        await peer.send_bytes(chunk, chunk_seed(other, source, D))
        assert await peer.answer() == Refuse("a chunk was damaged on its way"), "nothing more is to come over this"
        assert await peer.answer() == Abort(ticket.transfer_id, "chunk 0 was damaged on its way")
        assert pair.receiver.stats.digest_failures == 1
        await fails(waiting, match="chunk 0 was damaged on its way")
        with pytest.raises(ConnectionLost):
            await peer.answer()


async def test_a_ticket_is_good_for_one_offer_whatever_became_of_it() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer, raw_peer(pair) as other:
        ticket, waiting = await granted(pair, peer)
        for offering in (peer, other):
            offering.connection.send(Offer(ticket, 12))
            assert await offering.answer() == Abort(ticket.transfer_id, "the ticket was used before")
            if offering is peer:  # which has been told that its own transfer is over; so it is
                peer.connection.send(Abort(ticket.transfer_id, "as you say"))
                await fails(waiting, match="as you say")
