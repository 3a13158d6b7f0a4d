"""The live engine: a runner on a thread of its own, so that the event loop only schedules, communicates and frees."""

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from twostroke.model.cache.layer_announcer import LaunchedStep
from twostroke.model.runner import ModelRunner
from twostroke.model.step import BlockCopy, OnLayer, SequenceStep
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import ArrangeExperts
from twostroke.protocol.requests import SampledToken

if TYPE_CHECKING:  # numba is imported only where there is no GPU
    from twostroke.model.cpu.kernels.launch import CoreLending


class ThreadEngine:
    """Implements model.step.Engine.

    The runner is built on the engine's thread: thread counts and thread pools of torch belong to the thread that asks.
    """

    def __init__(
        self,
        build: Callable[[], ModelRunner],
        *,
        threads: int | None = None,
        cores: Collection[int] | None = None,
        lending: "CoreLending | None" = None,
    ):
        """Calls `build` on the new thread and waits for it; what it raises is raised here, and no thread is left.

        `threads` is how many cores a step may use, `cores` which ones; None: all that this process may run on. With
        `lending`, which belongs to the engine then, the cores are lent while there is no step.
        """
        self._lending = lending
        self._num_given = self._num_ended = 0  # steps; each is counted on one thread alone
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=_settle, initargs=(threads, cores)
        )
        self._failure: BaseException | None = None
        self._earlier: LaunchedStep | None = None  # the last step
        # Waits for what a GPU has still to do, so that the engine's thread can launch the next step meanwhile. Without
        # a GPU it never has a thread.
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="engine-collector")
        try:
            self._runner = self._executor.submit(build).result()
        except BaseException:
            self._executor.shutdown()
            if lending is not None:
                lending.close()
            raise
        self._lend_if_idle()

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        """Implement model.step.Engine.step.

        Raises WorkerLost when the step fails, and at every call after that. `on_layer` is not called any more once
        the caller is cancelled.
        """
        loop = asyncio.get_running_loop()
        wanted = threading.Event()
        wanted.set()

        def deliver(layer: int) -> None:
            if on_layer is not None and wanted.is_set():
                on_layer(layer)

        def announce(layer: int) -> None:  # on the engine's thread
            if wanted.is_set():
                loop.call_soon_threadsafe(deliver, layer)

        # The result comes back over the same queue of the loop as the layers, so it is seen after all of them.
        try:
            ended: Future[list[SampledToken | None]] = Future()
            announcer = None if on_layer is None else announce
            self._num_given += 1
            begun = self._executor.submit(self._step, ended, batch, announcer, copies)
            begun.add_done_callback(lambda begun: ended.cancel() if begun.cancelled() else None)  # by `close`
            return await asyncio.wrap_future(ended)
        finally:
            wanted.clear()

    async def arrange_experts(self, order: ArrangeExperts) -> None:
        """Arrange this rank's experts, after the steps requested before and before those requested later.

        Raises WorkerLost when it fails, as does every step from then on.
        """
        await asyncio.get_running_loop().run_in_executor(self._executor, self._arrange, order)

    @property
    def num_broken_rows(self) -> int:
        """Implement model.step.Engine.num_broken_rows; a step under way may still raise it."""
        return self._runner.num_broken_rows

    def close(self) -> None:
        """End the threads, after the step under way. Steps that wait are dropped; later calls raise RuntimeError."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._collector.shutdown(wait=True)
        self._runner.close()
        if self._lending is not None:
            self._lending.close()

    def _step(
        self,
        ended: "Future[list[SampledToken | None]]",
        batch: Sequence[SequenceStep],
        on_layer: Callable[[int], None] | None,
        copies: Sequence[BlockCopy],
    ) -> None:
        """Launch a step, and have it end where what it draws is known first: the event loop has no part between."""
        self._num_ended += 1
        if not ended.set_running_or_notify_cancel():
            self._lend_if_idle()
            return
        try:
            launched = self._launch(batch, on_layer, copies)
            if not launched.is_done:
                self._collector.submit(self._collect, ended, launched)
                return
            found = launched.result()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(found)
        finally:
            self._lend_if_idle()

    def _lend_if_idle(self) -> None:
        """Lend the cores unless another step waits. A step that comes meanwhile takes them back as it begins."""
        if self._lending is not None and self._num_ended == self._num_given:
            self._lending.end()

    def _launch(
        self,
        batch: Sequence[SequenceStep],
        on_layer: Callable[[int], None] | None,
        copies: Sequence[BlockCopy],
    ) -> LaunchedStep:
        if self._failure is not None:
            raise WorkerLost(f"the engine is dead since a step failed: {self._failure}")
        if self._lending is not None:
            self._lending.begin()
        try:
            if copies:
                self._runner.copy_blocks(copies)
                if not batch:
                    return LaunchedStep([])
            self._earlier = self._runner.launch(batch, on_layer, self._earlier)
            return self._earlier
        except Exception as error:
            raise self._failed(error) from error

    def _arrange(self, order: ArrangeExperts) -> None:
        if self._failure is not None:
            raise WorkerLost(f"the engine is dead since a step failed: {self._failure}")
        try:
            self._runner.arrange_experts(order)
        except Exception as error:
            raise self._failed(error) from error

    def _collect(self, ended: "Future[list[SampledToken | None]]", launched: LaunchedStep) -> None:
        try:
            found = launched.result()
        except Exception as error:
            failed = self._failed(error)
            failed.__cause__ = error
            ended.set_exception(failed)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(found)

    def _failed(self, error: Exception) -> WorkerLost:
        self._failure = error
        return WorkerLost(f"an engine step failed: {type(error).__name__}: {error}")


def _settle(threads: int | None, cores: Collection[int] | None) -> None:
    """Bind this thread, and the pool that torch makes for it later, which inherits its cores."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
