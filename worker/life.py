"""A worker's life, the same for both kinds: it steps, falls quiet, drains, dies of its engine, is stopped.

The task that keeps a worker stepping: it runs while there is work, sleeps until woken, and dies visibly.

A step under way is not cancelled: an engine goes on writing into blocks until its step ends. One that takes longer
than any step may is wedged: its worker is unhealthy, and is waited for no longer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import WorkerLeaving, WorkerLost
from twostroke.worker.block_pool import BlockPool


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


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerCallbacks:
    """What a worker does and tells. Only `step` and `hang_up` wait."""

    step: Callable[[], Awaitable[bool]]  # run one step; whether there was anything to do
    is_busy: Callable[[], bool]  # whether any call, transfer or trial is under way
    died: Callable[[str], None]  # the engine died, for this reason: fail every request
    hang_up: Callable[[], Coroutine[Any, Any, None]]  # close the token channel
    is_ahead: Callable[[], bool] = lambda: False  # whether `step` has begun another step than the one it saw end


class WorkerLife:
    """Owns a worker's step loop. `worker_id` is for messages; `pools` are checked whenever the worker is idle.

    An idle worker's block accounting is checked at most every `integrity_interval_s`. A step longer than `max_step_s`
    is stuck.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        pools: Sequence[BlockPool],
        clock: Clock,
        integrity_interval_s: float,
        max_step_s: float,
        callbacks: WorkerCallbacks,
    ):
        self._worker_id = worker_id
        self._pools = pools
        self._clock = clock
        self._integrity_interval_s = integrity_interval_s
        self._callbacks = callbacks
        self._loop = StepLoop(
            step=callbacks.step,
            is_ahead=callbacks.is_ahead,
            idle=self._idle,
            died=self._died,
            clock=clock,
            max_step_s=max_step_s,
        )
        self._quiet = asyncio.Event()  # set where the step loop finds that nothing is under way, and at its end
        self._is_stepping = False
        self._is_draining = False
        self._is_ending = False  # draining, and for good
        self._checked_at = float("-inf")
        self._hanging_up: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to step. Must be called on the event loop that serves the worker."""
        self._loop.start()
        self._is_stepping = True

    def check_health(self) -> None:
        """Raises WorkerLost where the step loop has died, does not run, or is stuck in a step."""
        self._loop.check_health()

    def check_takes_requests(self) -> None:
        """Raises WorkerLost where the worker is not healthy, WorkerLeaving where it is draining."""
        self.check_health()
        if self._is_draining:
            raise WorkerLeaving(f"worker {self._worker_id} is draining")

    def wake(self) -> None:
        """There may be something to do now: a request, free blocks, or nothing left at all."""
        self._loop.wake()

    def engine_lost(self, reason: str) -> None:
        """The engine can't go on, though perhaps no step is under way that would tell: the worker dies of it."""
        self._loop.fail(WorkerLost(reason))

    @property
    def is_draining(self) -> bool:
        """Whether the worker takes no new requests, since it is to end, or a router has said so."""
        return self._is_draining

    def take_no_more(self) -> None:
        """Let no new request in, unless the worker is to `stay`."""
        self._is_draining = True

    def stay(self) -> None:
        """Let requests in again: whoever has said that the worker is taken down was wrong. Not once it is to end."""
        self._is_draining = self._is_ending

    async def drain(self) -> None:
        """Take no new requests, and return once nothing is under way."""
        self._is_ending = self._is_draining = True
        if self._is_stepping and self._callbacks.is_busy():
            self._quiet.clear()
            self._loop.wake()
            await self._quiet.wait()

    async def stop(self) -> None:
        """Step no more; steps under way finish first, unless one is stuck. May be called more than once."""
        self._is_ending = self._is_draining = True
        await self._loop.stop()
        if self._hanging_up is not None:
            await self._hanging_up
        self._is_stepping = False
        self._quiet.set()

    def _idle(self) -> None:
        if self._callbacks.is_busy():
            return
        self._quiet.set()
        now = self._clock()
        if now - self._checked_at >= self._integrity_interval_s:
            self._checked_at = now
            for pool in self._pools:
                pool.check_integrity()
                if pool.owned_blocks:
                    _log.error("%d blocks are owned although the worker is idle", pool.owned_blocks)

    def _died(self, error: Exception) -> None:
        self._callbacks.died(f"the engine of worker {self._worker_id} died: {error!r}")
        self._is_stepping = False
        self._quiet.set()
        # Routers see the channel go and turn elsewhere, well before anybody has asked for our health.
        self._hanging_up = asyncio.create_task(self._callbacks.hang_up(), name="hang up")
