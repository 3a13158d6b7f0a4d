"""What this router replica has under way at each worker: exact, and newer than the workers' own numbers."""

from collections import Counter
from collections.abc import Iterable

from protocol.tickets import Peer


class Hold:
    """One request's places at its workers, until released."""

    def __init__(self, counts: "InFlight", workers: Iterable[Peer], num_tokens: int):
        self._counts = counts
        self._workers = set(workers)
        self._num_tokens = num_tokens
        for worker in self._workers:
            counts._add(worker, 1, num_tokens)

    def release(self, worker: Peer | None = None) -> None:
        """Give up the place at `worker`, or all that are left. May be called more than once."""
        for one in self._workers & ({worker} if worker is not None else self._workers):
            self._workers.discard(one)
            self._counts._add(one, -1, -self._num_tokens)


class InFlight:
    """Counts of requests and of their prompt tokens, by worker."""

    def __init__(self) -> None:
        self._requests: Counter[Peer] = Counter()
        self._tokens: Counter[Peer] = Counter()

    def hold(self, workers: Iterable[Peer], num_tokens: int) -> Hold:
        """Count a request of `num_tokens` prompt tokens at each of `workers`."""
        return Hold(self, workers, num_tokens)

    def requests(self, worker: Peer) -> int:
        """Requests under way at `worker`."""
        return self._requests[worker]

    def tokens(self, worker: Peer) -> int:
        """Prompt tokens of those requests."""
        return self._tokens[worker]

    def total(self) -> int:
        """All places held: 0 when idle."""
        return self._requests.total()

    def _add(self, worker: Peer, requests: int, tokens: int) -> None:
        self._requests[worker] += requests
        self._tokens[worker] += tokens
        if self._requests[worker] == 0:  # workers come and go: no trace of one stays behind
            del self._requests[worker], self._tokens[worker]
