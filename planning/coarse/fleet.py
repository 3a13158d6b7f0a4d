"""A fleet under load: requests come, workers come and go as a scaler says. Discrete events, times from the start."""

import csv
import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from twostroke.cluster.autoscaling.samples import Arrived, RoleSignals, Signals
from twostroke.loadtests.plan import RateSteps
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import (
    CoarseDecodeWorker,
    CoarsePrefillWorker,
    CoarseRequest,
    CoarseWorker,
    DecodingRow,
)
from twostroke.planning.layouts import HANDOVER_S, JOIN_STEPS
from twostroke.protocol.errors import ConfigError
from twostroke.router.generate.moves import AT_ONCE, LOOK_S, MAX_MOVES, MIN_LEFT, REST_S
from twostroke.router.request_state import MoveReason
from twostroke.worker.profile import BLOCK_TOKENS, WorkerProfile

MISSING_TOKENS = BLOCK_TOKENS
"""Tokens that a moved stream's target computes while the stream waits: a partial block, or what was written since."""
WARM_REQUESTS = 15
"""A fleet whose workers have ended fewer prompts tells no step costs yet."""

Scaler = Callable[["CoarseFleet"], tuple[int, int]]


@dataclass(frozen=True)
class Change:
    """A target that became another."""

    at_s: float
    prefill: int
    decode: int


@dataclass
class CoarseFleet:
    """All workers, those that start and drain included, and the counters that a scaler sees.

    One that begins without prefill workers is aggregated: decode workers read the prompts.
    """

    profile: WorkerProfile  # of decode workers
    startup_s: float
    ttft_s: float
    tpot_s: float
    router: SimulatedRouter
    prefill: list[CoarsePrefillWorker] = field(default_factory=list)
    decode: list[CoarseDecodeWorker] = field(default_factory=list)
    is_aggregated: bool = False
    prefill_target: int = 0
    decode_target: int = 0
    now_s: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    output_tokens: int = 0
    prefilled: int = 0
    prefilled_tokens: int = 0
    ended: int = 0
    moved: int = 0  # streams that went on elsewhere
    changes: list[Change] = field(default_factory=list)
    gone_worker_s: float = 0.0
    prefill_profile: WorkerProfile | None = None  # None: as decode workers

    @property
    def reader_profile(self) -> WorkerProfile:
        """Profile of prefill workers."""
        return self.profile if self.prefill_profile is None else self.prefill_profile

    def signals(self) -> Signals:
        """Return the policy's input."""
        running_p, running_d = self.running_prefill(), self.running_decode()
        for worker in (*self.prefill, *self.decode):
            worker.advance(self.now_s)
        costs = self.profile.costs if self.prefilled >= WARM_REQUESTS else None
        unread = self.requests - self.prefilled, self.prompt_tokens - self.prefilled_tokens
        arrived = Arrived(self.requests, self.prompt_tokens, 0.0, self.prompt_pairs, self.output_tokens, self.ended)
        prefill = RoleSignals(
            running=len(running_p),
            target=self.prefill_target,
            costs=None if self.is_aggregated or costs is None else self.reader_profile.costs,
            queued_requests=0 if self.is_aggregated else unread[0],
            queued_tokens=0 if self.is_aggregated else unread[1],
            step_tokens=self.reader_profile.step_tokens,
        )
        decode = RoleSignals(
            running=len(running_d),
            target=self.decode_target,
            costs=costs,
            queued_requests=sum(len(worker.waiting) for worker in self.decode) + unread[0] * self.is_aggregated,
            queued_tokens=unread[1] * self.is_aggregated,
            num_decoding=sum(len(worker.rows) for worker in self.decode),
            context_tokens=int(sum(worker.context for worker in self.decode)),
            owned_tokens=sum(worker.held_tokens for worker in self.decode),
            total_tokens=self.profile.kv_tokens * len(running_d),
            max_batch=self.profile.max_batch,
            step_tokens=self.profile.step_tokens,
        )
        return Signals(self.now_s, arrived, prefill, decode, self.ttft_s, self.tpot_s)

    def running_prefill(self) -> list[CoarsePrefillWorker]:
        """Those that take requests now."""
        return [one for one in self.prefill if one.gone_s is None and one.ready_s <= self.now_s]

    def running_decode(self) -> list[CoarseDecodeWorker]:
        """Those that take requests now."""
        return [one for one in self.decode if one.gone_s is None and one.ready_s <= self.now_s]

    def scale(self, prefill: int, decode: int, startup_s: float) -> None:
        """Orders workers, or gives back: first those that start, then those with the least to do, which drain."""
        if (prefill, decode) == (self.prefill_target, self.decode_target):
            return
        self.changes.append(Change(self.now_s, prefill, decode))
        ready_s = self.now_s + startup_s
        while self.prefill_target < prefill:
            self.prefill.append(CoarsePrefillWorker(self.reader_profile, self.now_s, ready_s, self.tpot_s))
            self.prefill_target += 1
        while self.decode_target < decode:
            self.decode.append(CoarseDecodeWorker(self.profile, self.now_s, ready_s, self.tpot_s))
            self.decode_target += 1
        while self.prefill_target > prefill:
            kept_p = [one for one in self.prefill if one.gone_s is None]
            first = max(kept_p, key=lambda one: (max(one.ready_s, self.now_s), -len(one.rows), -one.free_s))
            first.gone_s = math.inf if first.num_requests else self.now_s
            self.prefill_target -= 1
        while self.decode_target > decode:
            kept_d = [one for one in self.decode if one.gone_s is None]
            least = max(kept_d, key=lambda one: (max(one.ready_s, self.now_s), -one.num_requests))
            least.gone_s = math.inf if least.num_requests else self.now_s
            self.decode_target -= 1

    def clean(self) -> None:
        """Forgets workers that have gone."""
        for workers in (self.prefill, self.decode):
            for worker in [one for one in workers if one.gone_s is not None and one.gone_s <= self.now_s]:
                self.gone_worker_s += worker.gone_s - worker.ordered_s  # type: ignore[operator]
                workers.remove(worker)  # type: ignore[arg-type]

    def worker_s(self) -> float:
        """Seconds of workers so far, from their order until they are gone."""
        there: list[CoarseWorker] = [*self.prefill, *self.decode]
        return self.gone_worker_s + sum(self.now_s - one.ordered_s for one in there)


