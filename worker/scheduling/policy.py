"""The step policy: which requests decode together, and the prompt tokens computed beside them. Pure.

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
LEAST_STALL_S and `most_stall_s`. On a decode worker that is a pause that people hardly notice between two words. A step
whose decodes alone take that long may become LEAST_GROWTH times as long. The settings `max_stall_s` and `stall_factor`
replace this rule.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import LEAST_STRETCH, StepCosts
from twostroke.worker.config import WorkerConfig
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.queue_order import AnswerLengths, ClassShares
from twostroke.worker.scheduling.step import PromptBudget

if TYPE_CHECKING:
    from twostroke.worker.scheduling.scheduler import Scheduler

CAUTIOUS_CHUNK = 64
"""Prompt tokens beside decodes while step costs are not known."""
LEAST_STALL_S = 0.05
"""Least bound of a step's time with prompts, without promises and settings: an accelerator keeps to it."""
LEAST_GROWTH = 1.75
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
        return min(bounds_s, default=max(self.usual_stall_s(costs), LEAST_GROWTH * beside_s))

    def usual_stall_s(self, costs: StepCosts) -> float:
        """Return the longest time of a step without promises and without settings."""
        return min(max(costs.weights_s + costs.prompt_s(self.longest_chunk), LEAST_STALL_S), self.most_stall_s)


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
        return batch.plain_s(costs) <= max(batch.longest_s(costs, self._safety), LEAST_STRETCH * batch.lone_s(costs))

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
