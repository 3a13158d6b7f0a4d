"""What runs together ends together, whatever is cancelled meanwhile."""

import asyncio

import pytest

from twostroke.kvtransfer.timeouts import all_ended, finish, run_movers, run_until_lost
from twostroke.protocol.errors import ConnectionLost


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


async def test_movers_that_return_leave_the_others_time_to_end() -> None:
    order: list[str] = []
    go = asyncio.Event()

    async def slow() -> None:
        await go.wait()
        order.append("moved")

    async def quick() -> None:
        go.set()

    async def close() -> None:
        order.append("closed")

    assert await run_movers(slow(), quick(), close=close) is None
    assert order == ["moved", "closed"]


async def test_a_lost_link_is_closed_after_its_movers_have_ended_and_before_anybody_hears_of_it() -> None:
    order: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("ended")

    async def close() -> None:
        order.append("closed")

    loss = await run_movers(wait_for_ever(), lose("gone"), close=close)
    assert str(loss) == "gone"
    assert order == ["ended", "closed"]


async def test_a_movers_mistake_is_raised_once_the_link_is_closed() -> None:
    is_closed = asyncio.Event()

    async def divide() -> None:
        raise ZeroDivisionError

    async def close() -> None:
        is_closed.set()

    with pytest.raises(ZeroDivisionError):
        await run_movers(divide(), close=close)
    assert is_closed.is_set()


async def test_a_link_is_closed_to_the_end_though_its_user_is_cancelled_again_and_again() -> None:
    may_close, begun, is_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait_for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def close() -> None:
        await may_close.wait()
        is_closed.set()

    running = asyncio.create_task(run_movers(wait_for_ever(), close=close))
    await begun.wait()
    for _ in range(6):
        running.cancel()
        await asyncio.sleep(0)
    assert not running.done()
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_closed.is_set()
