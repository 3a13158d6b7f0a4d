"""Which requests share the next step, who waits, and who holds blocks: what both roles decide alike. Pure.

No I/O, no clock, no asyncio. A request waits until its turn has come (worker/queue_order.py) and all blocks that it
needs so far can be reserved for it at once; then its KV comes by a transfer, or is computed here in chunks. Blocks go
back once the request has ended and neither a step nor a transfer uses them.

A prompt whose beginning another worker may offer waits for that offer without holding anything or anybody up. Admitted
in its turn, it takes part in no step until the KV is in its blocks, or does not come; then the rest is computed in the
same blocks. An offer holds blocks at the other worker. So where blocks are short here all offers that wait are given
up: workers would else wait for each other's blocks in a circle.

Each role says in a scheduler of its own what else is in a step, who gives way, and when a request ends.
"""

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

import msgspec

from twostroke.model.step import BlockCopy, SequenceStep
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import FinishReason, GenerateRequest, Promise, SampledToken, TokenEvent, finish_reason
from twostroke.protocol.stats import StepCosts
from twostroke.worker.block_pool import BlockPool, OutOfBlocks
from twostroke.worker.config import WorkerConfig
from twostroke.worker.queue_order import NO_LIMIT, ClassShares, JobT, turn_of, turns
from twostroke.worker.sequence import Phase, SequenceState

CHUNK_MULTIPLE = 16  # kernels compute so many rows together


class StepEntry(msgspec.Struct, Generic[JobT], frozen=True):
    """A job's part of a step."""

    job: JobT
    step: SequenceStep


@dataclass(frozen=True, slots=True)
class Admitted(Generic[JobT]):
    """Whose waiting is over."""

    # They hold blocks since this very decision. Those that are receiving wait for their transfer to be let into these,
    # from `sequence.num_computed` tokens on.
    jobs: tuple[JobT, ...] = ()
    declined: tuple[JobT, ...] = ()  # the offers to them are not wanted any more


@dataclass(frozen=True, slots=True)
class Swap(Generic[JobT]):
    """A job's KV on its way between the cache and host memory."""

    job: JobT
    copy: BlockCopy


@dataclass(frozen=True, slots=True)
class ScheduledStep(Generic[JobT]):
    """What to run next, and who has been admitted by the way."""

    entries: tuple[StepEntry[JobT], ...] = ()
    admitted: Admitted[JobT] = Admitted()
    swaps: tuple[Swap[JobT], ...] = ()  # what the engine copies before anything else

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the engine to do."""
        return not (self.entries or self.swaps)


class DrawnToken(msgspec.Struct, Generic[JobT], frozen=True):
    """A token that was drawn or received, and whether it ended its request."""

    job: JobT
    index: int  # of the token among the request's output tokens
    token: SampledToken
    finish_reason: FinishReason | None

    @property
    def event(self) -> TokenEvent:
        """What the request's router is told."""
        request, is_first = self.job.request, self.index == self.job.request.num_output_tokens_given
        num_cached = self.job.num_cached_tokens if is_first else None
        return TokenEvent(request.request_id, self.index, (self.token,), self.finish_reason, None, num_cached)


@dataclass(slots=True)
class PromptBudget:
    """What is left of one step for chunks of prompts: tokens, and time where decodes would wait for it."""

    tokens: int
    least: int = 0  # of these, so many are given whatever time they take, so that prompts always get on
    seconds: float | None = None
    costs: StepCosts | None = None

    @property
    def is_spent(self) -> bool:
        """Whether not even a small chunk with nothing before it is left."""
        return self._most(CHUNK_MULTIPLE, 0) == 0

    def take(self, wanted: int, num_before: int) -> int:
        """A chunk of at most `wanted` tokens after `num_before` others; 0 where nothing is left."""
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
    """How many prompt tokens after `num_before` others are computed in so much time: prompt_s the other way round."""
    if seconds <= 0:
        return 0
    token_s = costs.token_s + costs.pair_s * num_before  # of the first; each one after it also sees those before it
    # n * (token_s + pair_s / 2 * n) = seconds, in the form that loses nothing where pair_s is small, or 0
    divisor = token_s + math.sqrt(token_s * token_s + 2 * costs.pair_s * seconds)
    return int(min(2 * seconds / divisor, 1e9)) if divisor > 0 else int(1e9)


