"""The task that keeps a worker stepping: it runs while there is work, sleeps until woken, and dies visibly.

A step under way is never cancelled: an engine goes on writing into blocks until its step ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from protocol.errors import WorkerLost

_log = logging.getLogger(__name__)


class StepLoop:
    """Calls `step` again and again; it returns whether there was anything to do, and `idle` is called where not.

    The first exception ends the loop for good: `died` is called with it, and `check_health` raises from then on.
    """

    def __init__(
        self, *, step: Callable[[], Awaitable[bool]], idle: Callable[[], None], died: Callable[[Exception], None]
    ):
        self._step = step
        self._idle = idle
        self._died = died
        self._work = asyncio.Event()
        self._stopping = False
        self._failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Must be called on the event loop that serves the worker."""
        self._task = asyncio.create_task(self._run(), name="step-loop")

    def wake(self) -> None:
        """There may be something to do now."""
        self._work.set()

    def check_health(self) -> None:
        """Raises WorkerLost where the loop isn't running."""
        if self._failure is not None:
            raise WorkerLost(f"the step loop has died: {self._failure!r}") from self._failure
        if self._task is None or self._stopping:
            raise WorkerLost("the worker is not running")

    async def stop(self) -> None:
        """Let the step under way finish, and end. May be called more than once."""
        self._stopping = True
        self._work.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                if not await self._step():
                    self._idle()
                    await self._work.wait()
        except Exception as error:
            _log.exception("the step loop has died")
            self._failure = error
            self._died(error)
