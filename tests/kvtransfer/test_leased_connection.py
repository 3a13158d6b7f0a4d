"""Leases, by a clock that the test moves."""

import asyncio

import pytest

from twostroke.kvtransfer.timeouts import LeasedConnection
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Message, Ping


class FakeConnection:
    """Keeps what is sent; receives what is put."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.is_closed = False
        self.unsent_bytes = 0

    def send(self, message: Message) -> None:
        if self.is_closed:
            raise ConnectionLost("closed")
        self.sent.append(message)

    async def drain(self) -> None:
        pass

    async def receive(self) -> Message:
        return await self.inbox.get()

    async def close(self) -> None:
        self.is_closed = True


async def test_silence_for_a_lease_ends_the_connection_and_pings_go_out_meanwhile() -> None:
    connection = FakeConnection()
    loop = asyncio.get_running_loop()
    with pytest.raises(ConnectionLost, match="lease has ended"):
        await asyncio.wait_for(LeasedConnection(connection, loop.time, 0.09).watch(), 20)
    assert 2 <= len(connection.sent) <= 3
    assert set(connection.sent) == {Ping()}


async def test_time_in_which_this_process_slept_is_not_the_peers_silence() -> None:
    connection = FakeConnection()
    now = 100.0
    leased = LeasedConnection(connection, lambda: now, 0.03)
    watch = asyncio.create_task(leased.watch())
    await asyncio.sleep(0)
    now += 1000.0  # stopped, and woken
    await asyncio.wait([watch], timeout=0.03)
    assert not watch.done()
    await connection.inbox.put(Ping())
    await leased.receive()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_a_peer_that_takes_no_message_for_a_lease_is_lost_though_it_pings_without_end() -> None:
    connection = FakeConnection()
    loop = asyncio.get_running_loop()
    leased = LeasedConnection(connection, loop.time, 0.09)
    never = asyncio.Event()

    async def be_pinged() -> None:
        while True:
            connection.inbox.put_nowait(Ping())
            await leased.receive()
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        pinged = group.create_task(be_pinged())
        for _ in range(20):
            await leased.drain()  # it takes some first
        connection.drain = never.wait  # type: ignore[assignment, method-assign]
        draining = [group.create_task(leased.drain()) for _ in range(2)]
        with pytest.raises(ConnectionLost, match="has taken no message"):
            await asyncio.wait_for(leased.watch(), 20)
        for task in (pinged, *draining):
            task.cancel()


async def test_posting_to_a_closed_connection_is_left_to_its_reader() -> None:
    connection = FakeConnection()
    await connection.close()
    LeasedConnection(connection, asyncio.get_running_loop().time, 1).post(Ping())
