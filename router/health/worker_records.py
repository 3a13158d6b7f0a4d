"""Records of how workers serve requests: which workers are left out, and which requests are suspects.

`WorkerRecords` hears the events of attempts. `Ejection` leaves out workers that are there and keep failing: they get no
requests for a while, then one that probes them. A worker whose process ends comes back with another epoch and a clean
record. Suspects are explained in `poison.py`.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

from annotated_types import Ge, Le
from pydantic import PositiveFloat, model_validator

from twostroke.protocol.blocked_requests import BlockedRequests
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import (
    RequestError,
    TransferFailed,
    TwostrokeError,
    WorkerFailed,
    WorkerLeaving,
    WorkerLost,
)
from twostroke.protocol.requests import Peer
from twostroke.protocol.settings import Count, Section
from twostroke.protocol.stats import ROLES
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.fleet import Fleet, Path
from twostroke.router.health.poison import Suspects, SuspectsConfig
from twostroke.router.request_state import (
    AttemptContext,
    AttemptEnded,
    AttemptEvent,
    DecodeFailed,
    DecodeStarted,
    PrefillDone,
    PrefillLost,
    ScoreDone,
    SuspectRequest,
)

K = TypeVar("K", bound=Hashable)

_RECENT = 20
"""Outcomes over which the failure rate is taken."""
_CLEAN_AFTER = 10
"""Successes in a row after which the next ejection is as short as the first."""


class EjectionConfig(Section):
    """Conditions on which a worker is left out, and the time for which it is."""

    failures_in_a_row: Count = 5
    """Requests in a row that a worker fails, after which it gets none for a while. A client's error is no failure, nor
    is a full queue; a lost connection is one, however many requests it takes along."""
    failure_rate: Annotated[float, Ge(0.05), Le(1)] = 0.5
    """Share of a worker's last 20 requests that fail, after which it gets none for a while."""
    first_s: PositiveFloat = 2.0
    """First time for which a worker is left out, shortened at random by up to half; doubles with each further
    ejection until the worker has done ten requests in a row. Half of a role's workers are left out at most.
    Afterwards one request probes the worker. At most `most_s`."""
    most_s: PositiveFloat = 60.0
    """Longest time for which a worker is left out."""

    @model_validator(mode="after")
    def _check(self) -> "EjectionConfig":
        if self.first_s > self.most_s:
            raise ValueError(f"first_s: {self.first_s:g} must be at most most_s ({self.most_s:g})")
        return self


@dataclass(slots=True)
class _Record:
    """The record of one worker. It is ejected until `until`, then until a probe has succeeded."""

    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))  # outcomes, True is a failure
    in_a_row: int = 0  # failures
    successes: int = 0  # in a row
    times: int = 0  # ejected, since it was last forgiven
    until: float | None = None  # None: not ejected
    is_on_trial: bool = False  # one request is finding out
    lost_at: float = float("-inf")


