"""The step policy of prefill workers: all of a step goes to prompts, in the order of their turns. Pure.

A prompt of a higher class or a tighter promise has the next step's tokens first, though another prompt is begun. A
prompt ends with its first token. It gets all its blocks when it is admitted, so a running prompt never waits for
blocks. Only where a prompt of a higher class lacks them are running ones preempted, of which no KV has been sent.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.scheduler import RolePolicy, Scheduler
from twostroke.worker.scheduling.step import PromptBudget

LEFT_TO_HIGHER = 8
"""One in this number of blocks is left to prompts of higher classes than KV that waits to be sent."""


class PrefillPolicy(RolePolicy):
    """Chunked prefill: at most `max_step_tokens` tokens of `max_batch` prompts in a step."""

    is_prefill_only: ClassVar[bool] = True

    def __init__(self, config: PrefillConfig):
        self._config = config

    def check_fits(self, request: GenerateRequest, max_context: int, capacity: int) -> None:
        num_tokens = len(request.token_ids)
        most = max_context - min(1, request.max_tokens)
        if num_tokens > most:
            raise _too_long(
                f"the prompt has {num_tokens} tokens; the model's context has room for {most}, and an answer"
            )
        if num_tokens > capacity:
            raise _too_long(f"the prompt has {num_tokens} tokens; this worker's whole KV cache holds {capacity}")

    def prompt_budget(self, decodes: Iterable[WorkerJob]) -> PromptBudget:
        return PromptBudget(self._config.max_step_tokens)

    def may_join(self, job: WorkerJob, staying: Sequence[WorkerJob], num_chunks: int) -> bool:
        return num_chunks < self._config.max_batch

    def blocks_to_leave(self, job: WorkerJob, scheduler: Scheduler) -> int:
        """Leave some blocks to higher classes while KV of the job's class or a higher one waits to be sent.

        That KV may wait long for room at a decode worker and is never preempted, since it would be computed twice. A
        pool that is full of it would shut out classes for which the decode worker makes room at once. Nothing is left
        where no request has had a higher class than this prompt's.
        """
        priority = job.request.promise.priority
        if scheduler.highest_priority is None or priority >= scheduler.highest_priority:
            return 0
        is_crowded = any(other.has_ended and other.request.promise.priority >= priority for other in scheduler.sending)
        return scheduler.pool.num_blocks // LEFT_TO_HIGHER if is_crowded else 0


def _too_long(message: str) -> RequestError:
    return RequestError(message, param="prompt", code="context_length_exceeded")
