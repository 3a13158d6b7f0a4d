"""Which prompts share the next step, and who holds blocks. Pure: no I/O, no clock, no asyncio.

A prompt gets all its blocks when it is admitted, so a running one never waits for blocks and none is preempted. Blocks
go back once the job has ended and neither a step nor a transfer uses them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from model.block_pool import BlockPool
from model.sequence import SequenceState
from model.step import SequenceStep
from protocol.errors import RequestError
from protocol.requests import GenerateRequest


@dataclass(eq=False, slots=True)
class PrefillJob:
    """One prompt between its arrival and the release of its blocks. Only the scheduler changes it."""

    sequence: SequenceState
    arrival: int  # 0, 1, 2, ...: the order in which prompts came
    num_cached_tokens: int = 0  # found in the prefix cache on admission
    in_step: bool = False  # the engine may be writing into its blocks
    is_sending: bool = False  # a transfer may be reading its blocks
    has_ended: bool = False  # computed, failed or aborted: nothing more will be scheduled

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

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
class PrefillStep:
    """What to run next. `admitted` jobs hold blocks since this very decision; they are among the chunks' jobs."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[PrefillJob, ...]


QueuePolicy = Callable[[PrefillJob], tuple[float, ...]]
"""A sort key over waiting jobs: the smallest is admitted next."""


def first_come_first_served(job: PrefillJob) -> tuple[float, ...]:
    """The order of arrival."""
    return (job.arrival,)


class PrefillScheduler:
    """Chunked prefill over one block pool: at most `max_step_tokens` tokens of `max_batch` prompts in a step.

    At most `max_waiting` prompts may be queued.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_step_tokens: int,
        max_batch: int,
        max_context: int,
        max_waiting: int,
        policy: QueuePolicy = first_come_first_served,
    ):
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._max_batch = max_batch
        self._max_context = max_context
        self._max_waiting = max_waiting
        self._policy = policy
        self._waiting: list[PrefillJob] = []
        self._running: list[PrefillJob] = []  # in the order of their admission
        self._num_arrived = 0
        self.prefix_queries = 0  # counter: prompt tokens looked up
        self.prefix_hits = 0  # counter: prompt tokens found
        self.preemptions = 0  # counter, always 0: a prompt has all its blocks from the start

    @property
    def num_waiting(self) -> int:
        """Prompts that hold no blocks yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts that are being computed."""
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return sum(job.sequence.num_uncomputed for job in (*self._waiting, *self._running))

    def add(self, request: GenerateRequest) -> PrefillJob:
        """Queue a prompt.

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
        job = PrefillJob(SequenceState(request, self._pool.block_size), self._num_arrived)
        self._num_arrived += 1
        self._waiting.append(job)
        return job

    def schedule(self) -> PrefillStep:
        """Decide the next step: prompts begun go on first, then others are admitted while tokens and blocks last.

        Marks the jobs as in a step; `complete` or `abandon` must follow before the next call.
        """
        budget = self._max_step_tokens
        chunks: list[Chunk] = []
        for job in self._running:
            if budget == 0:
                break
            budget -= self._add_chunk(chunks, job, budget)
        admitted: list[PrefillJob] = []
        while budget > 0 and self._waiting and len(self._running) < self._max_batch:
            job = min(self._waiting, key=self._policy)
            if not self._admit(job):
                break  # nobody overtakes: a large prompt would starve behind small ones
            admitted.append(job)
            budget -= self._add_chunk(chunks, job, budget)
        return PrefillStep(tuple(chunks), tuple(admitted))

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
        job.is_sending = True

    def end_sending(self, job: PrefillJob) -> None:
        """No transfer reads the job's blocks any more."""
        job.is_sending = False
        self._release_if_unused(job)

    def end(self, job: PrefillJob) -> None:
        """Schedule the job no more; its blocks go back as soon as nothing uses them. Harmless when repeated."""
        if job.has_ended:
            return
        job.has_ended = True
        if job in self._waiting:
            self._waiting.remove(job)
        else:
            self._running.remove(job)
        self._release_if_unused(job)

    def _admit(self, job: PrefillJob) -> bool:
        sequence = job.sequence
        matched = sequence.match_prefix(self._pool)
        if sequence.blocks_needed(sequence.num_uncomputed) > self._pool.free_blocks:
            sequence.reset(self._pool)
            return False
        sequence.reserve(self._pool, sequence.num_uncomputed)
        job.num_cached_tokens = matched
        self.prefix_queries += job.num_tokens
        self.prefix_hits += matched
        self._waiting.remove(job)
        self._running.append(job)
        return True

    def _add_chunk(self, chunks: list[Chunk], job: PrefillJob, budget: int) -> int:
        num_tokens = min(job.sequence.num_uncomputed, budget)
        chunks.append(Chunk(job, job.sequence.step(num_tokens), job.sequence.num_computed + num_tokens))
        job.in_step = True
        return num_tokens

    def _release_if_unused(self, job: PrefillJob) -> None:
        if job.has_ended and not job.in_step and not job.is_sending:
            job.sequence.reset(self._pool)
