"""Publication of scaling decisions, from Serve's controller to the routers, through the key-value store of Ray's head.

Each decision is one entry. Each router reads it about once a second, in the background. The entry outlives the
controller and the routers, so readers check its age.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from twostroke.protocol.clock import Clock
from twostroke.router.observe.scaling import Scaling

LOOK_S = 1.0
STALE_S = 60.0
"""Beside the time between decisions. What was decided longer ago, and stays, is of an earlier application of the same
name."""

_log = logging.getLogger(__name__)


class DecisionWatch:
    """Made and used on one event loop. `published` asks for the last decision, and may take a while."""

    def __init__(self, published: Callable[[], Scaling | None], *, interval_s: float, wall_clock: Clock = time.time):
        self._published = published
        self._oldest_s = STALE_S + interval_s
        self._wall_clock = wall_clock
        self._first: Scaling | None = None  # what was found at the first check
        self._latest: Scaling | None = None
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._is_lost = False

    def latest(self) -> Scaling | None:
        """The last decision that is known; None before the first."""
        return self._latest

    def start(self) -> None:
        """Look it up from now on."""
        self._looking = asyncio.create_task(self._follow())

    def look_soon(self) -> None:
        """Something has happened that may come of a decision. On any thread."""
        self._loop.call_soon_threadsafe(self._wake.set)

    async def close(self) -> None:
        """Stop looking for decisions."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None

    async def check(self) -> None:
        """Once. Where there is no answer, what is known stays."""
        try:
            newest = await asyncio.to_thread(self._published)
        except Exception as error:  # whatever it is, the next check may succeed
            if not self._is_lost:
                _log.warning("can't learn what the autoscaler decides: %s", error or type(error).__name__)
            self._is_lost = True
            return
        self._is_lost = False
        if newest is None:
            return
        self._first = self._first or newest
        is_old = self._wall_clock() - newest.decided_at > self._oldest_s
        # An autoscaler that still decides is this application's, however far its machine's clock is behind.
        if self._latest is not None or newest != self._first or not is_old:
            self._latest = newest

    async def _follow(self) -> None:
        while True:
            await self.check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            self._wake.clear()


_NAMESPACE = b"twostroke"


def publish(app_name: str, scaling: Scaling) -> None:
    """Tell all routers of the application. Takes a round trip to Ray's head."""
    _internal_kv_put(_key(app_name), msgspec.json.encode(scaling), overwrite=True, namespace=_NAMESPACE)


def published(app_name: str) -> Scaling | None:
    """Return the last published decision. It takes a round trip to Ray's head. Raises RayError where the head does not
    answer, and msgspec.DecodeError for an entry of another version of ours."""
    entry = _internal_kv_get(_key(app_name), namespace=_NAMESPACE)
    return None if entry is None else msgspec.json.decode(entry, type=Scaling)


def _key(app_name: str) -> bytes:
    return f"autoscaling/{app_name}".encode()
