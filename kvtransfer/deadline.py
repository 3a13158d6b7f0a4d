"""A deadline that moves: for a transfer that must make progress."""

import asyncio
from collections.abc import Callable

from twostroke.protocol.clock import Clock

_TOLERANCE_S = 1e-6  # timers fire up to a clock tick early


class Deadline:
    """Calls `expired` on the event loop once `seconds` have passed since `restart`, unless stopped or restarted.

    A restart only moves a number: the timer is set anew when it fires, so a restart for every chunk costs nothing.
    """

    def __init__(self, clock: Clock, seconds: float, expired: Callable[[], None]):
        self._clock = clock
        self._seconds = seconds
        self._expired = expired
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Count from now."""
        self._due = self._clock() + self._seconds
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._fire)

    def stop(self) -> None:
        """Don't expire, until restarted."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._due is None:
            return
        left = self._due - self._clock()
        if left > _TOLERANCE_S:
            self._timer = asyncio.get_running_loop().call_later(left, self._fire)
        else:
            self._due = None
            self._expired()
