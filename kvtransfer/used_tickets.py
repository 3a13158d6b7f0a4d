"""Which tickets were used: each is good for one transfer. Bounded in time and number."""

from protocol.clock import Clock


class UsedTickets:
    """Remembers transfer ids for `keep_s` seconds, `max_count` of them at most (the oldest go first).

    A ticket that comes back after that is not harmful, only late: no request expects its transfer any more.
    """

    def __init__(self, clock: Clock, keep_s: float, max_count: int):
        self._clock = clock
        self._keep_s = keep_s
        self._max_count = max_count
        self._used: dict[bytes, float] = {}  # transfer id -> when it was used; the oldest first

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._used

    def use(self, transfer_id: bytes) -> bool:
        """Mark as used; False where it was used before."""
        now = self._clock()
        while self._used:
            oldest = next(iter(self._used))
            if len(self._used) < self._max_count and now - self._used[oldest] < self._keep_s:
                break
            del self._used[oldest]
        if transfer_id in self._used:
            return False
        self._used[transfer_id] = now
        return True
