"""A source that breaks the protocol, message by message, beside one that does not; and a target that does."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from memory_transport import MemoryTransport
from transfer_harness import BLOCK_BYTES, SECRET, TOKEN, BytesStore, D, P, Pair, make_pair, reach, settle

from kvtransfer.config import TransferConfig
from kvtransfer.digest import chunk_seal
from kvtransfer.layout import Segment
from kvtransfer.lifecycle import SenderState
from kvtransfer.link import DataLink
from kvtransfer.receiver import KVReceiver
from protocol.errors import ConnectionLost, TransferFailed
from protocol.messages import (
    Abort,
    Chunk,
    Commit,
    Damaged,
    Grant,
    Hello,
    KVHello,
    KVWelcome,
    LinkReady,
    LinkWanted,
    Message,
    Offer,
    Ping,
    Run,
    StatsFrame,
    Verified,
    Welcome,
)
from protocol.network import Connection, Handler, Listener
from protocol.stats import WorkerStats
from protocol.tcp_network import TcpNetwork
from protocol.tickets import Address, Peer, Ticket, mint_ticket

NEIGHBOUR = Peer("prefill-1", 33)
ANYBODY = b"x" * 16


@dataclass
class RawPeer:
    """A source whose messages the test writes itself."""

    connection: Connection
    link: DataLink
    store: BytesStore
    name: Peer = P

    async def send_chunk(self, ticket: Ticket, sequence: int, *runs: Run, attempt: int = 0) -> None:
        """Chunk and bytes: those of block 0, as often as it takes."""
        chunk = announced(ticket.transfer_id, sequence, *runs, attempt=attempt)
        self.connection.send(chunk)
        await self.send_bytes(chunk)

    async def send_bytes(self, chunk: Chunk, seal: int | None = None) -> None:
        num_units = sum(run.num_units for run in chunk.runs)
        await self.link.send([Segment(0, (0,) * num_units)], chunk_seal(chunk, self.name, D) if seal is None else seal)

    async def answer(self) -> Message:
        """The next message that is no Ping."""
        while isinstance(message := await self.connection.receive(), Ping):
            pass
        return message


def announced(transfer_id: bytes, sequence: int, *runs: Run, attempt: int = 0, link: int = 0) -> Chunk:
    num_bytes = sum(run.num_units for run in runs) * BLOCK_BYTES
    return Chunk(transfer_id, sequence, attempt, link, runs, num_bytes)


def greeting(pair: Pair, peer: Peer = P) -> Hello:
    return Hello(peer, D, KVHello(pair.source.layout, 0, "raw", reach("memory")))


@contextlib.asynccontextmanager
async def raw_peer(pair: Pair, peer: Peer = P) -> AsyncIterator[RawPeer]:
    store = BytesStore()
    store.fill(5)
    transport = MemoryTransport(store)
    connection = await pair.network.connect(pair.address)
    connection.send(greeting(pair, peer))
    welcome = await connection.receive()
    assert isinstance(welcome, Welcome)
    assert welcome.kv is not None
    link = await transport.join(welcome.kv.link, pair.target_cut)
    try:
        yield RawPeer(connection, link, store, peer)
    finally:
        await link.close()
        await connection.close()


async def granted(
    pair: Pair, peer: RawPeer, request_id: str = "r", skip: int = 0
) -> tuple[Ticket, asyncio.Task[object]]:
    """A transfer of blocks 4, 5, 6 (12 tokens), and a task that awaits it."""
    ticket = pair.ticket(request_id)
    incoming = pair.receiver.expect(ticket, [4, 5, 6], 12, skip)
    peer.connection.send(Offer(ticket, 12))
    assert await peer.answer() == Grant(ticket.transfer_id, skip)
    return ticket, asyncio.create_task(incoming.verified())


@pytest.mark.parametrize(
    ("sequence", "attempt", "runs", "text"),
    [
        (1, 0, [Run(0, 1, 1)], "chunk 1 came in place of 0"),
        (-1, 0, [Run(0, 1, 1)], "chunk -1 came in place of 0"),
        (0, 0, [Run(3, 1, 1)], "there is no layer 3"),
        (0, 0, [Run(-1, 1, 1)], "there is no layer -1"),
        (0, 0, [Run(0, 1, 3)], "there are no units 1 to 4"),
        (0, 0, [Run(0, -1, 2)], "there are no units -1 to 1"),
        (0, 0, [Run(0, 1, 1), Run(1, 2, 2)], "there are no units 2 to 4"),
        (0, 0, [Run(0, 0, 1)], "unit 0 was skipped in the grant"),
        (0, 0, [Run(0, 1, 2), Run(0, 2, 1)], "units 2 to 3 of layer 0 came twice"),
        (0, 1, [Run(0, 1, 1)], "nobody asked for attempt 1 of chunk 0"),
    ],
)
async def test_a_chunk_that_can_not_be_ends_its_transfer_alone(
    sequence: int, attempt: int, runs: list[Run], text: str
) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer, skip=4)
        good, good_waiting = await granted(pair, peer, "good", skip=4)
        await peer.send_chunk(ticket, sequence, *runs, attempt=attempt)
        answer = await peer.answer()
        assert isinstance(answer, Abort)
        assert text in answer.reason
        with pytest.raises(TransferFailed, match=text):
            await waiting
        assert pair.target.copy() == [bytes(32 * BLOCK_BYTES)] * 3
        for layer in range(3):
            await peer.send_chunk(good, layer, Run(layer, 1, 2))
        peer.connection.send(Commit(good.transfer_id, 3, TOKEN))
        assert await peer.answer() == Verified(good.transfer_id), "the stream is still in step"
        assert await good_waiting == TOKEN


async def test_a_unit_that_comes_twice_ends_its_transfer() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        await peer.send_chunk(ticket, 0, Run(0, 0, 2))
        await peer.send_chunk(ticket, 1, Run(0, 1, 2))
        with pytest.raises(TransferFailed, match="units 1 to 3 of layer 0 came twice"):
            await waiting


@pytest.mark.parametrize("field", ["sequence", "attempt", "transfer", "epoch", "runs"])
async def test_bytes_of_another_chunk_do_not_pass_for_this_ones(field: str) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        chunk = announced(ticket.transfer_id, 0, Run(0, 0, 3))
        other = {
            "sequence": msgspec.structs.replace(chunk, sequence=1),
            "attempt": msgspec.structs.replace(chunk, attempt=1),
            "transfer": msgspec.structs.replace(chunk, transfer_id=ANYBODY),
            "runs": msgspec.structs.replace(chunk, runs=(Run(1, 0, 3),)),
        }.get(field, chunk)
        source = Peer(P.worker_id, P.epoch - 1) if field == "epoch" else P
        peer.connection.send(chunk)
        await peer.send_bytes(chunk, chunk_seal(other, source, D))
        assert await peer.answer() == Damaged(ticket.transfer_id, 0, 0)
        assert pair.receiver.stats.digest_failures == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_retry_must_be_the_chunk_that_was_asked_for() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        chunk = announced(ticket.transfer_id, 0, Run(0, 0, 2))
        peer.connection.send(chunk)
        await peer.send_bytes(chunk, 0)
        assert await peer.answer() == Damaged(ticket.transfer_id, 0, 0)
        await peer.send_chunk(ticket, 0, Run(0, 0, 3), attempt=1)
        with pytest.raises(TransferFailed, match="nobody asked for attempt 1 of chunk 0"):
            await waiting


async def test_a_chunk_that_came_whole_is_not_taken_again() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        await peer.send_chunk(ticket, 0, Run(0, 0, 3))
        await peer.send_chunk(ticket, 0, Run(0, 0, 3), attempt=1)
        with pytest.raises(TransferFailed, match="nobody asked for attempt 1 of chunk 0"):
            await waiting


@pytest.mark.parametrize(
    ("num_layers", "num_chunks", "text"),
    [
        (2, 2, "committed 2 chunks, and 3 units are missing"),
        (2, 3, "committed 3 chunks, and announced 2"),
        (3, 2, "committed 2 chunks, and announced 3"),
    ],
)
async def test_a_commit_of_less_than_everything_is_not_verified(num_layers: int, num_chunks: int, text: str) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        for layer in range(num_layers):
            await peer.send_chunk(ticket, layer, Run(layer, 0, 3))
        peer.connection.send(Commit(ticket.transfer_id, num_chunks, TOKEN))
        with pytest.raises(TransferFailed, match=text):
            await waiting


async def test_nothing_may_follow_the_commit() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        chunk = announced(ticket.transfer_id, 0, *(Run(layer, 0, 3) for layer in range(2)))
        peer.connection.send(chunk)
        peer.connection.send(Commit(ticket.transfer_id, 1, TOKEN))
        peer.connection.send(announced(ticket.transfer_id, 1, Run(2, 0, 3)))
        with pytest.raises(TransferFailed, match="chunk 1 came after the commit"):
            await wait_while_sending(waiting, peer, chunk)


async def wait_while_sending(waiting: "asyncio.Task[object]", peer: RawPeer, chunk: Chunk) -> None:
    """A transfer that was given up ends with the chunk that is under way."""
    assert isinstance(await peer.answer(), Abort)
    await peer.send_bytes(chunk)
    await waiting


async def test_a_second_commit_is_one_too_many() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        chunk = announced(ticket.transfer_id, 0, *(Run(layer, 0, 3) for layer in range(3)))
        peer.connection.send(chunk)
        for _ in range(2):
            peer.connection.send(Commit(ticket.transfer_id, 1, TOKEN))
        with pytest.raises(TransferFailed, match="committed 1 chunks"):
            await wait_while_sending(waiting, peer, chunk)


async def test_chunks_and_commits_of_unknown_transfers_are_discarded() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        await peer.send_chunk(pair.ticket("never offered"), 0, Run(0, 0, 3))
        peer.connection.send(Commit(b"?" * 16, 1, TOKEN))
        ticket, waiting = await granted(pair, peer)
        for layer in range(3):
            await peer.send_chunk(ticket, layer, Run(layer, 0, 3))
        peer.connection.send(Commit(ticket.transfer_id, 3, TOKEN))
        assert await waiting == TOKEN


async def test_an_offer_is_good_only_for_the_source_that_its_ticket_names() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket = pair.ticket(source=NEIGHBOUR)
        incoming = pair.receiver.expect(ticket, [4, 5, 6], 12, 0)
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


async def test_a_ticket_is_good_for_one_offer_whatever_became_of_it() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer, raw_peer(pair) as other:
        ticket, waiting = await granted(pair, peer)
        for offering in (peer, other):
            offering.connection.send(Offer(ticket, 12))
            assert await offering.answer() == Abort(ticket.transfer_id, "the ticket was used before")
            if offering is peer:  # which has been told that its own transfer is over; so it is
                peer.connection.send(Abort(ticket.transfer_id, "as you say"))
                with pytest.raises(TransferFailed, match="as you say"):
                    await waiting


async def test_an_offer_is_good_only_for_the_rank_that_its_ticket_counts() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket = mint_ticket(SECRET, "r", P, D, (pair.address,), source_ranks=2)
        incoming = pair.receiver.expect(ticket, [4, 5, 6], 12, 0)
        peer.connection.send(Offer(ticket, 12))
        assert await peer.answer() == Grant(ticket.transfer_id, 0), "rank 0 has the one head"
        waiting = asyncio.create_task(incoming.verified())
        odd = mint_ticket(SECRET, "r", P, D, (pair.address,), source_ranks=0)
        with pytest.raises(TransferFailed, match="0 ranks can't send to 1"):
            await pair.receiver.expect(odd, [7], 4, 0).verified()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_nobody_aborts_or_commits_the_transfer_of_another_connection() -> None:
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


async def test_nobody_declines_or_withdraws_the_transfer_of_another_source_before_it_is_expected() -> None:
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
        incoming = pair.receiver.expect(ticket, [4, 5, 6], 12, 0)
        assert await peer.answer() == Grant(ticket.transfer_id, 0)
        incoming.abort("enough")


async def granted_and_done(pair: Pair, peer: RawPeer, request_id: str, source: Peer = P) -> None:
    """A whole transfer: everything sent before it has been handled then."""
    ticket = pair.ticket(request_id, source)
    incoming = pair.receiver.expect(ticket, [10], 4, 0)
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
        Damaged(ANYBODY, 0, 0),
        LinkReady(1, "memory", {}),
        Hello(P, D),
        LinkWanted(0, ()),
        LinkWanted(2, ()),
        Chunk(ANYBODY, 0, 0, 0, (), 0),
        Chunk(ANYBODY, 0, 0, 0, (Run(0, 0, 0),), 0),
        Chunk(ANYBODY, 0, 0, 0, (Run(0, 0, -1),), -BLOCK_BYTES),
        Chunk(ANYBODY, 0, 0, 0, (Run(0, 0, 2), Run(0, 2, -1)), BLOCK_BYTES),
        Chunk(ANYBODY, 0, 0, 0, (Run(0, 0, 1 << 40),), BLOCK_BYTES << 40),
        Chunk(ANYBODY, 0, 0, 0, (Run(0, 0, 1),), 2 * BLOCK_BYTES),
        Chunk(ANYBODY, 0, 0, 1, (Run(0, 0, 1),), BLOCK_BYTES),
        Chunk(ANYBODY, 0, 0, 0, tuple(Run(0, unit, 1) for unit in range(4)), 4 * BLOCK_BYTES),
    ],
)
async def test_a_stream_that_can_not_be_trusted_is_closed_and_the_neighbour_goes_on(message: Message) -> None:
    async with make_pair() as pair:
        neighbour = pair.make_sender(peer=NEIGHBOUR)
        ticket = pair.ticket("neighbour", source=NEIGHBOUR)
        out = neighbour.open(ticket, 4, [1], 0)
        async with raw_peer(pair) as peer:
            _, waiting = await granted(pair, peer)
            peer.connection.send(message)
            with pytest.raises(TransferFailed, match=r"does not send|can't be"):
                await waiting
            with pytest.raises(ConnectionLost):
                await peer.answer()
            with pytest.raises(ConnectionLost):
                await peer.link.discard(1)  # the link is closed too
        incoming = pair.receiver.expect(ticket, [9], 4, 0)
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
        with pytest.raises(TransferFailed, match="ahead of its bytes"):
            await waiting


async def test_bytes_that_never_come_cost_the_link_within_a_lease_and_are_asked_for_again_though_pings_do_come() -> (
    None
):
    async with make_pair(config=TransferConfig(lease_s=0.2)) as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)

        async def ping() -> None:
            while True:
                peer.connection.send(Ping())
                await asyncio.sleep(0.02)

        pinging = asyncio.create_task(ping())
        chunk = announced(ticket.transfer_id, 0, Run(0, 0, 3))
        for attempt in range(2):
            peer.connection.send(msgspec.structs.replace(chunk, attempt=attempt))
            assert await peer.answer() == Damaged(ticket.transfer_id, 0, attempt)
        with pytest.raises(ConnectionLost):
            await peer.link.discard(1)
        peer.connection.send(msgspec.structs.replace(chunk, attempt=2))
        with pytest.raises(TransferFailed, match="chunk 0 was damaged or lost on its way 3 times"):
            await waiting
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)


async def test_an_abort_is_heard_while_a_chunk_before_it_is_still_under_way() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        slow, slow_waiting = await granted(pair, peer)
        other, other_waiting = await granted(pair, peer, "other")
        chunk = announced(slow.transfer_id, 0, *(Run(layer, 0, 3) for layer in range(3)))
        peer.connection.send(chunk)
        peer.connection.send(Abort(other.transfer_id, "the client left"))
        with pytest.raises(TransferFailed, match="the client left"):
            await other_waiting
        assert not slow_waiting.done()
        await peer.send_bytes(chunk)
        peer.connection.send(Commit(slow.transfer_id, 1, TOKEN))
        assert await slow_waiting == TOKEN


# --- targets ---


@contextlib.asynccontextmanager
async def raw_target(pair: Pair, *answers: Any, pings: int = 0) -> AsyncIterator[Ticket]:
    """A target that grants, and after the commit sends `answers` (made of the transfer's id); a ticket for it.

    It says Ping so often before its Welcome.
    """

    async def serve(connection: Connection) -> None:
        await connection.receive()
        pending = await pair.transports[1].by_name["memory"].prepare("127.0.0.1", pair.target_cut)
        kv = KVWelcome(pair.target.layout, 0, "memory", "why", (), pending.params)
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
        except ConnectionLost:
            await pending.close()

    listener = await TcpNetwork(SECRET).listen("127.0.0.1", serve)
    yield mint_ticket(SECRET, "r", P, D, (listener.address,))
    await listener.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda transfer_id: Damaged(transfer_id, 1, 0), "attempt 0 of chunk 1 is not out"),
        (lambda transfer_id: Damaged(transfer_id, -1, 0), "attempt 0 of chunk -1 is not out"),
        (lambda transfer_id: Damaged(transfer_id, 0, 1), "attempt 1 of chunk 0 is not out"),
        (lambda transfer_id: Damaged(transfer_id, 0, 2), "attempt 2 of chunk 0 is not out"),
        (lambda transfer_id: Grant(transfer_id, 0), "GRANT can't happen"),
        (lambda transfer_id: LinkReady(1, "memory", {}), "link 1 was not asked for"),
        (lambda transfer_id: Ping(), None),
    ],
)
async def test_a_targets_odd_answer_ends_the_transfer(answer: Any, text: str | None) -> None:
    async with make_pair() as pair, raw_target(pair, answer) as ticket:
        out = pair.sender.open(ticket, 4, [1], 4)
        out.commit(TOKEN)
        if text is None:
            await settle(lambda: out.lanes[0].state.name == "COMMITTED")
            out.abort("enough")
        with pytest.raises(TransferFailed, match=text or "enough"):
            await out.done()


async def test_a_target_that_calls_a_chunk_damaged_twice_at_once_ends_the_transfer() -> None:
    async with make_pair() as pair:
        damaged = [lambda transfer_id: Damaged(transfer_id, 0, 0)] * 2
        async with raw_target(pair, *damaged) as ticket:
            out = pair.sender.open(ticket, 4, [1], 4)
            out.commit(TOKEN)
            with pytest.raises(TransferFailed, match="attempt 0 of chunk 0 is not out"):
                await out.done()


async def test_a_target_that_is_slow_to_prepare_its_link_may_ping_before_its_welcome() -> None:
    verified = [lambda transfer_id: Verified(transfer_id)]
    async with make_pair() as pair, raw_target(pair, *verified, pings=2) as ticket:
        out = pair.sender.open(ticket, 4, [1], 4)
        out.commit(TOKEN)
        await out.done()


# --- peers that listen to nothing ---


class DeafConnection:
    """The connection to a peer that reads nothing any more once `is_deaf`: what is sent to it piles up here."""

    def __init__(self, inner: Connection):
        self._inner = inner
        self._never = asyncio.Event()
        self.is_deaf = False
        self.num_sent = 0

    @property
    def unsent_bytes(self) -> int:
        return self._inner.unsent_bytes

    def send(self, message: Message) -> None:
        self.num_sent += not isinstance(message, Ping)
        self._inner.send(message)

    async def drain(self) -> None:
        if self.is_deaf:
            await self._never.wait()
        await self._inner.drain()

    async def receive(self) -> Message:
        return await self._inner.receive()

    async def close(self) -> None:
        await self._inner.close()


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
        incoming = pair.receiver.expect(ticket, [4], 4, 0)
        out = sender.open(ticket, 4, [1], 0)
        await settle(lambda: out.lanes[0].state is SenderState.GRANTED)
        network.connections[0].is_deaf = True
        for layer in range(3):
            out.layer_ready(layer, 4)
        with pytest.raises(TransferFailed, match="has taken no message"):
            await out.done()
        with pytest.raises(TransferFailed):
            await incoming.verified()
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
