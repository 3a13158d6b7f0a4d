"""What the faulty network does to messages, on a connection in memory."""

import asyncio

import pytest

from tests.chaos.faulty_network import FaultyNetwork
from tests.chaos.orders import Tamper
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Cancel, Hello, Message, Ping, PrefillFailed
from twostroke.protocol.network import Connection, Handler, Listener
from twostroke.protocol.requests import Address, Peer

HERE = Address("127.0.0.1", 1)
HELLO = Hello(Peer("router", 1), Peer("worker", 2))


class Wire:
    """A Network of one connection, whose messages a test reads and writes."""

    unsent_bytes = 0

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.coming: asyncio.Queue[Message] = asyncio.Queue()
        self.is_closed = False
        self.send = self.sent.append
        self.receive = self.coming.get

    async def connect(self, address: Address) -> Connection:
        return self

    async def listen(self, host: str, handler: Handler) -> Listener:
        await handler(self)
        raise ConnectionLost("one is all there is")

    async def drain(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


async def joined() -> tuple[FaultyNetwork, Wire, Connection]:
    """A connection to another worker."""
    wire = Wire()
    network = FaultyNetwork(wire)
    return network, wire, await network.connect(HERE)


async def test_a_partition_holds_messages_up_and_lets_them_go_in_their_order() -> None:
    network, wire, connection = await joined()
    barrier = network.barriers["workers"]
    barrier.close()
    connection.send(Cancel("1"))
    connection.send(Cancel("2"))
    wire.coming.put_nowait(Ping())
    receiving = asyncio.create_task(connection.receive())
    for _ in range(5):  # it comes, and meets the barrier
        await asyncio.sleep(0)
    assert (wire.sent, receiving.done()) == ([], False)
    barrier.open()
    assert wire.sent == [Cancel("1"), Cancel("2")]
    assert await receiving == Ping()
    assert barrier.held == 3


async def test_a_connection_that_is_closed_in_a_partition_says_so_and_sends_nothing_afterwards() -> None:
    network, wire, connection = await joined()
    network.barriers["workers"].close()
    connection.send(Ping())
    wire.coming.put_nowait(Ping())
    receiving = asyncio.create_task(connection.receive())
    await asyncio.sleep(0)
    await connection.close()
    with pytest.raises(ConnectionLost):
        await receiving
    network.barriers["workers"].open()
    assert wire.sent == []
    assert wire.is_closed


async def test_one_side_is_cut_off_and_not_the_other() -> None:
    network, wire, connection = await joined()
    assert await network.cut("routers") == 0
    network.barriers["routers"].close()
    connection.send(Ping())
    assert wire.sent == [Ping()]
    assert await network.cut("workers") == 1
    assert wire.is_closed


async def test_a_router_is_known_by_its_hello() -> None:
    wire = Wire()
    network = FaultyNetwork(wire)
    wire.coming.put_nowait(HELLO)

    async def handle(connection: Connection) -> None:
        await connection.receive()
        assert await network.cut("routers") == 1

    with pytest.raises(ConnectionLost):
        await network.listen("127.0.0.1", handle)
    assert network.connections == set()


@pytest.mark.parametrize(("order", "copies"), [(Tamper("Cancel", "repeat"), 2), (Tamper("Cancel", "drop"), 0)])
async def test_the_next_message_of_a_type_is_tampered_with_and_no_other(order: Tamper, copies: int) -> None:
    network, wire, connection = await joined()
    tampering = asyncio.create_task(network.tamper(order, patience_s=5.0))
    await asyncio.sleep(0)
    for message in (PrefillFailed("0"), Cancel("1"), Cancel("2")):
        connection.send(message)
    assert wire.sent == [PrefillFailed("0"), *[Cancel("1")] * copies, Cancel("2")]
    assert await tampering == 1
