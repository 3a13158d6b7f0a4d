"""Which prompts share a prefill worker's next step, and who gives blocks back. Pure: no I/O, no clock, no asyncio.

All of a step goes to prompts, in the order of their turns: one that comes with a higher class or a tighter promise has
the next step's tokens first, though another's prompt is begun. A prompt ends with its first token. It gets all its
blocks when it is admitted, so a running one never waits for blocks. Only where one of a higher class lacks them do
running ones give theirs back, to be computed again later: those of which no KV has been sent.
"""

import math
from dataclasses import dataclass

from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, SampledToken
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.config import WorkerConfig
from twostroke.worker.queue_order import who_yields
from twostroke.worker.scheduler import DrawnToken, PromptBudget, ScheduledStep, Scheduler
from twostroke.worker.sequence import WorkerJob

LEFT_TO_HIGHER = 8
"""The part of the blocks, one in so many, that is left to prompts of higher classes than KV that waits to be sent."""


@dataclass(eq=False, slots=True)
class PrefillJob(WorkerJob):
    """One prompt between its arrival and the release of its blocks."""

    is_sending: bool = False  # a transfer may be reading its blocks
    has_been_sent: bool = False  # a transfer has begun to read them: they must stay, whatever became of it

    @property
    def is_in_use(self) -> bool:
        return bool(self.under_way) or self.is_receiving or self.is_sending


class PrefillScheduler(Scheduler[PrefillJob]):
    """Chunked prefill: at most `max_step_tokens` tokens of `max_batch` prompts in a step."""

    def __init__(self, pool: BlockPool, config: WorkerConfig, max_context: int):
        super().__init__(pool, config, max_context)
        self._sending: set[PrefillJob] = set()
        self._highest_priority = -math.inf  # that has ever been here

    def add(self, request: GenerateRequest, *, now: float, awaits_offer: bool = False) -> PrefillJob:
        """Queue a prompt; one that awaits an offer is not admitted before `offered_prefix` or `no_prefix`.

        `now` is in seconds of a clock that the caller keeps to.

        Raises RequestError for one that could never run here, and, with status 429, for one too many.
        """
        num_tokens = len(request.token_ids)
        most = self._max_context - min(1, request.max_tokens)
        if num_tokens > most:
            raise _too_long(
                f"the prompt has {num_tokens} tokens; the model's context has room for {most}, and an answer"
            )
        if num_tokens > self._capacity:
            raise _too_long(f"the prompt has {num_tokens} tokens; this worker's whole KV cache holds {self._capacity}")
        job = self._enter(PrefillJob(self._sequence(request), now, awaits_offer))
        self._highest_priority = max(self._highest_priority, request.promise.priority)
        return job

    def schedule(self) -> ScheduledStep[PrefillJob]:
        """Decide the next step: in the order of their turns prompts get tokens, and are admitted while those last.

        A step may be under way: prompts that it does not end go on behind it. Marks the jobs as in a step; `complete`
        or `abandon` must follow for each step, in order, and for all but one of them before the next call.
        """
        budget = PromptBudget(self._config.max_step_tokens)
        unended = [job for job in self._running if not job.num_drawing]
        entries = self._give_chunks(unended, self._config.max_batch, budget)
        return ScheduledStep(tuple(entries), self._take_admitted())

    def begin_sending(self, job: PrefillJob) -> None:
        """A transfer reads the job's blocks from now on."""
        job.is_sending = job.has_been_sent = True
        self._sending.add(job)

    def end_sending(self, job: PrefillJob) -> None:
        """No transfer reads the job's blocks any more."""
        job.is_sending = False
        self._sending.discard(job)
        self._release_if_unused(job)

    def _append(self, job: PrefillJob, token: SampledToken) -> DrawnToken[PrefillJob]:
        drawn = super()._append(job, token)
        self.end(job)
        return drawn

    def _may_join(self, job: PrefillJob) -> bool:
        return len(self._chunks) < self._config.max_batch

    def _blocks_to_leave(self, job: PrefillJob) -> int:
        """Some, while there is KV of the job's class or a higher one that has to wait, to classes higher than its own.

        That may wait long for room at a decode worker, and gives way to nobody: it would be computed twice. A pool that
        is full of it would shut out classes for which the decode worker makes room at once. Nothing is left where
        nobody has ever asked for more than this prompt's class.
        """
        priority = job.request.promise.priority
        if priority >= self._highest_priority:
            return 0
        is_crowded = any(other.has_ended and other.request.promise.priority >= priority for other in self._sending)
        return self._pool.num_blocks // LEFT_TO_HIGHER if is_crowded else 0

    def _make_room(self, job: PrefillJob, missing_blocks: int) -> bool:
        idle = [
            other for other in self._running if not (other.under_way or other in self._chunks or other.has_been_sent)
        ]
        giving_way = who_yields(job, idle, missing_blocks, self._pool)
        for other in giving_way:
            other.num_preemptions += 1
            self.preemptions += 1
            self._send_back(other)
        return bool(giving_way)


def _too_long(message: str) -> RequestError:
    return RequestError(message, param="prompt", code="context_length_exceeded")
