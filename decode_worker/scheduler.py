"""Which requests share the next step, who waits, and who must give way. Pure: no I/O, no clock, no asyncio.

A request waits until its blocks are reserved (for a transfer not before it is offered); then its KV comes by the
transfer, or is computed here in chunks; then it decodes, one token a step. Where blocks run out, the youngest gives all
of its back: it is computed again later, which its own cached prefix makes cheap, or its KV is copied to host memory and
back. The oldest request therefore always gets on, and so does everyone in turn.

A step may be scheduled while the one before it is under way ("ahead"): decodes go on with the token that is being
drawn. One that turns out to have ended leaves a row whose token nobody takes.
"""

from bisect import insort
from collections.abc import Sequence

from decode_worker.jobs import DecodeJob, DecodeStep, Entry, Phase, Progress, Swap
from decode_worker.request_bounds import check_fits
from decode_worker.run_ahead import drawn_for, must_be_awaited
from decode_worker.swapped_blocks import SwappedBlocks
from model.block_pool import BlockPool
from model.sequence import SequenceState
from protocol.errors import RequestError
from protocol.requests import GenerateRequest, SampledToken, finish_reason


class DecodeScheduler:
    """Continuous batching over one block pool: at most `max_step_tokens` tokens of `max_batch` requests in a step.

    Admission leaves `watermark_blocks` free, so that running requests have some to grow into. At most `max_waiting`
    newcomers may be queued.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_step_tokens: int,
        max_batch: int,
        watermark_blocks: int,
        max_context: int,
        max_waiting: int,
        swapped: SwappedBlocks,
    ):
        self._pool = pool
        self._swapped = swapped
        self._max_step_tokens = max_step_tokens
        self._max_batch = max_batch
        self._watermark_blocks = watermark_blocks
        self._max_context = max_context
        self._max_waiting = max_waiting
        # Both in the order of arrival, whatever happened to a job in between.
        self._waiting: list[DecodeJob] = []
        self._running: list[DecodeJob] = []
        self._transferring: set[DecodeJob] = set()
        self._num_arrived = 0
        self.prefix_queries = 0  # counter: prompt tokens looked up
        self.prefix_hits = 0  # counter: prompt tokens found
        self.preemptions = 0  # counter
        self.swaps = 0  # counter: of them, those whose KV went to host memory

    @property
    def num_waiting(self) -> int:
        """Requests in no step yet: without blocks, or with KV under way."""
        return len(self._waiting) + len(self._transferring)

    @property
    def num_running(self) -> int:
        """Requests that decode, or whose prompt is being computed here."""
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed here before their requests decode."""
        local = sum(job.num_to_compute for job in self._waiting if not job.wants_transfer)
        return local + sum(job.sequence.num_uncomputed for job in self._running if job.sequence.num_uncomputed > 1)

    def add(self, request: GenerateRequest, *, wants_transfer: bool) -> DecodeJob:
        """Queue a request.

        Raises RequestError for one that could never run here to its end, and, with status 429, for one too many.
        One that gives way later is queued again whatever the number.
        """
        check_fits(request, max_context=self._max_context, capacity=self._pool.num_blocks * self._pool.block_size)
        if len(self._waiting) >= self._max_waiting:
            raise RequestError(f"{self._max_waiting} requests wait here already", code="overloaded", status=429)
        job = DecodeJob(SequenceState(request, self._pool.block_size), self._num_arrived, wants_transfer)
        self._num_arrived += 1
        self._waiting.append(job)
        return job

    def schedule(self, in_flight: DecodeStep | None = None) -> DecodeStep:
        """Decide the next step: decodes, then chunks of prompts begun, then whoever can be admitted.

        `in_flight` is the one step under way, if any. The new one, which is to run right behind it, is empty where that
        can't be decided before its end: where somebody must give way, or a draw needs to know the tokens before it.
        Where somebody is swapped out, it does nothing else: what that frees is known when it has ended.
        Marks the jobs as in a step, receiving or copying; `complete` or `abandon` must follow for each step, in order,
        and for all but one of them before the next call.
        """
        staying = [job for job in self._running if not job.is_drawing_its_last]
        decodes = [job for job in staying[: self._max_batch] if job.num_unscheduled == 1]
        if in_flight is not None and not self._can_run_ahead(in_flight, decodes):
            return DecodeStep((), ())
        decodes, swapped_out = self._make_room(decodes)
        if swapped_out is not None:
            return DecodeStep((), (), (swapped_out,))
        prompts = [job for job in staying[: self._max_batch] if job.num_unscheduled > 1]
        follows = drawn_for(in_flight)
        entries: list[Entry] = []
        for job in decodes:
            job.sequence.reserve(self._pool, job.num_under_way + 1)
            self._add_entry(entries, job, 1, follows.get(job))
        budget = self._max_step_tokens - len(entries)
        for job in prompts:
            if budget > 0 and job.phase is Phase.RUNNING:
                budget -= self._add_entry(entries, job, budget)
        num_places = self._max_batch - sum(job.phase is Phase.RUNNING for job in staying)
        reserved: list[DecodeJob] = []
        swapped_in: list[Swap] = []
        # One who just gave way can't come back in the same breath: it needs all it gave, and some of that is taken.
        for job in list(self._waiting):
            if job.wants_transfer and not job.is_offered:
                # Blocks reserved for what may still wait for blocks elsewhere could end in a circle of workers that
                # wait for each other.
                continue
            if not job.wants_transfer and (budget == 0 or num_places <= 0):
                break
            if not self._admit(job):
                break  # nobody overtakes one that is ready: a large request would starve behind small ones
            if job.wants_transfer:
                reserved.append(job)
            else:
                if (swap := self._swapped.swap_in(job)) is not None:
                    swapped_in.append(swap)
                budget -= self._add_entry(entries, job, budget)
                num_places -= 1
        return DecodeStep(tuple(entries), tuple(reserved), tuple(swapped_in))

    def reserve_offered(self) -> tuple[DecodeJob, ...]:
        """Reserve the blocks of offered jobs whose turn it is; may be called while a step is under way.

        So their KV need not wait for the step's end. Whoever computes here gets its turn before the next step.
        """
        reserved: list[DecodeJob] = []
        for job in list(self._waiting):
            if not job.wants_transfer:
                break
            if job.is_offered:
                if not self._admit(job):
                    break
                reserved.append(job)
        return tuple(reserved)

    def complete(self, step: DecodeStep, sampled: "list[SampledToken | None]") -> list[Progress]:
        """Account for a step that has run; returns the drawn tokens of jobs that nobody has ended meanwhile.

        Jobs whose token finishes them are ended.
        """
        for swap in step.swaps:
            self._copied(swap)
        progress: list[Progress] = []
        for entry, token in zip(step.entries, sampled, strict=True):
            job, sequence = entry.job, entry.job.sequence
            job.under_way.pop(0)
            # Of one that was ended, a step ahead may have computed a token that it never got.
            end = min(entry.step.start + len(entry.step.token_ids), len(sequence.token_ids))
            sequence.num_computed = end
            sequence.publish_full_blocks(self._pool)
            if job.has_ended:
                self._release_if_unused(job)
            elif token is not None:
                progress.append(self._append(job, token))
        return progress

    def abandon(self, step: DecodeStep) -> None:
        """Account for a step that failed: the engine is dead and touches nothing any more."""
        for swap in step.swaps:
            swap.job.is_copying = False
            self._release_if_unused(swap.job)
        for entry in step.entries:
            entry.job.under_way.pop(0)
            self._release_if_unused(entry.job)

    def verified(self, job: DecodeJob, first_token: SampledToken) -> Progress | None:
        """All KV of the job's prompt has come, with its first token. None where the job was ended meanwhile."""
        job.is_receiving = False
        if job.has_ended:
            self._release_if_unused(job)
            return None
        self._transferring.remove(job)
        sequence = job.sequence
        sequence.num_computed = len(sequence.token_ids)
        sequence.publish_full_blocks(self._pool)
        self._run(job)
        return self._append(job, first_token)

    def transfer_failed(self, job: DecodeJob) -> None:
        """No KV comes, and nothing writes into the job's blocks any more: it is to be computed here."""
        job.is_receiving = False
        if job.has_ended:
            self._release_if_unused(job)
            return
        self._transferring.remove(job)
        self._send_back(job)

    def offered(self, job: DecodeJob) -> None:
        """The job's prefill worker has begun with it: from now on blocks may be reserved."""
        job.is_offered = True

    def compute_here(self, job: DecodeJob) -> None:
        """Don't wait for a transfer that has not begun. Does nothing for a job that has begun, or ended."""
        if job.phase is Phase.WAITING:
            job.wants_transfer = False

    def end(self, job: DecodeJob) -> None:
        """Schedule the job no more; its blocks go back as soon as nothing uses them. Harmless when repeated."""
        match job.phase:
            case Phase.WAITING:
                self._waiting.remove(job)
            case Phase.TRANSFERRING:
                self._transferring.remove(job)
            case Phase.RUNNING:
                self._running.remove(job)
            case Phase.ENDED:
                return
        job.phase = Phase.ENDED
        self._release_if_unused(job)

    def _can_run_ahead(self, in_flight: DecodeStep, decodes: Sequence[DecodeJob]) -> bool:
        if must_be_awaited(in_flight):
            return False
        return self._blocks_wanted(decodes) <= self._pool.free_blocks  # whoever gives way must be in no step

    def _make_room(self, decodes: list[DecodeJob]) -> tuple[list[DecodeJob], Swap | None]:
        """Have the youngest give way until there are blocks for the next token of the others, who are returned.

        One whose KV is to be kept frees its blocks only when it has been copied: with it, this ends for now.
        """
        while self._blocks_wanted(decodes) > self._pool.free_blocks:
            youngest = self._running.pop()
            youngest.num_preemptions += 1
            self.preemptions += 1
            swap = self._swapped.swap_out(youngest)
            self._send_back(youngest)
            if swap is not None:
                self.swaps += 1
                return [], swap
            decodes = [job for job in decodes if job is not youngest]
        return decodes, None

    def _copied(self, swap: Swap) -> None:
        job = swap.job
        job.is_copying = False
        if swap.copy.is_out:
            job.sequence.reset(self._pool)
        else:
            self._swapped.release(job)
        self._release_if_unused(job)

    def _blocks_wanted(self, decodes: Sequence[DecodeJob]) -> int:
        return sum(job.sequence.blocks_needed(job.num_under_way + 1) for job in decodes)

    def _admit(self, job: DecodeJob) -> bool:
        """Reserve blocks for all tokens known so far."""
        sequence = job.sequence
        matched = sequence.match_prefix(self._pool)
        wanted = sequence.blocks_needed(sequence.num_uncomputed)
        others_grow = bool(self._running or self._transferring)
        if wanted + (self._watermark_blocks if others_grow else 0) > self._pool.free_blocks:
            sequence.reset(self._pool)
            return False
        sequence.reserve(self._pool, sequence.num_uncomputed)
        if job.num_preemptions == 0:
            job.num_cached_tokens = matched
        self.prefix_queries += len(sequence.token_ids)
        self.prefix_hits += matched
        self._waiting.remove(job)
        if job.wants_transfer:
            job.phase = Phase.TRANSFERRING
            job.is_receiving = True
            self._transferring.add(job)
        else:
            self._run(job)
        return True

    def _run(self, job: DecodeJob) -> None:
        job.phase = Phase.RUNNING
        insort(self._running, job, key=lambda other: other.arrival)

    def _send_back(self, job: DecodeJob) -> None:
        """Back to the queue, at its old place in the order of arrival; what is lost will be computed here."""
        if not job.is_copying:
            job.sequence.reset(self._pool)
        job.phase = Phase.WAITING
        job.wants_transfer = False
        insort(self._waiting, job, key=lambda other: other.arrival)

    def _add_entry(self, entries: list[Entry], job: DecodeJob, budget: int, follows: int | None = None) -> int:
        num_tokens = min(job.num_unscheduled, budget)
        step = job.sequence.step(num_tokens, start=job.num_scheduled, follows=follows)
        entries.append(Entry(job, step))
        job.under_way.append(step)
        return num_tokens

    def _append(self, job: DecodeJob, token: SampledToken) -> Progress:
        sequence = job.sequence
        index = sequence.num_output_tokens
        sequence.append(token.token_id)
        reason = finish_reason(sequence.request, index + 1, token.token_id)
        if reason is not None:
            self.end(job)
        return Progress(job, index, token, reason)

    def _release_if_unused(self, job: DecodeJob) -> None:
        if job.has_ended and not job.is_in_use:
            job.sequence.reset(self._pool)
            self._swapped.release(job)
