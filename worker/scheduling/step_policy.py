"""The policy of a step: the order of the queue, the requests that decode together, the prompt tokens beside them. Pure.

Workers of both roles compute prompts and decode; a role is a policy's two numbers (the longest step with prompts beside
streams) and which blocks it keeps free. Both parts follow from the worker's own step costs. While these are not known,
no request waits for a place, and chunks of prompts beside decodes are small.

**The batch.** A request that has a place in the batch keeps it, so that streams flow; newcomers wait until there is
room, in the order of their arrival. Only a request of a higher class takes places, of the youngest of the lowest class
first: their KV stays where it is, and they go on when there is room again. A class without places still gets its share
of the tokens. Prompts that end here with their first token (`is_prefill_only`) take no places.

A promise is one of a mean time per token. Where drafts are accepted, a step draws several tokens of a request; it may
be longer by as much, less the time of the drafts' rows. Newcomers are taken to be like those that have ended.

**Prompts beside decodes.** Where decoding requests were promised a time per token, prompts get what that leaves.
Without promises a step with prompts may take what `longest_chunk` prompt tokens take on this worker, within
MIN_STALL_S and `most_stall_s`. On a decode worker that is a pause that people hardly notice between two words. A step
whose decodes alone take that long may become MIN_GROWTH times as long. The settings `max_stall_s` and `stall_factor`
replace this rule.

**The queue**, the same in both roles. Higher priorities go first. Within one priority, requests that have tokens
already (resumed or preempted ones) go before those that have none: their clients are reading. Then the policy decides:

    edf    by the deadline of the first token: least time left first; without a promise, UNPROMISED_S are assumed
    sjf    by the tokens to be computed, fewest first: those of the prompt, and on a decode worker those predicted for
           the answer (`AnswerLengths`). They count as a later arrival, by MAX_OVERTAKING_S at most: no request
           overtakes one that arrived that much earlier
    fcfs   by arrival

A turn doesn't change while a request waits. So a request is overtaken only by those that come before it in this order,
and each policy bounds how many can. Across priorities, ClassShares bounds it.

Classes of a lower priority get their share while higher ones keep a worker busy, so that none starves. A class that
waits saves up its share of the tokens that go to higher classes, and may spend these savings before them. Tokens that
it gets in its own turn are paid from the savings too. A class without waiting requests loses its savings.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import MIN_STRETCH, StepCosts
from twostroke.worker.config import QueuePolicy, WorkerConfig
from twostroke.worker.constants import (
    ANSWER_MEAN_WEIGHT,
    ANSWER_TOKENS_PER_S,
    CHUNK_MULTIPLE,
    FIRST_ANSWER_TOKENS,
    MAX_OVERTAKING_S,
    MAX_SHARE,
    MIN_CLASS_CHUNK,
    MIN_SHARE,
    PROMPT_TOKENS_PER_S,
    UNPROMISED_S,
)
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import Turn, WorkerJob

if TYPE_CHECKING:
    from twostroke.worker.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class PromptBudget:
    """Tokens, and time where decodes would wait, that one step still has for chunks of prompts."""

    tokens: int
    least: int = 0  # tokens given whatever time they take, so that prompts always progress
    seconds: float | None = None
    costs: StepCosts | None = None

    @property
    def is_spent(self) -> bool:
        """True where not even a small chunk with nothing before it is left."""
        return self._most(CHUNK_MULTIPLE, 0) == 0

    def spend_on_rows(self, num_rows: int) -> None:
        """Take off rows of drafts. Prompts keep their time: these rows are there because they pay for theirs."""
        self.tokens = max(0, self.tokens - num_rows)

    def take(self, wanted: int, num_before: int) -> int:
        """Take a chunk of at most `wanted` tokens after `num_before` others; return its length, 0 where none is."""
        num_tokens = self._most(wanted, num_before)
        self.tokens -= num_tokens
        self.least = max(0, self.least - num_tokens)
        if num_tokens and self.seconds is not None and self.costs is not None:
            self.seconds -= self.costs.context_s * num_before + self.costs.prompt_s(num_tokens, num_before)
        return num_tokens

    def _most(self, wanted: int, num_before: int) -> int:
        most = min(wanted, self.tokens)
        if self.seconds is None or self.costs is None:
            return most
        in_time = tokens_in(self.costs, self.seconds - self.costs.context_s * num_before, num_before)
        if in_time >= most:
            return most
        return min(most, max(in_time - in_time % CHUNK_MULTIPLE, self.least))


def tokens_in(costs: StepCosts, seconds: float, num_before: int) -> int:
    """Return how many prompt tokens after `num_before` others are computed in `seconds`: the inverse of prompt_s."""
    if seconds <= 0:
        return 0
    token_s = costs.token_s + costs.pair_s * num_before  # of the first; each one after it also sees those before it
    # n * (token_s + pair_s / 2 * n) = seconds, in the form that loses nothing where pair_s is small, or 0
    divisor = token_s + math.sqrt(token_s * token_s + 2 * costs.pair_s * seconds)
    return int(min(2 * seconds / divisor, 1e9)) if divisor > 0 else int(1e9)


class ClassShares:
    """The savings of each class, in tokens, or in rows of steps where those are scheduled."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return True where any class has savings."""
        return bool(self._saved)

    def saved(self, class_name: str) -> int:
        """Return the whole tokens that the class may have before any higher class."""
        return int(self._saved.get(class_name, 0.0))

    def settle(self, given: Mapping[Promise, int], waiting: Iterable[Promise]) -> None:
        """Account for a step: the tokens given by promise, and the classes that it leaves waiting for more."""
        highest = max((promise.priority for promise in given), default=None)
        if highest is None and not self._saved:
            return
        saved: dict[str, float] = {}
        for name, promise in {promise.class_name: promise for promise in waiting}.items():
            to_higher = sum(tokens for other, tokens in given.items() if other.priority > promise.priority)
            to_it = sum(tokens for other, tokens in given.items() if other.class_name == name)
            share = min(max(promise.share, MIN_SHARE), MAX_SHARE)
            # x of T tokens are its share once it saves x / (T - x) of the tokens that others get.
            left = self._saved.get(name, 0.0) + to_higher * share / (1 - share) - to_it
            if left > 0:
                saved[name] = left
        self._saved = saved


