"""A deadline that moves.

Limits in time, of one call and of several that overlap.

Leases, by a clock that the test moves.

What runs together ends together, whatever is cancelled meanwhile.
"""

import asyncio

import pytest

from twostroke.kvtransfer.timeouts import (
    Deadline,
    LeasedConnection,
    Patience,
    all_ended,
    finish,
    run_until_lost,
    within,
)
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Message, Ping


@pytest.fixture
def fired() -> asyncio.Event:
    return asyncio.Event()


async def test_it_expires_after_its_time(fired: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    Deadline(loop.time, 0.02, fired.set).restart()
    await fired.wait()
    assert loop.time() - start >= 0.02


async def test_a_restart_moves_it(fired: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    deadline = Deadline(loop.time, 0.05, fired.set)
    deadline.restart()
    moved = asyncio.Event()
    loop.call_later(0.03, lambda: (deadline.restart(), moved.set()))
    await moved.wait()
    start = loop.time()
    await fired.wait()
    assert loop.time() - start >= 0.05 - 1e-3


async def test_a_stopped_one_does_not_expire(fired: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    deadline, later = Deadline(loop.time, 0.01, fired.set), asyncio.Event()
    deadline.restart()
    deadline.stop()
    loop.call_later(0.03, later.set)
    await later.wait()
    assert not fired.is_set()


async def test_within_names_what_took_too_long() -> None:
    with pytest.raises(ConnectionLost, match=r"the welcome took longer than 0\.01 s"):
        await within(0.01, asyncio.Event().wait(), "the welcome")


async def test_a_call_that_waits_behind_another_has_its_own_time_after_it() -> None:
    patience = Patience(0.2)
    loop = asyncio.get_running_loop()
    start = loop.time()
    first_done = loop.create_future()
    loop.call_later(0.15, first_done.set_result, None)

    async def first() -> None:
        await patience.wait(first_done, "the first")

    second = asyncio.create_task(patience.wait(asyncio.Event().wait(), "the second"))
    await first()
    with pytest.raises(ConnectionLost, match=r"the second took longer than 0\.2 s"):
        await second
    assert loop.time() - start >= 0.35 - 1e-3


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


async def test_a_peer_that_takes_no_message_for_a_lease_is_lost() -> None:
    connection = FakeConnection()
    leased = LeasedConnection(connection, asyncio.get_running_loop().time, 0.05)
    await leased.drain()
    connection.drain = asyncio.Event().wait  # type: ignore[assignment, method-assign]
    with pytest.raises(ConnectionLost, match="has taken no message"):
        await asyncio.wait_for(leased.drain(), 20)


async def test_posting_to_a_closed_connection_is_left_to_its_reader() -> None:
    connection = FakeConnection()
    await connection.close()
    LeasedConnection(connection, asyncio.get_running_loop().time, 1).post(Ping())


async def lose(reason: str) -> None:
    raise ConnectionLost(reason)


async def test_the_parts_of_a_connection_end_together() -> None:
    ended = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert await run_until_lost(wait_for_ever(), lose("gone")) == "gone"
    assert ended.is_set()


async def test_a_mistake_in_a_part_is_not_taken_for_a_lost_connection() -> None:
    async def divide() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_until_lost(divide(), lose("gone"))


async def test_a_part_that_ends_slowly_is_waited_for_though_the_waiter_is_cancelled_twice() -> None:
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def close() -> None:
        await may_end.wait()
        ended.set()

    async def hold() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await finish(close())

    running = asyncio.create_task(run_until_lost(hold()))
    await begun.wait()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not running.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_what_must_be_finished_hands_on_its_error() -> None:
    with pytest.raises(ConnectionLost, match="gone"):
        await finish(lose("gone"))


async def test_all_ended_is_told_of_no_results() -> None:
    task = asyncio.create_task(lose("gone"))
    await all_ended([task])
    assert isinstance(task.exception(), ConnectionLost)
