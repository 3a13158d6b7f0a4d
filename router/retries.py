"""Whether a request that failed is tried again, and after which pause. Pure.

A worker that died, is cut off or leaves on purpose gives its requests back, all at once: each is tried again, whatever
the retry budget says, since no accepted request may be lost to a dead worker, and its load has gone with it. Refusals
and failures of workers that live are bounded by the budget: there, retries are load on top of load. But whoever has
tokens already was accepted, and waits for a refusing worker's room until the request's own deadline.
"""

from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed
from twostroke.router.backoff import Backoff
from twostroke.router.retry_budget import RetryBudget

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
