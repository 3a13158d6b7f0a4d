"""The scheduler of a worker of either role: the requests of the next step, the queue, and the owners of blocks. Pure.

No I/O, no clock, no asyncio. A request's way:

1. It waits for its turn (step_policy.py), and until all blocks that it needs so far can be reserved at once.
2. Its KV arrives by a transfer, or is computed here in chunks.
3. It decodes one token a step while it has a place in the batch. A prompt that another worker goes on with, or that is
   only scored, ends with its first token (`is_prefill_only`).
4. Its blocks are released once it has ended and neither a step nor a transfer uses them.

A step may be scheduled while the one before it is under way ("ahead"). Decodes go on with the token that is being
drawn, and prompts with their next chunk. A request that turns out to have ended leaves a row whose token is dropped.

A prompt whose prefix another worker may offer waits for that offer, without blocks and without holding others up.
Admitted in its turn, it takes part in no step until the KV is in its blocks, or fails to arrive; then the rest is
computed in the same blocks. An offer holds blocks at the other worker. So where blocks are short here, all offers that
wait are declined: otherwise workers would wait for each other's blocks in a circle.

A role is a `StepPolicy` (step_policy.py).

Preemption:

- **When.** Between steps: where the next token of running requests lacks blocks, or where the next request to be
  admitted has a higher class than some that run. No step runs ahead of that. Requests that a transfer reads, or has
  read, keep their blocks.
- **Which.** The youngest of the lowest class first. A request that its class's share admitted is spared by higher
  classes: they would otherwise evict it as often as it is admitted. Requests whose blocks turn out not to be needed
  are spared too.
- **What becomes of the KV.** It is dropped and computed again later, which the request's own cached prefix makes cheap,
  or the engine copies it to host memory and back (`Swapping`), whichever costs less.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from twostroke.model.step import BlockCopy, MtpDrafts, SequenceStep
from twostroke.protocol.errors import ContextExceeded, RequestError
from twostroke.protocol.kv_layout import NO_BLOCK
from twostroke.protocol.requests import FinishReason, GenerateRequest, Promise, SampledToken, TokenEvent, finish_reason
from twostroke.worker.config import PreemptionMode, WorkerConfig
from twostroke.worker.scheduling.block_pool import BlockPool, OutOfBlocks
from twostroke.worker.scheduling.job import Phase, SequenceState, SwappedKV, WorkerJob
from twostroke.worker.scheduling.step_policy import NO_LIMIT, ClassShares, PromptBudget, StepPolicy, turn_of, turns
from twostroke.worker.speculator import Draft, Speculator


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


def preemption_order(job: WorkerJob) -> tuple[bool, int, int]:
    """Return the order in which running jobs are preempted: the smallest first."""
    return (job.keeps_blocks, job.request.promise.priority, -job.arrival)


def lower_classes_to_preempt(
    waiting: WorkerJob, running: Iterable[WorkerJob], missing_blocks: int, pool: BlockPool
) -> list[WorkerJob]:
    """Return jobs of lower classes that together free enough blocks for a waiting one; none where they can't."""
    priority = waiting.request.promise.priority
    lower = [job for job in running if job.request.promise.priority < priority and not job.keeps_blocks]
    return jobs_to_preempt(sorted(lower, key=preemption_order), missing_blocks, pool)


def jobs_to_preempt(candidates: Iterable[WorkerJob], missing_blocks: int, pool: BlockPool) -> list[WorkerJob]:
    """Return the first candidates that together free enough blocks; none where all of them would not.

    Candidates that turn out not to be needed are left out. So each preemption is needed, and no preempted job can be
    admitted again at once.
    """
    chosen: list[tuple[WorkerJob, int]] = []
    freed = 0
    for job in candidates:
        if freed >= missing_blocks:
            break
        own = pool.num_freed(job.sequence.block_ids)
        if own:
            chosen.append((job, own))
            freed += own
    if freed < missing_blocks:
        return []
    needed: list[WorkerJob] = []
    for job, own in chosen:
        if freed - own >= missing_blocks:
            freed -= own
        else:
            needed.append(job)
    return needed


def blocks_wanted(decodes: Sequence[WorkerJob]) -> int:
    """Return how many blocks the next token of each of these jobs needs."""
    return sum(job.sequence.blocks_needed(job.num_under_way + 1) for job in decodes)


# --- KV in host memory ---


