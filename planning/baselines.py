"""The literature's ways to batch and to keep KV, step by step on one trace: what each of them gained.

static       a batch is padded to its longest prompt, and holds its rows until its longest answer has ended
no KV cache  every step computes all tokens again
iteration    requests join and leave between steps (Yu et al., Orca, OSDI 2022); prompts are computed whole
contiguous   memory for a request in one piece, reserved when it begins: for the longest context there is, for the
             answer's next power of two, or (oracle) for what it will be (Kwon et al., vLLM, SOSP 2023, figure 2)
paged        blocks as they are needed; out of blocks, the youngest is computed again later (vLLM)
chunked      a step holds at most so many prompt tokens beside its rows (Agrawal et al., Sarathi, OSDI 2024)
disaggregated half of the workers read, the others write (Zhong et al., DistServe, OSDI 2024; Patel et al., Splitwise)

Simpler than our own schedulers: requests are dealt to workers in turn, and share nothing.
"""

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twostroke.loadtests.plan import SLO
from twostroke.worker.profile import BLOCK_TOKENS, WorkerProfile
from twostroke.worker.scheduling.step_policy import AnswerLengths, shortest_first

CHUNK_TOKENS = 512
TRANSFER_S = 0.002

Allocation = Literal["paged", "largest", "power", "oracle"]
Tokens = tuple[float, int, int, str]
"""When a request comes, tokens of its prompt and of its answer, and its class."""


@dataclass(frozen=True)
class Way:
    """A way to batch requests and to keep KV."""

    name: str
    allocation: Allocation = "paged"
    is_static: bool = False
    has_cache: bool = True
    is_chunked: bool = False
    is_disaggregated: bool = False


WAYS = (
    Way("no KV cache", has_cache=False),
    Way("static batching", allocation="largest", is_static=True),
    Way("iteration, contiguous: largest", allocation="largest"),
    Way("iteration, contiguous: power of two", allocation="power"),
    Way("iteration, contiguous: oracle", allocation="oracle"),
    Way("iteration, paged", allocation="paged"),
    Way("chunked prefill, paged", is_chunked=True),
    Way("disaggregated, paged", is_disaggregated=True),
)
CHUNKED = WAYS[6]

ORDERS = ("fcfs", "edf", "sjf", "sjf oracle")
"""Orders of waiting requests. `sjf` predicts answers as decode workers do; the oracle knows them."""


@dataclass(slots=True, eq=False)
class BaselineJob:
    """A request at a simulated worker, and how far it has come. Times in seconds, lengths in tokens."""

    at_s: float
    prompt: int
    output: int
    class_name: str = ""
    ready_s: float = 0.0  # when this worker may begin with it
    deadline_s: float = 0.0  # of its first token
    turn: float = 0.0  # the smallest goes first
    computed: int = 0  # of the prompt, and after a preemption of what was written
    written: int = 0
    place: tuple[int, int] = (0, 0)  # of contiguous memory: where, and how much
    first_s: float = 0.0
    last_s: float = 0.0


