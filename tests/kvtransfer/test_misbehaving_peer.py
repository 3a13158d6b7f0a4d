"""A prefill worker that breaks the protocol, message by message, beside one that does not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import xxhash
from transfer_harness import TOKEN, BytesStore, D, P, Pair, make_pair

from kvtransfer.config import TransferConfig
from kvtransfer.link import DataLink
from kvtransfer.transports.tcp import TcpTransport
from protocol.errors import ConnectionLost, TransferFailed
from protocol.messages import Abort, Chunk, Commit, Grant, Hello, Message, Offer, Ping, StatsFrame, Verified, Welcome
from protocol.network import Connection
from protocol.stats import WorkerStats
from protocol.tickets import Peer, Ticket

BLOCK_BYTES = 96
NEIGHBOUR = Peer("prefill-1", 33)


@dataclass
class RawPeer:
    """A prefill worker whose messages the test writes itself."""

    connection: Connection
    link: DataLink
    store: BytesStore

    async def send_chunk(
        self, ticket: Ticket, sequence: int, layer: int, first: int, count: int = 1, **odd: int
    ) -> None:
        """Chunk and bytes; `odd` fields of the message replace the true ones, the bytes stay `num_bytes`."""
        num_bytes = odd.get("num_bytes", count * BLOCK_BYTES)
        ids = [0] * max(1, num_bytes // BLOCK_BYTES)
        digest = xxhash.xxh3_128(self.store.block(0, 0) * len(ids)).digest()
        self.connection.send(Chunk(ticket.transfer_id, sequence, layer, first, count, num_bytes, digest))
        await self.link.send(0, ids)

    async def answer(self) -> Message:
        """The next message that is no Ping."""
        while isinstance(message := await self.connection.receive(), Ping):
            pass
        return message


@contextlib.asynccontextmanager
async def raw_peer(pair: Pair) -> AsyncIterator[RawPeer]:
    store = BytesStore()
    store.fill(5)
    transport = TcpTransport(store)
    connection = await pair.network.connect(pair.address)
    connection.send(Hello(P, D, "f", "tcp"))
    welcome = await connection.receive()
    assert isinstance(welcome, Welcome)
    link = await transport.join(welcome.link)
    try:
        yield RawPeer(connection, link, store)
    finally:
        await transport.close()
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
    ("sequence", "layer", "first", "count", "odd", "text"),
    [
        (1, 0, 1, 1, {}, "chunk 1 came in place of 0"),
        (0, 3, 1, 1, {}, "there is no layer 3"),
        (0, -1, 1, 1, {}, "there is no layer -1"),
        (0, 0, 1, 3, {}, "there are no blocks 1 to 4"),
        (0, 0, -1, 2, {}, "there are no blocks -1 to 1"),
        (0, 0, 1, 0, {"num_bytes": 96}, "there are no blocks 1 to 1"),
        (0, 0, 1, 1, {"num_bytes": 192}, "1 blocks are not 192 bytes"),
        (0, 0, 1, 2, {"num_bytes": 96}, "2 blocks are not 96 bytes"),
        (0, 0, 0, 1, {}, "block 0 was skipped in the grant"),
    ],
)
async def test_a_chunk_that_can_not_be_ends_its_transfer_alone(
    sequence: int, layer: int, first: int, count: int, odd: dict[str, int], text: str
) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer, skip=1)
        good, good_waiting = await granted(pair, peer, "good", skip=1)
        await peer.send_chunk(ticket, sequence, layer, first, count, **odd)
        answer = await peer.answer()
        assert isinstance(answer, Abort)
        assert text in answer.reason
        with pytest.raises(TransferFailed, match=text):
            await waiting
        assert pair.target.copy() == [bytes(32 * BLOCK_BYTES)] * 3
        for layer_index in range(3):
            await peer.send_chunk(good, layer_index, layer_index, 1, 2)
        peer.connection.send(Commit(good.transfer_id, 3, TOKEN))
        assert await peer.answer() == Verified(good.transfer_id), "the stream is still in step"
        assert await good_waiting == TOKEN


async def test_a_block_that_comes_twice_ends_its_transfer() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        await peer.send_chunk(ticket, 0, 0, 0, 2)
        await peer.send_chunk(ticket, 1, 0, 1, 2)
        with pytest.raises(TransferFailed, match="blocks 1 to 3 of layer 0 came twice"):
            await waiting


@pytest.mark.parametrize(("num_layers", "num_chunks"), [(2, 2), (2, 3), (3, 2)])
async def test_a_commit_of_less_than_everything_is_not_verified(num_layers: int, num_chunks: int) -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)
        for layer in range(num_layers):
            await peer.send_chunk(ticket, layer, layer, 0, 3)
        peer.connection.send(Commit(ticket.transfer_id, num_chunks, TOKEN))
        with pytest.raises(TransferFailed, match=f"committed {num_chunks} chunks, {num_layers} came"):
            await waiting


async def test_chunks_and_commits_of_unknown_transfers_are_discarded() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        await peer.send_chunk(pair.ticket("never offered"), 0, 0, 0, 3)
        peer.connection.send(Commit(b"?" * 16, 1, TOKEN))
        ticket, waiting = await granted(pair, peer)
        for layer in range(3):
            await peer.send_chunk(ticket, layer, layer, 0, 3)
        peer.connection.send(Commit(ticket.transfer_id, 3, TOKEN))
        assert await waiting == TOKEN


async def test_an_offer_is_good_only_for_the_prefill_worker_that_its_ticket_names() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        ticket = pair.ticket(prefill=NEIGHBOUR)
        pair.receiver.expect(ticket, [4, 5, 6], 12, 0)
        peer.connection.send(Offer(ticket, 12))
        answer = await peer.answer()
        assert isinstance(answer, Abort)
        assert "names prefill worker prefill-1, not prefill-0" in answer.reason
        restarted = pair.ticket(prefill=Peer(P.worker_id, P.epoch + 1))
        peer.connection.send(Offer(restarted, 12))
        answer = await peer.answer()
        assert isinstance(answer, Abort)
        assert "epoch" in answer.reason


async def test_nobody_aborts_or_commits_the_transfer_of_another_connection() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer, raw_peer(pair) as other:
        ticket, waiting = await granted(pair, peer)
        other.connection.send(Abort(ticket.transfer_id, "not yours"))
        other.connection.send(Commit(ticket.transfer_id, 0, TOKEN))
        await other.send_chunk(ticket, 0, 0, 0, 3)
        await granted_and_done(pair, other, "theirs")
        for layer in range(3):
            await peer.send_chunk(ticket, layer, layer, 0, 3)
        peer.connection.send(Commit(ticket.transfer_id, 3, TOKEN))
        assert await waiting == TOKEN


async def granted_and_done(pair: Pair, peer: RawPeer, request_id: str) -> None:
    """A whole transfer: everything sent before it has been handled then."""
    ticket = pair.ticket(request_id)
    incoming = pair.receiver.expect(ticket, [10], 4, 0)
    peer.connection.send(Offer(ticket, 4))
    assert await peer.answer() == Grant(ticket.transfer_id, 0)
    for layer in range(3):
        await peer.send_chunk(ticket, layer, layer, 0)
    peer.connection.send(Commit(ticket.transfer_id, 3, TOKEN))
    await incoming.verified()


@pytest.mark.parametrize(
    "message",
    [
        StatsFrame(WorkerStats()),
        Grant(b"x" * 16, 0),
        Hello(P, D, "f", "tcp"),
        Chunk(b"x" * 16, 0, 0, 0, 1, 0, b""),
        Chunk(b"x" * 16, 0, 0, 0, 1, -96, b""),
        Chunk(b"x" * 16, 0, 0, 0, 1, 1 << 40, b""),
    ],
)
async def test_a_stream_that_can_not_be_trusted_is_closed_and_the_neighbour_goes_on(message: Message) -> None:
    async with make_pair() as pair:
        neighbour = pair.make_sender(peer=NEIGHBOUR)
        ticket = pair.ticket("neighbour", prefill=NEIGHBOUR)
        out = neighbour.open(ticket, 4, [1], 0)
        async with raw_peer(pair) as peer:
            _, waiting = await granted(pair, peer)
            peer.connection.send(message)
            with pytest.raises(TransferFailed, match=r"does not send|can't be"):
                await waiting
            with pytest.raises(ConnectionLost):
                await peer.answer()
            with pytest.raises(ConnectionLost):
                await peer.link.receive(0, [0])  # the link is closed too
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
            peer.connection.send(Chunk(b"x" * 16, 0, 0, 0, 1, 96, b""))
        with pytest.raises(TransferFailed, match="ahead of its bytes"):
            await waiting


async def test_bytes_that_never_come_close_the_connection_within_a_lease_though_pings_do_come() -> None:
    async with make_pair(config=TransferConfig(lease_s=0.2)) as pair, raw_peer(pair) as peer:
        ticket, waiting = await granted(pair, peer)

        async def ping() -> None:
            while True:
                peer.connection.send(Ping())
                await asyncio.sleep(0.02)

        pinging = asyncio.create_task(ping())
        peer.connection.send(Chunk(ticket.transfer_id, 0, 0, 0, 3, 3 * BLOCK_BYTES, b""))
        with pytest.raises(TransferFailed, match="receiving a chunk took longer"):
            await waiting
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)


async def test_an_abort_is_heard_while_a_chunk_before_it_is_still_under_way() -> None:
    async with make_pair() as pair, raw_peer(pair) as peer:
        slow, slow_waiting = await granted(pair, peer)
        other, other_waiting = await granted(pair, peer, "other")
        peer.connection.send(Chunk(slow.transfer_id, 0, 0, 0, 3, 3 * BLOCK_BYTES, b"wrong"))
        peer.connection.send(Abort(other.transfer_id, "the client left"))
        with pytest.raises(TransferFailed, match="the client left"):
            await other_waiting
        assert not slow_waiting.done()
        await peer.link.send(0, [0, 1, 2])
        with pytest.raises(TransferFailed, match="damaged"):
            await slow_waiting
