"""A worker's life, the same for both kinds: it steps, falls quiet, drains, dies of its engine, is stopped."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.model.block_pool import BlockPool
from twostroke.model.step_loop import StepLoop
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import WorkerLeaving, WorkerLost

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
