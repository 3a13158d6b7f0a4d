"""Blocking calls on daemon threads, and a store that is opened on one: a disk that hangs delays its own tier alone.

A call may never return: a hung NFS server must keep no process from ending. concurrent.futures joins its threads when
the interpreter ends, so a thread that hangs in the kernel would hang the worker.
"""

import asyncio
import contextlib
import errno
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from twostroke.kvtiers.storage.blobs import BlobStore

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
StoreT = TypeVar("StoreT", bound=BlobStore)


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


class OpeningStore(Generic[StoreT]):
    """A store that is being opened on a thread."""

    def __init__(self, name: str, opening: "Future[StoreT]"):
        """`name` is the tier's, in logs."""
        self._name = name
        self._opening = opening

    @property
    def opened(self) -> StoreT | None:
        """The store; None before it is open, and where it could not be opened."""
        return self._opening.result() if self._opening.done() and self._opening.exception() is None else None

    def wait(self, timeout_s: float) -> None:
        """Wait for the store, at most so long, and warn where it is not open then. Raises what opening it raised."""
        try:
            self._opening.result(timeout_s)
        except TimeoutError:
            if self._opening.done():
                raise
            _log.warning(
                "the %s tier waits for its storage or key, which does not answer; the worker starts without", self._name
            )
            self._opening.add_done_callback(self._answered)

    def _answered(self, opening: "Future[StoreT]") -> None:
        if (error := opening.exception()) is None:
            _log.info("the storage of the %s tier has answered, and is used from now on", self._name)
        else:
            _log.error("the %s tier stays out until the worker starts again: %s", self._name, error)

    def store(self) -> StoreT:
        """Wait until the store is open, and return it. Blocks; raises OSError where it could not be opened."""
        try:
            return self._opening.result()
        except Exception as error:
            raise OSError(errno.EIO, f"the storage could not be opened: {error}") from error
