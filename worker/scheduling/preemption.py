"""Preemption: which requests give their blocks back, when, and what becomes of their KV. Pure.

- **When.** Between steps: where the next token of running requests lacks blocks, or where the next request to be
  admitted has a higher class than some that run. No step runs ahead of that. Requests that a transfer reads, or has
  read, keep their blocks.
- **Which.** The youngest of the lowest class first. A request that its class's share admitted is spared by higher
  classes: they would otherwise evict it as often as it is admitted. Requests whose blocks turn out not to be needed
  are spared too.
- **What becomes of the KV.** It is dropped and computed again later, which the request's own cached prefix makes cheap,
  or the engine copies it to host memory and back (`Swapping`), whichever costs less.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from twostroke.model.step import BlockCopy
from twostroke.protocol.kv_layout import NO_BLOCK
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import SwappedKV, WorkerJob
from twostroke.worker.scheduling.step import ScheduledStep, Swap

if TYPE_CHECKING:
    from twostroke.worker.scheduling.scheduler import Scheduler

PreemptionMode = Literal["recompute", "swap", "auto"]


class Preemptor:
    """Preempts requests of one scheduler."""

    def __init__(self, scheduler: "Scheduler", swapping: "Swapping"):
        self._scheduler = scheduler
        self._swapping = swapping
        self.num_preemptions = 0  # counter

    def may_run_ahead(self, in_flight: ScheduledStep, decodes: Sequence[WorkerJob]) -> bool:
        """Return True where a step can be decided behind `in_flight`: a job can be preempted only while in no step."""
        if in_flight.swaps:
            return False  # the blocks that they free are not known yet
        return blocks_wanted(decodes) <= self._scheduler.pool.free_blocks and not self._for_next_to_admit()

    def free_blocks_for(self, decodes: Sequence[WorkerJob]) -> tuple[Swap, ...]:
        """Preempt until there are blocks for the next token of the `decodes` that are left, then for the next to admit.

        A job whose KV is kept frees its blocks only once they are copied, so this stops at the first of these jobs.
        """
        while blocks_wanted(decodes) > self._scheduler.pool.free_blocks:
            job = min(self._scheduler.preemptible(), key=preemption_order)
            if swap := self._preempt(job):
                return (swap,)
            decodes = [other for other in decodes if other is not job]
        return tuple([swap for job in self._for_next_to_admit() if (swap := self._preempt(job)) is not None])

    def _for_next_to_admit(self) -> list[WorkerJob]:
        """Return the jobs of lower classes whose blocks the next to admit needs, where it lacks nothing else."""
        scheduler = self._scheduler
        waiting, running = scheduler.waiting, scheduler.running
        if not waiting or not running:
            return []
        if waiting[0].request.promise.priority <= min(job.request.promise.priority for job in running):
            return []
        if (head := scheduler.next_to_admit()) is None:
            return []
        head.sequence.match_prefix(scheduler.pool)  # others' blocks that it shares need not be freed
        missing = scheduler.missing_blocks(head)
        preemptible = scheduler.preemptible() if missing > 0 else []
        chosen = lower_classes_to_preempt(head, preemptible, missing, scheduler.pool)
        head.sequence.reset(scheduler.pool)
        return chosen

    def _preempt(self, job: WorkerJob) -> Swap | None:
        """Queue the job again. Return the copy of its KV where that is kept."""
        job.num_preemptions += 1
        self.num_preemptions += 1
        swap = self._swapping.swap_out(job)
        self._scheduler.send_back(job)
        return swap


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
