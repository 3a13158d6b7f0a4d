"""Records of how workers serve requests: which workers are left out, and which requests take workers down.

`WorkerRecords` hears the events of attempts. `Ejection` leaves out workers that are there and keep failing: they get no
requests for a while, then one that probes them. A worker whose process ends comes back with another epoch and a clean
record. `Suspects` keeps requests that take workers down from taking down more:

1. A worker's death makes suspects of all requests that it was computing and had given no token of its own.
2. A suspect is tried apart from other suspects, and one request of a fingerprint at a time. A token clears it.
3. A request that was the only suspect on a second worker that died is blocked: refused for `refuse_s`, at all routers.

So a poisonous request takes down two workers. If it kills the first only after that worker has sent a token, that death
is not counted, and it takes down three. Another router that tries it at the same moment loses as many.

Without rule 2, requests that ran twice beside a poisonous one would be blocked with it. Requests are known by
`fingerprint_of`, so the choices of one prompt, and its repeats, are one suspect.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

from annotated_types import Ge, Le
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import (
    RequestError,
    TransferFailed,
    TwostrokeError,
    WorkerFailed,
    WorkerLeaving,
    WorkerLost,
)
from twostroke.protocol.requests import (
    LONGEST_S,
    BlockedRequest,
    BlockedRequests,
    GenerateRequest,
    Peer,
    fingerprint_of,
)
from twostroke.protocol.settings import Count, Section
from twostroke.protocol.stats import ROLES
from twostroke.router.fleet import Fleet
from twostroke.router.request_state import (
    AttemptContext,
    AttemptEnded,
    AttemptEvent,
    DecodeFailed,
    DecodeStarted,
    Path,
    PrefillDone,
    PrefillLost,
    ScoreDone,
    SuspectRequest,
)
from twostroke.router.token_channels import TokenChannels

REMEMBERED_S = 120.0
"""Seconds for which a death counts against the requests that were there."""
POLL_S = 0.05
"""Pause between two looks whether a lost worker is gone."""
PAUSE_SPREAD = 4.0
"""Most extra pauses of a suspect, by its fingerprint. Routers don't share suspects: with equal pauses two of them would
try theirs on one worker at once, and block the innocent one."""


class SuspectsConfig(Section):
    """Suspects: pauses, and how long requests are blocked."""

    pause_s: NonNegativeFloat = 0.1
    """Shortest pause between a worker's death and the next attempt of a request that may have caused it; the longest is
    five times that. What else dies in that time did not die of the request."""
    verdict_s: NonNegativeFloat = 10.0
    """Longest time in which a router finds out whether two workers that were lost under the same request are really
    gone."""
    refuse_s: NonNegativeFloat = 600.0
    """Time for which a request that has taken two workers down is refused (status 422, `poison_request`)."""
    max_refused: NonNegativeInt = 1024
    """Most blocked requests that a router remembers; the oldest go first."""


class PoisonRequest(RequestError):
    """The request takes down every worker that computes it (422)."""

    def __init__(self) -> None:
        super().__init__(
            "the request has taken down the workers that computed it, and is refused", code="poison_request", status=422
        )


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker's death under a request. `is_alone`: it was a suspect already, and the only one there."""

    worker: Peer
    at: float
    is_alone: bool


