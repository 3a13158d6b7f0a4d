"""Requests at moments of their own."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def send_at_moments(
    moments: Iterable[float], send: Callable[[int, float], Coroutine[Any, Any, Result]]
) -> list[Result]:
    """Call `send`, with a moment's number and its `time.perf_counter`, when it has come; returns when all calls have.

    The moments are seconds after now, in their order. Each is asked for when the one before it has come: whoever tells
    them may stop at any time.
    """
    began = time.perf_counter()
    tasks: list[asyncio.Task[Result]] = []
    async with asyncio.TaskGroup() as group:
        for number, moment in enumerate(moments):
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            tasks.append(group.create_task(send(number, began + moment)))
    return [task.result() for task in tasks]