NO_LIMIT = 1 << 62
"""Tokens of a turn without a limit."""


def turn_of(job: WorkerJob, policy: QueuePolicy, answer_tokens: float = 0.0) -> Turn:
    """Return the job's turn under a policy; `answer_tokens` are expected to be computed here."""
    promise = job.request.promise
    urgency = 0.0
    match policy:
        case "edf":
            urgency = job.arrived_at + (UNPROMISED_S if promise.ttft_left_s is None else promise.ttft_left_s)
        case "sjf":
            urgency = shortest_first(job.arrived_at, job.num_uncached, answer_tokens)
        case "fcfs":
            pass  # the arrival alone
    return (-promise.priority, not job.has_output, urgency, job.arrival)


def shortest_first(arrived_at: float, prompt_tokens: int, answer_tokens: float) -> float:
    """Return the time at which a request counts as arrived: the more tokens it has, the later."""
    later_s = prompt_tokens / PROMPT_TOKENS_PER_S + answer_tokens / ANSWER_TOKENS_PER_S
    return arrived_at + min(later_s, MAX_OVERTAKING_S)


def turns(ready: Sequence[Sequence[WorkerJob]], shares: ClassShares) -> Iterator[tuple[WorkerJob, int]]:
    """Yield all jobs in order, each with the tokens that it may get in this turn; `ready` are lists in that order.

    Jobs whose class has saved enough come first, with the savings as their limit; these jobs come twice.
    """
    if shares:
        firsts: dict[str, WorkerJob] = {}
        for jobs in ready:
            for name, job in {job.request.promise.class_name: job for job in reversed(jobs)}.items():
                firsts[name] = min(firsts.get(name, job), job, key=_turn)
        for job in sorted(firsts.values(), key=_turn):
            saved = shares.saved(job.request.promise.class_name)
            if saved >= (job.num_indivisible or min(MIN_CLASS_CHUNK, job.num_to_compute)):
                yield job, saved
    for job in heapq.merge(*ready, key=_turn):
        yield job, NO_LIMIT


def _turn(job: WorkerJob) -> Turn:
    return job.turn


# --- predicted lengths of answers, for sjf ---


Group = tuple[str | int, ...]


@dataclass(slots=True)
class _Mean:
    """A mean in which recent answers count more than old ones."""

    tokens: float = 0.0
    num_answers: int = 0

    def add(self, tokens: int) -> None:
        self.num_answers += 1
        self.tokens += max(ANSWER_MEAN_WEIGHT, 1 / self.num_answers) * (tokens - self.tokens)