class Suspects:
    """One router replica's suspects.

    `is_gone` returns whether a lost worker is gone for good; None: not known yet. `tell` tells all other routers.
    """

    def __init__(
        self,
        config: SuspectsConfig,
        clock: Clock,
        *,
        blocked: BlockedRequests,
        is_gone: Callable[[Peer], bool | None],
        tell: Callable[[tuple[BlockedRequest, ...]], None],
    ):
        self._config = config
        self._clock = clock
        self._blocked = blocked
        self._is_gone = is_gone
        self._tell = tell
        self._running: dict[Peer, set[SuspectRequest]] = defaultdict(
            set
        )  # computing there, with no token of the worker's own
        self._turns: dict[bytes | Peer, SuspectRequest] = {}  # the suspect being tried, by fingerprint and by worker
        self._turn_ended = asyncio.Event()
        self._deaths: dict[bytes, list[WorkerDeath]] = {}
        self._dead: dict[Peer, float] = {}  # workers that died a moment ago

    def open(self, request: GenerateRequest) -> SuspectRequest:
        """Register a new request. Raises PoisonRequest where it is blocked."""
        self.check(suspect := SuspectRequest(fingerprint_of(request)))
        return suspect

    def check(self, suspect: SuspectRequest) -> None:
        """Raises PoisonRequest where the request is blocked."""
        if self._blocked.blocks(suspect.fingerprint):
            raise PoisonRequest

    def is_suspect(self, suspect: SuspectRequest) -> bool:
        """Return whether the request may only be tried apart from other suspects."""
        return suspect.fingerprint in self._deaths

    async def await_exclusive_try(self, suspect: SuspectRequest, workers: Collection[Peer]) -> None:
        """Wait, as a suspect, until no other one is tried on `workers`. Raises PoisonRequest."""
        await self.judge(suspect)
        wanted: list[bytes | Peer] = [suspect.fingerprint, *workers]
        while self.is_suspect(suspect):
            pause_s = self._next_try_at(suspect) - self._clock()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            elif all(self._turns.get(one, suspect) is suspect for one in wanted):
                self._turns.update(dict.fromkeys(wanted, suspect))
                return
            else:
                await self._turn_ended.wait()
            await self.judge(suspect)

    def run(self, suspect: SuspectRequest, worker: Peer) -> None:
        """Note that `worker` may compute the request from now on."""
        self._running[worker].add(suspect)

    def leave(self, suspect: SuspectRequest, worker: Peer) -> None:
        """Note that `worker` computes nothing more for the request, or has given a token of its own."""
        self._running[worker].discard(suspect)

    def clear(self, suspect: SuspectRequest) -> None:
        """Drop the suspicion: a worker has given a token of its own."""
        self._deaths.pop(suspect.fingerprint, None)
        self.end_turn(suspect)

    def end_turn(self, suspect: SuspectRequest) -> None:
        """Let other suspects be tried."""
        if self._turns.get(suspect.fingerprint) is suspect:
            self._turns = {key: one for key, one in self._turns.items() if one is not suspect}
        self._turn_ended.set()
        self._turn_ended = asyncio.Event()

    def died(self, worker: Peer) -> None:
        """Make suspects of the requests on a worker that was lost. Only the first report counts.

        Requests that came later, before this router knew, have met a dead worker.
        """
        now = self._clock()
        self._forget(lambda death: death.at < now - REMEMBERED_S)
        self._dead = {one: at for one, at in self._dead.items() if at > now - self._config.pause_s}
        fingerprints = {suspect.fingerprint for suspect in self._running.pop(worker, ())}
        if worker in self._dead:
            return
        self._dead[worker] = now
        suspects = fingerprints & self._deaths.keys()
        for one in fingerprints:
            self._deaths.setdefault(one, []).append(WorkerDeath(worker, now, is_alone=suspects == {one}))

    async def judge(self, suspect: SuspectRequest) -> None:
        """Raise PoisonRequest where the request is blocked, and block it where it has taken two workers down.

        A worker that lives after all, or of which nothing is known within `verdict_s`, counts no more.
        """
        self.check(suspect)
        deadline = self._clock() + self._config.verdict_s
        while workers := self.killed_by(suspect):
            fates = {worker: self._is_gone(worker) for worker in workers}
            if all(fates.values()):
                del self._deaths[suspect.fingerprint]
                block = BlockedRequest(suspect.fingerprint, min(self._config.refuse_s, LONGEST_S))
                self._tell(self._blocked.learn([block]))
                raise PoisonRequest
            # A dying worker's channel may drop a bit later.
            until = {None: deadline, False: self._next_try_at(suspect)}
            alive = [worker for worker, gone in fates.items() if not gone and self._clock() >= until[gone]]
            self._forget(lambda death, alive=alive: death.worker in alive)  # type: ignore[misc]
            await asyncio.sleep(POLL_S)
            self.check(suspect)

    def killed_by(self, suspect: SuspectRequest) -> tuple[Peer, ...]:
        """Return two workers that the request has taken down if they are gone; none where it may be innocent."""
        deaths = self._deaths.get(suspect.fingerprint, [])
        before = [death.worker for death in deaths if death.worker != deaths[-1].worker]
        return (before[-1], deaths[-1].worker) if before and deaths[-1].is_alone else ()

    def _next_try_at(self, suspect: SuspectRequest) -> float:
        pauses = 1 + PAUSE_SPREAD * suspect.fingerprint[0] / 255
        return self._deaths[suspect.fingerprint][-1].at + pauses * self._config.pause_s

    def _forget(self, is_over: Callable[[WorkerDeath], bool]) -> None:
        kept = {one: [death for death in deaths if not is_over(death)] for one, deaths in self._deaths.items()}
        self._deaths = {one: deaths for one, deaths in kept.items() if deaths}


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
