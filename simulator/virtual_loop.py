"""An asyncio event loop whose time is a number: when nothing is ready, it jumps to the next timer.

What runs is deterministic: the ready queue is first in, first out; timers fire in the order of their time, and those of
the same moment in the order of their creation; tasks and futures hash by the order of their creation, so that a set of
them iterates the same in every run. A simulation that
waits for nothing that could ever happen raises, with the tasks that wait, in place of hanging.

Tasks may belong to a simulated process (`PROCESS`, inherited by the tasks that they start), and a process can be
stopped and continued, as by SIGSTOP and SIGCONT: what it should have done meanwhile, it does late, in the right order.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

PROCESS: ContextVar[str] = ContextVar("PROCESS", default="")
"""The simulated process that a task belongs to."""


class SimulationStuck(Exception):
    """Nothing can happen any more, too much virtual time has passed, or none passes although tasks run."""


class _OrderedTask(asyncio.Task[Any]):
    """A task that hashes by its number, not by its address."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class _OrderedFuture(asyncio.Future[Any]):
    """A future that hashes by its number, not by its address."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's docstring. `limit_s` is how much virtual time may pass.

    Replaces asyncio's own round, of which half goes into sockets, threads and debugging that simulations don't have.
    """

    def __init__(self, limit_s: float = 3600.0) -> None:
        super().__init__()
        self._now = 0.0
        self._limit_s = limit_s
        self._rounds = 0  # since time has passed
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count(1)
        self._stopped: dict[str, list[asyncio.Handle]] = {}  # by process: its callbacks whose turn has come meanwhile
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the function at once. Computing takes no virtual time, and no thread would wait for it."""
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Pass time where nothing is ready, then call what is ready now, not what that makes ready."""
        ready, timers, stopped = self._ready, self._timers, self._stopped  # type: ignore[attr-defined]
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if ready or self._stopping:  # type: ignore[attr-defined]
            self._rounds += 1
            if self._rounds > 100_000:
                raise SimulationStuck(f"tasks run on and on at {self._now} s, and no time passes")
        elif not timers:
            raise SimulationStuck("deadlock: every task waits, and no timer is set")
        else:
            self._rounds = 0
            self._now = max(self._now, timers[0][0])
            if self._now > self._limit_s:
                raise SimulationStuck(f"still running after {self._limit_s} virtual seconds")
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if stopped and (laid_aside := stopped.get(handle._context.get(PROCESS, ""))) is not None:
                laid_aside.append(handle)
            elif not handle._cancelled:
                handle._run()

    def stop_process(self, name: str) -> None:
        """Nothing of this process runs until it is continued; time passes for it all the same."""
        self._stopped.setdefault(name, [])

    def continue_process(self, name: str) -> None:
        """Let it run again, if it stands still."""
        self._ready.extend(self._stopped.pop(name, ()))  # type: ignore[attr-defined]

    def continue_all(self) -> None:
        """Let every process run again."""
        for name in list(self._stopped):
            self.continue_process(name)

    def create_future(self) -> "asyncio.Future[Any]":
        future = _OrderedFuture(loop=self)
        future._number = next(self._numbers)
        return future

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any],
        context: Context | None = None,
        name: str | None = None,
    ) -> "asyncio.Task[Any]":
        # The constructor already puts the task into a set, so it must know its number before.
        task = _OrderedTask.__new__(_OrderedTask)
        task._number = next(self._numbers)
        task.__init__(coro, loop=loop, context=context, name=name)  # type: ignore[misc]
        return task


def virtual_loop() -> VirtualLoop:
    """The loop that runs this simulation."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise TypeError("only virtual processes can be stopped")
    return loop


class VirtualProcess:
    """A simulated process: the tasks that run in its context, all of which can be stopped and continued."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context = Context()
        self.context.run(PROCESS.set, name)
        self.tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Coroutine[Any, Any, T], what: str | None = None) -> "asyncio.Task[T]":
        """Run a task in this process."""
        name = None if what is None else f"{what} at {self.name}"
        task = asyncio.get_running_loop().create_task(work, name=name, context=self.context.copy())
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task


def run_virtually(main: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Run `main` on a fresh VirtualLoop to its end. Raises SimulationStuck, with the waiting tasks' places."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        loop = runner.get_loop()
        try:
            return runner.run(main)
        except SimulationStuck as error:
            for task in sorted(asyncio.all_tasks(loop), key=hash):
                error.add_note(f"waiting: {describe(task)}")
            raise
        finally:
            if isinstance(loop, VirtualLoop):
                loop.continue_all()  # so that what is left of them can be cancelled


def describe(task: "asyncio.Task[Any]") -> str:
    """A task's name, and the innermost place where it waits."""
    places: list[str] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return f"{task.get_name()} at {' > '.join(places)}"
