"""A link's own thread: blocking calls on its socket, in the order in which they are made."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from protocol.errors import ConnectionLost

P = ParamSpec("P")
R = TypeVar("R")


class LinkThread:
    """Owns a connected socket and the thread that blocks on it."""

    def __init__(self, connected: socket.socket, name: str):
        connected.setblocking(True)
        self.socket = connected
        self._executor = ThreadPoolExecutor(1, name)
        self._under_way: set[asyncio.Future[Any]] = set()
        self._broken = False

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`function(*args, **kwargs)` on the thread, after all calls made before.

        Raises ConnectionLost for an OSError and once the link is broken; a cancellation breaks it too.
        """

        def run() -> R:
            if self._broken:
                raise ConnectionLost("the link is closed")
            return function(*args, **kwargs)

        if self._broken:
            raise ConnectionLost("the link is closed")
        future = asyncio.get_running_loop().run_in_executor(self._executor, run)
        self._under_way.add(future)
        future.add_done_callback(self._done)
        try:
            return await asyncio.shield(future)
        except OSError as error:
            self._break()
            raise ConnectionLost(f"the link broke: {error}") from error
        except BaseException:
            self._break()
            raise

    async def close(self) -> None:
        """When this returns no call is under way, and none will be."""
        self._break()
        if self._under_way:
            await asyncio.wait(self._under_way)
        self._executor.shutdown()
        self.socket.close()

    def _break(self) -> None:
        """Wake the thread, if it is in a call on the socket, with an error."""
        self._broken = True
        with contextlib.suppress(OSError):  # the peer was quicker, or we are not connected yet
            self.socket.shutdown(socket.SHUT_RDWR)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._under_way.discard(future)
        if not future.cancelled():
            future.exception()  # it was told to whoever waited
