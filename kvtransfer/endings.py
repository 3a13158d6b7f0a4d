"""How things that run together end together, whatever is cancelled meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from twostroke.protocol.errors import ConnectionLost


async def all_ended(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Wait until the tasks have ended, whatever their results. A cancellation of the waiter is raised after that."""
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait([task for task in tasks if not task.done()])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def finish(work: Coroutine[None, None, None]) -> None:
    """Do `work` to its end, though this is cancelled meanwhile: for what must not be left half done."""
    task = asyncio.get_running_loop().create_task(work)
    await all_ended([task])
    task.result()


async def run_until_lost(*parts: Coroutine[None, None, None]) -> str:
    """Run the parts of a connection together until one raises ConnectionLost; returns why. All have ended then.

    Not a TaskGroup: that cancels in the order of a set, and a simulation has to replay exactly.
    """
    tasks = [asyncio.get_running_loop().create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await all_ended(tasks)
    lost = _loss(tasks)
    return "the connection was closed" if lost is None else str(lost)


async def run_movers(
    *movers: Coroutine[None, None, None], close: Callable[[], Awaitable[None]]
) -> ConnectionLost | None:
    """Run the movers of one link until all return or one loses the link, then `close` it, though cancelled.

    Returns the loss, if there was one. Any other error of a mover is raised once the link is closed.
    """
    tasks = [asyncio.get_running_loop().create_task(mover) for mover in movers]

    async def end() -> None:
        for task in tasks:
            task.cancel()
        await all_ended(tasks)
        await close()

    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await finish(end())
    return _loss(tasks)


def _loss(tasks: Collection["asyncio.Task[None]"]) -> ConnectionLost | None:
    """The first task's ConnectionLost. Raises any other error."""
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, ConnectionLost):
            raise error
    return errors[0] if errors else None  # type: ignore[return-value]
