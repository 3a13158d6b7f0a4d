"""The step loop of a worker, the same in both roles: it steps, idles, drains, dies of its engine, or is stopped.

One task keeps a worker stepping: it runs while there is work, sleeps until woken, and dies visibly. A step under way is
not cancelled, since an engine writes into blocks until its step ends. Another task watches the steps: a step that takes
longer than its bound is hung, and the worker dies of it as of an error, except that the step keeps its blocks.
`StepsUnderWay` holds the steps that the engine has been given and has not finished: one that runs, and perhaps the next
behind it.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from twostroke.model.step import BlockCopy, Engine, OnLayer, SequenceStep
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import WorkerLeaving, WorkerLost
from twostroke.protocol.requests import SampledToken
from twostroke.protocol.stats import StepCosts
from twostroke.worker.config import WorkerConfig
from twostroke.worker.constants import AHEAD_S, MAX_BROKEN_REQUESTS, WATCH_S
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.step_costs import StepContent, StepCostFit

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class StepLoop:
    """Calls `step` again and again. An exception or a hung step ends that: the worker has died."""

    step: Callable[[], Awaitable[bool]]  # runs one step; False: there is nothing to do
    is_busy: Callable[[], bool]  # anything is under way
    fail_all: Callable[[str], None]  # ends all requests
    hang_up: Callable[[], Coroutine[Any, Any, None]]
    steps: Sized  # those under way; the loop does not leave the engine before they have ended
    worker_id: str  # for messages
    pools: Sequence[BlockPool]  # checked where the worker is idle
    clock: Clock
    config: WorkerConfig
    step_bound_s: Callable[[], float]  # after which the step that runs is hung
    is_draining: bool = field(default=False, init=False)
    """True while the worker takes no new requests, since it is to end, or a router has said so."""
    _is_ending: bool = field(default=False, init=False)  # draining, and for good
    _is_ordered: bool = field(default=False, init=False)  # an operator has it drain
    _is_stopping: bool = field(default=False, init=False)
    _task: "asyncio.Task[None] | None" = field(default=None, init=False)
    _watch: "asyncio.Task[None] | None" = field(default=None, init=False)
    _work: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # Set where nothing is under way, and at the end.
    _quiet: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _step_began: float | None = field(default=None, init=False)  # None between steps
    _checked_at: float = field(default=-math.inf, init=False)
    _engine_loss: WorkerLost | None = field(default=None, init=False)  # the error to die of
    _failure: BaseException | None = field(default=None, init=False)  # the error it died of
    has_hung: bool = field(default=False, init=False)  # it died of a step that did not end
    _hanging_up: "asyncio.Task[None] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Begin to step, on the event loop that serves the worker."""
        self._task = asyncio.create_task(self._run(), name="step-loop")
        self._watch = asyncio.create_task(self._watch_steps(), name="step-watch")

    def wake(self) -> None:
        """Look for work: there may be a request, free blocks, or nothing left at all."""
        self._work.set()

    def engine_lost(self, reason: str) -> None:
        """Let the worker die of an engine that can't go on, though perhaps no step is under way that would fail.

        Where a step is under way, the worker dies of that step's error, which has the same cause.
        """
        self._engine_loss = WorkerLost(reason)
        self._work.set()

    def check_health(self) -> None:
        """Raises WorkerLost where the worker has died, of a hung step too, or does not run."""
        if self._failure is not None:
            raise WorkerLost(f"the step loop has died: {self._failure!r}") from self._failure
        if self._task is None or self._is_stopping:
            raise WorkerLost("the worker is not running")

    def check_takes_requests(self) -> None:
        """Raises WorkerLost where the worker is not healthy, WorkerLeaving where it is draining."""
        self.check_health()
        if self.is_draining:
            raise WorkerLeaving(f"worker {self.worker_id} is draining")

    def stop_taking_requests(self, *, is_ordered: bool = False) -> None:
        """Refuse new requests until `resume`; with `is_ordered`, until an operator's own."""
        self.is_draining = True
        self._is_ordered = self._is_ordered or is_ordered

    def resume(self, *, is_ordered: bool = False) -> None:
        """Take requests again, unless the worker is to end, or an operator has it drain."""
        self._is_ordered = self._is_ordered and not is_ordered
        self.is_draining = self._is_ending or self._is_ordered

    async def drain(self) -> None:
        """Take no new requests, and return once nothing is under way."""
        self._is_ending = self.is_draining = True
        if self._failure is None and self._task is not None and not self._task.done() and self.is_busy():
            self._quiet.clear()
            self._work.set()
            await self._quiet.wait()

    async def stop(self) -> None:
        """Stop stepping; steps under way finish first. May be called more than once.

        A step that is hung is left alone, with the blocks that it may write into: only the process's end ends it.
        """
        self._is_ending = self.is_draining = self._is_stopping = True
        self._work.set()
        if self._task is not None:
            while not self._task.done() and (time_left := self._step_time_left()) > 0:  # each has its own time
                await asyncio.wait({self._task}, timeout=time_left)
            if not self._task.done():
                _log.error("a step has not ended in its %g s: the worker stops without it", self.step_bound_s())
                self._task.cancel()
                await asyncio.wait({self._task})
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        if self._hanging_up is not None:
            await self._hanging_up
        self._quiet.set()

    def _step_time_left(self) -> float:
        """Return the seconds until the step under way, or one that began now, is hung."""
        began = self._step_began
        return self.step_bound_s() - (0.0 if began is None else self.clock() - began)

    async def _watch_steps(self) -> None:
        """Let the worker die of a step that exceeds its bound. Time that the process stood still does not count."""
        while self._failure is None:
            before = self.clock()
            await asyncio.sleep(WATCH_S)
            began, overslept_s = self._step_began, self.clock() - before - WATCH_S
            if began is not None and overslept_s > WATCH_S:
                self._step_began = min(began + overslept_s, self.clock())
            if began is not None and self._step_time_left() < 0:
                self.has_hung, bound_s = True, self.step_bound_s()
                self._die(WorkerLost(f"the engine hangs: a step has not ended in {bound_s:.1f} s, its bound"))

    async def _run(self) -> None:
        try:
            while not (self._is_stopping or self._failure is not None) or self.steps:
                self._work.clear()
                if self._engine_loss is not None and not self.steps:
                    raise self._engine_loss
                self._step_began = self.clock()
                has_stepped = await self.step()
                self._step_began = None
                if not has_stepped:
                    self._idle()
                    await self._work.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic in Rust is no Exception, and must not end the loop in silence
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """End all requests and hang up; a hung step that ends or fails after that changes nothing."""
        if self._failure is not None:
            return
        _log.error("the step loop has died: %s", error, exc_info=error)
        self._failure = error
        self.fail_all(f"the engine of worker {self.worker_id} died: {error!r}")
        self._quiet.set()
        # Routers see the channel go and turn elsewhere, long before the next health check.
        self._hanging_up = asyncio.create_task(self.hang_up(), name="hang up")

    def _idle(self) -> None:
        if self.is_busy():
            return
        self._quiet.set()
        now = self.clock()
        if now - self._checked_at >= self.config.integrity_interval_s:
            self._checked_at = now
            for pool in self.pools:
                pool.check_integrity()
                if pool.owned_blocks:
                    _log.error("%d blocks are owned although the worker is idle", pool.owned_blocks)


