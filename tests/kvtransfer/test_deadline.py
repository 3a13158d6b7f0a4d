"""A deadline that moves."""

import asyncio

import pytest

from twostroke.kvtransfer.timeouts import Deadline


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
