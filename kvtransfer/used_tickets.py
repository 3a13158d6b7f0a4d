"""Which tickets were used: each is good for one transfer, once on each of its lanes. Bounded in time and number."""

from twostroke.protocol.clock import Clock


class UsedTickets:
    """Remembers transfer ids for `keep_s` seconds, `max_count` of them at most (the oldest go first).

    A ticket that comes back after that is not harmful, only late: no request expects its transfer any more.
    """

    def __init__(self, clock: Clock, keep_s: float, max_count: int):
        self._clock = clock
        self._keep_s = keep_s
        self._max_count = max_count
        self._used: dict[bytes, tuple[float, set[int]]] = {}  # transfer id -> first use, lanes; the oldest first

    def __contains__(self, transfer_id: bytes) -> bool:
        """Whether it was used on any lane."""
        return transfer_id in self._used

    def was_used(self, transfer_id: bytes, lane: int) -> bool:
        """Whether it was used on this lane."""
        return transfer_id in self._used and lane in self._used[transfer_id][1]

    def use(self, transfer_id: bytes, lane: int = 0) -> bool:
        """Mark as used on this lane; False where it was used there before."""
        now = self._clock()
        while self._used:
            oldest = next(iter(self._used))
            if len(self._used) < self._max_count and now - self._used[oldest][0] < self._keep_s:
                break
            del self._used[oldest]
        _, lanes = self._used.setdefault(transfer_id, (now, set()))
        if lane in lanes:
            return False
        lanes.add(lane)
        return True