@dataclass(slots=True)
class AnswerLengths:
    """Predicts the lengths of answers, and learns from each one that ends.

    A request's answer is expected to be as long as the mean of its SLO class and of prompts about as long as its own
    (within a factor of two). Before one of these has ended, the mean of its class counts, then that of all answers.
    """

    _means: dict[Group, _Mean] = field(default_factory=dict)

    def expected(self, class_name: str, num_prompt_tokens: int) -> float:
        """Return the expected tokens of an answer."""
        return next(
            (self._means[group].tokens for group in _groups(class_name, num_prompt_tokens) if group in self._means),
            FIRST_ANSWER_TOKENS,
        )

    def ended(self, class_name: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Learn from an answer that has ended."""
        for group in _groups(class_name, num_prompt_tokens):
            self._means.setdefault(group, _Mean()).add(num_tokens)


def _groups(class_name: str, num_prompt_tokens: int) -> Iterator[Group]:
    """Yield the groups that a request belongs to, the narrowest first."""
    yield (class_name, num_prompt_tokens.bit_length())
    yield (class_name,)
    yield ()


CAUTIOUS_CHUNK = 64
"""Prompt tokens beside decodes while step costs are not known."""
MIN_STALL_S = 0.05
"""Least bound of a step's time with prompts, without promises and settings: an accelerator keeps to it."""
MIN_GROWTH = 1.75
"""Factor by which prompts may always lengthen a step of decodes: otherwise they would never progress."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """One worker's bounds of steps, by its settings and its current step costs."""

    config: WorkerConfig
    costs: Callable[[], StepCosts | None]
    longest_chunk: int
    """Prompt tokens whose time a step may take where neither a promise nor a setting says otherwise."""
    most_stall_s: float
    """Upper bound of that time, which a CPU keeps to."""

    def places(self) -> "Places":
        """An empty batch."""
        return Places(self.costs(), self.config.tpot_safety)

    def for_prompts(self, decodes: Iterable[WorkerJob]) -> PromptBudget:
        """Return the prompt budget of a step in which these requests decode."""
        batch = PromisedBatch()
        for job in decodes:
            batch.add(job)
        tokens = max(0, self.config.max_step_tokens - batch.num_rows)
        if not batch.num_rows:
            return PromptBudget(tokens)
        costs = self.costs()
        if costs is None:
            return PromptBudget(min(tokens, CAUTIOUS_CHUNK))
        beside_s = costs.weights_s + costs.decode_s(batch.num_rows, batch.num_context_tokens)
        step_s = batch.longest_s(costs, self.config.tpot_safety)
        if step_s == math.inf:
            step_s = self.stall_s(costs, batch.plain_s(costs), beside_s)
        return PromptBudget(tokens, least=self.config.min_chunk_tokens, seconds=step_s - beside_s, costs=costs)

    def stall_s(self, costs: StepCosts, alone_s: float, beside_s: float) -> float:
        """Return the longest time of a step whose decodes have no TPOT promise.

        The decodes take `alone_s`, and `beside_s` where a chunk of a prompt has all experts loaded.
        """
        bounds_s = []
        if self.config.max_stall_s is not None:
            bounds_s.append(self.config.max_stall_s)
        if self.config.stall_factor is not None:
            bounds_s.append(self.config.stall_factor * alone_s)
        return min(bounds_s, default=max(self.usual_stall_s(costs), MIN_GROWTH * beside_s))

    def usual_stall_s(self, costs: StepCosts) -> float:
        """Return the longest time of a step without promises and without settings."""
        return min(max(costs.weights_s + costs.prompt_s(self.longest_chunk), MIN_STALL_S), self.most_stall_s)


@dataclass(slots=True)
class PromisedBatch:
    """Requests that decode together: their rows, and what their promises allow a step."""

    num_rows: int = 0
    num_context_tokens: int = 0
    tightest_s: float = math.inf  # promised time per token
    step_s: float = math.inf  # the same times the tokens that the request's steps have drawn of late
    num_drafted: float = 0.0  # rows of drafts, likewise
    num_drafted_context: float = 0.0  # tokens in the contexts of these rows

    def add(self, job: WorkerJob) -> None:
        """Count a request."""
        num_tokens = len(job.sequence.token_ids)
        self.num_rows += 1
        self.num_context_tokens += num_tokens
        self.tightest_s = min(self.tightest_s, job.promised_s)
        self.step_s = min(self.step_s, job.promised_s * job.tokens_per_step)
        self.num_drafted += job.drafts_per_step
        self.num_drafted_context += job.drafts_per_step * num_tokens

    def plain_s(self, costs: StepCosts) -> float:
        """Return the seconds of a step without drafts."""
        return costs.reading_s(self.num_rows) + costs.decode_s(self.num_rows, self.num_context_tokens)

    def lone_s(self, costs: StepCosts) -> float:
        """Return the seconds of a usual request's step alone."""
        return costs.reading_s(1) + costs.decode_s(1, self.num_context_tokens // self.num_rows)

    def drafted_s(self, costs: StepCosts) -> float:
        """Return the seconds that as many drafts as of late add to a step."""
        reading_s = costs.reading_s(self.num_rows + self.num_drafted) - costs.reading_s(self.num_rows)
        return reading_s + self.num_drafted * costs.row_s + self.num_drafted_context * costs.context_s

    def longest_s(self, costs: StepCosts, safety: float = 1.0) -> float:
        """Return the longest step, drafts aside, that keeps all promises: without drafts, or with as many as of late.

        `safety` is the share of promises that a step may take.
        """
        return max(self.tightest_s * safety, self.step_s * safety - self.drafted_s(costs))

    def speedup(self, costs: StepCosts, tokens_per_step: float, drafts_per_step: float) -> float:
        """Return by what factor drafts shorten the time per token of a newcomer with such steps; at least 1."""
        num_rows = max(1, self.num_rows)
        context_tokens = self.num_context_tokens / num_rows
        plain_s = costs.reading_s(num_rows) + num_rows * (costs.row_s + context_tokens * costs.context_s)
        num_all = num_rows * (1 + drafts_per_step)
        drafted_s = costs.reading_s(num_all) + num_all * (costs.row_s + context_tokens * costs.context_s)
        # A fit may put all costs into the contexts' lengths, and there may be none.
        return max(1.0, tokens_per_step * plain_s / drafted_s) if drafted_s > 0 else 1.0


class Places:
    """The requests with a place in the batch so far, and a check that one more keeps all promises per token."""

    def __init__(self, costs: StepCosts | None, safety: float):
        self._costs = costs
        self._safety = safety
        self._batch = PromisedBatch()

    def allow(self, job: WorkerJob) -> bool:
        """Return True where the step would be short enough with the job in it; one alone is always allowed."""
        batch, costs = replace(self._batch), self._costs
        batch.add(job)
        if costs is None or batch.num_rows == 1 or batch.tightest_s == math.inf:
            return True
        return batch.plain_s(costs) <= max(batch.longest_s(costs, self._safety), MIN_STRETCH * batch.lone_s(costs))

    def take(self, job: WorkerJob) -> None:
        """Give the job a place."""
        self._batch.add(job)


class StepPolicy:
    """Continuous batching: at most `max_batch` requests in a step, and no more than a StepBudget allows.

    Admission leaves the watermark's blocks free, so that running streams have some to grow into. Each role's policy is
    a subclass.
    """

    longest_chunk: ClassVar[int]
    """Prompt tokens whose time a step with streams may take where neither a promise nor a setting says otherwise."""
    most_stall_s: ClassVar[float]
    """Upper bound of that time."""

    def __init__(self, config: WorkerConfig, costs: Callable[[], StepCosts | None], pool: BlockPool):
        """`costs` returns the worker's step costs, None while they are not known."""
        self._budget = StepBudget(config, costs, self.longest_chunk, self.most_stall_s)
        self._batch = DecodeBatch(self._budget)
        self._watermark_blocks = int(config.watermark * pool.num_blocks)
        self._lengths = AnswerLengths()

    def choose(self, staying: Sequence[WorkerJob]) -> list[WorkerJob]:
        """Return the running jobs that are in the next step, in the given order."""
        return self._batch.choose(staying)

    def settle(self, staying: Sequence[WorkerJob], chosen: Sequence[WorkerJob]) -> None:
        """Account for a step with the `chosen` of the `staying` jobs."""
        self._batch.settle(staying, chosen)

    def prompt_budget(self, decodes: Iterable[WorkerJob]) -> PromptBudget:
        """Return what a step in which these jobs decode has for prompts."""
        return self._budget.for_prompts(decodes)

    def may_join(self, job: WorkerJob, staying: Sequence[WorkerJob]) -> bool:
        """Return True where the step has a place for a waiting job that is to be computed here."""
        return self._batch.has_room(job, staying)

    def blocks_to_leave(self, job: WorkerJob, scheduler: "Scheduler") -> int:
        """Return how many blocks must be free after a job has been admitted."""
        others = (*scheduler.running, *scheduler.transferring)
        return 0 if all(other.is_prefill_only for other in others) else self._watermark_blocks

    def expected_answer(self, job: WorkerJob) -> float:
        """Return how many tokens of the job's answer are expected to be computed here."""
        if job.is_prefill_only:
            return 0.0
        expected = min(self._lengths.expected(*_kind(job)), job.request.max_tokens)
        return max(1.0, expected - job.sequence.num_output_tokens)

    def answer_ended(self, job: WorkerJob) -> None:
        """Learn from an answer that has ended."""
        if not job.is_prefill_only:
            self._lengths.ended(*_kind(job), job.sequence.num_output_tokens)


class DecodeBatch:
    """The batch of decoding requests: at most `max_batch`, and no more than keep the TPOT promise of each."""

    def __init__(self, budget: StepBudget):
        self._max_batch = budget.config.max_batch
        self._budget = budget
        self._shares = ClassShares()

    def choose(self, jobs: Sequence[WorkerJob]) -> list[WorkerJob]:
        """Return the jobs that are in the next step, in the given order."""
        if len(jobs) <= self._max_batch and not _is_promised(jobs):
            return list(jobs)
        places = self._budget.places()
        chosen = {job for job in jobs if job.is_prefill_only}
        has_newcomers = False
        is_open = True  # to newcomers: none overtakes one without room, even with a looser promise
        for job in self._ranked([job for job in jobs if not job.is_prefill_only]):
            if len(chosen) >= self._max_batch:
                break
            # Changed costs and longer contexts take no places away. A newcomer of a higher class does.
            if (job.has_place and not has_newcomers) or ((job.has_place or is_open) and places.allow(job)):
                has_newcomers = has_newcomers or not job.has_place
                chosen.add(job)
                places.take(job)
            elif not job.has_place:
                is_open = False
        return [job for job in jobs if job in chosen]

    def has_room(self, newcomer: WorkerJob, jobs: Iterable[WorkerJob]) -> bool:
        """Return True where a newcomer would have a place beside those of `jobs` that are not of a lower class."""
        priority = newcomer.request.promise.priority
        not_lower = [job for job in jobs if job.request.promise.priority >= priority]
        if len(not_lower) >= self._max_batch:
            return False
        places = self._budget.places()
        for job in not_lower:
            if not job.is_prefill_only:
                places.take(job)
        return newcomer.is_prefill_only or places.allow(newcomer)

    def settle(self, jobs: Sequence[WorkerJob], chosen: Sequence[WorkerJob]) -> None:
        """Account for a step with the `chosen` of `jobs`."""
        jobs = [job for job in jobs if not job.is_prefill_only]
        chosen = [job for job in chosen if not job.is_prefill_only]
        given: Counter[Promise] = Counter()
        waiting: list[Promise] = []
        if len(chosen) < len(jobs):
            having = set(chosen)
            for job in jobs:
                job.has_place = job in having
                if job.has_place:
                    given[job.request.promise] += 1
                else:
                    waiting.append(job.request.promise)
        else:
            for job in jobs:
                job.has_place = True
        self._shares.settle(given, waiting)

    def _ranked(self, jobs: Sequence[WorkerJob]) -> list[WorkerJob]:
        ranked = sorted(jobs, key=_batch_order)
        if not self._shares:
            return ranked
        taken: Counter[str] = Counter()
        ahead: list[WorkerJob] = []
        behind: list[WorkerJob] = []
        for job in ranked:
            name = job.request.promise.class_name
            if taken[name] < self._shares.saved(name):
                taken[name] += 1
                ahead.append(job)
            else:
                behind.append(job)
        return ahead + behind


def _batch_order(job: WorkerJob) -> tuple[int, bool, int]:
    return (-job.request.promise.priority, not job.has_place, job.arrival)


def _is_promised(jobs: Iterable[WorkerJob]) -> bool:
    return any(job.promised_s < math.inf for job in jobs)


def _kind(job: WorkerJob) -> tuple[str, int]:
    """Return the class and the prompt's tokens, on which the answer's length may depend."""
    return job.request.promise.class_name, job.request.num_prompt_tokens
