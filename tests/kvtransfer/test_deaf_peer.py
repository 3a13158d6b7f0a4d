"""Peers that listen to nothing: nobody waits for them for longer than a lease."""

import asyncio
import time

import pytest
from raw_peer import RawPeer, raw_peer
from transfer_harness import SECRET, D, make_pair, settle

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.rules.lifecycle import SenderState
from twostroke.protocol.errors import ConnectionLost, TransferFailed
from twostroke.protocol.messages import Message, Offer, Ping
from twostroke.protocol.network import Connection, Handler, Listener, TcpNetwork
from twostroke.protocol.requests import Address


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