def run(
    fleet: CoarseFleet,
    requests: Sequence[CoarseRequest],
    scaler: Scaler,
    start: tuple[int, int],
    until_s: float,
    look_s: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Serves `requests`, in the order of their arrival, until `until_s` and, what has come, to its end.

    `scaler` is asked every `look_s`, and `progress` told how many requests have ended; the first workers are there at
    once. After `until_s` nobody is paid.
    """
    fleet.is_aggregated = start[0] == 0
    fleet.scale(*start, startup_s=0.0)
    fleet.changes.clear()
    _Run(fleet, requests, scaler, progress).go(until_s, look_s)


class _Run:
    """One run of the event loop. Events lie in heaps; an event of a worker that has changed since is skipped."""

    def __init__(
        self,
        fleet: CoarseFleet,
        requests: Sequence[CoarseRequest],
        scaler: Scaler,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.fleet = fleet
        self.requests = requests
        self.scaler = scaler
        self.progress = progress
        self.arriving: list[tuple[float, int, CoarseRequest, int]] = []  # heap: KV under way, and tokens of its answer
        self.ends: list[tuple[float, int, CoarseWorker]] = []  # heap: when a worker's next row, or prompt, ends
        self.watched: dict[int, CoarseWorker] = {}  # that have streams which may have to move
        self.next_moves_s = math.inf
        self.number = 0

    def go(self, until_s: float, look_s: float) -> None:
        fleet, requests = self.fleet, self.requests
        next_request, next_look_s = 0, 0.0
        while True:
            request_s = requests[next_request].at_s if next_request < len(requests) else math.inf
            arriving_s = self.arriving[0][0] if self.arriving else math.inf
            while self.ends and self.ends[0][1] != self.ends[0][2].event:
                heapq.heappop(self.ends)
            ending_s = self.ends[0][0] if self.ends else math.inf
            event_s = min(request_s, arriving_s, ending_s)
            now_s = min(event_s, next_look_s, self.next_moves_s)
            if now_s > until_s and event_s == math.inf:
                fleet.now_s = until_s
                return
            fleet.now_s = now_s
            if now_s == next_look_s:
                self._look()
                next_look_s += look_s
            elif now_s == self.next_moves_s:
                self._look_for_moves()
            elif now_s == ending_s:
                self._end(heapq.heappop(self.ends)[2])
            elif now_s == request_s:
                self._arrive(requests[next_request])
                next_request += 1
            else:
                self._decode(*heapq.heappop(self.arriving)[2:])

    def _changed(self, worker: CoarseWorker) -> None:
        """Something else than time has changed it: its next end is another. A draining one goes when it is empty."""
        self.number += 1
        worker.event = self.number
        end_s = worker.next_end_s()
        if end_s < math.inf:
            heapq.heappush(self.ends, (end_s, self.number, worker))
        if worker.gone_s == math.inf and not worker.num_requests:
            worker.gone_s = self.fleet.now_s
        self.fleet.router.changed(worker)
        if self.fleet.router.moves:
            self._watch(worker)

    def _look(self) -> None:
        fleet = self.fleet
        fleet.clean()
        fleet.scale(*self.scaler(fleet), startup_s=fleet.startup_s)
        fleet.router.follow(fleet.running_prefill(), fleet.running_decode(), fleet.now_s)
        for worker in (*fleet.prefill, *fleet.decode):  # a signal's time may have passed there: pace, rounding are new
            self._changed(worker)
        if self.progress is not None:
            self.progress(fleet.ended)

    def _arrive(self, request: CoarseRequest) -> None:
        fleet = self.fleet
        tokens = request.prompt_tokens
        path = fleet.router.choose(request, fleet.now_s)
        if path is None:
            request.is_refused = True
            return
        reader, target = path
        request.target = target
        fleet.requests += 1
        fleet.prompt_tokens += tokens
        fleet.prompt_pairs += tokens * tokens / 2
        reader.read(request, fleet.now_s)
        if isinstance(reader, CoarsePrefillWorker):
            target.coming += 1
            target.coming_tokens += tokens
            if target is not reader:
                self._changed(target)
        self._changed(reader)

    def _send(self, request: CoarseRequest, target: CoarseWorker) -> None:
        """Its KV travels from the prefill worker, which has drawn its first token now, to the decode worker."""
        profile = self.fleet.reader_profile
        whole_s = request.prompt_tokens * profile.kv_bytes / profile.link_bytes_per_s
        hidden_s = profile.costs.prompt_s(request.prompt_tokens)
        late_s = HANDOVER_S + max(whole_s - hidden_s, whole_s / profile.num_layers)
        self._arrive_later(request, target, late_s, 1)

    def _arrive_later(self, request: CoarseRequest, target: CoarseWorker, late_s: float, written: int) -> None:
        if target.rows:
            late_s += JOIN_STEPS * target.step_s
        self.number += 1
        heapq.heappush(self.arriving, (self.fleet.now_s + late_s, self.number, request, written))

    def _decode(self, request: CoarseRequest, written: int) -> None:
        fleet, target = self.fleet, request.target
        if target is None:
            raise RuntimeError("KV travels to no worker")
        target.coming -= 1
        target.coming_tokens -= request.prompt_tokens
        if request.output_tokens > 1:
            target.join(request, fleet.now_s, written)
        else:
            self._ended(request, request.first_s)
        self._changed(target)

    def _end(self, worker: CoarseWorker) -> None:
        fleet = self.fleet
        for request in worker.end_some(fleet.now_s):
            if request.first_s == fleet.now_s:
                fleet.prefilled += 1
                fleet.prefilled_tokens += request.prompt_tokens
            if request.last_s < math.inf:
                request.ended_at = worker.role
                self._ended(request, request.last_s)
            elif request.target is not None and request.target is not worker:
                self._send(request, request.target)
        self._changed(worker)

    def _ended(self, request: CoarseRequest, at_s: float) -> None:
        request.last_s = at_s
        request.target = None
        self.fleet.ended += 1
        self.fleet.output_tokens += request.output_tokens
        self.fleet.router.ended(request)

    # --- streams that move (router/generate/moves.py) ---

    def _watch(self, worker: CoarseWorker) -> None:
        if worker.rows and (worker.gone_s is not None or isinstance(worker, CoarsePrefillWorker)):
            self.watched[id(worker)] = worker
            self.next_moves_s = min(self.next_moves_s, self.fleet.now_s + LOOK_S)
        else:
            self.watched.pop(id(worker), None)

    def _look_for_moves(self) -> None:
        self.next_moves_s = self.fleet.now_s + LOOK_S if self.watched else math.inf
        for worker in list(self.watched.values()):
            if (reason := self._reason(worker)) is not None:
                self._move_some(worker, reason)

    def _reason(self, worker: CoarseWorker) -> MoveReason | None:
        if worker.gone_s is not None:
            return "drain"
        if isinstance(worker, CoarsePrefillWorker) and self.fleet.router.gets_prompts(worker, self.fleet.now_s):
            return "prompts"
        return None

    def _move_some(self, worker: CoarseWorker, reason: MoveReason) -> None:
        """Move streams away, the youngest first. A move takes no longer than until the next look."""
        fleet = self.fleet
        worker.advance(fleet.now_s)
        rows = sorted((row for _, _, row in worker.rows), key=lambda row: -row.request.came_s)
        movable = [row for row in rows if self._may_move(row, worker, reason)][: AT_ONCE[reason]]
        for row in movable:
            written = worker.written(row)
            target = fleet.router.move_target(row.request, written, worker, to_prefill=reason == "drain")
            if target is None:
                break
            self._move(row, written, worker, target)
        if movable:
            self._changed(worker)

    def _may_move(self, row: DecodingRow, worker: CoarseWorker, reason: MoveReason) -> bool:
        request = row.request
        if reason == "drain":
            return True
        is_long = request.output_tokens - worker.written(row) >= MIN_LEFT
        return is_long and request.num_moves < MAX_MOVES and self.fleet.now_s - request.came_s >= REST_S

    def _move(self, row: DecodingRow, written: int, source: CoarseWorker, target: CoarseWorker) -> None:
        """The transfer is hidden behind the source's decoding; the stream waits for the tokens written since."""
        request = row.request
        source.leave(row)
        request.num_moves += 1
        request.target = target
        self.fleet.moved += 1
        target.coming += 1
        target.coming_tokens += request.prompt_tokens
        pause_s = target.profile.costs.prefill_s(MISSING_TOKENS, request.prompt_tokens + written, MISSING_TOKENS)
        self._arrive_later(request, target, pause_s, written)
        self._changed(target)


HOUR_S = 3600.0
DAY_S = 86_400.0
TIME, RATE, NAME = "t_s", "rate_rps", "model"
"""The columns, as in ServeGen's rates summed up (Xiang et al., arXiv:2505.09999); the last may be missing."""


def day_rates(text: str, mean_rate: float) -> RateSteps:
    """Poisson arrivals at the rates of `FILE` or `FILE:NAME`, its first day, scaled so that their mean is `mean_rate`.

    NAME says which of the models that a file has. Raises ConfigError.
    """
    path, name = Path(text), ""
    if not path.is_file() and ":" in text:
        of_file, _, name = text.rpartition(":")
        path = Path(of_file)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(row.get(NAME, ""), float(row[TIME]), float(row[RATE])) for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"--day {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--day {path}: wants columns {TIME} and {RATE} with numbers: {error}") from error
    names = sorted({one for one, _, _ in rows})
    if name not in names and len(names) > 1:
        raise ConfigError(f"--day {text}: the file has several models; name one after a colon, of {', '.join(names)}")
    steps = [(at_s, rate) for one, at_s, rate in rows if at_s < DAY_S and name in (one, "")]
    mean = statistics.fmean(rate for _, rate in steps) if steps else 0.0
    if not steps or steps[0][0] != 0 or mean <= 0:
        raise ConfigError(f"--day {text}: wants rates above 0 whose times begin at 0")
    return RateSteps(tuple((at_s, rate * mean_rate / mean) for at_s, rate in steps))


def scaling_cost(fleet: CoarseFleet, start: tuple[int, int], ends_s: float) -> dict[str, float]:
    """Return what a fleet that served until `ends_s` cost: worker-hours from each order on, the most workers of each
    role, and the most reversals of a role in any hour."""
    targets = [Change(0.0, *start), *(one for one in fleet.changes if one.at_s <= ends_s)]
    return {
        "worker_hours": round(fleet.worker_s() / HOUR_S, 2),
        "most_prefill": max(one.prefill for one in targets),
        "most_decode": max(one.decode for one in targets),
        "prefill_reversals": reversals([(one.at_s, one.prefill) for one in targets]),
        "decode_reversals": reversals([(one.at_s, one.decode) for one in targets]),
        "changes": len(targets) - 1,
    }


def reversals(counts: Sequence[tuple[float, int]]) -> int:
    """The most turns, from up to down or back, within any hour of (when, how many)."""
    turns: list[float] = []
    went = 0
    for (_, before), (at_s, after) in pairwise(counts):
        way = (after > before) - (after < before)
        if way and went and way != went:
            turns.append(at_s)
        went = way or went
    return max((sum(at_s <= one < at_s + HOUR_S for one in turns) for at_s in turns), default=0)
