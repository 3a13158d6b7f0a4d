"""Blocking calls on daemon threads. A call may never return: a hung NFS server must keep no process from ending.

concurrent.futures joins its threads when the interpreter ends, so a thread that hangs in the kernel would hang the
worker.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


def on_thread(name: str, call: Callable[[], ResultT]) -> "Future[ResultT]":
    """Return the call's result to come, from a daemon thread of its own."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # the waiter's to handle
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class BlockingCalls:
    """Runs calls on at most `max_threads` threads, which are started when they are needed."""

    def __init__(self, name: str, max_threads: int):
        self._name = name
        self._max_threads = max_threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self.num_under_way = 0  # calls that have not ended, those that wait for a thread included

    @property
    def is_full(self) -> bool:
        """True while a further call would wait for a thread."""
        return self.num_under_way >= self._max_threads

    async def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Return the call's result, or raise what it raises. A cancelled waiter leaves the call as it is."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[ResultT] = loop.create_future()

        def end(result: ResultT | None, error: BaseException | None) -> None:
            self.num_under_way -= 1
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # there is one where there is no error

        def job() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # the waiter's to handle
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended while the call hung
                loop.call_soon_threadsafe(end, result, error)

        self.num_under_way += 1
        if self.num_under_way > self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._num_threads}", daemon=True).start()
        self._jobs.put(job)
        return await done

    def close(self) -> None:
        """Let the threads end once they have nothing left to do. No call may follow."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
