"""The time limits of KV transfer, and how the parts of a connection end together.

Three limits, each for a failure that one side alone can't notice:

- the **deadline** of a transfer (`progress_s`): it must make a step within it (a grant, a chunk, the answer to the
  commit), or it is given up. `Deadline`.
- the **patience** with a link (`lease_s`): each chunk's bytes must have moved within it, or the link is lost. The same
  holds for connecting and for joining a link. `Patience`, `within`.
- the **lease** of a peer (`lease_s`): it must send a message within it, if only a ping, and accept messages, or its
  connection is lost. `LeasedConnection`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from twostroke.protocol.clock import Clock, Silence
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Message, Ping
from twostroke.protocol.network import Connection

T = TypeVar("T")


class Deadline:
    """Calls a function on the event loop once `seconds` have passed since `restart`, unless stopped or restarted."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None  # while it runs

    @property
    def runs(self) -> bool:
        return self._timer is not None

    def restart(self, expired: Callable[[], None]) -> None:
        """Count from now."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._fire, expired)

    def stop(self) -> None:
        """Stop the deadline until it is restarted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self, expired: Callable[[], None]) -> None:
        self._timer = None
        expired()


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """Return the result of `awaitable`. Raises ConnectionLost, naming `what`, when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError as error:
        raise ConnectionLost(f"{what} took longer than {seconds:g} s") from error


class Patience:
    """A limit for each chunk of a link that has several under way: its time begins once those before it have ended."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._limits: list[asyncio.Timeout] = []  # of those under way

    async def wait(self, awaitable: Awaitable[T], what: str) -> T:
        """Return the result of `awaitable`. Raises ConnectionLost, naming `what`, when it takes too long."""
        try:
            async with asyncio.timeout(self._seconds) as limit:
                self._limits.append(limit)
                try:
                    return await awaitable
                finally:
                    self._limits.remove(limit)
                    self._restart()
        except TimeoutError as error:
            raise ConnectionLost(f"{what} took longer than {self._seconds:g} s") from error

    def _restart(self) -> None:
        due = asyncio.get_running_loop().time() + self._seconds
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(due)


class LeasedConnection:
    """One side's view of a control connection: silence is broken by pings, and too long a silence ends it."""

    def __init__(self, connection: Connection, clock: Clock, lease_s: float):
        self._connection = connection
        self._clock = clock
        self._lease_s = lease_s
        self._said = clock()
        self._silence = Silence(clock, lease_s)

    def post(self, message: Message) -> None:
        """Send `message`, if the connection still stands; never waits.

        A lost connection is no error here: its reader notices it, and ends every transfer on it.
        """
        try:
            self._connection.send(message)
        except ConnectionLost:
            return
        self._said = self._clock()

    async def drain(self) -> None:
        """Wait until the peer keeps up with what was posted. Raises ConnectionLost, also where that takes a lease."""
        try:
            async with asyncio.timeout(self._lease_s):
                await self._connection.drain()
        except TimeoutError as error:
            raise ConnectionLost(
                f"the peer has taken no message for {self._lease_s:g} s: its lease has ended"
            ) from error

    async def receive(self) -> Message:
        """Return the next message. Raises ConnectionLost."""
        message = await self._connection.receive()
        self._silence.end()
        return message

    async def watch(self) -> None:
        """Send a ping after a third of a lease without a message to the peer.

        Raises ConnectionLost once the peer has been silent for a lease.
        """
        while not self._silence.is_too_long:
            now = self._clock()
            if now - self._said >= self._lease_s / 3:
                self.post(Ping())
                self._said = now
            until_ping_s = self._said + self._lease_s / 3 - now
            await self._silence.pause(max(min(until_ping_s, self._lease_s - self._silence.length_s), 0.001))
        raise ConnectionLost(f"the peer was silent for {self._silence.length_s:.1f} s: its lease has ended")


# --- ends ---


async def all_ended(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Wait until the tasks have ended, whatever their results. A cancellation of the waiter is raised after that."""
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait([task for task in tasks if not task.done()])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def finish(work: Coroutine[None, None, None]) -> None:
    """Do `work` to its end, even where this is cancelled: for work that must not be left half done."""
    task = asyncio.get_running_loop().create_task(work)
    await all_ended([task])
    task.result()


async def run_until_lost(*parts: Coroutine[None, None, None]) -> str:
    """Run the parts of a connection together until one raises ConnectionLost; returns why. All have ended then.

    Not a TaskGroup: that cancels in the order of a set, and a simulation has to replay exactly.
    """
    tasks = [asyncio.get_running_loop().create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await all_ended(tasks)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, ConnectionLost):
            raise error
    return str(errors[0]) if errors else "the connection was closed"
