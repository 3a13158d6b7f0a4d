"""Whether a request that failed is tried again, and after which pause. Pure.

A worker that died, is cut off or leaves on purpose gives its requests back, all at once: each is tried again, whatever
the retry budget says, since no accepted request may be lost to a dead worker, and its load has gone with it. Refusals
and failures of workers that live are bounded by the budget: there, retries are load on top of load. But whoever has
tokens already was accepted, and waits for a refusing worker's room until the request's own deadline.

How many retries the router may add to its workers' load. Pure: the clock is an argument.

Without a bound, workers that refuse or fail under load get every request several times, and never recover.

Pauses between the attempts of one request. Pure: the random source is an argument.
"""

from collections.abc import Callable

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed

_REFILL_S = 10.0


class RetryBudget:
    """A token bucket: every first attempt adds `share` of a retry.

    `floor` retries are there at the beginning and come back within ten seconds, so that a server with little traffic
    can retry, too; ten times as many can be saved up.
    """

    def __init__(self, *, share: float, floor: int, clock: Clock):
        self._share = share
        self._floor = floor
        self._clock = clock
        self._tokens = float(floor)
        self._refilled_at = clock()

    def count_first_attempt(self) -> None:
        """A request begins."""
        self._refill()
        self._tokens = min(self._tokens + self._share, max(10.0 * self._floor, 1.0))

    def take(self) -> bool:
        """Whether one more retry may be made; if so, it is counted."""
        self._refill()
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _refill(self) -> None:
        now = self._clock()
        elapsed_s, self._refilled_at = now - self._refilled_at, now
        if self._tokens < self._floor:
            self._tokens = min(self._tokens + elapsed_s * self._floor / _REFILL_S, float(self._floor))


class Backoff:
    """Pauses that double, each shortened at random by up to half: requests that failed together don't return together.

    `draw` gives numbers from 0 to 1.
    """

    def __init__(self, *, first_s: float, most_s: float, draw: Callable[[], float]):
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw

    def pause_s(self, num_before: int) -> float:
        """The pause after which to try again, with `num_before` pauses made already."""
        longest_s = min(self._first_s * 2.0 ** min(num_before, 32), self._most_s)
        return longest_s * (1.0 - 0.5 * self._draw())


_TRY_ELSEWHERE = (429, 503)  # refusals that speak of the worker, not of the request


class Retries:
    """One request's. `most` attempts in a row may fail to bring it on."""

    def __init__(self, *, most: int, budget: RetryBudget, backoff: Backoff):
        self._most = most
        self._budget = budget
        self._backoff = backoff
        self._in_a_row = 0

    def pause_s(
        self, error: TwostrokeError, *, has_got_on: bool, has_refused_before: bool, has_begun: bool
    ) -> float | None:
        """The pause before the next attempt; None: none is made, and the client is told of `error`.

        `has_got_on` tells of the attempt that failed, `has_refused_before` of its decode worker and this request,
        `has_begun` of whether the client has any token.
        """
        is_refusal = isinstance(error, RequestError)
        is_believed = has_refused_before and not has_begun
        if isinstance(error, RequestError) and (error.status not in _TRY_ELSEWHERE or is_believed):
            return None
        is_excused = is_refusal and has_begun
        self._in_a_row = 1 if has_got_on else self._in_a_row + 1
        if self._in_a_row > self._most:
            if not is_excused:
                return None
            self._in_a_row = self._most
        if (is_refusal or isinstance(error, WorkerFailed)) and not is_excused and not self._budget.take():
            return None
        num_pauses = self._in_a_row - (1 if is_refusal else 2)
        return 0.0 if num_pauses < 0 else self._backoff.pause_s(num_pauses)
