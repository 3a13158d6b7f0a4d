"""The crew of a Locust process: greenlets, and the machine's monotonic clock. Locust has patched all blocking calls."""

import time
from collections.abc import Callable

import gevent
from gevent.pool import Group


class Greenlets:
    """twostroke.loadtests.generator.dispatcher.Crew."""

    def __init__(self) -> None:
        self._group = Group()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        gevent.sleep(seconds)

    def spawn(self, work: Callable[..., object], *arguments: object) -> None:
        self._group.spawn(work, *arguments)

    def join(self) -> None:
        self._group.join()

    def kill(self) -> None:
        self._group.kill()
