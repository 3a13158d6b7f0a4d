"""How many retries the router may add to its workers' load. Pure: the clock is an argument.

Without a bound, workers that refuse or fail under load get every request several times, and never recover.
"""

from twostroke.protocol.clock import Clock

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