class Scheduler(ABC, Generic[JobT]):
    """The requests of one worker, over one block pool, within the bounds of its settings."""

    def __init__(self, pool: BlockPool, config: WorkerConfig, max_context: int):
        """`max_context` is the model's, in tokens."""
        self._pool = pool
        self._config = config
        self._max_context = max_context
        self._shares = ClassShares()
        self._waiting: list[JobT] = []  # by their turns
        self._running: list[JobT] = []  # in the order of arrival
        self._transferring: set[JobT] = set()
        self._chunks: Counter[JobT] = Counter()  # prompt tokens in the step that is being decided
        self._given: Counter[Promise] = Counter()  # prompt tokens whose turn came since shares were settled
        self._admitted: list[JobT] = []  # not told yet
        self._declined: list[JobT] = []  # not told yet
        self._num_arrived = 0
        self.prefix_queries = 0  # counter: prompt tokens looked up
        self.prefix_hits = 0  # counter: prompt tokens found
        self.preemptions = 0  # counter: requests whose blocks went to others

    @property
    def num_waiting(self) -> int:
        """Requests in no step yet: without blocks, or with KV under way."""
        return len(self._waiting) + len(self._transferring)

    @property
    def num_running(self) -> int:
        """Requests that decode, or whose prompt is being computed."""
        return len(self._running)

    def waiting_work(self) -> Iterable[tuple[Promise, int]]:
        """Tokens still to be computed here before they decode, of each request that has some."""
        for jobs in (self._waiting, self._transferring, self._running):
            for job in jobs:
                if num_tokens := job.num_to_compute:
                    yield job.request.promise, num_tokens

    @property
    def decoding(self) -> Iterable[JobT]:
        """The requests that decode, those that stand still included."""
        return ()

    def admit_offered(self) -> Admitted[JobT]:
        """Admit requests whose KV is offered and whose turn it is, and no others. A step may be under way.

        So their KV need not wait for the step's end. Whoever computes here gets its turn before the next step.
        """
        for job, most in turns((self._ready(),), self._shares):
            if job.phase is Phase.WAITING and not (job.has_kv_coming and self._admit(job, most)):
                break
        return self._take_admitted()

    def offered_prefix(self, job: JobT, num_tokens: int) -> None:
        """Another worker offers the KV of a waiting job's first `num_tokens` tokens."""
        job.awaits_offer = False
        job.offered_tokens = num_tokens
        if num_tokens >= len(job.sequence.token_ids):  # one must be computed, or there is nothing to draw from
            self._decline(job)

    def no_prefix(self, job: JobT) -> None:
        """No offer comes for a waiting job."""
        job.awaits_offer = False

    def pulled(self, job: JobT) -> int:
        """All offered KV has come; returns how many tokens that spares, 0 where the job has ended meanwhile."""
        num_cached, num_tokens = job.sequence.num_computed, job.offered_tokens
        if not self._received(job):
            return 0
        job.num_cached_tokens = num_tokens
        job.sequence.received(self._pool, num_tokens)
        job.offered_tokens = 0
        self._run(job)
        return num_tokens - num_cached

    def pull_failed(self, job: JobT) -> None:
        """The offered KV does not come, and nothing writes into the job's blocks any more: all is computed here."""
        job.offered_tokens = 0
        if self._received(job):
            job.sequence.expect_nothing(self._pool)
            self._run(job)

    def complete(self, step: ScheduledStep[JobT], sampled: Sequence[SampledToken | None]) -> list[DrawnToken[JobT]]:
        """Account for a step that has run; returns the drawn tokens of jobs that nobody has ended meanwhile.

        Jobs whose token finishes them are ended.
        """
        drawn: list[DrawnToken[JobT]] = []
        for entry, token in zip(step.entries, sampled, strict=True):
            job, sequence = entry.job, entry.job.sequence
            job.end_step()
            # Of one that was ended, a step ahead may have computed a token that it never got.
            sequence.computed(self._pool, min(entry.step.start + len(entry.step.token_ids), len(sequence.token_ids)))
            if job.has_ended:
                self._release_if_unused(job)
            elif token is not None:
                drawn.append(self._append(job, token))
        return drawn

    def abandon(self, step: ScheduledStep[JobT]) -> None:
        """Account for a step that failed: the engine is dead and touches nothing any more."""
        for entry in step.entries:
            entry.job.end_step()
            self._release_if_unused(entry.job)

    def end(self, job: JobT) -> None:
        """Schedule the job no more; its blocks go back as soon as nothing uses them. Harmless when repeated."""
        if not job.has_ended:
            self._leave(job)
            job.phase = Phase.ENDED
            self._release_if_unused(job)

    # --- what the roles differ in ---

    @abstractmethod
    def _may_join(self, job: JobT) -> bool:
        """Whether the step has a place for a waiting job that is to be computed here."""

    @abstractmethod
    def _blocks_to_leave(self, job: JobT) -> int:
        """How many blocks must be free after a job has been admitted."""

    def _expected_answer(self, job: JobT) -> float:
        """Tokens that the job's answer is expected to have computed here."""
        return 0.0

    def _make_room(self, job: JobT, missing_blocks: int) -> bool:
        """Have others give way to a waiting job; whether it has all its blocks then."""
        return False

    def _release(self, job: JobT) -> None:
        """Nothing uses the job's blocks any more, and it has ended."""
        job.sequence.reset(self._pool)

    # --- what they build on ---

    def _sequence(self, request: GenerateRequest) -> SequenceState:
        pool = self._pool
        return SequenceState(request, pool.block_size, pool.groups, self._config.max_step_tokens)

    @property
    def _capacity(self) -> int:
        """Tokens of the longest request that all blocks together hold."""
        pool = self._pool
        return pool.groups.tokens_in(pool.num_blocks, pool.block_size, self._config.max_step_tokens)

    def _enter(self, job: JobT) -> JobT:
        """Queue a newcomer. Raises RequestError for an empty prompt, and, with status 429, for one too many.

        One that gives way later is queued again whatever the number.
        """
        if not job.sequence.token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        most = self._config.max_waiting
        if len(self._waiting) >= most:
            raise RequestError(f"{most} requests wait here already", code="overloaded", status=429)
        num_cached = self._pool.lookup(job.sequence.matchable_hashes) * self._pool.block_size
        job.num_uncached = len(job.sequence.token_ids) - num_cached
        job.arrival = self._num_arrived
        self._num_arrived += 1
        self._wait(job)
        return job

    def _give_chunks(self, prompts: Iterable[JobT], num_places: int, budget: PromptBudget) -> list[StepEntry[JobT]]:
        """In the order of their turns give tokens to `prompts` that are begun, and admit others while there are some.

        At most `num_places` jobs have a part in the step.
        """
        chunks = self._chunks
        chunks.clear()
        prompts = sorted(prompts, key=lambda job: job.turn)
        is_open = True  # nobody overtakes one that is ready: a large request would starve behind small ones

        def give_chunk(job: JobT, most: int) -> None:
            if job.phase is Phase.RUNNING and (job in chunks or len(chunks) < num_places):
                # Behind a chunk under way, windows may have come no further than that.
                held = job.sequence.num_held - job.num_scheduled
                wanted = min(min(job.num_unscheduled, held) - chunks[job], most)
                if num_tokens := budget.take(wanted, job.num_scheduled + chunks[job]):
                    chunks[job] += num_tokens
                    self._given[job.request.promise] += num_tokens

        for job, most in turns((self._ready(), prompts), self._shares):
            if job.phase is Phase.WAITING:
                may_join = job.has_kv_coming or (not budget.is_spent and self._may_join(job))
                is_open = is_open and may_join and self._admit(job, most)
                if not is_open and most == NO_LIMIT:
                    break  # hundreds may wait behind it
            give_chunk(job, most)
        for job in prompts:  # those that come after one that waits
            give_chunk(job, NO_LIMIT)
        wanting = (*self._ready(), *prompts, *(job for job in self._admitted if job.phase is Phase.RUNNING))
        self._settle_shares(job for job in wanting if job not in chunks or chunks[job] < job.num_unscheduled)
        return [self._entry(job, num_tokens) for job, num_tokens in chunks.items()]

    def _entry(self, job: JobT, num_tokens: int, follows: int | None = None) -> StepEntry[JobT]:
        """The job has a part in the step; `follows` as in SequenceStep."""
        step = job.sequence.step(num_tokens, start=job.num_scheduled, follows=follows)
        job.begin_step(step)
        return StepEntry(job, step)

    def _settle_shares(self, left: Iterable[JobT]) -> None:
        """A step is decided that leaves these wanting more."""
        promises = [job.request.promise for job in left]
        self._shares.settle(self._given if promises else {}, promises)
        self._given.clear()

    def _take_admitted(self) -> Admitted[JobT]:
        admitted = Admitted(tuple(self._admitted), tuple(self._declined))
        self._admitted, self._declined = [], []
        return admitted

    def _ready(self) -> list[JobT]:
        """Those who wait and may be admitted, by their turns."""
        return [job for job in self._waiting if job.is_ready]

    def _admit(self, job: JobT, most: int) -> bool:
        """Reserve blocks for all tokens known so far, if there are enough; it `is_receiving` then, or runs.

        With a limit `most` to its tokens, so by its class's share, it keeps them.
        """
        sequence, is_computed_here = job.sequence, not job.has_kv_coming
        matched = sequence.match_prefix(self._pool)
        missing = self._missing_blocks(job)
        if missing > 0 and not self._make_room(job, missing):
            sequence.reset(self._pool)
            for other in self._waiting:
                self._decline(other)
            return False
        sequence.reserve(self._pool, sequence.num_uncomputed)
        if is_computed_here and not job.num_preemptions:
            matched += sequence.match_tail(self._pool)
        if job.num_preemptions == 0:
            job.num_cached_tokens = matched
        job.keeps_blocks = most < NO_LIMIT
        self.prefix_queries += len(sequence.token_ids)
        self.prefix_hits += matched
        if job.has_kv_coming and (job.num_indivisible or self._can_pull(job)):
            self._given[job.request.promise] += job.num_indivisible
            if job.num_indivisible:
                sequence.expect(self._pool, job.num_indivisible, keeps_prefix=False)
            self._receive(job)
        else:
            self._decline(job)
            self._run(job)
        self._admitted.append(job)
        return True

    def _can_pull(self, job: JobT) -> bool:
        """Whether what is offered is worth it; its blocks are ready for it then."""
        if job.offered_tokens < job.sequence.num_computed + self._config.min_pull_tokens:
            return False
        try:
            job.sequence.expect(self._pool, job.offered_tokens, keeps_prefix=True)
        except OutOfBlocks:
            return False
        return True

    def _missing_blocks(self, job: JobT) -> int:
        """Blocks that a waiting job lacks which has taken what the prefix cache holds; 0 or less: none."""
        wanted = job.sequence.blocks_needed(job.sequence.num_uncomputed)
        return wanted + self._blocks_to_leave(job) - self._pool.free_blocks

    def _decline(self, job: JobT) -> None:
        if job.offered_tokens:
            job.offered_tokens = 0
            self._declined.append(job)

    def _append(self, job: JobT, token: SampledToken) -> DrawnToken[JobT]:
        sequence = job.sequence
        index = sequence.num_output_tokens
        sequence.append(token.token_id)
        reason = finish_reason(sequence.request, index + 1, token.token_id)
        if reason is not None:
            self.end(job)
        return DrawnToken(job, index, token, reason)

    # --- where each request stands ---

    def _wait(self, job: JobT) -> None:
        job.phase = Phase.WAITING
        job.turn = turn_of(job, self._config.queue, self._expected_answer(job))
        insort(self._waiting, job, key=lambda other: other.turn)

    def _receive(self, job: JobT) -> None:
        """A transfer may write into the job's blocks from now on."""
        self._leave(job)
        job.phase = Phase.TRANSFERRING
        job.is_receiving = True
        self._transferring.add(job)

    def _received(self, job: JobT) -> bool:
        """The transfer into the job's blocks has ended, whole or not; whether the job goes on."""
        job.is_receiving = False
        self._release_if_unused(job)
        return not job.has_ended

    def _run(self, job: JobT) -> None:
        """Let the job take part in steps."""
        self._leave(job)
        job.phase = Phase.RUNNING
        insort(self._running, job, key=lambda other: other.arrival)

    def _send_back(self, job: JobT) -> None:
        """Back to the queue; what is lost will be computed again."""
        self._leave(job)
        job.keeps_blocks = False
        if not job.is_in_use:  # else whoever reads them now gives them back
            job.sequence.reset(self._pool)
        self._wait(job)

    def _leave(self, job: JobT) -> None:
        match job.phase:
            case Phase.WAITING:
                self._waiting.remove(job)
            case Phase.TRANSFERRING:
                self._transferring.remove(job)
            case Phase.RUNNING:
                self._running.remove(job)

    def _release_if_unused(self, job: JobT) -> None:
        """To be called wherever something has done with a job's blocks."""
        if job.has_ended and not job.is_in_use:
            self._release(job)