class HostBlocks(Protocol):
    """The part of rank 0's swap space (model/cache/swap_space.py) that a worker uses."""

    num_blocks: int
    block_bytes: int  # of all layers
    num_bytes: int  # counter: copied, both ways
    seconds: float  # counter


class Swapping:
    """Keeps KV of preempted requests in host memory: its blocks, and what copying and computing cost.

    A job's host blocks are allocated when it is preempted. They are released when its KV is in the cache again, or when
    it ends. `space` is the engine's, None where there is none; `block_size` is in tokens, that of the cache.
    """

    def __init__(self, space: HostBlocks | None, mode: PreemptionMode, block_size: int):
        self._space = space
        self._mode = mode
        self.pool = None if space is None else BlockPool(space.num_blocks, block_size)
        self.num_swaps = 0  # counter: preempted requests whose KV went to host memory
        self._computed_tokens = 0  # of prompts
        self._computing_s = 0.0

    def swap_out(self, job: WorkerJob) -> Swap | None:
        """Allocate host blocks for all KV of a job, whose own blocks must stay until it is copied.

        Return None where its KV is better dropped, or can't be kept.
        """
        if self._space is None or self.pool is None or job.request.scoring is not None or job.sequence.awaits_copy:
            return None  # a scored prompt must be computed again, since its scores are not kept
        sequence = job.sequence
        table = sequence.block_ids[: -(-sequence.num_computed // sequence.block_size) * sequence.groups.count]
        blocks = tuple([block_id for block_id in table if block_id != NO_BLOCK])
        if not 0 < len(blocks) <= self.pool.free_blocks or not self._pays(
            self._space, sequence.num_computed, len(blocks)
        ):
            return None
        host_blocks = self.pool.allocate(len(blocks))
        there = iter(host_blocks)
        host_table = tuple([NO_BLOCK if block_id == NO_BLOCK else next(there) for block_id in table])
        job.swapped = SwappedKV(host_table, sequence.num_computed)
        job.is_copying = True
        self.num_swaps += 1
        return Swap(job, BlockCopy(True, blocks, tuple(host_blocks)))

    def swap_in(self, job: WorkerJob, pool: BlockPool) -> Swap | None:
        """Copy a job's KV back into its new blocks, except for what the prefix cache still had. None: none."""
        swapped, sequence = job.swapped, job.sequence
        if swapped is None:
            return None
        if sequence.num_computed >= swapped.num_computed:
            self.release(job)
            return None
        first = sequence.num_computed // sequence.block_size * sequence.groups.count  # what is cached are whole rows
        sequence.expect(pool, swapped.num_computed, keeps_prefix=False)
        here = sequence.block_ids[first : len(swapped.block_ids)]
        pairs = [pair for pair in zip(here, swapped.block_ids[first:], strict=True) if NO_BLOCK not in pair]
        sequence.receives(pool, swapped.num_computed)
        job.is_copying = True
        blocks, host_blocks = zip(*pairs, strict=True)
        return Swap(job, BlockCopy(False, blocks, host_blocks))

    def release(self, job: WorkerJob) -> None:
        """Release the job's host blocks. Harmless where it has none."""
        swapped, job.swapped = job.swapped, None
        if swapped is not None and self.pool is not None:
            self.pool.release(swapped.block_ids)

    def step_ended(self, num_prompt_tokens: int, prompts_s: float) -> None:
        """Learn what computing costs from a step that has run; `prompts_s` is its prompts' part of its time."""
        if num_prompt_tokens:
            self._computed_tokens += num_prompt_tokens
            self._computing_s += prompts_s

    def _pays(self, space: HostBlocks, num_tokens: int, num_blocks: int) -> bool:
        """Return True where copying these tokens costs less than computing them, or the setting says `swap`.

        With `auto`, requests are computed again until the rate of computing is known, then swapped until the rate of
        copying is known.
        """
        if self._mode != "auto":
            return self._mode == "swap"
        if not self._computing_s:
            return False
        if not space.seconds:
            return True
        computing_s = num_tokens * self._computing_s / self._computed_tokens
        copying_s = 2 * num_blocks * space.block_bytes * space.seconds / space.num_bytes  # there and back
        return copying_s < computing_s


DRAFTS_BESIDE_PROMPTS = 8
"""Beside prompts, drafts get so small a part of a step's tokens: prompts must progress."""


class Scheduler:
    """The requests of one worker, over one block pool, within the bounds of its settings and its role's policy."""

    def __init__(
        self,
        pool: BlockPool,
        config: WorkerConfig,
        max_context: int,
        policy: StepPolicy,
        swapping: Swapping,
        speculator: Speculator | None = None,
    ):
        """`max_context` is the model's, in tokens. Without a `speculator` each step draws one token of a request."""
        self.pool = pool
        self.shares = ClassShares()
        self.waiting: list[WorkerJob] = []  # by their turns
        self.running: list[WorkerJob] = []  # in the order of arrival
        self.transferring: set[WorkerJob] = set()
        self.sending: set[WorkerJob] = set()
        self.highest_priority: int | None = None  # of all requests so far
        self.prefix_queries = 0  # counter: prompt tokens looked up
        self.prefix_hits = 0  # counter: prompt tokens found
        self.num_preemptions = 0  # counter
        self._config = config
        self._max_context = max_context
        self.policy = policy
        self._swapping = swapping
        self.speculator = speculator
        self._chunks: Counter[WorkerJob] = Counter()  # prompt tokens in the step that is being decided
        self._given: Counter[Promise] = Counter()  # prompt tokens whose turn came since shares were settled
        self._admitted: list[WorkerJob] = []  # not returned yet
        self._declined: list[WorkerJob] = []  # not returned yet
        self._swapped_in: list[Swap] = []  # in the step that is being decided
        self._num_arrived = 0
        self.usual_steps = (1.0, 0.0)  # tokens and rows of drafts of a request's step, by answers that have ended

    @property
    def num_waiting(self) -> int:
        """Requests in no step yet: without blocks, or with KV under way."""
        return len(self.waiting) + len(self.transferring)

    @property
    def num_running(self) -> int:
        """Requests that decode, or whose prompt is being computed."""
        return len(self.running)

    @property
    def num_decoding(self) -> int:
        """Requests whose answers are written here, once their prompts are computed."""
        jobs = (*self.waiting, *self.transferring, *self.running)
        return len(jobs) - sum(job.is_prefill_only for job in jobs)

    @property
    def decoding(self) -> Iterable[WorkerJob]:
        """The requests that decode, those without a place in the batch included."""
        return (job for job in self.running if job.sequence.num_uncomputed <= 1 and not job.is_prefill_only)

    def waiting_work(self) -> Iterable[tuple[Promise, int]]:
        """Yield each request's tokens that are still to be computed here before it decodes, where it has some."""
        for jobs in (self.waiting, self.transferring, self.running):
            for job in jobs:
                if num_tokens := job.num_to_compute:
                    yield job.request.promise, num_tokens

    # --- requests ---

    def add(
        self,
        request: GenerateRequest,
        *,
        now: float,
        is_prefill_only: bool = False,
        wants_transfer: bool = False,
        awaits_offer: bool = False,
    ) -> WorkerJob:
        """Queue a request; `now` is in seconds of a clock that the caller keeps to.

        With `is_prefill_only` it ends with its first token.

        With `awaits_offer` it is not admitted before `offered_prefix` or `no_prefix`, with `wants_transfer` not before
        `offered` or `compute_here`.

        Raises RequestError for one that could never run here, and, with status 429, for one too many. A preempted
        request is queued again whatever the number.
        """
        pool, most = self.pool, self._config.max_waiting
        capacity = pool.groups.tokens_in(pool.num_blocks, pool.block_size, self._config.max_step_tokens)
        _check_fits(request, self._max_context, capacity, is_prefill_only=is_prefill_only)
        sequence = SequenceState(request, pool.block_size, pool.groups, self._config.max_step_tokens)
        if not sequence.token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if self.speculator is not None and self.speculator.uses_mtp:
            sequence.mtp = MtpDrafts()
        if len(self.waiting) >= most:
            raise RequestError(f"{most} requests wait here already", code="overloaded", status=429)
        job = WorkerJob(sequence, now, awaits_offer, wants_transfer=wants_transfer, is_prefill_only=is_prefill_only)
        job.num_uncached = len(sequence.token_ids) - pool.lookup(sequence.matchable_hashes) * pool.block_size
        job.arrival = self._num_arrived
        job.tokens_per_step, job.drafts_per_step = self.usual_steps
        self._num_arrived += 1
        self._wait(job)
        priority = request.promise.priority
        self.highest_priority = max(priority, priority if self.highest_priority is None else self.highest_priority)
        return job

    def end(self, job: WorkerJob) -> None:
        """Schedule the job no more; its blocks are released once nothing uses them. Harmless when repeated.

        A stop string ends a request this way too, so its answer is one to learn from.
        """
        if job.has_ended:
            return
        if job.has_output and job.request.scoring is None:
            self.policy.answer_ended(job)
            self.usual_steps = job.usual_steps(self.usual_steps)
            if self.speculator is not None and not job.is_prefill_only:
                self.speculator.ended(job)
        self._leave(job)
        job.phase = Phase.ENDED
        self._release_if_unused(job)

    # --- steps ---

    def schedule(self, in_flight: ScheduledStep | None = None) -> ScheduledStep:
        """Decide the next step: decodes first, then chunks of prompts and admissions, in the order of their turns.

        `in_flight` is the one step under way, if any, which the new one is to follow. The new step is empty where it
        can't be decided before the end of that one: where a job must be preempted, or a draw depends on the tokens
        before it. A step that swaps jobs out does nothing else: what that frees is known at its end.
        Marks the jobs as in a step, receiving or copying; `complete` or `abandon` must follow for each step, in order,
        and for all but one of them before the next call.
        """
        staying = self._staying()
        chosen = self.policy.choose(staying)
        decodes = [job for job in chosen if job.is_decoding]
        prompts = [job for job in chosen if not job.is_decoding]
        if in_flight is not None:
            if not self._may_run_ahead(in_flight, decodes) or self._awaits_drafts(in_flight, decodes, prompts):
                return ScheduledStep()
        elif swaps := self._free_blocks_for(decodes):
            return ScheduledStep(swaps=swaps)
        elif any(job.phase is not Phase.RUNNING for job in staying):
            return self.schedule()  # the places of preempted jobs go to others, which need blocks too
        self.policy.settle(staying, chosen)
        follows = {} if in_flight is None else in_flight.drawing
        entries = []
        drafts = self._drafts(decodes, prompts) if in_flight is None else {}
        for job in decodes:
            job.sequence.reserve(self.pool, job.num_under_way + 1)
            entries.append(self._entry(job, 1, follows.get(job), drafts.get(job)))
        if not prompts and not self.waiting:
            self._settle_shares(())
            return ScheduledStep(tuple(entries), self._take_admitted())
        budget = self.policy.prompt_budget([entry.job for entry in entries])
        num_drafted = sum(len(entry.drafts) for entry in entries)
        budget.spend_on_rows(num_drafted)
        entries += self._schedule_prefills(prompts, self._config.max_batch - len(entries) - num_drafted, budget)
        swaps, self._swapped_in = tuple(self._swapped_in), []
        return ScheduledStep(tuple(entries), self._take_admitted(), swaps)

    def complete(self, step: ScheduledStep, sampled: Sequence[SampledToken | None]) -> list[NewTokens]:
        """Account for a step that has run; return the drawn tokens of jobs that have not been ended meanwhile.

        Jobs whose token finishes them are ended.
        """
        for swap in step.swaps:
            swap.job.is_copying = False
            if swap.copy.is_out:
                swap.job.sequence.reset(self.pool)
            else:
                self._swapping.release(swap.job)
            self._release_if_unused(swap.job)
        drawn: list[NewTokens] = []
        results = iter(sampled)
        for entry in step.entries:
            job, sequence = entry.job, entry.job.sequence
            tokens = [next(results) for _ in entry.rows]
            job.end_step()
            # For a job that was ended, a step ahead may have computed a token that the job never got.
            sequence.computed(self.pool, min(entry.step.start + len(entry.step.token_ids), len(sequence.token_ids)))
            if job.has_ended:
                self._release_if_unused(job)
            elif tokens[0] is not None:
                drawn.append(self._accept(entry, tokens))
        return drawn

    def learn_rows(self, step: ScheduledStep, seconds: float) -> None:
        """Learn what rows of drafts cost from a step without prompts that took so long. Comes before `complete`."""
        if self.speculator is not None:
            num_drafted = sum(len(entry.drafts) for entry in step.entries)
            self.speculator.step_ended([entry.job for entry in step.entries], num_drafted, seconds)

    def abandon(self, step: ScheduledStep) -> None:
        """Account for a step that failed: the engine is dead and touches nothing any more."""
        for swap in step.swaps:
            swap.job.is_copying = False
            self._release_if_unused(swap.job)
        for entry in step.entries:
            entry.job.end_step()
            self._release_if_unused(entry.job)

    # --- KV from other workers ---

    def admit_offered(self) -> Admitted:
        """Admit requests whose KV is offered and whose turn it is, and no others. A step may be under way.

        So their KV need not wait for the step's end. Requests that are computed here are admitted before the next step.
        """
        for job, most in turns((self._ready(),), self.shares):
            if job.phase is Phase.WAITING and not (job.has_kv_coming and self._admit(job, most)):
                break
        return self._take_admitted()

    def offered_prefix(self, job: WorkerJob, num_tokens: int) -> None:
        """Note that another worker offers the KV of a waiting job's first `num_tokens` tokens."""
        job.awaits_offer = False
        job.offered_tokens = num_tokens
        if num_tokens >= len(job.sequence.token_ids):  # one must be computed, or there is nothing to draw from
            self.decline(job)

    def no_prefix(self, job: WorkerJob) -> None:
        """Note that no prefix is offered to a waiting job."""
        job.awaits_offer = False

    def pulled(self, job: WorkerJob) -> int:
        """Account for an offered prefix that has arrived; return the tokens it spares, 0 where the job has ended."""
        num_cached, num_tokens = job.sequence.num_computed, job.offered_tokens
        if not self._received(job):
            return 0
        job.num_cached_tokens = num_tokens
        job.sequence.received(self.pool, num_tokens)
        job.offered_tokens = 0
        self._run(job)
        return num_tokens - num_cached

    def pull_failed(self, job: WorkerJob) -> None:
        """Have the whole prompt computed: the prefix has not arrived, and nothing writes into its blocks any more."""
        job.offered_tokens = 0
        if self._received(job):
            job.sequence.expect_nothing(self.pool)
            self._run(job)

    def offered(self, job: WorkerJob) -> None:
        """Note that the job's prefill worker has begun: from now on blocks may be reserved."""
        job.is_offered = True

    def verified(self, job: WorkerJob, first_token: SampledToken) -> NewTokens | None:
        """Account for the whole prompt's KV and its first token. Return None where the job was ended meanwhile."""
        if not self._received(job):
            return None
        job.sequence.received(self.pool, len(job.sequence.token_ids))
        self._run(job)
        index = job.sequence.num_output_tokens
        return NewTokens(job, index, (first_token,), self._append(job, first_token))

    def transfer_failed(self, job: WorkerJob) -> None:
        """Queue the job again, to be computed here: no KV arrives, and nothing writes into its blocks any more."""
        if self._received(job):
            self._send_back(job)

    def wait_on(self, job: WorkerJob) -> None:
        """Compute nothing of a job whose transfer has failed before `compute_here`. Does nothing for an ended job."""
        if job.phase is Phase.WAITING:
            job.wants_transfer, job.is_offered = True, False

    def compute_here(self, job: WorkerJob) -> None:
        """Stop waiting for a transfer that has not begun. Does nothing for a job that has begun, or ended."""
        if job.phase is Phase.WAITING:
            job.wants_transfer = False

    # --- KV for other workers ---

    def begin_sending(self, job: WorkerJob) -> None:
        """Note that a transfer reads the job's blocks from now on."""
        job.is_sending = job.has_been_sent = True
        self.sending.add(job)

    def end_sending(self, job: WorkerJob) -> None:
        """Note that no transfer reads the job's blocks any more."""
        job.is_sending = False
        self.sending.discard(job)
        self._release_if_unused(job)

    # --- preemption ---

    def _staying(self) -> list[WorkerJob]:
        """Return the running jobs that want a further step."""
        return [job for job in self.running if not job.is_drawing_its_last]

    def _may_run_ahead(self, in_flight: ScheduledStep, decodes: Sequence[WorkerJob]) -> bool:
        """Return True where a step can be decided behind `in_flight`: a job can be preempted only while in no step."""
        if in_flight.swaps:
            return False  # the blocks that they free are not known yet
        return blocks_wanted(decodes) <= self.pool.free_blocks and not self._for_next_to_admit()

    def _free_blocks_for(self, decodes: Sequence[WorkerJob]) -> tuple[Swap, ...]:
        """Preempt until there are blocks for the next token of the `decodes` that are left, then for the next to admit.

        A job whose KV is kept frees its blocks only once they are copied, so this stops at the first of these jobs.
        """
        while blocks_wanted(decodes) > self.pool.free_blocks:
            job = min(self._preemptible(), key=preemption_order)
            if swap := self._preempt(job):
                return (swap,)
            decodes = [other for other in decodes if other is not job]
        return tuple([swap for job in self._for_next_to_admit() if (swap := self._preempt(job)) is not None])

    def _for_next_to_admit(self) -> list[WorkerJob]:
        """Return the jobs of lower classes whose blocks the next to admit needs, where it lacks nothing else."""
        waiting, running = self.waiting, self.running
        if not waiting or not running:
            return []
        if waiting[0].request.promise.priority <= min(job.request.promise.priority for job in running):
            return []
        if (head := self._next_to_admit()) is None:
            return []
        head.sequence.match_prefix(self.pool)  # others' blocks that it shares need not be freed
        missing = self._missing_blocks(head)
        preemptible = self._preemptible() if missing > 0 else []
        chosen = lower_classes_to_preempt(head, preemptible, missing, self.pool)
        head.sequence.reset(self.pool)
        return chosen

    def _preempt(self, job: WorkerJob) -> Swap | None:
        """Queue the job again. Return the copy of its KV where that is kept."""
        job.num_preemptions += 1
        self.num_preemptions += 1
        swap = self._swapping.swap_out(job)
        self._send_back(job)
        return swap

    def _preemptible(self) -> list[WorkerJob]:
        """Return the running jobs whose blocks no transfer has used. No step may be under way."""
        return [job for job in self.running if not job.has_been_sent]

    def _next_to_admit(self) -> WorkerJob | None:
        """Return the waiting job whose turn it is, where only blocks may keep it from being admitted."""
        job, _ = next(turns((self._ready(),), self.shares), (None, 0))
        return job if job is not None and (job.has_kv_coming or self._may_join(job)) else None

    def _missing_blocks(self, job: WorkerJob) -> int:
        """Return how many blocks a waiting job lacks that has matched the prefix cache; 0 or less: none."""
        wanted = job.sequence.blocks_needed(job.sequence.num_uncomputed)
        return wanted + self.policy.blocks_to_leave(job, self) - self.pool.free_blocks

    def _send_back(self, job: WorkerJob) -> None:
        """Queue the job again; what is lost will be computed again."""
        self._leave(job)
        job.has_place = job.wants_transfer = job.keeps_blocks = False
        if not job.is_in_use:  # else they are released by what reads them now
            job.sequence.reset(self.pool)
        self._wait(job)

    def decline(self, job: WorkerJob) -> None:
        """Decline the prefix that is offered to a job, if any."""
        if job.offered_tokens:
            job.offered_tokens = 0
            self._declined.append(job)

    # --- inside a step ---

    def _schedule_prefills(
        self, prompts: Iterable[WorkerJob], num_places: int, budget: PromptBudget
    ) -> list[StepEntry]:
        """Give tokens to `prompts` that are begun in the order of their turns, and admit others while some are left.

        At most `num_places` jobs have a part in the step.
        """
        chunks = self._chunks
        chunks.clear()
        prompts = sorted(prompts, key=lambda job: job.turn)
        is_open = True  # no job overtakes one that is ready: a large request would starve behind small ones

        def give_chunk(job: WorkerJob, most: int) -> None:
            if job.phase is Phase.RUNNING and (job in chunks or len(chunks) < num_places):
                # Behind a chunk under way, windows may have blocks for no more tokens.
                held = job.sequence.num_held - job.num_scheduled
                wanted = min(min(job.num_unscheduled, held) - chunks[job], most)
                if num_tokens := budget.take(wanted, job.num_scheduled + chunks[job]):
                    chunks[job] += num_tokens
                    self._given[job.request.promise] += num_tokens

        for job, most in turns((self._ready(), prompts), self.shares):
            if job.phase is Phase.WAITING:
                may_join = job.has_kv_coming or (not budget.is_spent and self._may_join(job))
                is_open = is_open and may_join and self._admit(job, most)
                if not is_open and most == NO_LIMIT:
                    break  # hundreds may wait behind it
            give_chunk(job, most)
        for job in prompts:  # those behind the one that waits
            give_chunk(job, NO_LIMIT)
        wanting = (*self._ready(), *prompts, *(job for job in self._admitted if job.phase is Phase.RUNNING))
        self._settle_shares(job for job in wanting if job not in chunks or chunks[job] < job.num_unscheduled)
        return [self._entry(job, num_tokens) for job, num_tokens in chunks.items()]

    def _entry(
        self, job: WorkerJob, num_tokens: int, follows: int | None = None, draft: Draft | None = None
    ) -> StepEntry:
        """Give the job a part in the step; `follows` is that of SequenceStep."""
        step = job.sequence.step(num_tokens, start=job.num_scheduled, follows=follows)
        drafts = job.sequence.draft_steps(draft.token_ids, step.start + 1, draft.constraint) if draft else ()
        job.begin_step(step)
        return StepEntry(job, step, drafts)

    def _awaits_drafts(
        self, in_flight: ScheduledStep, decodes: Sequence[WorkerJob], prompts: Sequence[WorkerJob]
    ) -> bool:
        """Return True where the next step is better decided at the end of the one under way, with drafts."""
        if self.speculator is None or not decodes:
            return False
        room = self._room_for_drafts(decodes, prompts)
        return in_flight.has_drafts or self.speculator.is_worth_waiting(decodes, room)

    def _room_for_drafts(self, decodes: Sequence[WorkerJob], prompts: Sequence[WorkerJob]) -> int:
        """Return how many rows drafts may add to a step; beside prompts few, since rows take of their tokens."""
        most_tokens = self._config.max_step_tokens
        if prompts or self._ready():
            most_tokens //= DRAFTS_BESIDE_PROMPTS
        return min(self._config.max_batch, most_tokens) - len(decodes) - len(prompts)

    def _drafts(self, decodes: Sequence[WorkerJob], prompts: Sequence[WorkerJob]) -> dict[WorkerJob, Draft]:
        """Return what is drafted for these jobs, which have blocks for it then.

        Drafts take no blocks that the other jobs need for their next tokens.
        """
        if self.speculator is None or not decodes:
            return {}
        found = self.speculator.drafts(decodes, self._room_for_drafts(decodes, prompts))
        for job, draft in found.items():
            spare = self.pool.free_blocks - len(decodes) * self.pool.groups.count
            if job.sequence.blocks_needed(1 + len(draft.token_ids)) > max(0, spare):
                held = job.sequence.num_held - job.num_scheduled - 1
                del draft.token_ids[max(0, held) :]
            job.sequence.reserve(self.pool, 1 + len(draft.token_ids))
        return found

    def _settle_shares(self, left: Iterable[WorkerJob]) -> None:
        """Settle the classes' shares for a step that leaves these jobs wanting more."""
        promises = [job.request.promise for job in left]
        self.shares.settle(self._given if promises else {}, promises)
        self._given.clear()

    def _may_join(self, job: WorkerJob) -> bool:
        return self.policy.may_join(job, self._staying())

    def _ready(self) -> list[WorkerJob]:
        """Return the waiting jobs that may be admitted, by their turns."""
        return [job for job in self.waiting if job.is_ready]

    def _take_admitted(self) -> Admitted:
        admitted = Admitted(tuple(self._admitted), tuple(self._declined))
        self._admitted, self._declined = [], []
        return admitted

    def _admit(self, job: WorkerJob, most: int) -> bool:
        """Reserve blocks for all tokens known so far, if there are enough; it `is_receiving` then, or runs.

        With a limit `most` to its tokens, it is admitted by its class's share, and keeps its blocks.
        """
        sequence, is_computed_here = job.sequence, not job.has_kv_coming
        matched = sequence.match_prefix(self.pool)
        if self._missing_blocks(job) > 0:
            sequence.reset(self.pool)
            for other in self.waiting:
                self.decline(other)
            return False
        sequence.reserve(self.pool, sequence.num_uncomputed)
        if is_computed_here and not job.num_preemptions:
            matched += sequence.match_tail(self.pool)
        if job.num_preemptions == 0:
            job.num_cached_tokens = matched
        job.keeps_blocks = most < NO_LIMIT
        self.prefix_queries += len(sequence.token_ids)
        self.prefix_hits += matched
        if job.has_kv_coming and (job.num_indivisible or self._can_pull(job)):
            self._given[job.request.promise] += job.num_indivisible
            if job.num_indivisible:
                sequence.expect(self.pool, job.num_indivisible, keeps_prefix=False)
            self._receive(job)
        else:
            self.decline(job)
            self._run(job)
            if (swap := self._swapping.swap_in(job, self.pool)) is not None:
                self._swapped_in.append(swap)
        self._admitted.append(job)
        return True

    def _can_pull(self, job: WorkerJob) -> bool:
        """Return True where the offered prefix is worth pulling; its blocks are ready then."""
        if job.offered_tokens < job.sequence.num_computed + self._config.min_pull_tokens:
            return False
        try:
            job.sequence.expect(self.pool, job.offered_tokens, keeps_prefix=True)
        except OutOfBlocks:
            return False
        return True

    def _accept(self, entry: StepEntry, tokens: Sequence[SampledToken | None]) -> NewTokens:
        """Append the token that the entry's step drew, and each one further that a right draft stands before."""
        job, sequence = entry.job, entry.job.sequence
        index = sequence.num_output_tokens
        accepted: list[SampledToken] = []
        reason: FinishReason | None = None
        for place, token in enumerate(tokens):
            if token is None or (place and not _is_sound(entry.drafts[place - 1])):
                break
            if place:
                sequence.computed(self.pool, len(sequence.token_ids))
            accepted.append(token)
            reason = self._append(job, token)
            is_last = place == len(entry.drafts) or job.has_ended
            if is_last or entry.drafts[place].token_ids[0] != token.token_id:
                break
        job.drew(len(accepted), len(entry.drafts))
        if entry.drafts and self.speculator is not None:
            self.speculator.accepted(len(entry.drafts), len(accepted) - 1)
        return NewTokens(job, index, tuple(accepted), reason)

    def _append(self, job: WorkerJob, token: SampledToken) -> FinishReason | None:
        """Append a token, and end the job where that finishes it; return the reason."""
        sequence = job.sequence
        sequence.append(token.token_id)
        reason = finish_reason(sequence.request, sequence.num_output_tokens, token.token_id)
        if reason is not None or job.is_prefill_only:
            self.end(job)
        return reason

    # --- the phases of a job ---

    def _wait(self, job: WorkerJob) -> None:
        job.phase = Phase.WAITING
        job.turn = turn_of(job, self._config.queue, self.policy.expected_answer(job))
        insort(self.waiting, job, key=lambda other: other.turn)

    def _receive(self, job: WorkerJob) -> None:
        """Let a transfer write into the job's blocks from now on."""
        self._leave(job)
        job.phase = Phase.TRANSFERRING
        job.is_receiving = True
        self.transferring.add(job)

    def _received(self, job: WorkerJob) -> bool:
        """Account for the end of the transfer into the job's blocks; return whether the job goes on."""
        job.is_receiving = False
        self._release_if_unused(job)
        return not job.has_ended

    def _run(self, job: WorkerJob) -> None:
        """Let the job take part in steps."""
        self._leave(job)
        job.phase = Phase.RUNNING
        insort(self.running, job, key=lambda other: other.arrival)

    def _leave(self, job: WorkerJob) -> None:
        match job.phase:
            case Phase.WAITING:
                self.waiting.remove(job)
            case Phase.TRANSFERRING:
                self.transferring.remove(job)
            case Phase.RUNNING:
                self.running.remove(job)

    def _release_if_unused(self, job: WorkerJob) -> None:
        """Release the blocks of a job that has ended; called wherever something no longer uses them."""
        if job.has_ended and not job.is_in_use:
            job.sequence.reset(self.pool)
            self._swapping.release(job)


def _is_sound(row: SequenceStep) -> bool:
    """Return True unless a draft's row failed; its token is then drawn once more, without the draft."""
    draw = row.draw
    if draw is None or (draw.fault is not None and draw.fault.error is not None):
        return False
    return draw.constraint is None or not draw.constraint.has_failed(row.start + 1)


def _check_fits(request: GenerateRequest, max_context: int, capacity: int, *, is_prefill_only: bool) -> None:
    """Raise RequestError for a request that could never run here; `capacity` is the whole cache's, in tokens."""
    num_tokens = len(request.token_ids)
    if is_prefill_only:
        most = max_context - min(1, request.max_tokens)
        if num_tokens > min(most, capacity):
            raise ContextExceeded("prompt", num_tokens, min(max_context, capacity))
        return
    most = min(max_context, capacity + 1)  # the last token's KV is never needed
    if request.num_prompt_tokens + request.max_tokens > most:
        raise ContextExceeded("prompt", request.num_prompt_tokens, most, request.max_tokens)