class LogitHealth:
    """Notices a worker whose steps give no logits that are numbers."""

    def __init__(self) -> None:
        self._num_broken_rows = 0
        self._ahead = 0  # broken rows that the engine has counted for a step that is still to end
        self._requests: set[str] = set()  # without a sound row since the last sound one

    def step_ended(self, num_broken_rows: int, drawing: Collection[str]) -> str | None:
        """Account for a step that drew for the requests `drawing`; `num_broken_rows` is the engine's count.

        Return why the model is broken; None: it is not.
        """
        num_new, self._num_broken_rows = num_broken_rows - self._num_broken_rows, num_broken_rows
        ahead = self._ahead + num_new - len(drawing)
        self._ahead = max(0, min(ahead, len(drawing)))
        if ahead < 0:
            self._requests.clear()
        if ahead < 0 or not drawing:
            return None
        self._requests.update(drawing)
        if len(self._requests) < MAX_BROKEN_REQUESTS:
            return None
        return (
            f"all logits of the last {len(self._requests)} requests were NaN or infinite: the model's weights or its "
            "cache are broken"
        )


StepT = TypeVar("StepT")


@dataclass(frozen=True, slots=True)
class EndedStep(Generic[StepT]):
    """A step that has run."""

    step: StepT
    content: StepContent
    sampled: list[SampledToken | None]  # one for each entry
    seconds: float  # that it ran; time behind another step isn't counted


