"""Which prompts share the next step, and who holds blocks. Pure: no I/O, no clock, no asyncio.

Whose turn it is says worker/queue_order.py, for those who wait and for those who share a step alike: a prompt that
comes with a higher class or a tighter promise has the next step's tokens first. A prompt gets all its blocks when it is
admitted, so a running one never waits for blocks. Only where one of a higher class lacks them do running ones give
theirs back, to be computed again later: those of which no KV has been sent. Blocks go back once the job has ended and
neither a step nor a transfer uses them.

A prompt whose beginning is pulled from another worker waits for that worker's offer, holding nothing and nobody up;
then it is admitted in its turn, and is computed on from where the pulled KV ends, or from where its own began. An offer
holds blocks at the other worker. So where blocks are short here all offers that wait are given up: workers would else
wait for each other's blocks in a circle.

What the prefill scheduler keeps of a prompt, and what it decides.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.model.step import SequenceStep
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Promise
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.queue_order import NO_LIMIT, ClassShares, QueuePolicy, Turn, turn_of, turns, who_gives_way
from twostroke.worker.sequence import SequenceState


@dataclass(eq=False, slots=True)
class PrefillJob:
    """One prompt between its arrival and the release of its blocks. Only the scheduler changes it."""

    sequence: SequenceState
    arrival: int  # 0, 1, 2, ...: the order in which prompts came
    arrived_at: float  # in seconds of the worker's clock
    num_uncached: int  # tokens that were not in the prefix cache when it came
    turn: Turn = ()
    awaits_offer: bool = False  # another worker may offer its beginning: not to be admitted yet
    offered_tokens: int = 0  # how much of its beginning another worker offers; 0: nothing, or no longer wanted
    num_cached_tokens: int = 0  # found in the prefix cache on admission, or pulled
    is_pulling: bool = False  # a transfer may be writing into its blocks
    in_step: bool = False  # the engine may be writing into its blocks
    is_sending: bool = False  # a transfer may be reading its blocks
    has_been_sent: bool = False  # a transfer has begun to read them: they must stay, whatever became of it
    keeps_blocks: bool = False  # its class's share has brought it on: no higher class takes its blocks back
    has_ended: bool = False  # computed, failed or aborted: nothing more will be scheduled

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

    @property
    def has_begun(self) -> bool:
        """Whether it has output tokens already: a resumed request."""
        return self.request.num_output_tokens_given > 0

    @property
    def is_admitted(self) -> bool:
        """Whether it holds its blocks."""
        return bool(self.sequence.block_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is not here yet."""
        return self.sequence.num_uncomputed

    @property
    def num_indivisible(self) -> int:
        """0: any chunk will do."""
        return 0

    @property
    def num_tokens(self) -> int:
        """Length of the prompt; for a resumed request, with the outputs that came with it."""
        return len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A job's part of a step."""

    job: PrefillJob
    step: SequenceStep
    num_tokens_after: int  # the prompt's tokens whose KV exists once the step is done

    @property
    def ends_prompt(self) -> bool:
        return self.step.draw is not None