class BaselineMemory:
    """A worker's KV memory, in tokens: who holds how much of it, and where, if in one piece."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.reserved = 0
        self._free: list[tuple[int, int]] = [(0, tokens)]  # pieces by where they begin

    def take(self, tokens: int) -> tuple[int, int] | None:
        """A piece of so many tokens, the first that fits; None where none does."""
        for index, (begin, size) in enumerate(self._free):
            if size >= tokens:
                self._free[index : index + 1] = [(begin + tokens, size - tokens)] if size > tokens else []
                self.reserved += tokens
                return begin, tokens
        return None

    def give_back(self, place: tuple[int, int]) -> None:
        """Join the piece with its neighbours."""
        self.reserved -= place[1]
        insort(self._free, place)
        joined: list[tuple[int, int]] = []
        for begin, size in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((begin, size))
        self._free = joined


class BaselineWorker:
    """One worker under a way. `serve` runs its requests to their ends."""

    def __init__(self, profile: WorkerProfile, way: Way, order: str, max_context: int, *, writes: bool) -> None:
        self._profile = profile
        self._way = way
        self._order = order
        self._lengths = AnswerLengths()
        self._max_context = max_context
        self._writes = writes
        self._memory = BaselineMemory(profile.kv_tokens)
        self._waiting: list[tuple[float, int, BaselineJob]] = []
        self._running: list[BaselineJob] = []
        self._number = 0
        self.held_s = self.used_s = 0.0  # tokens of memory reserved, and of them filled, times seconds

    def serve(self, jobs: Sequence[BaselineJob]) -> None:
        """`jobs` by `ready_s`; sets when each has had its first and its last token here."""
        now_s, coming = 0.0, 0
        while coming < len(jobs) or self._waiting or self._running:
            if not self._waiting and not self._running:
                now_s = max(now_s, jobs[coming].ready_s)
            while coming < len(jobs) and jobs[coming].ready_s <= now_s:
                jobs[coming].turn = self._turn_at(jobs[coming])
                self._wait(jobs[coming])
                coming += 1
            self._admit()
            now_s = self._step(now_s)

    def _turn_at(self, job: BaselineJob) -> float:
        match self._order:
            case "edf":
                return job.deadline_s
            case "sjf":
                expected = self._lengths.expected(job.class_name, job.prompt)
            case "sjf oracle":
                expected = float(job.output)
            case _:
                return job.at_s
        return shortest_first(job.at_s, job.prompt, expected)

    def _wait(self, job: BaselineJob) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (job.turn, self._number, job))

    def _admit(self) -> None:
        if self._way.is_static and self._running:
            return
        while self._waiting and len(self._running) < self._profile.max_batch:
            job = self._waiting[0][2]
            if not self._reserve(job):
                if self._running:
                    return
                raise ValueError(f"a request of {job.prompt + job.output} tokens fits into no empty worker")
            heapq.heappop(self._waiting)
            self._running.append(job)

    def _reserve(self, job: BaselineJob) -> bool:
        if not self._way.has_cache:
            return True
        if self._way.allocation == "paged":
            blocks = _blocks(job.prompt + job.written + 1)
            if self._memory.reserved + blocks > self._memory.tokens:
                return False
            self._memory.reserved += blocks
            job.place = (0, blocks)
            return True
        answer = {"oracle": job.output, "power": 1 << (job.output - 1).bit_length()}.get(self._way.allocation)
        size = self._max_context if answer is None else min(job.prompt + answer, self._max_context)
        place = self._memory.take(max(size, job.prompt + job.output))
        job.place = place or (0, 0)
        return place is not None

    def _release(self, job: BaselineJob) -> None:
        if self._way.has_cache:
            if self._way.allocation == "paged":
                self._memory.reserved -= job.place[1]
            else:
                self._memory.give_back(job.place)
        job.place = (0, 0)

    def _step(self, now_s: float) -> float:
        """Run one step; returns when it ends."""
        way, costs = self._way, self._profile.costs
        writers = [job for job in self._running if job.computed >= job.prompt + job.written]
        seconds = 0.0
        num_tokens = len(writers)
        if way.has_cache:
            context = sum(job.prompt + job.written for job in writers)
            seconds += costs.decode_s(len(writers), context)
        else:
            seconds += sum(costs.prompt_s(job.prompt + job.written) for job in writers)
            num_tokens = sum(job.prompt + job.written for job in writers)
        left = min(CHUNK_TOKENS, self._profile.step_tokens) if way.is_chunked else self._profile.step_tokens
        longest = max((job.prompt for job in self._running), default=0) if way.is_static else 0
        ready = [job for job in writers if job.written < job.output]
        for job in self._running:
            missing = job.prompt + job.written - job.computed
            if missing <= 0 or left <= 0:
                continue
            tokens = min(missing, left) if way.is_chunked else missing
            padded = max(tokens, longest)
            seconds += costs.prompt_s(padded, job.computed) + costs.context_s * job.computed
            num_tokens += padded
            left -= padded
            job.computed += tokens
            if job.computed == job.prompt + job.written:
                ready.append(job)
        seconds += costs.reading_s(num_tokens)
        if way.has_cache:
            self.held_s += seconds * self._memory.reserved
            self.used_s += seconds * sum(min(job.computed, job.prompt + job.output) for job in self._running)
        now_s += seconds
        for job in ready:
            self._write(job, now_s)
        if way.is_static and all(job.written == job.output for job in self._running):
            for job in self._running:
                self._release(job)
            self._running = []
        return now_s

    def _write(self, job: BaselineJob, now_s: float) -> None:
        if job not in self._running:  # it gave way to one that wrote before it in this step
            return
        if job.written == 0:
            job.first_s = now_s
        job.written += 1
        job.computed = job.prompt + job.written  # its KV comes with the next step, whose time counts it
        job.last_s = now_s
        if job.written == job.output or not self._writes:
            if job.written == job.output:
                self._lengths.ended(job.class_name, job.prompt, job.output)
            if not self._way.is_static:
                self._release(job)
                self._running.remove(job)
        elif self._way.has_cache and self._way.allocation == "paged":
            self._grow(job)

    def _grow(self, job: BaselineJob) -> None:
        needed = _blocks(job.prompt + job.written + 1) - job.place[1]
        while needed > 0 and self._memory.reserved + needed > self._memory.tokens:
            youngest = max(self._running, key=lambda one: one.at_s)
            self._release(youngest)
            self._running.remove(youngest)
            youngest.computed = 0
            self._wait(youngest)
            if youngest is job:
                return
        if needed > 0:
            self._memory.reserved += needed
            job.place = (0, job.place[1] + needed)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True)
class BaselineResult:
    """Result of one way on the trace. Times are in seconds."""

    way: str
    order: str
    output_rate: float  # tokens a second, from the first arrival to the last token
    ttft_mean_s: float
    ttft_p90_s: float
    tpot_mean_s: float
    tpot_p90_s: float
    waste: float | None  # share of the reserved KV memory that holds nothing, over time; None: nothing is kept
    attainment: float | None


def serve_way(
    requests: Sequence[Tokens], profile: WorkerProfile, way: Way, order: str, slo: SLO, workers: int
) -> BaselineResult:
    """The trace under one way on so many workers, dealt to them in turn."""
    max_context = max(prompt + output for _, prompt, output, _ in requests)
    deadline_s = slo.ttft_s or 0.0
    jobs = [
        BaselineJob(at_s, prompt, output, class_name, at_s, at_s + deadline_s)
        for at_s, prompt, output, class_name in requests
    ]
    groups: list[BaselineWorker] = []
    num_readers = max(1, workers // 2) if way.is_disaggregated else workers
    for index in range(num_readers):
        reader = BaselineWorker(profile, way, order, max_context, writes=not way.is_disaggregated)
        reader.serve(jobs[index::num_readers])
        groups.append(reader)
    if way.is_disaggregated:
        for job in jobs:
            job.ready_s = job.first_s + TRANSFER_S + job.prompt * profile.kv_bytes / profile.link_bytes_per_s
        moved = sorted((job for job in jobs if job.written < job.output), key=lambda job: job.ready_s)
        num_writers = max(1, workers - num_readers)
        for index in range(num_writers):
            writer = BaselineWorker(profile, way, order, max_context, writes=True)
            writer.serve(moved[index::num_writers])
            groups.append(writer)
    held_s, used_s = sum(one.held_s for one in groups), sum(one.used_s for one in groups)
    ttfts = sorted(job.first_s - job.at_s for job in jobs)
    tpots = [(job.last_s - job.first_s) / (job.output - 1) for job in jobs if job.output > 1]
    met = [
        (slo.ttft_s is None or job.first_s - job.at_s <= slo.ttft_s)
        and (slo.tpot_s is None or job.last_s - job.first_s <= slo.tpot_s * max(0, job.output - 1))
        for job in jobs
    ]
    return BaselineResult(
        way=way.name,
        order=order,
        output_rate=sum(job.output for job in jobs) / (max(job.last_s for job in jobs) - jobs[0].at_s),
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p90_s=ttfts[int(0.9 * (len(ttfts) - 1))],
        tpot_mean_s=sum(tpots) / max(1, len(tpots)),
        tpot_p90_s=sorted(tpots)[int(0.9 * (len(tpots) - 1))] if tpots else 0.0,
        waste=1 - used_s / held_s if held_s else None,
        attainment=None if slo == SLO() else sum(met) / len(met),
    )


def compare_baselines(
    requests: Sequence[Tokens], profile: WorkerProfile, slo: SLO, workers: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every way first come first served, then chunked prefill in every order; says a table and returns it."""
    runs = [(way, "fcfs") for way in WAYS] + [(CHUNKED, order) for order in ORDERS if order != "fcfs"]
    say(f"{'way':38}{'order':15}{'tokens/s':>9}{'TTFT':>9}{'P90':>9}{'TPOT':>9}{'P90':>9}{'waste':>7}{'met':>7}")
    rows: list[BaselineResult] = []
    for way, order in runs:
        one = serve_way(requests, profile, way, order, slo, workers)
        rows.append(one)
        times = "".join(
            f"{value:>9.4g}" for value in (one.ttft_mean_s, one.ttft_p90_s, one.tpot_mean_s, one.tpot_p90_s)
        )
        waste, met = ("-" if share is None else f"{share:.1%}" for share in (one.waste, one.attainment))
        say(f"{one.way:38}{one.order:15}{one.output_rate:>9.0f}{times}{waste:>7}{met:>7}")
    return {"workers": workers, "requests": len(requests), "baselines": [vars(one) for one in rows]}
