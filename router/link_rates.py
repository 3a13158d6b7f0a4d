"""How fast KV comes to each worker, learnt from what transfers took. Pure.

Most transfers wait for prefill rather than for the wire, so what workers count is a lower bound of their links' rate.
Pulled prefixes are all ready when they begin: what they took is the rate.
"""

from collections.abc import Collection

from twostroke.protocol.stats import WorkerStats
from twostroke.protocol.tickets import Peer

FIRST_GUESS = 1e9
"""Bytes a second: about what one 10 GbE port carries, and far below shared memory."""

_WEIGHT = 0.3  # of a new measurement
_FORGOTTEN = 0.001  # with each report: a worker that was judged slow would else never be tried again
_LEAST, _MOST = 1e6, 1e13  # what pulls may make of a rate: an estimate that is always wrong must not grow for ever
_LEAST_BYTES = 1 << 16  # transfers of less measure round trips


class LinkRates:
    """Bytes a second, by worker."""

    def __init__(self) -> None:
        self._rates: dict[Peer, float] = {}
        self._counted: dict[Peer, tuple[int, float]] = {}

    def of(self, worker: Peer) -> float:
        """Into and out of `worker`."""
        return self._rates.get(worker, FIRST_GUESS)

    def told(self, worker: Peer, stats: WorkerStats) -> None:
        """The worker has told its numbers."""
        num_bytes, seconds = self._counted.get(worker, (0, 0.0))
        new_bytes, new_seconds = stats.transfer_bytes - num_bytes, stats.transfer_seconds - seconds
        self._counted[worker] = stats.transfer_bytes, stats.transfer_seconds
        rate = self.of(worker)
        rate += _FORGOTTEN * (FIRST_GUESS - rate)
        if new_bytes >= _LEAST_BYTES and new_seconds > 0:
            rate = max(rate, new_bytes / new_seconds)
        self._rates[worker] = rate

    def pulled(self, worker: Peer, *, expected_s: float, took_s: float) -> None:
        """A prefix came to `worker`. Steps are shared, so one measurement alone says no more than twice or half."""
        factor = min(2.0, max(0.5, expected_s / took_s if took_s > 0 else 2.0))
        rate = self.of(worker) * (1 + _WEIGHT * (factor - 1))
        self._rates[worker] = min(max(rate, _LEAST), _MOST)

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget all others."""
        for gone in self._rates.keys() - set(workers):
            del self._rates[gone]
        for gone in self._counted.keys() - set(workers):
            del self._counted[gone]