@dataclass(frozen=True, slots=True)
class Admission:
    """Whose waiting is over. Nothing is to be computed for an admitted job that `is_pulling` until that has ended."""

    admitted: tuple[PrefillJob, ...]  # they hold blocks since this very decision
    declined: tuple[PrefillJob, ...]  # the offers to them are not wanted any more


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What to run next."""

    chunks: tuple[Chunk, ...]
    admission: Admission


LEFT_TO_HIGHER = 8
"""The part of the blocks, one in so many, that is left to prompts of higher classes than KV that waits to be sent."""


class PrefillScheduler:
    """Chunked prefill over one block pool: at most `max_step_tokens` tokens of `max_batch` prompts in a step.

    At most `max_waiting` prompts may be queued. An offer is taken where it spares `min_pull_tokens` at least.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_step_tokens: int,
        max_batch: int,
        max_context: int,
        max_waiting: int,
        min_pull_tokens: int = 1,
        queue: QueuePolicy = "edf",
    ):
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._max_batch = max_batch
        self._max_context = max_context
        self._max_waiting = max_waiting
        self._min_pull_tokens = min_pull_tokens
        self._policy = queue
        self._shares = ClassShares()
        self._waiting: list[PrefillJob] = []  # by their turns, like the next
        self._running: list[PrefillJob] = []
        self._pulling: list[PrefillJob] = []
        self._sending: set[PrefillJob] = set()
        self._admitted: list[PrefillJob] = []  # not told yet
        self._declined: list[PrefillJob] = []  # not told yet
        self._num_arrived = 0
        self._highest_priority = -math.inf  # that has ever been here
        self.prefix_queries = 0  # counter: prompt tokens looked up
        self.prefix_hits = 0  # counter: prompt tokens found
        self.preemptions = 0  # counter: prompts whose blocks went to one of a higher class

    @property
    def num_waiting(self) -> int:
        """Prompts that are in no step yet: without blocks, or with KV under way."""
        return len(self._waiting) + len(self._pulling)

    @property
    def num_running(self) -> int:
        """Prompts that are being computed."""
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return sum(tokens for _, tokens in self.waiting_work())

    def waiting_work(self) -> Iterable[tuple[Promise, int]]:
        """Prompt tokens still to be computed, of each request."""
        for job in self._pulling:
            yield job.request.promise, job.num_tokens - job.offered_tokens
        for job in (*self._waiting, *self._running):
            yield job.request.promise, job.sequence.num_uncomputed

    def add(self, request: GenerateRequest, *, now: float, awaits_offer: bool = False) -> PrefillJob:
        """Queue a prompt; one that awaits an offer is not admitted before `offered` or `not_offered`.

        `now` is in seconds of a clock that the caller keeps to.

        Raises RequestError for one that could never run here, and, with status 429, for one too many.
        """
        num_tokens = len(request.token_ids)
        if num_tokens < 1:
            raise RequestError("the prompt is empty", param="prompt")
        if num_tokens >= self._max_context:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and the model's context of {self._max_context} must hold "
                "at least one more",
                param="prompt",
                code="context_length_exceeded",
            )
        if num_tokens > self._pool.num_blocks * self._pool.block_size:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; this worker's whole KV cache holds "
                f"{self._pool.num_blocks * self._pool.block_size}",
                param="prompt",
                code="context_length_exceeded",
            )
        if len(self._waiting) >= self._max_waiting:
            raise RequestError(f"{self._max_waiting} prompts wait here already", code="overloaded", status=429)
        sequence = SequenceState(request, self._pool.block_size)
        num_cached = self._pool.lookup(sequence.matchable_hashes) * self._pool.block_size
        job = PrefillJob(sequence, self._num_arrived, now, num_tokens - num_cached, awaits_offer=awaits_offer)
        job.turn = turn_of(job, self._policy)
        self._num_arrived += 1
        self._highest_priority = max(self._highest_priority, request.promise.priority)
        _insert(self._waiting, job)
        return job

    def schedule(self) -> PrefillStep:
        """Decide the next step: in the order of their turns prompts get tokens, and are admitted while those last.

        Marks the jobs as in a step; `complete` or `abandon` must follow before the next call.
        """
        budget = self._max_step_tokens
        given: Counter[PrefillJob] = Counter()
        is_open = True  # nobody overtakes one that waits: a large prompt would starve behind small ones
        ready = [job for job in self._waiting if not job.awaits_offer]
        running = tuple(self._running)

        def has_place(job: PrefillJob) -> bool:
            return budget > 0 and (job in given or len(given) < self._max_batch)

        def give_chunk(job: PrefillJob, most: int) -> None:
            nonlocal budget
            num_tokens = min(job.sequence.num_uncomputed - given[job], most, budget)
            if num_tokens and has_place(job) and job.is_admitted and not job.is_pulling:
                given[job] += num_tokens
                job.in_step = True
                budget -= num_tokens

        for job, most in turns((ready, running), self._shares):
            if not job.is_admitted:
                is_open = is_open and (has_place(job) or job.offered_tokens > 0) and self._admit(job, most)
                if not is_open and most == NO_LIMIT:
                    break  # hundreds may wait behind it
            give_chunk(job, most)
        for job in running:  # those that come after one that waits
            give_chunk(job, NO_LIMIT)
        self._settle_shares(given)
        return PrefillStep(tuple(_chunk(job, num_tokens) for job, num_tokens in given.items()), self._take_admission())

    def admit_offered(self) -> Admission:
        """Admit prompts with an offer whose turn it is, and no others. May be called while a step is under way."""
        for job in [job for job in self._waiting if not job.awaits_offer]:
            if not job.offered_tokens or not self._admit(job, NO_LIMIT):
                break
        return self._take_admission()

    def offered(self, job: PrefillJob, num_tokens: int) -> None:
        """Another worker offers the KV of a waiting job's first `num_tokens` tokens."""
        job.awaits_offer = False
        if num_tokens < job.num_tokens:  # at least one must be computed, or there is nothing to draw from
            job.offered_tokens = num_tokens
        else:
            self._declined.append(job)

    def not_offered(self, job: PrefillJob) -> None:
        """No offer comes for a waiting job."""
        job.awaits_offer = False

    def pulled(self, job: PrefillJob) -> int:
        """All offered KV has come; returns how many tokens that spares, 0 where the job has ended meanwhile."""
        num_cached = job.sequence.num_computed
        if not self._end_pull(job):
            return 0
        job.sequence.num_computed = job.num_cached_tokens = job.offered_tokens
        job.sequence.publish_full_blocks(self._pool)
        return job.offered_tokens - num_cached

    def pull_failed(self, job: PrefillJob) -> None:
        """The offered KV does not come, and nothing writes into the job's blocks any more: all is computed here."""
        self._end_pull(job)

    def complete(self, step: PrefillStep) -> list[PrefillJob]:
        """Account for a step that has run; returns the jobs whose prompt is now computed and that nobody has ended."""
        computed: list[PrefillJob] = []
        for chunk in step.chunks:
            job = chunk.job
            job.in_step = False
            job.sequence.num_computed = chunk.num_tokens_after
            job.sequence.publish_full_blocks(self._pool)
            if job.has_ended:
                self._release_if_unused(job)
            elif chunk.ends_prompt:
                computed.append(job)
        return computed

    def abandon(self, step: PrefillStep) -> None:
        """Account for a step that failed: the engine is dead and touches nothing any more."""
        for chunk in step.chunks:
            chunk.job.in_step = False
            self._release_if_unused(chunk.job)

    def begin_sending(self, job: PrefillJob) -> None:
        """A transfer reads the job's blocks from now on."""
        job.is_sending = job.has_been_sent = True
        self._sending.add(job)

    def end_sending(self, job: PrefillJob) -> None:
        """No transfer reads the job's blocks any more."""
        job.is_sending = False
        self._sending.discard(job)
        self._release_if_unused(job)

    def end(self, job: PrefillJob) -> None:
        """Schedule the job no more; its blocks go back as soon as nothing uses them. Harmless when repeated."""
        if job.has_ended:
            return
        job.has_ended = True
        for jobs in (self._waiting, self._pulling, self._running):
            if job in jobs:
                jobs.remove(job)
        self._release_if_unused(job)

    def _admit(self, job: PrefillJob, most: int) -> bool:
        """Reserve the job's blocks; with a limit to its tokens, by its class's share, it keeps them."""
        sequence = job.sequence
        matched = sequence.match_prefix(self._pool)
        missing = sequence.blocks_needed(sequence.num_uncomputed) + self._left_to_higher(job) - self._pool.free_blocks
        if missing > 0 and not self._take_back(job, missing):
            sequence.reset(self._pool)
            for other in self._waiting:
                self._decline(other)
            return False
        sequence.reserve(self._pool, sequence.num_uncomputed)
        job.num_cached_tokens = matched
        job.keeps_blocks = most < NO_LIMIT
        self.prefix_queries += job.num_tokens
        self.prefix_hits += matched
        self._waiting.remove(job)
        self._admitted.append(job)
        if job.offered_tokens >= matched + self._min_pull_tokens:
            job.is_pulling = True
            self._pulling.append(job)
        else:
            self._decline(job)
            _insert(self._running, job)
        return True

    def _left_to_higher(self, job: PrefillJob) -> int:
        """Blocks that this prompt must leave free, while there is KV of its class or a higher one that has to wait.

        That may wait long for room at a decode worker, and gives way to nobody: it would be computed twice. A pool that
        is full of it would shut out classes for which the decode worker makes room at once. Nothing is left where
        nobody has ever asked for more than this prompt's class.
        """
        priority = job.request.promise.priority
        if priority >= self._highest_priority:
            return 0
        is_crowded = any(other.has_ended and other.request.promise.priority >= priority for other in self._sending)
        return self._pool.num_blocks // LEFT_TO_HIGHER if is_crowded else 0

    def _take_back(self, job: PrefillJob, missing_blocks: int) -> bool:
        """Have prompts of lower classes give so many blocks back; False, and nothing done, where they can't."""
        lower = [
            other
            for other in self._running
            if other.request.promise.priority < job.request.promise.priority
            and not (other.in_step or other.has_been_sent or other.keeps_blocks)
        ]
        lower.sort(key=lambda other: (other.request.promise.priority, -other.arrival))
        giving_way = who_gives_way(lower, missing_blocks, self._pool)
        for other in giving_way:
            other.sequence.reset(self._pool)
            other.offered_tokens = 0  # what was pulled is cached here, for a while
            self._running.remove(other)
            _insert(self._waiting, other)
            self.preemptions += 1
        return bool(giving_way)

    def _settle_shares(self, given: Counter[PrefillJob]) -> None:
        wanting = (job for job in (*self._waiting, *self._running) if not job.awaits_offer)
        left = [job for job in wanting if job not in given or given[job] < job.sequence.num_uncomputed]
        by_promise: Counter[Promise] = Counter()
        if left:
            for job, num_tokens in given.items():
                by_promise[job.request.promise] += num_tokens
        self._shares.settle(by_promise, [job.request.promise for job in left])

    def _decline(self, job: PrefillJob) -> None:
        if job.offered_tokens:
            job.offered_tokens = 0
            self._declined.append(job)

    def _take_admission(self) -> Admission:
        admission = Admission(tuple(self._admitted), tuple(self._declined))
        self._admitted, self._declined = [], []
        return admission

    def _end_pull(self, job: PrefillJob) -> bool:
        """Whether the job goes on."""
        job.is_pulling = False
        if job.has_ended:
            self._release_if_unused(job)
            return False
        self._pulling.remove(job)
        _insert(self._running, job)
        return True

    def _release_if_unused(self, job: PrefillJob) -> None:
        if job.has_ended and not (job.in_step or job.is_sending or job.is_pulling):
            job.sequence.reset(self._pool)


def _insert(jobs: list[PrefillJob], job: PrefillJob) -> None:
    insort(jobs, job, key=lambda other: other.turn)


def _chunk(job: PrefillJob, num_tokens: int) -> Chunk:
    return Chunk(job, job.sequence.step(num_tokens), job.sequence.num_computed + num_tokens)