@dataclass(frozen=True)
class _GivenStep(Generic[StepT]):
    """A step that the engine has been given."""

    step: StepT
    batch: Sequence[SequenceStep]
    result: asyncio.Task[list[SampledToken | None]]

    @cached_property
    def content(self) -> StepContent:
        """The content that the step's costs depend on."""
        return StepContent.of(self.batch)


class StepsUnderWay(Generic[StepT]):
    """Hands steps to an engine, and takes them back in the same order. Belongs to the worker's step loop."""

    def __init__(self, engine: Engine, clock: Clock):
        self._engine = engine
        self._clock = clock
        self._steps: list[_GivenStep[StepT]] = []
        self._began = 0.0  # when the first of them could begin

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> StepT | None:
        """The step that another one would have to wait for."""
        return self._steps[-1].step if self._steps else None

    async def begin(
        self,
        step: StepT,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> None:
        """Have the engine run a step after those under way. Returns once the engine has it."""
        if not self._steps:
            self._began = self._clock()
        result = asyncio.create_task(self._engine.step(batch, on_layer, copies), name="engine step")
        self._steps.append(_GivenStep(step, batch, result))
        await asyncio.sleep(0)  # the task begins: the engine starts before the loop goes on

    async def nears_its_end(self, costs: StepCosts | None) -> bool:
        """Wait until it is time to schedule behind the step that runs; return False where that ends before.

        A step must run. A step of decodes is short, so it is time at once. Prompts take long, and so may steps of
        unknown costs.
        """
        running = self._steps[0]
        if not running.content.prompt_tokens:
            return True
        if costs is None:
            return False
        left = self._began + running.content.expected_s(costs) - AHEAD_S - self._clock()
        if left > 0:
            await asyncio.wait([running.result], timeout=left)
        return not running.result.done()

    def bound_s(self, costs: StepCostFit, config: WorkerConfig) -> float:
        """Return the seconds after which the step that runs is hung. It may take longer where its shape is new."""
        expected_s = costs.familiar_s(self._steps[0].content) if self._steps else None
        if expected_s is None:
            return config.max_step_s
        return min(config.max_step_s, max(config.min_hang_s, config.hang_factor * expected_s))

    async def first_ended(self) -> EndedStep[StepT]:
        """Wait for the step that runs. Raises the engine's error; the engine then does nothing more."""
        try:
            sampled = await self._steps[0].result
        except BaseException:
            for given in self._steps:
                given.result.cancel()
            await asyncio.gather(*[given.result for given in self._steps], return_exceptions=True)
            raise
        began, self._began = self._began, self._clock()
        ended = self._steps.pop(0)
        return EndedStep(ended.step, ended.content, sampled, self._began - began)

    def give_up(self) -> list[StepT]:
        """Forget all steps of an engine that has died; return them."""
        given_up, self._steps = self._steps, []
        return [given.step for given in given_up]
