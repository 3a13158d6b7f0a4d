"""A prefill and a decode worker on virtual time, with admission before them: by numbers, without any of our workers.

The prefill worker computes one prompt at a time, by priority, but keeps each class's share; the decode worker's steps
get longer with every request in them. Estimates are what a cost model would say that knows all
this, made wrong on purpose.
"""

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, GenerateRequest, Peer, Promise, SamplingParams
from twostroke.protocol.stats import QueuedWork, Role, WorkerInfo, WorkerStats
from twostroke.router.fleet import Estimate, Path
from twostroke.router.observe.stages import Stages
from twostroke.router.slo.admission import Admission, Overloaded
from twostroke.router.slo.attainment import verdict_of
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.router.slo.demand import DecayingSum


def worker(role: Role) -> WorkerInfo:
    layout = KVLayout("fake", "float32", 2, 2, 8, 16)
    return WorkerInfo(role, Peer(role, 1), Address("127.0.0.1", 1), (), layout, 1000, 4096)


PREFILL, DECODE = worker("prefill"), worker("decode")


def request_of(one: SLOClass, *, outputs: int = 20, prompt_tokens: int = 100) -> GenerateRequest:
    promise = Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)
    return GenerateRequest("", "", (1,) * prompt_tokens, prompt_tokens, SamplingParams(), outputs, promise=promise)


@dataclass
class Job:
    """A request in the simulation."""

    request: GenerateRequest
    prompt_s: float
    stages: Stages
    tokens_left: int = 0


@dataclass
class Report:
    """What came of the requests, by class."""

    offered: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    admitted_at: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    done: dict[str, list[Job]] = field(default_factory=lambda: defaultdict(list))
    retry_after_s: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    waited: list[tuple[int, float]] = field(default_factory=list)  # told first, and until admitted, by the obedient

    def met(self, since: float = 0.0, until: float = float("inf")) -> int:
        """Requests that arrived in between and got what they were promised."""
        jobs = (job for jobs in self.done.values() for job in jobs if since <= job.stages.arrive < until)
        return sum(verdict_of(job.request.promise, job.stages.ttft_s, job.stages.tpot_s) == "met" for job in jobs)

    def refused_part(self, name: str) -> float:
        return 1 - len(self.admitted_at[name]) / self.offered[name]


