"""Which requests share the next step, who waits, and who must give way. Pure: no I/O, no clock, no asyncio.

A request waits until its blocks are reserved (for a transfer not before it is offered), in the order that
worker/queue_order.py says; then its KV comes by the transfer, or is computed here in chunks; then it decodes, one token
a step, as long as it has a place in the batch. Where blocks run out, or one of a higher class waits for some, others
give all of theirs back (decode_worker/preemption.py): what they lose is computed again later, which their own cached
prefix makes cheap, or their KV is copied to host memory and back. The oldest request of the highest class therefore
always gets on, and so does everyone in turn: within a class by arrival, across classes by their shares.

A step may be scheduled while the one before it is under way ("ahead"): decodes go on with the token that is being
drawn. One that turns out to have ended leaves a row whose token nobody takes.

The steps that the engine has been given and has not finished: one that runs, and perhaps the next behind it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostroke.decode_worker.jobs import DecodeJob, DecodeStep, Entry, Phase, Progress, Swap
from twostroke.decode_worker.preemption import SwappedBlocks, first_to_go
from twostroke.decode_worker.standings import Batch, OfferedPrefixes, Reservations, Standings
from twostroke.decode_worker.step_budget import PromptBudget, StepBudget, check_fits, drawn_for, must_be_awaited
from twostroke.model.step import Engine
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Promise, SampledToken, finish_reason
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.queue_order import NO_LIMIT, ClassShares, QueuePolicy, turns
from twostroke.worker.sequence import SequenceState


class DecodeScheduler:
    """Continuous batching over one block pool: at most `max_batch` requests in a step, and what `budget` says.

    Admission leaves `watermark_blocks` free, so that running requests have some to grow into. At most `max_waiting`
    newcomers may be queued.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        budget: StepBudget,
        max_batch: int,
        watermark_blocks: int,
        max_context: int,
        max_waiting: int,
        swapped: SwappedBlocks,
        min_pull_tokens: int = 1,
        queue: QueuePolicy = "edf",
    ):
        self._pool = pool
        self._swapped = swapped
        self._budget = budget
        self._max_batch = max_batch
        self._max_context = max_context
        self._max_waiting = max_waiting
        self._standings = Standings(pool, swapped, queue)
        self.prefixes = OfferedPrefixes(pool, self._standings, min_tokens=min_pull_tokens)
        self._reservations = Reservations(pool, self._standings, self.prefixes, watermark_blocks=watermark_blocks)
        self._batch = Batch(max_batch, budget)
        self._shares = ClassShares()
        self._given: Counter[Promise] = Counter()  # prompt tokens whose turn came since shares were settled
        self._num_arrived = 0
        self.preemptions = 0  # counter
        self.swaps = 0  # counter: of them, those whose KV went to host memory

    @property
    def prefix_queries(self) -> int:
        """Counter: prompt tokens looked up."""
        return self._reservations.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Counter: prompt tokens found."""
        return self._reservations.prefix_hits

    @property
    def num_waiting(self) -> int:
        """Requests in no step yet: without blocks, or with KV under way."""
        return len(self._standings.waiting) + len(self._standings.transferring)

    @property
    def num_running(self) -> int:
        """Requests that decode, or whose prompt is being computed here."""
        return len(self._standings.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed here before their requests decode."""
        return sum(tokens for _, tokens in self.waiting_work())

    @property
    def decoding(self) -> Iterable[DecodeJob]:
        """The requests that decode, those that stand still included."""
        return self._standings.decoding

    def waiting_work(self) -> Iterable[tuple[Promise, int]]:
        """Tokens still to be computed here before they decode, of each request that does not."""
        return self._standings.waiting_work()

    def add(
        self, request: GenerateRequest, *, now: float, wants_transfer: bool, awaits_offer: bool = False
    ) -> DecodeJob:
        """Queue a request; `now` is in seconds of a clock that the caller keeps to.

        One that awaits the offer of a prefix is not admitted before `prefixes` hear of it.

        Raises RequestError for one that could never run here to its end, and, with status 429, for one too many.
        One that gives way later is queued again whatever the number.
        """
        check_fits(request, max_context=self._max_context, capacity=self._pool.num_blocks * self._pool.block_size)
        if len(self._standings.waiting) >= self._max_waiting:
            raise RequestError(f"{self._max_waiting} requests wait here already", code="overloaded", status=429)
        sequence = SequenceState(request, self._pool.block_size)
        num_cached = self._pool.lookup(sequence.matchable_hashes) * self._pool.block_size
        num_uncached = len(sequence.token_ids) - num_cached
        job = DecodeJob(sequence, self._num_arrived, now, num_uncached, wants_transfer, awaits_offer=awaits_offer)
        self._num_arrived += 1
        self._standings.wait(job)
        return job

    def schedule(self, in_flight: DecodeStep | None = None) -> DecodeStep:
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
                return DecodeStep((), ())
        elif swaps := self._make_room(decodes):
            return DecodeStep((), (), swaps)
        elif any(job.phase is not Phase.RUNNING for job in staying):
            return self.schedule()  # their places are for others, who need blocks to grow into as well
        self._batch.settle(staying, chosen)
        follows = drawn_for(in_flight)
        entries: list[Entry] = []
        for job in decodes:
            job.sequence.reserve(self._pool, job.num_under_way + 1)
            entries.append(_entry(job, 1, follows.get(job)))
        prompts = [job for job in chosen if job.num_unscheduled > 1] if len(entries) < len(chosen) else []
        if not prompts and not self._standings.waiting:
            self._settle_shares(())
            return DecodeStep(tuple(entries), ())
        budget = self._budget.for_prompts([entry.job for entry in entries])
        given, reserved, swapped_in = self._give_turns(prompts, self._max_batch - len(entries), budget)
        entries.extend(_entry(job, num_tokens) for job, num_tokens in given.items())
        return DecodeStep(tuple(entries), tuple(reserved), tuple(swapped_in))

    def reserve_offered(self) -> tuple[DecodeJob, ...]:
        """Reserve the blocks of offered jobs whose turn it is; may be called while a step is under way.

        So their KV need not wait for the step's end. Whoever computes here gets its turn before the next step.
        """
        reserved: list[DecodeJob] = []
        for job, most in turns((self._reservations.ready(),), self._shares):
            if job.phase is Phase.WAITING:
                if not job.has_kv_coming or not self._admit(job, most):
                    break
                if job.is_receiving:
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
            job.end_first()
            # Of one that was ended, a step ahead may have computed a token that it never got.
            end = min(entry.step.start + len(entry.step.token_ids), len(sequence.token_ids))
            sequence.num_computed = end
            sequence.publish_full_blocks(self._pool)
            if job.has_ended:
                self._standings.release_if_unused(job)
            elif token is not None:
                progress.append(self._append(job, token))
        return progress

    def abandon(self, step: DecodeStep) -> None:
        """Account for a step that failed: the engine is dead and touches nothing any more."""
        for swap in step.swaps:
            swap.job.is_copying = False
            self._standings.release_if_unused(swap.job)
        for entry in step.entries:
            entry.job.end_first()
            self._standings.release_if_unused(entry.job)

    def verified(self, job: DecodeJob, first_token: SampledToken) -> Progress | None:
        """All KV of the job's prompt has come, with its first token. None where the job was ended meanwhile."""
        if not self._standings.received(job):
            return None
        sequence = job.sequence
        sequence.num_computed = len(sequence.token_ids)
        sequence.publish_full_blocks(self._pool)
        self._standings.run(job)
        return self._append(job, first_token)

    def transfer_failed(self, job: DecodeJob) -> None:
        """No KV comes, and nothing writes into the job's blocks any more: it is to be computed here."""
        if self._standings.received(job):
            self._standings.send_back(job)

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

    def end(self, job: DecodeJob) -> None:
        """Schedule the job no more; its blocks go back as soon as nothing uses them. Harmless when repeated."""
        self._standings.end(job)

    def _staying(self) -> list[DecodeJob]:
        """Those who want a further step."""
        return [job for job in self._standings.running if not job.is_drawing_its_last]

    def _can_run_ahead(self, in_flight: DecodeStep, decodes: Sequence[DecodeJob]) -> bool:
        if must_be_awaited(in_flight):
            return False
        # Whoever gives way must be in no step.
        return self._blocks_wanted(decodes) <= self._pool.free_blocks and not self._who_yields()

    def _make_room(self, decodes: Sequence[DecodeJob]) -> tuple[Swap, ...]:
        """Have others give way until there are blocks for the next token of the `decodes` that are left.

        And for the one who is admitted next, where those of lower classes hold them. Whoever's KV is to be kept frees
        its blocks only when it has been copied: with the copies, this ends for now.
        """
        while self._blocks_wanted(decodes) > self._pool.free_blocks:
            job = first_to_go(self._standings.running)
            if swap := self._give_way(job):
                return (swap,)
            decodes = [other for other in decodes if other is not job]
        return tuple(swap for job in self._who_yields() if (swap := self._give_way(job)) is not None)

    def _give_way(self, job: DecodeJob) -> Swap | None:
        job.num_preemptions += 1
        self.preemptions += 1
        swap = self._swapped.swap_out(job)
        if swap is not None:
            self.swaps += 1
        self._standings.send_back(job)
        return swap

    def _who_yields(self) -> list[DecodeJob]:
        """Those whose blocks the next to be admitted needs, where all that it lacks are these."""
        waiting, running = self._standings.waiting, self._standings.running
        if not waiting or not running:
            return []
        if waiting[0].request.promise.priority <= min(job.request.promise.priority for job in running):
            return []
        head, _ = next(turns((self._reservations.ready(),), self._shares), (None, 0))
        if head is None or not (head.has_kv_coming or self._batch.has_room(head, self._staying())):
            return []
        return self._reservations.who_yields_to(head)

    def _give_turns(
        self, prompts: Sequence[DecodeJob], num_places: int, budget: PromptBudget
    ) -> tuple[Counter[DecodeJob], list[DecodeJob], list[Swap]]:
        """Chunks of prompts in so many places, whose blocks a transfer may fill, and whose KV comes back."""
        given: Counter[DecodeJob] = Counter()
        reserved: list[DecodeJob] = []
        swapped_in: list[Swap] = []
        is_open = True  # nobody overtakes one that is ready: a large request would starve behind small ones
        prompts = sorted(prompts, key=lambda job: job.turn)

        def give_chunk(job: DecodeJob, most: int) -> None:
            if job.phase is Phase.RUNNING and (job in given or len(given) < num_places):
                wanted = min(job.num_unscheduled - given[job], most)
                num_tokens = budget.take(wanted, job.num_scheduled + given[job])
                if num_tokens:
                    given[job] += num_tokens
                    self._given[job.request.promise] += num_tokens

        for job, most in turns((self._reservations.ready(), prompts), self._shares):
            if job.phase is Phase.WAITING:
                is_open = is_open and self._may_join(job, budget) and self._admit(job, most)
                if not is_open:
                    if most == NO_LIMIT:
                        break  # hundreds may wait behind it
                    continue
                if job.is_receiving:
                    reserved.append(job)
                elif (swap := self._swapped.swap_in(job)) is not None:
                    swapped_in.append(swap)
            give_chunk(job, most)
        for job in prompts:  # those that come after one that waits
            give_chunk(job, NO_LIMIT)
        wanting = (*self._reservations.ready(), *prompts)
        self._settle_shares(job for job in wanting if job not in given or given[job] < job.num_unscheduled)
        return given, reserved, swapped_in

    def _settle_shares(self, left: Iterable[DecodeJob]) -> None:
        promises = [job.request.promise for job in left]
        self._shares.settle(self._given if promises else {}, promises)
        self._given.clear()

    def _may_join(self, job: DecodeJob, budget: PromptBudget) -> bool:
        return job.has_kv_coming or (not budget.is_spent and self._batch.has_room(job, self._staying()))

    def _admit(self, job: DecodeJob, most: int) -> bool:
        if not self._reservations.reserve(job, most):
            return False
        if job.wants_transfer:
            self._given[job.request.promise] += len(job.sequence.token_ids)
        return True

    def _copied(self, swap: Swap) -> None:
        job = swap.job
        job.is_copying = False
        if swap.copy.is_out:
            job.sequence.reset(self._pool)
        else:
            self._swapped.release(job)
        self._standings.release_if_unused(job)

    def _blocks_wanted(self, decodes: Sequence[DecodeJob]) -> int:
        return sum(job.sequence.blocks_needed(job.num_under_way + 1) for job in decodes)

    def _append(self, job: DecodeJob, token: SampledToken) -> Progress:
        sequence = job.sequence
        index = sequence.num_output_tokens
        sequence.append(token.token_id)
        reason = finish_reason(sequence.request, index + 1, token.token_id)
        if reason is not None:
            self.end(job)
        return Progress(job, index, token, reason)


