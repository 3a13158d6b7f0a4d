"""What a decode worker's step may take: who decodes together, and how much of prompts is computed beside them. Pure.

Both follow from the worker's own step costs. While these are not known, nobody is kept waiting, and chunks of prompts
beside decodes are small.

Whoever has a place in the batch keeps it, so that streams flow; newcomers wait until there is room, in the order of
their arrival. Only for one of a higher class do others stop, the youngest of the lowest class first: their KV stays
where it is, and they go on when there is room again. A class that stands still gets its share of the tokens all the
same.

Where the requests that decode were promised a time per token, prompts beside them get what that leaves. Where nothing
was promised, a step with prompts may take as long as people hardly notice between two words: what LONGEST_CHUNK prompt
tokens take on this worker, but LEAST_STALL_S at least, which is what an accelerator keeps to, and MOST_STALL_S at most,
as on a CPU. A step whose decodes alone take so long, all experts read, may become LEAST_GROWTH times as long, or
prompts would never get on. `max_stall_s` and `stall_factor`, where they are set, take the place of all that.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.jobs import DecodeJob
from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import LEAST_STRETCH, StepCosts
from twostroke.worker.queue_order import ClassShares
from twostroke.worker.scheduler import PromptBudget

CAUTIOUS_CHUNK = 64  # prompt tokens beside decodes while costs are not known
LONGEST_CHUNK = 384  # prompt tokens whose time a step may take where nothing else is said
LEAST_STALL_S = 0.05
MOST_STALL_S = 0.25
LEAST_GROWTH = 1.75  # times


@dataclass(frozen=True, slots=True)
class StepBudget:
    """One worker's bounds of steps, by its settings and what its steps cost now."""

    config: DecodeConfig
    costs: Callable[[], StepCosts | None]

    def places(self) -> "Places":
        """An empty batch."""
        return Places(self.costs(), self.config.tpot_safety)

    def for_prompts(self, decodes: Iterable[DecodeJob]) -> PromptBudget:
        """For a step in which these requests decode."""
        contexts, tightest_s = [], math.inf
        for job in decodes:
            contexts.append(len(job.sequence.token_ids))
            tightest_s = min(tightest_s, _tpot_s(job))
        tokens = self.config.max_step_tokens - len(contexts)
        if not contexts:
            return PromptBudget(tokens)
        costs = self.costs()
        if costs is None:
            return PromptBudget(min(tokens, CAUTIOUS_CHUNK))
        rows_s = costs.decode_s(len(contexts), sum(contexts))
        alone_s, beside_s = costs.reading_s(len(contexts)) + rows_s, costs.weights_s + rows_s
        step_s = (
            self.stall_s(costs, alone_s, beside_s) if tightest_s == math.inf else tightest_s * self.config.tpot_safety
        )
        return PromptBudget(tokens, least=self.config.min_chunk_tokens, seconds=step_s - beside_s, costs=costs)

    def stall_s(self, costs: StepCosts, alone_s: float, beside_s: float) -> float:
        """How long a step may take whose decodes were promised nothing.

        They take `alone_s`, and `beside_s` where a chunk of a prompt has all experts read.
        """
        bounds_s = []
        if self.config.max_stall_s is not None:
            bounds_s.append(self.config.max_stall_s)
        if self.config.stall_factor is not None:
            bounds_s.append(self.config.stall_factor * alone_s)
        return min(bounds_s, default=max(usual_stall_s(costs), LEAST_GROWTH * beside_s))


def usual_stall_s(costs: StepCosts) -> float:
    """How long a worker's step may take where nothing was promised, and nothing set."""
    return min(max(costs.weights_s + costs.prompt_s(LONGEST_CHUNK), LEAST_STALL_S), MOST_STALL_S)


