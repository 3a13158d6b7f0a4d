"""A crew on virtual time: greenlets of their own hub, so that nothing waits and nothing is patched."""

import heapq
import itertools
from collections.abc import Callable

from greenlet import GreenletExit, getcurrent, greenlet


class VirtualCrew:
    """The dispatcher's Crew. Time goes on when all wait; whoever sleeps wakes `late_s` after its time."""

    def __init__(self, late_s: float = 0.0):
        self._time = 0.0
        self._late_s = late_s
        self._hub = getcurrent()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, greenlet]] = []
        self._members: list[greenlet] = []

    def run(self, work: Callable[[], object], until: float | None = None) -> greenlet:
        """From the hub: do `work` until all is done, or to a moment. Raises what it raises."""
        worker = greenlet(work, parent=self._hub)
        self._wake_at(0.0, worker)
        while self._waiting and (until is None or self._waiting[0][0] <= until):
            self._time, _, next_one = heapq.heappop(self._waiting)
            if not next_one.dead:
                next_one.switch()
        return worker

    def now(self) -> float:
        return self._time

    def sleep(self, seconds: float) -> None:
        self._wake_at(self._time + max(0.0, seconds) + self._late_s, getcurrent())
        self._hub.switch()

    def spawn(self, work: Callable[..., object], *arguments: object) -> None:
        member = greenlet(lambda: work(*arguments), parent=self._hub)
        self._members.append(member)
        self._wake_at(self._time, member)

    def join(self) -> None:
        while self._waiting and not all(member.dead for member in self._members):
            self._wake_at(self._waiting[0][0], getcurrent())
            self._hub.switch()

    def kill(self) -> None:
        for member in self._members:
            if not member.dead:
                member.parent = getcurrent()
                member.throw(GreenletExit)

    def _wake_at(self, time: float, one: greenlet) -> None:
        heapq.heappush(self._waiting, (time, next(self._numbers), one))
