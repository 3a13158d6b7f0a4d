"""What one API key may use: requests and tokens a minute, and choices at a time. Pure: the clock is injected."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError

MINUTE_S = 60.0


class RateLimited(RequestError):
    """The key has used up what it may for now (429)."""

    def __init__(self, message: str, *, retry_after_s: float):
        whole_s = max(1, math.ceil(retry_after_s))
        message = f"{message}; try again in {whole_s} s"
        super().__init__(message, code="rate_limit_exceeded", status=429, retry_after_s=whole_s)


class TokenBucket:
    """Holds a minute's worth at most, is full at first, and is refilled steadily."""

    def __init__(self, per_minute: float, clock: Clock):
        self._clock = clock
        self._capacity = per_minute
        self._per_second = per_minute / MINUTE_S
        self._level = per_minute
        self._at = clock()

    def take(self, amount: float) -> float:
        """Take `amount`, and return how much was taken: the whole bucket where it asks for more than that holds.

        Raises `NotYet` where there isn't enough.
        """
        self._refill()
        amount = min(amount, self._capacity)
        if self._level < amount:
            raise NotYet((amount - self._level) / self._per_second)
        self._level -= amount
        return amount

    def settle(self, taken: float, used: float) -> None:
        """Give back what was `taken` and not used. What was used beyond it is owed, and delays the next."""
        self._refill()
        self._level = min(self._capacity, self._level + taken - used)

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
        self._at = now


class NotYet(Exception):
    """The bucket will have enough in `wait_s` seconds, if nobody else takes it."""

    def __init__(self, wait_s: float):
        super().__init__(f"enough in {wait_s:.3g} s")
        self.wait_s = wait_s


class KeyLimits:
    """The limits of one key at one router; None is no limit."""

    def __init__(
        self,
        *,
        clock: Clock,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        max_in_flight: int | None,
    ):
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute, clock)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute, clock)
        self._max_in_flight = max_in_flight
        self._in_flight = 0

    def count_request(self) -> None:
        """Raises RateLimited where the key sends more requests than it may."""
        if self._requests is not None:
            try:
                self._requests.take(1)
            except NotYet as not_yet:
                raise RateLimited("the API key has used up its requests", retry_after_s=not_yet.wait_s) from None

    @contextmanager
    def in_flight(self, num_choices: int) -> Iterator[None]:
        """Places for so many choices. Raises RateLimited where there are not so many now, RequestError where never."""
        if self._max_in_flight is not None and num_choices > self._max_in_flight:
            message = f"{num_choices} choices, and the API key may have {self._max_in_flight} under way at a time"
            raise RequestError(message, param="n")
        if self._max_in_flight is not None and self._in_flight + num_choices > self._max_in_flight:
            message = f"the API key may have {self._max_in_flight} choices under way at a time"
            raise RateLimited(message, retry_after_s=1)
        self._in_flight += num_choices
        try:
            yield
        finally:
            self._in_flight -= num_choices

    @contextmanager
    def tokens(self, most: int, used: Callable[[], int]) -> Iterator[None]:
        """Set tokens aside for a request that takes `most`; at the end it is asked how many it `used`.

        Raises RateLimited where the key has too few left.
        """
        if self._tokens is None:
            yield
            return
        try:
            taken = self._tokens.take(most)
        except NotYet as not_yet:
            raise RateLimited("the API key has used up its tokens", retry_after_s=not_yet.wait_s) from None
        try:
            yield
        finally:
            self._tokens.settle(taken, used())
