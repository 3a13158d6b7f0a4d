"""The scheduler of a worker of either role: the requests of the next step, the queue, and the owners of blocks. Pure.

No I/O, no clock, no asyncio. A request's way:

1. It waits for its turn (queue_order.py), and until all blocks that it needs so far can be reserved at once.
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

A role is a `StepPolicy` (policy.py). Preemption is in preemption.py.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence

from twostroke.model.step import MtpDrafts, SequenceStep
from twostroke.protocol.errors import ContextExceeded, RequestError
from twostroke.protocol.requests import FinishReason, GenerateRequest, Promise, SampledToken, finish_reason
from twostroke.worker.config import WorkerConfig
from twostroke.worker.scheduling.block_pool import BlockPool, OutOfBlocks
from twostroke.worker.scheduling.job import Phase, WorkerJob
from twostroke.worker.scheduling.policy import StepPolicy
from twostroke.worker.scheduling.preemption import Preemptor, Swapping
from twostroke.worker.scheduling.queue_order import NO_LIMIT, ClassShares, turn_of, turns
from twostroke.worker.scheduling.sequence import SequenceState
from twostroke.worker.scheduling.step import Admitted, NewTokens, PromptBudget, ScheduledStep, StepEntry, Swap
from twostroke.worker.speculation.speculator import Draft, Speculator

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
        self.preemptor = Preemptor(self, swapping)
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
        staying = self.staying()
        chosen = self.policy.choose(staying)
        decodes = [job for job in chosen if job.is_decoding]
        prompts = [job for job in chosen if not job.is_decoding]
        if in_flight is not None:
            if not self.preemptor.may_run_ahead(in_flight, decodes) or self._awaits_drafts(in_flight, decodes, prompts):
                return ScheduledStep()
        elif swaps := self.preemptor.free_blocks_for(decodes):
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
        entries += self._give_chunks(prompts, self._config.max_batch - len(entries) - num_drafted, budget)
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
            self.send_back(job)

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

    # --- for the preemptor ---

    def staying(self) -> list[WorkerJob]:
        """Return the running jobs that want a further step."""
        return [job for job in self.running if not job.is_drawing_its_last]

    def preemptible(self) -> list[WorkerJob]:
        """Return the running jobs whose blocks no transfer has used. No step may be under way."""
        return [job for job in self.running if not job.has_been_sent]

    def next_to_admit(self) -> WorkerJob | None:
        """Return the waiting job whose turn it is, where only blocks may keep it from being admitted."""
        job, _ = next(turns((self._ready(),), self.shares), (None, 0))
        return job if job is not None and (job.has_kv_coming or self._may_join(job)) else None

    def missing_blocks(self, job: WorkerJob) -> int:
        """Return how many blocks a waiting job lacks that has matched the prefix cache; 0 or less: none."""
        wanted = job.sequence.blocks_needed(job.sequence.num_uncomputed)
        return wanted + self.policy.blocks_to_leave(job, self) - self.pool.free_blocks

    def send_back(self, job: WorkerJob) -> None:
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

    def _give_chunks(self, prompts: Iterable[WorkerJob], num_places: int, budget: PromptBudget) -> list[StepEntry]:
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
        return self.policy.may_join(job, self.staying())

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
        if self.missing_blocks(job) > 0:
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
            self.speculator.verified(len(entry.drafts), len(accepted) - 1)
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
