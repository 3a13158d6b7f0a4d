"""A source that has said hello, whose further messages the test writes itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.rigs.kv_pair import BLOCK_BYTES, BytesStore, D, P, Pair, make_transport, reach
from twostroke.kvtransfer.layout import Segment
from twostroke.kvtransfer.link import DataLink, chunk_seed
from twostroke.protocol.messages import Chunk, Grant, Hello, KVHello, Message, Offer, Ping, Run, Welcome
from twostroke.protocol.network import Connection
from twostroke.protocol.requests import Peer, Ticket

NEIGHBOUR = Peer("prefill-1", 33)
ANYBODY = b"x" * 16


@dataclass
class RawPeer:
    """A source whose messages the test writes itself."""

    connection: Connection
    link: DataLink
    store: BytesStore
    name: Peer = P

    async def send_chunk(self, ticket: Ticket, sequence: int, *runs: Run) -> None:
        """Chunk and bytes: those of block 0, as often as it takes."""
        chunk = announced(ticket.transfer_id, sequence, *runs)
        self.connection.send(chunk)
        await self.send_bytes(chunk)

    async def send_bytes(self, chunk: Chunk, seed: int | None = None) -> None:
        num_units = sum(run.num_units for run in chunk.runs)
        await self.link.send([Segment(0, (0,) * num_units)], chunk_seed(chunk, self.name, D) if seed is None else seed)

    async def answer(self) -> Message:
        """The next message that is no Ping."""
        while isinstance(message := await self.connection.receive(), Ping):
            pass
        return message


def announced(transfer_id: bytes, sequence: int, *runs: Run) -> Chunk:
    num_bytes = sum(run.num_units for run in runs) * BLOCK_BYTES
    return Chunk(transfer_id, sequence, runs, num_bytes)


def greeting(pair: Pair, peer: Peer = P) -> Hello:
    return Hello(peer, D, KVHello(pair.source.layout, 0, "raw", reach("tcp")))


@contextlib.asynccontextmanager
async def raw_peer(pair: Pair, peer: Peer = P) -> AsyncIterator[RawPeer]:
    store = BytesStore()
    store.fill(5)
    transport = make_transport("tcp", store)
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
        await transport.close()


async def granted(
    pair: Pair, peer: RawPeer, request_id: str = "r", skip: int = 0
) -> tuple[Ticket, asyncio.Task[object]]:
    """A transfer of blocks 4, 5, 6 (12 tokens), and a task that awaits it."""
    ticket = pair.ticket(request_id)
    incoming = pair.receiver.expect_transfer(ticket, [4, 5, 6], 12, skip)
    peer.connection.send(Offer(ticket, 12))
    assert await peer.answer() == Grant(ticket.transfer_id, skip)
    return ticket, asyncio.create_task(incoming.verified())
