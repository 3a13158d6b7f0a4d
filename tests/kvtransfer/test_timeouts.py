"""Limits in time of calls that overlap, and errors of what runs together.

Deadlines and leases: the simulation of transfers (test_lifecycle_safeguards.py), and test_transfer_faults.py.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.kvtransfer.timeouts import (
    LeasedConnection,
    Patience,
    all_ended,
    finish,
    run_until_lost,
)
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Message, Ping


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


async def test_posting_to_a_closed_connection_is_left_to_its_reader() -> None:
    def send(_: Message) -> None:
        raise ConnectionLost("closed")

    connection: Any = SimpleNamespace(send=send)
    LeasedConnection(connection, asyncio.get_running_loop().time, 1).post(Ping())


async def lose(reason: str) -> None:
    raise ConnectionLost(reason)


async def test_a_mistake_in_a_part_is_not_taken_for_a_lost_connection() -> None:
    async def divide() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_until_lost(divide(), lose("gone"))


async def test_what_must_be_finished_hands_on_its_error() -> None:
    with pytest.raises(ConnectionLost, match="gone"):
        await finish(lose("gone"))


async def test_all_ended_ignores_results() -> None:
    task = asyncio.create_task(lose("gone"))
    await all_ended([task])
    assert isinstance(task.exception(), ConnectionLost)
