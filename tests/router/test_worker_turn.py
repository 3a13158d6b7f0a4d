"""This router's turn at one worker."""

import asyncio

import pytest

from twostroke.protocol.messages import AskTurn, EndTurn
from twostroke.router.health.suspect_turns import WorkerTurn


class Scene:
    def __init__(self):
        self.sent: list[AskTurn | EndTurn] = []
        self.turn = WorkerTurn(self.sent.append)

    async def taking(self) -> "asyncio.Task[None]":
        """Somebody who waits for it."""
        task = asyncio.create_task(self.turn.take())
        await asyncio.sleep(0)
        return task


@pytest.fixture
def scene():
    return Scene()


async def test_it_is_asked_for_once_and_shared_until_its_end(scene):
    first, second = await scene.taking(), await scene.taking()
    assert not first.done()
    scene.turn.come(1)
    async with asyncio.timeout(1):
        await asyncio.gather(first, second, scene.turn.take())
    assert scene.sent == [AskTurn(1)]
    scene.turn.end()
    scene.turn.end()
    assert scene.sent == [AskTurn(1), EndTurn()]


async def test_a_turn_that_was_given_up_is_not_taken_for_the_next(scene):
    gone = await scene.taking()
    gone.cancel()
    scene.turn.end()
    waiting = await scene.taking()
    scene.turn.come(1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    scene.turn.come(2)
    async with asyncio.timeout(1):
        await waiting
    assert scene.sent == [AskTurn(1), EndTurn(), AskTurn(2)]


async def test_one_of_two_that_wait_may_leave(scene):
    leaving, waiting = await scene.taking(), await scene.taking()
    leaving.cancel()
    await asyncio.sleep(0)
    scene.turn.come(1)
    async with asyncio.timeout(1):
        await waiting


async def test_nobody_waits_for_a_worker_that_is_gone(scene):
    waiting = await scene.taking()
    scene.turn.lose()
    async with asyncio.timeout(1):
        await waiting
    assert scene.sent == [AskTurn(1)]
    again = await scene.taking()
    assert not again.done(), "the next connection is asked anew"
    scene.turn.come(2)
    async with asyncio.timeout(1):
        await again
