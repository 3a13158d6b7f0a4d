"""Which idle prefill worker is to be tried against its costs. Pure: the time is an argument.

What a worker has fitted may be wrong, or of a time when its machine was slow. If it is thought slow, nothing is sent
there, and it learns nothing better. So a worker that has had no prompt of some length for long gets one: where it is
thought as quick as others after `TRY_S`, where it is thought k times as slow after k times that. What trials cost the
requests that they are made with is then the same little part of all time, however wrong or right the costs are.
"""

from collections.abc import Sequence

from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.routing.fleet_view import AVAILABLE, WorkerTable

TRY_S = 10.0
_LOOK_S = 1.0  # between two looks for somebody to be tried: they cost more than other decisions
_NUM_LENGTHS = 12  # by powers of 4


class Trials:
    """When each prefill worker had its last prompt of each length, and who is to be tried next."""

    def __init__(self) -> None:
        self._last: dict[Peer, list[float]] = {}
        self._due: dict[Peer, list[float]] = {}
        self._looked_at = [0.0] * _NUM_LENGTHS

    def keep(self, infos: Sequence[WorkerInfo], now: float) -> None:
        """These workers are there now. New ones count as if they had just had prompts."""
        peers = [info.peer for info in infos if info.role == "prefill"]
        self._last = {peer: self._last.get(peer) or [now] * _NUM_LENGTHS for peer in peers}
        self._due = {peer: self._due.get(peer) or [now + TRY_S] * _NUM_LENGTHS for peer in peers}

    def worked(self, worker: Peer, num_tokens: int, now: float) -> None:
        """A prompt of which so many tokens are to be computed goes there; it tells of shorter ones, too."""
        if worker in self._last:
            last, due = self._last[worker], self._due[worker]
            for length in range(_length(num_tokens) + 1):
                last[length] = now
                due[length] = now + TRY_S

    def candidate(self, table: WorkerTable, num_tokens: int, now: float) -> Peer | None:
        """The idle worker that has waited longest for a prompt of this length, if one may be due."""
        length = _length(num_tokens)
        if now - self._looked_at[length] < _LOOK_S:
            return None
        self._looked_at[length] = now
        idle = (table.columns.requests == 0) & (table.tier == AVAILABLE)  # decode workers' come last
        peers = [info.peer for info, is_idle in zip(table.of_role["prefill"], idle, strict=False) if is_idle]
        due = [peer for peer in peers if self._due[peer][length] <= now]
        return min(due, key=lambda peer: self._last[peer][length], default=None)

    def is_due(self, worker: Peer, num_tokens: int, slower: float, now: float) -> bool:
        """Whether the candidate, which is thought `slower` times as slow as the best path, is to be tried now."""
        length = _length(num_tokens)
        self._due[worker][length] = self._last[worker][length] + TRY_S * max(1.0, slower)
        return self._due[worker][length] <= now


def _length(num_tokens: int) -> int:
    return min(num_tokens.bit_length() // 2, _NUM_LENGTHS - 1)