def _entry(job: DecodeJob, num_tokens: int, follows: int | None = None) -> Entry:
    step = job.sequence.step(num_tokens, start=job.num_scheduled, follows=follows)
    job.begin(step)
    return Entry(job, step)


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has run."""

    step: DecodeStep
    sampled: list[SampledToken | None]  # one for each entry
    seconds: float  # how long it ran; time behind another step isn't counted


class StepsUnderWay:
    """Hands steps to an engine, and takes them back in the same order. Belongs to the worker's step loop."""

    def __init__(self, engine: Engine, clock: Clock):
        self._engine = engine
        self._clock = clock
        self._steps: list[DecodeStep] = []
        self._results: list[asyncio.Task[list[SampledToken | None]]] = []  # of each step
        self._began = 0.0  # when the first of them could begin

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> DecodeStep | None:
        """The one that another step would have to wait for."""
        return self._steps[-1] if self._steps else None

    async def begin(self, step: DecodeStep) -> None:
        """Have it run after those under way. Returns once the engine has it; does nothing for an empty step."""
        if step.is_empty:
            return
        if not self._steps:
            self._began = self._clock()
        run = self._engine.step([entry.step for entry in step.entries], copies=[swap.copy for swap in step.swaps])
        self._steps.append(step)
        self._results.append(asyncio.create_task(run, name="engine step"))
        await asyncio.sleep(0)  # the task begins: the engine starts before the loop goes on thinking

    async def first_ended(self) -> EndedStep:
        """Wait for the step that runs. Raises what the engine raises, which then does nothing more."""
        try:
            sampled = await self._results[0]
        except BaseException:
            for result in self._results:
                result.cancel()
            await asyncio.gather(*self._results, return_exceptions=True)
            raise
        began, self._began = self._began, self._clock()
        del self._results[0]
        return EndedStep(self._steps.pop(0), sampled, self._began - began)

    def give_up(self) -> list[DecodeStep]:
        """Forget all steps, of an engine that has died; returns them."""
        given_up, self._steps, self._results = self._steps, [], []
        return given_up
