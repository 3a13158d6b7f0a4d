"""Retries: whether a request that failed is tried again, and after which pause. Pure.

A worker that died, is cut off or leaves on purpose gives its requests back, all at once: each is tried again, whatever
the retry budget says, since no accepted request may be lost to a dead worker, and its load has gone with it. Refusals
and failures of workers that live are bounded by the budget: there, retries are load on top of load. But a request
with tokens was accepted, and waits for a refusing worker's room until its own deadline.

Without a budget, workers that refuse or fail under load would get every request several times, and never recover.
"""

from collections.abc import Callable

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.health.worker_records import backoff_s

_REFILL_S = 10.0


class RetryBudget:
    """A token bucket: every first attempt adds `retry_budget` of a retry.

    `retry_floor` retries are there at the beginning and come back within ten seconds, so that a server with little
    traffic can retry, too; ten times as many can be saved up.
    """

    def __init__(self, config: PipelineConfig, clock: Clock):
        self._share = config.retry_budget
        self._floor = config.retry_floor
        self._clock = clock
        self._tokens = float(self._floor)
        self._refilled_at = clock()

    def count_first_attempt(self) -> None:
        """A request begins."""
        self._refill()
        self._tokens = min(self._tokens + self._share, max(10.0 * self._floor, 1.0))

    def take(self) -> bool:
        """Count one more retry and return True, if it may be made."""
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


_TRY_ELSEWHERE = (429, 503)
"""Status codes of refusals that are about the worker, not the request."""


class Retries:
    """The retries of one request. `draw` gives numbers from 0 to 1."""

    def __init__(self, config: PipelineConfig, budget: RetryBudget, draw: Callable[[], float]):
        self._config = config
        self._budget = budget
        self._draw = draw
        self._in_a_row = 0

    def pause_s(
        self, error: TwostrokeError, *, has_decoded: bool, decode_failed_before: bool, has_begun: bool
    ) -> float | None:
        """The pause before the next attempt; None: none is made, and the client gets `error`.

        `has_decoded`: the attempt that failed had a token of the decode worker's own. `decode_failed_before`: this
        request's decode worker failed or refused an earlier attempt. `has_begun`: the client has a token."""
        is_refusal = isinstance(error, RequestError)
        is_final = decode_failed_before and not has_begun
        if isinstance(error, RequestError) and (error.status not in _TRY_ELSEWHERE or is_final):
            return None
        is_exempt = is_refusal and has_begun
        self._in_a_row = 1 if has_decoded else self._in_a_row + 1
        if self._in_a_row > self._config.retries:
            if not is_exempt:
                return None
            self._in_a_row = self._config.retries
        if (is_refusal or isinstance(error, WorkerFailed)) and not is_exempt and not self._budget.take():
            return None
        num_pauses = self._in_a_row - (1 if is_refusal else 2)
        if num_pauses < 0:
            return 0.0
        return backoff_s(self._config.retry_first_s, self._config.retry_most_s, num_pauses, self._draw)
