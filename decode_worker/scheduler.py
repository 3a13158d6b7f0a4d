"""Which requests share a decode worker's next step, and who must give way. Pure: no I/O, no clock, no asyncio.

A request waits until its blocks are reserved, for a transfer not before it is offered; then its KV comes by the
transfer, or is computed here in chunks; then it decodes, one token a step, as long as it has a place in the batch.
Where blocks run out, or one of a higher class waits for some, others give all of theirs back: what they lose is
computed again later, which their own cached prefix makes cheap, or their KV is copied to host memory and back
(decode_worker/preemption.py). The oldest request of the highest class therefore always gets on, and so does everyone in
turn: within a class by arrival, across classes by their shares.

A step may be scheduled while the one before it is under way ("ahead"): decodes go on with the token that is being
drawn, be it their first, and prompts with their next chunk. One that turns out to have ended leaves a row whose token
nobody takes.
"""

from collections.abc import Iterable, Sequence

from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.jobs import DecodeJob
from twostroke.decode_worker.preemption import Swapping
from twostroke.decode_worker.step_budget import DecodeBatch, StepBudget
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, SampledToken
from twostroke.worker.answer_lengths import AnswerLengths
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.queue_order import rank, turns, who_yields
from twostroke.worker.scheduler import DrawnToken, ScheduledStep, Scheduler, Swap
from twostroke.worker.sequence import Phase


