"""A link's own thread: blocking calls on its socket, in the order in which they are made."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from twostroke.protocol.errors import ConnectionLost

P = ParamSpec("P")
R = TypeVar("R")


class LinkThread:
    """Owns a connected socket and the thread that blocks on it."""

    def __init__(self, connected: socket.socket, name: str):
        connected.setblocking(True)
        self.socket = connected
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._under_way: set[asyncio.Future[Any]] = set()
        self._broken = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        return self._broken

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`function(*args, **kwargs)` on the thread, after all calls made before.

        Raises ConnectionLost for an OSError, for a RuntimeError (CUDA's errors are such), and once the link is broken.
        A cancellation breaks it too.
        """
        self._check()
        future: asyncio.Future[R] = self._loop.create_future()
        self._under_way.add(future)
        self._calls.put((lambda: function(*args, **kwargs), future))
        try:
            return await asyncio.shield(future)
        except (OSError, RuntimeError) as error:
            self.break_off()
            raise ConnectionLost(f"the link broke: {error}") from error
        except BaseException:
            self.break_off()
            raise

    def break_off(self) -> None:
        """Wake the thread, if it is in a call on the socket, with an error. Later calls are refused."""
        self._broken = True
        with contextlib.suppress(OSError):  # the peer was quicker, or we are not connected yet
            self.socket.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """When this returns no call is under way, and none will be."""
        self.break_off()
        if self._under_way:
            await asyncio.wait(self._under_way)
        self._calls.put(None)
        self._thread.join()
        self.socket.close()

    def _check(self) -> None:
        if self._broken:
            raise ConnectionLost("the link is closed")

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            function, future = item
            result: Any = None
            failure: BaseException | None = None
            try:
                self._check()
                result = function()
            except BaseException as error:  # it belongs to whoever waits
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop was closed over our heads: nobody waits
                self._loop.call_soon_threadsafe(self._settle, future, result, failure)
            del item, function, future, result, failure  # not kept alive by a thread that waits

    def _settle(self, future: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
        self._under_way.discard(future)
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
            future.exception()  # whoever made the call may have been cancelled


def receive_exactly(connected: socket.socket, num_bytes: int) -> bytearray:
    """Blocks. Raises OSError where the peer leaves before."""
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = connected.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the peer closed it")
        view = view[count:]
    return received
