"""The role of prefill workers: prompts take the step, in the order of their turns, and streams ride along. Pure.

A prompt of a higher class or a tighter promise has the next step's tokens first, though another prompt is begun. It
gets all its blocks when it is admitted, so a running prompt never waits for blocks. Only where a prompt of a higher
class lacks them are running ones preempted, of which no KV has been sent.
"""

from typing import ClassVar

from twostroke.prefill_worker.config import PrefillConfig
from twostroke.worker.role import WorkerRole
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.scheduler import Scheduler
from twostroke.worker.scheduling.step_policy import StepPolicy

LEFT_TO_HIGHER = 8
"""One in this number of blocks is left to prompts of higher classes than KV that waits to be sent."""


class PrefillPolicy(StepPolicy):
    """Lets streams wait for a whole step of prompts."""

    longest_chunk: ClassVar[int] = 2048
    most_stall_s: ClassVar[float] = 0.5

    def blocks_to_leave(self, job: WorkerJob, scheduler: Scheduler) -> int:
        """Leave some blocks to higher classes while KV of the job's class or a higher one waits to be sent.

        That KV may wait long for room at a decode worker and is never preempted, since it would be computed twice. A
        pool that is full of it would shut out classes for which the decode worker makes room at once. Nothing is left
        where no request has had a higher class than this prompt's.
        """
        least = super().blocks_to_leave(job, scheduler)
        priority = job.request.promise.priority
        if scheduler.highest_priority is None or priority >= scheduler.highest_priority:
            return least
        is_crowded = any(other.has_ended and other.request.promise.priority >= priority for other in scheduler.sending)
        return max(least, scheduler.pool.num_blocks // LEFT_TO_HIGHER if is_crowded else 0)


def prefill_role(config: PrefillConfig) -> WorkerRole:
    """Return the role of a prefill worker with these settings."""
    return WorkerRole("prefill", config, PrefillPolicy)