class Ejection(Generic[K]):
    """Counts the outcomes of requests by worker (or by whatever may fail), and says who is to be left out.

    Only failures of the worker belong here: never a client's error, a refusal for lack of room, or a client that left.
    """

    def __init__(self, config: EjectionConfig, *, clock: Clock, draw: Callable[[], float]):
        self._config = config
        self._clock = clock
        self._draw = draw
        self._records: dict[K, _Record] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no worker has failed."""
        return not self._records

    def keep_where(self, is_there: Callable[[K], bool]) -> None:
        """Forget the others."""
        for gone in [worker for worker in self._records if not is_there(worker)]:
            del self._records[gone]

    def begin(self, worker: K) -> None:
        """Note that a request goes there. Where its ejection is over, this request is the probe."""
        record = self._records.get(worker)
        if record is not None and record.until is not None and record.until <= self._clock():
            record.is_on_trial = True

    def succeeded(self, worker: K) -> None:
        """Count a request that the worker served."""
        record = self._records.get(worker)
        if record is None:
            return
        record.in_a_row = 0
        record.successes += 1
        record.recent.append(False)
        if record.until is not None and (record.is_on_trial or record.until <= self._clock()):
            record.until = None
            record.is_on_trial = False
            record.recent.clear()
        if record.successes >= _CLEAN_AFTER and record.until is None:
            del self._records[worker]

    def failed(self, worker: K) -> None:
        """Count a request that the worker failed."""
        record = self._records.setdefault(worker, _Record())
        record.successes = 0
        record.in_a_row += 1
        record.recent.append(True)
        if record.until is not None and not record.is_on_trial:
            return  # requests that were there before it was ejected
        rate = sum(record.recent) / len(record.recent)
        is_often = len(record.recent) >= _RECENT and rate >= self._config.failure_rate
        if record.is_on_trial or record.in_a_row >= self._config.failures_in_a_row or is_often:
            self._eject(record)

    def lost(self, worker: K) -> None:
        """Count a broken connection once, however many requests report it."""
        record = self._records.setdefault(worker, _Record())
        now = self._clock()
        if now - record.lost_at >= 1.0:
            record.lost_at = now
            self.failed(worker)

    def unresolved(self, worker: K) -> None:
        """Note a request that ended without a result: its client left, or it was the request's own fault."""
        record = self._records.get(worker)
        if record is not None:
            record.is_on_trial = False  # the next request finds out

    def is_out(self, worker: K) -> bool:
        """Return whether it is to be left out now, however many others are."""
        record = self._records.get(worker)
        return record is not None and record.until is not None and (record.is_on_trial or record.until > self._clock())

    def ejected(self, among: Collection[K]) -> frozenset[K]:
        """Return those of `among` to be left out now, half of them at most: the ones that return last."""
        out = [worker for worker in among if self.is_out(worker)]
        out.sort(key=lambda worker: -(self._records[worker].until or 0.0))
        return frozenset(out[: len(among) // 2])

    def _eject(self, record: _Record) -> None:
        out_s = backoff_s(self._config.first_s, self._config.most_s, record.times, self._draw)
        record.times += 1
        record.in_a_row = 0
        record.recent.clear()
        record.is_on_trial = False
        record.until = self._clock() + out_s


def backoff_s(first_s: float, most_s: float, num_before: int, draw: Callable[[], float]) -> float:
    """Return a time that has doubled `num_before` times, shortened at random by up to half.

    Workers that failed together then don't return together. `draw` gives numbers from 0 to 1.
    """
    longest_s = min(first_s * 2.0 ** min(num_before, 32), most_s)
    return longest_s * (1.0 - 0.5 * draw())


_PAIR_FAILURES = 2
"""Failures in a row after which two workers that can't exchange KV are kept apart."""


class WorkerRecords:
    """The records of one router replica. `draw` gives numbers from 0 to 1."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        channels: TokenChannels,
        clock: Clock,
        ejection: EjectionConfig,
        suspects: SuspectsConfig,
        blocked: BlockedRequests,
        draw: Callable[[], float],
    ):
        self._fleet = fleet
        self._channels = channels
        self.suspects = Suspects(suspects, clock, blocked=blocked, is_gone=self._is_gone, tell=channels.tell_blocked)
        self._ejection = Ejection[Peer](ejection, clock=clock, draw=draw)
        pairs = ejection.model_copy(update={"failures_in_a_row": _PAIR_FAILURES})
        self._pairs = Ejection[tuple[Peer, Peer]](pairs, clock=clock, draw=draw)

    def ejected(self) -> frozenset[Peer]:
        """Return the workers that get no requests for a while, half of a role at most. Quick while none has failed."""
        if self._ejection.is_empty:
            return frozenset()
        workers = self._fleet.workers()
        present = {info.peer for info in workers}
        self._ejection.keep_where(present.__contains__)
        return frozenset().union(
            *(self._ejection.ejected([info.peer for info in workers if info.role == role]) for role in ROLES)
        )

    def unreachable_prefill_for(self, decode: Peer) -> frozenset[Peer]:
        """Return the prefill workers whose KV does not reach this decode worker."""
        if self._pairs.is_empty:
            return frozenset()
        workers = {info.peer for info in self._fleet.workers()}
        self._pairs.keep_where(lambda pair: workers.issuperset(pair))
        return frozenset(one for one in workers if self._pairs.is_out((one, decode)))

    # --- questions of an attempt ---

    async def await_exclusive_try(self, suspect: SuspectRequest, path: Path) -> None:
        """Wait, as a suspect, until the path's workers may be called. Raises PoisonRequest."""
        await self.suspects.await_exclusive_try(suspect, path.workers)
        for worker in path.workers:
            self._ejection.begin(worker)
        if path.prefill is None:
            self.suspects.run(suspect, path.decode.peer)
        else:
            self._pairs.begin((path.prefill.peer, path.decode.peer))

    def begin_prefill(self, suspect: SuspectRequest, worker: Peer) -> None:
        """Let the prefill worker compute the prompt. Raises PoisonRequest."""
        self.suspects.check(suspect)
        self.suspects.run(suspect, worker)

    async def await_exclusive_decode(self, suspect: SuspectRequest, decode: Peer) -> None:
        """Wait, as a suspect, until the decode worker may compute the prompt. Raises PoisonRequest."""
        self.suspects.leave(suspect, decode)  # it waits for KV that won't come
        await self.suspects.await_exclusive_try(suspect, [decode])
        self.suspects.run(suspect, decode)

    # --- events of an attempt ---

    def on_event(self, attempt: AttemptContext, event: AttemptEvent) -> None:
        """Count successes and failures of workers and pairs, and keep track of the workers that compute the request."""
        suspect, decode = attempt.suspect, attempt.path.decode.peer
        prefill = None if attempt.path.prefill is None else attempt.path.prefill.peer
        match event:
            case PrefillDone() if prefill is not None:
                self.suspects.leave(suspect, prefill)
                self.suspects.run(suspect, decode)
                self._ejection.succeeded(prefill)
            case PrefillLost(TransferFailed()) if prefill is not None:
                self._pairs.failed((prefill, decode))  # nobody knows whose fault it is: it counts against neither
            case PrefillLost(error) if prefill is not None:
                self._failed(suspect, prefill, error)
            case DecodeStarted() | ScoreDone():
                self.suspects.leave(suspect, decode)
                self.suspects.clear(suspect)
                self._ejection.succeeded(decode)
                if prefill is not None:
                    self._pairs.succeeded((prefill, decode))
            case DecodeFailed(error):
                self._failed(suspect, decode, error)
            case AttemptEnded():
                for worker in attempt.path.workers:
                    self.suspects.leave(suspect, worker)
                    self._ejection.unresolved(worker)
                self.suspects.end_turn(suspect)
                if prefill is not None:
                    self._pairs.unresolved((prefill, decode))

    def _failed(self, suspect: SuspectRequest, worker: Peer, error: TwostrokeError) -> None:
        """Count a failure against the worker, unless the request is to blame or the worker has no room or leaves."""
        if isinstance(error, RequestError | WorkerLeaving):  # it lives, and computes nothing for the request any more
            self.suspects.leave(suspect, worker)
        if isinstance(error, WorkerLeaving):
            return
        if isinstance(error, WorkerLost) and not isinstance(error, WorkerFailed):
            # A closed connection means that the process died, perhaps because of the request. Silence does not mean
            # that.
            if not self._channels.fell_silent(worker):
                self.suspects.died(worker)
            self._ejection.lost(worker)
        elif not isinstance(error, RequestError) or error.status in (500, 502, 503):
            self._ejection.failed(worker)

    def _is_gone(self, worker: Peer) -> bool | None:
        if self._channels.is_connected(worker):
            return False
        is_there = any(info.peer == worker for info in self._fleet.workers())
        return None if is_there else True
