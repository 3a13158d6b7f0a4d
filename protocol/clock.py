"""Time as a constructor argument.

Live code passes `time.monotonic`; a simulation passes its event loop's virtual `time`. No deadline that crosses a
process is absolute: send remaining durations, keep monotonic deadlines.

`Silence` measures how long a peer has been silent. Time that this process slept through does not count: a process that
was stopped, or whose event loop was held up, finds the peer's messages unread in the socket. A peer that gave this
process up meanwhile has closed the connection.
"""

import asyncio
import secrets
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since an arbitrary, fixed moment of this process; never goes back."""


def draw_epoch() -> int:
    """Draw a random 63-bit number that names one incarnation of a process."""
    return secrets.randbits(63)


class Silence:
    """The silence of one peer. Its watcher lets time pass in `pause` alone; its reader calls `end` at each message."""

    def __init__(self, clock: Clock, limit_s: float):
        self._clock = clock
        self._limit_s = limit_s
        self._began = clock()

    def end(self) -> None:
        """Note that the peer has been heard."""
        self._began = self._clock()

    @property
    def length_s(self) -> float:
        """Seconds since the peer was last heard."""
        return self._clock() - self._began

    @property
    def is_too_long(self) -> bool:
        """Return whether the peer counts as lost."""
        return self.length_s >= self._limit_s

    async def pause(self, seconds: float) -> None:
        """Sleep, and forgive the peer what was slept beyond that, if it is a third of the limit or more."""
        began = self._clock()
        await asyncio.sleep(seconds)
        overslept_s = self._clock() - began - seconds
        if overslept_s > self._limit_s / 3:
            self._began = min(self._began + overslept_s, self._clock())

    async def outlast(self) -> None:
        """Return when the silence is too long."""
        while not self.is_too_long:
            await self.pause(max(self._limit_s - self.length_s, 0.001))
