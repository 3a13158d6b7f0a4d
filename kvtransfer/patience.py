"""How long a link may take."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from twostroke.protocol.errors import ConnectionLost

T = TypeVar("T")


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """The result of `awaitable`. Raises ConnectionLost, naming `what`, when it takes longer."""
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
        """The result of `awaitable`. Raises ConnectionLost, naming `what`, when it takes too long."""
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
