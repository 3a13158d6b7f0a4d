"""The task that keeps a worker stepping: it runs while there is work, sleeps until woken, and dies visibly.

A step under way is not cancelled: an engine goes on writing into blocks until its step ends. One that takes longer
than any step may is wedged: its worker is unhealthy, and is waited for no longer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import WorkerLost

_log = logging.getLogger(__name__)


class StepLoop:
    """Calls `step` again and again; it returns whether there was anything to do, and `idle` is called where not.

    The first exception ends the loop for good: `died` is called with it, and `check_health` raises from then on. It
    also raises while a step takes longer than `max_step_s`. `is_ahead` tells whether `step` has begun a step whose end
    only its next call will see: the loop doesn't end before that.
    """

    def __init__(
        self,
        *,
        step: Callable[[], Awaitable[bool]],
        is_ahead: Callable[[], bool],
        idle: Callable[[], None],
        died: Callable[[Exception], None],
        clock: Clock,
        max_step_s: float,
    ):
        self._step = step
        self._is_ahead = is_ahead
        self._idle = idle
        self._died = died
        self._clock = clock
        self._max_step_s = max_step_s
        self._step_began: float | None = None  # None between steps
        self._work = asyncio.Event()
        self._stopping = False
        self._failure: Exception | None = None
        self._fault: Exception | None = None  # to end the loop with
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Must be called on the event loop that serves the worker."""
        self._task = asyncio.create_task(self._run(), name="step-loop")

    def wake(self) -> None:
        """There may be something to do now."""
        self._work.set()

    def fail(self, error: Exception) -> None:
        """End the loop with `error`, or with that of a step under way: the engine is known to be lost, and fails it."""
        self._fault = error
        self._work.set()

    def check_health(self) -> None:
        """Raises WorkerLost where the loop isn't running, or is stuck in a step."""
        if self._failure is not None:
            raise WorkerLost(f"the step loop has died: {self._failure!r}") from self._failure
        if self._task is None or self._stopping:
            raise WorkerLost("the worker is not running")
        if self._step_time_left() < 0:
            raise WorkerLost(f"a step has not ended in {self._max_step_s:g} s")

    async def stop(self) -> None:
        """Let the steps under way finish, and end. May be called more than once.

        A step that is stuck is left alone, with the blocks that it may write into: only the process's end ends it.
        """
        self._stopping = True
        self._work.set()
        if self._task is None:
            return
        while not self._task.done() and (time_left := self._step_time_left()) > 0:  # each has its own time
            await asyncio.wait({self._task}, timeout=time_left)
        if not self._task.done():
            _log.error("a step has not ended in %g s: the worker stops without it", self._max_step_s)
            self._task.cancel()
            await asyncio.wait({self._task})

    def _step_time_left(self) -> float:
        """Seconds until the step under way, or one that began now, is stuck."""
        began = self._step_began
        return self._max_step_s - (0.0 if began is None else self._clock() - began)

    async def _run(self) -> None:
        try:
            while not self._stopping or self._is_ahead():
                self._work.clear()
                if self._fault is not None and not self._is_ahead():
                    raise self._fault
                self._step_began = self._clock()
                has_stepped = await self._step()
                self._step_began = None
                if not has_stepped:
                    self._idle()
                    await self._work.wait()
        except Exception as error:
            _log.exception("the step loop has died")
            self._failure = error
            self._died(error)
