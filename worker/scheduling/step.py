"""One step of a worker as the scheduler decides it: its entries, admissions, copies and token budget.

Pure data, and the arithmetic of a step's prompt budget.
"""

import math
from dataclasses import dataclass

import msgspec

from twostroke.model.step import BlockCopy, SequenceStep
from twostroke.protocol.requests import FinishReason, SampledToken, TokenEvent
from twostroke.protocol.stats import StepCosts
from twostroke.worker.constants import CHUNK_MULTIPLE
from twostroke.worker.scheduling.job import WorkerJob


class StepEntry(msgspec.Struct, frozen=True):
    """A job's part of a step."""

    job: WorkerJob
    step: SequenceStep
    drafts: tuple[SequenceStep, ...] = ()  # rows behind it that count as far as the rows before draw their tokens

    @property
    def rows(self) -> tuple[SequenceStep, ...]:
        """All of the job's entries in the engine's batch."""
        return (self.step, *self.drafts)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Jobs that have left the queue, and offers that are declined."""

    # They hold blocks since this decision. Those that are receiving wait for their transfer to be let into these, from
    # `sequence.num_computed` tokens on.
    jobs: tuple[WorkerJob, ...] = ()
    declined: tuple[WorkerJob, ...] = ()  # the offers to them are no longer wanted


@dataclass(frozen=True, slots=True)
class Swap:
    """A job's KV on its way between the cache and host memory."""

    job: WorkerJob
    copy: BlockCopy


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The next step to run, and the jobs admitted while it was decided."""

    entries: tuple[StepEntry, ...] = ()
    admitted: Admitted = Admitted()
    swaps: tuple[Swap, ...] = ()  # copied by the engine before anything else

    @property
    def is_empty(self) -> bool:
        """True where the engine has nothing to do."""
        return not (self.entries or self.swaps)

    @property
    def has_drafts(self) -> bool:
        """True where a job's next position is known only once the step has ended."""
        return any(one.drafts for one in self.entries)

    @property
    def batch(self) -> list[SequenceStep]:
        """The engine's batch."""
        return [row for entry in self.entries for row in entry.rows]

    @property
    def drawing(self) -> dict[WorkerJob, int]:
        """The jobs that a step without drafts draws a token for, each with the index of its entry."""
        return {one.job: index for index, one in enumerate(self.entries) if one.step.draw is not None}


class NewTokens(msgspec.Struct, frozen=True):
    """Tokens of one request that a step drew, or one that was received, and the reason where they finish it."""

    job: WorkerJob
    index: int  # of the first of them among the request's output tokens
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None

    @property
    def event(self) -> TokenEvent:
        """The event for the request's router."""
        request, is_first = self.job.request, self.index == self.job.request.num_output_tokens_given
        num_cached = self.job.num_cached_tokens if is_first else None
        return TokenEvent(request.request_id, self.index, self.tokens, self.finish_reason, None, num_cached)


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