class DecodeScheduler(Scheduler[DecodeJob]):
    """Continuous batching: at most `max_batch` requests in a step, and what a StepBudget says.

    Admission leaves the watermark's blocks free, so that running requests have some to grow into.
    """

    def __init__(self, pool: BlockPool, config: DecodeConfig, max_context: int, budget: StepBudget, swapping: Swapping):
        super().__init__(pool, config, max_context)
        self._budget = budget
        self._watermark_blocks = int(config.watermark * pool.num_blocks)
        self._swapping = swapping
        self._lengths = AnswerLengths()
        self._batch = DecodeBatch(budget)
        self._swapped_in: list[Swap[DecodeJob]] = []  # in the step that is being decided
        self.swaps = 0  # counter: of the preempted requests, those whose KV went to host memory

    @property
    def decoding(self) -> Iterable[DecodeJob]:
        return (job for job in self._running if job.sequence.num_uncomputed <= 1)

    def add(
        self, request: GenerateRequest, *, now: float, wants_transfer: bool, awaits_offer: bool = False
    ) -> DecodeJob:
        """Queue a request; `now` is in seconds of a clock that the caller keeps to.

        One that awaits the offer of a prefix is not admitted before `offered_prefix` or `no_prefix`.

        Raises RequestError for one that could never run here to its end, and, with status 429, for one too many.
        """
        longest = request.num_prompt_tokens + request.max_tokens
        asked = f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} exceed"
        if longest > self._max_context:
            raise _too_long(f"{asked} the model's context of {self._max_context}")
        if longest - 1 > self._capacity:  # the last token's KV is never needed
            raise _too_long(f"{asked} this worker's whole KV cache, which holds {self._capacity}")
        return self._enter(DecodeJob(self._sequence(request), now, awaits_offer, wants_transfer=wants_transfer))

    def schedule(self, in_flight: ScheduledStep[DecodeJob] | None = None) -> ScheduledStep[DecodeJob]:
        """Decide the next step: decodes, then in the order of their turns chunks of prompts begun, and admission.

        `in_flight` is the one step under way, if any. The new one, which is to run right behind it, is empty where that
        can't be decided before its end: where somebody must give way, or a draw needs to know the tokens before it.
        Where somebody is swapped out, it does nothing else: what that frees is known when it has ended.
        Marks the jobs as in a step, receiving or copying; `complete` or `abandon` must follow for each step, in order,
        and for all but one of them before the next call.
        """
        staying = self._staying()
        chosen = self._batch.choose(staying)
        decodes = [job for job in chosen if job.num_unscheduled == 1]
        if in_flight is not None:
            if not self._can_run_ahead(in_flight, decodes):
                return ScheduledStep()
        elif swaps := self._free_blocks_for(decodes):
            return ScheduledStep(swaps=swaps)
        elif any(job.phase is not Phase.RUNNING for job in staying):
            return self.schedule()  # their places are for others, who need blocks to grow into as well
        self._batch.settle(staying, chosen)
        follows = {} if in_flight is None else _drawn_for(in_flight)
        entries = []
        for job in decodes:
            job.sequence.reserve(self._pool, job.num_under_way + 1)
            entries.append(self._entry(job, 1, follows.get(job)))
        prompts = [job for job in chosen if job.num_unscheduled > 1] if len(entries) < len(chosen) else []
        if not prompts and not self._waiting:
            self._settle_shares(())
            return ScheduledStep(tuple(entries))
        budget = self._budget.for_prompts([entry.job for entry in entries])
        entries += self._give_chunks(prompts, self._config.max_batch - len(entries), budget)
        swaps, self._swapped_in = tuple(self._swapped_in), []
        return ScheduledStep(tuple(entries), self._take_admitted(), swaps)

    def complete(
        self, step: ScheduledStep[DecodeJob], sampled: Sequence[SampledToken | None]
    ) -> list[DrawnToken[DecodeJob]]:
        for swap in step.swaps:
            swap.job.is_copying = False
            if swap.copy.is_out:
                swap.job.sequence.reset(self._pool)
            else:
                self._swapping.release(swap.job)
            self._release_if_unused(swap.job)
        return super().complete(step, sampled)

    def abandon(self, step: ScheduledStep[DecodeJob]) -> None:
        for swap in step.swaps:
            swap.job.is_copying = False
            self._release_if_unused(swap.job)
        super().abandon(step)

    def end(self, job: DecodeJob) -> None:
        """End it as Scheduler.end does. Its answer is one to learn from: a stop string ends one by a cancellation."""
        if not job.has_ended and job.has_begun and job.request.reading is None:
            self._lengths.ended(*_kind(job), job.sequence.num_output_tokens)
        super().end(job)

    def verified(self, job: DecodeJob, first_token: SampledToken) -> DrawnToken[DecodeJob] | None:
        """All KV of the job's prompt has come, with its first token. None where the job was ended meanwhile."""
        if not self._received(job):
            return None
        sequence = job.sequence
        sequence.received(self._pool, len(sequence.token_ids))
        self._run(job)
        return self._append(job, first_token)

    def transfer_failed(self, job: DecodeJob) -> None:
        """No KV comes, and nothing writes into the job's blocks any more: it is to be computed here."""
        if self._received(job):
            self._send_back(job)

    def offered(self, job: DecodeJob) -> None:
        """The job's prefill worker has begun with it: from now on blocks may be reserved."""
        job.is_offered = True

    def wait_on(self, job: DecodeJob) -> None:
        """Compute nothing of a job whose transfer has failed before `compute_here`. Does nothing for one that ended."""
        if job.phase is Phase.WAITING:
            job.wants_transfer, job.is_offered = True, False

    def compute_here(self, job: DecodeJob) -> None:
        """Don't wait for a transfer that has not begun. Does nothing for a job that has begun, or ended."""
        if job.phase is Phase.WAITING:
            job.wants_transfer = False

    def _staying(self) -> list[DecodeJob]:
        """Those who want a further step."""
        return [job for job in self._running if not job.is_drawing_its_last]

    def _can_run_ahead(self, in_flight: ScheduledStep[DecodeJob], decodes: Sequence[DecodeJob]) -> bool:
        if in_flight.swaps:
            return False  # nobody knows yet which blocks that frees
        # Whoever gives way must be in no step.
        return self._blocks_wanted(decodes) <= self._pool.free_blocks and not self._who_yields()

    def _free_blocks_for(self, decodes: Sequence[DecodeJob]) -> tuple[Swap[DecodeJob], ...]:
        """Have others give way until there are blocks for the next token of the `decodes` that are left.

        And for the one who is admitted next, where those of lower classes hold them. Whoever's KV is to be kept frees
        its blocks only when it has been copied: with the copies, this ends for now.
        """
        while self._blocks_wanted(decodes) > self._pool.free_blocks:
            job = min(self._running, key=rank)
            if swap := self._give_way(job):
                return (swap,)
            decodes = [other for other in decodes if other is not job]
        return tuple([swap for job in self._who_yields() if (swap := self._give_way(job)) is not None])

    def _give_way(self, job: DecodeJob) -> Swap[DecodeJob] | None:
        job.num_preemptions += 1
        self.preemptions += 1
        swap = self._swapping.swap_out(job)
        self.swaps += swap is not None
        self._send_back(job)
        return swap

    def _who_yields(self) -> list[DecodeJob]:
        """Those whose blocks the next to be admitted needs, where all that it lacks are these."""
        if not self._waiting or not self._running:
            return []
        if self._waiting[0].request.promise.priority <= min(job.request.promise.priority for job in self._running):
            return []
        head, _ = next(turns((self._ready(),), self._shares), (None, 0))
        if head is None or not (head.has_kv_coming or self._may_join(head)):
            return []
        head.sequence.match_prefix(self._pool)  # what it finds of others' blocks it need not get from them
        missing = self._missing_blocks(head)
        yielding = who_yields(head, self._running, missing, self._pool) if missing > 0 else []
        head.sequence.reset(self._pool)
        return yielding

    def _blocks_wanted(self, decodes: Iterable[DecodeJob]) -> int:
        return sum(job.sequence.blocks_needed(job.num_under_way + 1) for job in decodes)

    def _expected_answer(self, job: DecodeJob) -> float:
        expected = min(self._lengths.expected(*_kind(job)), job.request.max_tokens)
        return max(1.0, expected - job.sequence.num_output_tokens)

    def _may_join(self, job: DecodeJob) -> bool:
        return self._batch.has_room(job, self._staying())

    def _blocks_to_leave(self, job: DecodeJob) -> int:
        return self._watermark_blocks if self._running or self._transferring else 0

    def _admit(self, job: DecodeJob, most: int) -> bool:
        if not super()._admit(job, most):
            return False
        if not job.is_receiving and (swap := self._swapping.swap_in(job, self._pool)) is not None:
            self._swapped_in.append(swap)
        return True

    def _send_back(self, job: DecodeJob) -> None:
        job.has_place = job.wants_transfer = False
        super()._send_back(job)

    def _release(self, job: DecodeJob) -> None:
        super()._release(job)
        self._swapping.release(job)


def _drawn_for(step: ScheduledStep[DecodeJob]) -> dict[DecodeJob, int]:
    """The jobs that a step draws a token for, with the entry that does."""
    return {one.job: i for i, one in enumerate(step.entries) if one.step.draw is not None}


def _kind(job: DecodeJob) -> tuple[str, int]:
    """Return the class and the prompt's tokens, on which the answer's length may depend."""
    return job.request.promise.class_name, job.request.num_prompt_tokens


def _too_long(message: str) -> RequestError:
    return RequestError(message, param="max_tokens", code="context_length_exceeded")