class AdmittedLoad:
    """Offers requests to admission, and runs those that it lets in."""

    def __init__(
        self, config: SLOConfig, *, seed: int = 1, bias: float = 1.0, prompt_s: float = 0.05, row_s: float = 0.002
    ):
        self.now = 0.0
        self.report = Report()
        self.admission = Admission(config=config, stats=self._stats, clock=lambda: self.now)
        self._config = config
        self._draw = random.Random(seed)
        self._bias = bias  # predicted over true times
        self._prompt_s = prompt_s
        self._row_s = row_s
        self._base_s = 10 * row_s
        self._queue: list[Job] = []
        self._served: dict[str, DecayingSum] = defaultdict(lambda: DecayingSum(2.0))  # seconds of prompts
        self._prefill_free_at = 0.0
        self._rows: list[Job] = []
        self._events: list[tuple[float, int, str, object]] = []
        self._count = itertools.count()
        self._is_stepping = False
        self._in_flight = 0

    def offer(self, rates: dict[str, float], *, since: float, seconds: float, retries: float = 0.0) -> None:
        """Poisson arrivals of so many a second of each class; a part of the refused come back when they are told."""
        for name, rate in rates.items():
            at = since
            while rate > 0 and (at := at + self._draw.expovariate(rate)) < since + seconds:
                self._push(at, "arrive", (name, self._draw.random() < retries, at, None))

    def run(self) -> Report:
        """To the last event."""
        while self._events:
            self.now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(what)
        return self.report

    def _arrive(self, what: tuple[str, bool, float, int | None]) -> None:
        name, obeys, first_at, told_s = what
        one = self._config.named(name)
        if told_s is None:
            self.report.offered[name] += 1
        job = Job(request_of(one), self._draw.uniform(0.5, 1.5) * self._prompt_s, Stages(self.now))
        path = Path(PREFILL, DECODE, estimate=self._estimate(job))
        try:
            self.admission.admit(job.request, path, 0.0, False)
        except Overloaded as error:
            self.report.retry_after_s[name].append(error.retry_after_s)
            if obeys:
                told_s = error.retry_after_s if told_s is None else told_s
                self._push(self.now + error.retry_after_s, "arrive", (name, obeys, first_at, told_s))
            return
        job.stages.admit, job.stages.expected = self.now, path.estimate
        if told_s is not None:
            self.report.waited.append((told_s, self.now - first_at))
        self.report.admitted_at[name].append(self.now)
        self._queue.append(job)
        self._in_flight += 1
        self._begin_prefill(None)

    def _estimate(self, job: Job) -> Estimate:
        promise = job.request.promise
        first = sum(other.prompt_s for other in self._queue if other.request.promise.priority >= promise.priority)
        if promise.share > 0:
            own = sum(o.prompt_s for o in self._queue if o.request.promise.class_name == promise.class_name)
            first = min(first, own / promise.share)
        queue_s = max(0.0, self._prefill_free_at - self.now) + first
        step_s = self._base_s + self._row_s * (self._in_flight + 1)
        return Estimate(queue_s * self._bias, 0.0, job.prompt_s * self._bias, 0.0, 0.0, step_s)

    def _stats(self, peer: Peer) -> WorkerStats:
        if peer == PREFILL.peer:
            return WorkerStats(
                queued=tuple(
                    QueuedWork(
                        one.name, one.priority, one.share, 100 * sum(self._is_of(one, job) for job in self._queue), 0
                    )
                    for one in self._config.classes
                )
            )
        promised = [job.request.promise.tpot_s for job in self._rows if job.request.promise.tpot_s is not None]
        return WorkerStats(num_running=len(self._rows), tightest_tpot_s=min(promised, default=None))

    @staticmethod
    def _is_of(one: SLOClass, job: Job) -> bool:
        return job.request.promise.class_name == one.name

    def _begin_prefill(self, _: object) -> None:
        if self.now < self._prefill_free_at or not self._queue:
            return
        job = min(self._queue, key=self._turn)
        self._queue.remove(job)
        self._served[job.request.promise.class_name].add(job.prompt_s, self.now)
        self._prefill_free_at = self.now + job.prompt_s
        self._push(self._prefill_free_at, "prefilled", job)
        self._push(self._prefill_free_at, "begin_prefill", None)

    def _turn(self, job: Job) -> tuple[bool, int, float]:
        promise = job.request.promise
        everybody = sum(one.value(self.now) for one in self._served.values())
        is_owed = self._served[promise.class_name].value(self.now) < promise.share * everybody
        return not is_owed, -promise.priority, job.stages.arrive

    def _prefilled(self, job: Job) -> None:
        job.stages.begin_attempt()
        job.stages.first_token = self.now
        job.stages.num_output_tokens = 1
        job.tokens_left = job.request.max_tokens - 1
        self._rows.append(job)
        if not self._is_stepping:
            self._step(())

    def _step(self, ran: tuple[Job, ...]) -> None:
        for job in ran:
            job.tokens_left -= 1
            job.stages.num_output_tokens += 1
            if job.tokens_left == 0:
                self._rows.remove(job)
                self._in_flight -= 1
                job.stages.finish = self.now
                self.report.done[job.request.promise.class_name].append(job)
                stages = job.stages
                self.admission.ended(job.request, stages.num_output_tokens, stages.predicted, stages.tpot_s)
        self._is_stepping = bool(self._rows)
        if self._rows:
            self._push(self.now + self._base_s + self._row_s * len(self._rows), "step", tuple(self._rows))

    def _push(self, at: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (at, next(self._count), kind, what))


def percentile(values: Iterator[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
