"""The choices that one router has under way, and whether it takes more."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.router.fleet import NoPath


class Gate:
    """Lets `most` choices in at once. `turned_away` is told how many choices of a request found no room."""

    def __init__(self, most: int, turned_away: Callable[[int], None], clock: Clock):
        self._most = most
        self._turned_away = turned_away
        self._clock = clock
        self._num_choices = 0
        self._cuts: set[asyncio.Future[None]] = set()  # of the responses under way
        self._takes_until: float | None = None  # None: for as long as it lives

    @contextmanager
    def room(self, num_choices: int) -> Iterator[None]:
        """Places for so many choices, from before they are tokenised to the end of the response.

        Raises RequestError (429) where the router has as much under way as it takes, NoPath where it is about to end.
        """
        if self._takes_until is not None and self._clock() >= self._takes_until:
            raise NoPath("the server is about to end")
        if self._num_choices + num_choices > self._most:
            self._turned_away(num_choices)
            raise RequestError(
                "the server has as many requests as it can take; try again shortly",
                code="overloaded",
                status=429,
                retry_after_s=1,
            )
        self._num_choices += num_choices
        try:
            yield
        finally:
            self._num_choices -= num_choices

    @contextmanager
    def cuttable(self) -> Iterator["asyncio.Future[None]"]:
        """Yield a future for a response, done when the server ends and the response has to end at once."""
        cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cuts.add(cut)
        try:
            yield cut
        finally:
            self._cuts.discard(cut)

    @property
    def num_choices(self) -> int:
        """Choices under way."""
        return self._num_choices

    @property
    def is_draining(self) -> bool:
        """Return whether the server is about to end, though it may still take requests."""
        return self._takes_until is not None

    def drain(self, notice_s: float) -> None:
        """Be not ready from now on, and take new requests for `notice_s` more: load balancers notice meanwhile."""
        self._takes_until = self._clock() + notice_s

    def cut(self) -> int:
        """Take nothing new, and end every response under way with an error; returns how many choices those have."""
        self.drain(notice_s=0.0)
        for cut in self._cuts:
            if not cut.done():
                cut.set_result(None)
        return self._num_choices