class Places:
    """Who has a place in the batch so far, and whether one more still leaves everybody the promised time per token."""

    def __init__(self, costs: StepCosts | None, safety: float):
        self._costs = costs
        self._safety = safety
        self._num_rows = 0
        self._num_context_tokens = 0
        self._tightest_s = math.inf

    def allow(self, job: DecodeJob) -> bool:
        """Whether the step would be short enough with the job in it; one alone is always allowed."""
        tightest_s = min(self._tightest_s, _tpot_s(job))
        if self._costs is None or self._num_rows == 0 or tightest_s == math.inf:
            return True
        num_rows = self._num_rows + 1
        num_context_tokens = self._num_context_tokens + len(job.sequence.token_ids)
        step_s = self._costs.reading_s(num_rows) + self._costs.decode_s(num_rows, num_context_tokens)
        lone_s = self._costs.reading_s(1) + self._costs.decode_s(1, num_context_tokens // num_rows)
        return step_s <= max(tightest_s * self._safety, LEAST_STRETCH * lone_s)

    def take(self, job: DecodeJob) -> None:
        """The job has a place."""
        self._num_rows += 1
        self._num_context_tokens += len(job.sequence.token_ids)
        self._tightest_s = min(self._tightest_s, _tpot_s(job))


class DecodeBatch:
    """At most `max_batch` requests, and no more than leave each of them the time per token that it was promised."""

    def __init__(self, budget: StepBudget):
        self._max_batch = budget.config.max_batch
        self._budget = budget
        self._shares = ClassShares()

    def choose(self, jobs: Sequence[DecodeJob]) -> list[DecodeJob]:
        """Those of `jobs` that are in the next step, in the order in which they are given."""
        if len(jobs) <= self._max_batch and not _is_promised(jobs):
            return list(jobs)
        places = self._budget.places()
        chosen: set[DecodeJob] = set()
        has_newcomers = False
        is_open = True  # to newcomers: none overtakes one for whom there is no room, though its own promise be looser
        for job in self._ranked(jobs):
            if len(chosen) == self._max_batch:
                break
            # Costs may have changed, or contexts grown: that stops nobody. A newcomer of a higher class does.
            if (job.has_place and not has_newcomers) or ((job.has_place or is_open) and places.allow(job)):
                has_newcomers = has_newcomers or not job.has_place
                chosen.add(job)
                places.take(job)
            elif not job.has_place:
                is_open = False
        return [job for job in jobs if job in chosen]

    def has_room(self, newcomer: DecodeJob, jobs: Iterable[DecodeJob]) -> bool:
        """Whether a newcomer would have a place beside those of `jobs` that are not of a lower class."""
        priority = newcomer.request.promise.priority
        not_lower = [job for job in jobs if job.request.promise.priority >= priority]
        if len(not_lower) >= self._max_batch:
            return False
        places = self._budget.places()
        for job in not_lower:
            places.take(job)
        return places.allow(newcomer)

    def settle(self, jobs: Sequence[DecodeJob], chosen: Sequence[DecodeJob]) -> None:
        """A step with the `chosen` of `jobs` begins."""
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

    def _ranked(self, jobs: Sequence[DecodeJob]) -> list[DecodeJob]:
        ranked = sorted(jobs, key=_rank)
        if not self._shares:
            return ranked
        taken: Counter[str] = Counter()
        ahead: list[DecodeJob] = []
        behind: list[DecodeJob] = []
        for job in ranked:
            name = job.request.promise.class_name
            if taken[name] < self._shares.saved(name):
                taken[name] += 1
                ahead.append(job)
            else:
                behind.append(job)
        return ahead + behind


def _rank(job: DecodeJob) -> tuple[int, bool, int]:
    return (-job.request.promise.priority, not job.has_place, job.arrival)


def _is_promised(jobs: Iterable[DecodeJob]) -> bool:
    return any(job.request.promise.tpot_s is not None for job in jobs)


def _tpot_s(job: DecodeJob) -> float:
    promised_s = job.request.promise.tpot_s
    return math.inf if promised_s is None else promised_s
