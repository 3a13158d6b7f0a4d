"""Where each request stands: it waits, its KV is on its way, it runs, or it has ended and its blocks go back. Pure.

Who has a place in the batch. Pure.

Whoever has one keeps it, so that streams flow; newcomers wait until there is room, in the order of their arrival. Only
for one of a higher class do others stop, the youngest of the lowest class first: their KV stays where it is, and they
go on when there is room again. A class that stands still gets its share of the tokens all the same.

Prompts computed here whose beginning another worker offers: what of it is taken, and what becomes of it. Pure.

Such a prompt waits for the offer without holding anything or anybody up. Admitted in its turn, it takes part in no step
until the KV is in its blocks, or does not come; then the rest is computed in the same blocks.

An offer holds blocks at the other worker. So where blocks are short here all offers that wait are given up: workers
would else wait for each other's blocks in a circle.

Who holds blocks: all that a request needs so far are reserved for it at once, when its turn has come. Pure.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence

from twostroke.decode_worker.jobs import DecodeJob, Phase
from twostroke.decode_worker.preemption import SwappedBlocks, who_yields
from twostroke.decode_worker.step_budget import StepBudget
from twostroke.protocol.requests import Promise
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.queue_order import NO_LIMIT, ClassShares, QueuePolicy, turn_of


class Standings:
    """The requests of one worker. Blocks are of `pool`, and of host memory as `swapped` has given them."""

    def __init__(self, pool: BlockPool, swapped: SwappedBlocks, policy: QueuePolicy):
        self._pool = pool
        self._swapped = swapped
        self._policy = policy
        self.waiting: list[DecodeJob] = []  # by their turns
        self.running: list[DecodeJob] = []  # in the order of arrival
        self.transferring: set[DecodeJob] = set()

    @property
    def decoding(self) -> Iterable[DecodeJob]:
        """Those that decode, or stand still while others do."""
        return (job for job in self.running if job.sequence.num_uncomputed <= 1)

    def waiting_work(self) -> Iterable[tuple[Promise, int]]:
        """Tokens still to be computed here before they decode, of each request that does not."""
        for job in self.waiting:
            if not job.wants_transfer:
                yield job.request.promise, job.num_to_compute
        for job in self.transferring:
            if not job.wants_transfer:
                yield job.request.promise, len(job.sequence.token_ids) - job.offered_tokens
        for job in self.running:
            if job.sequence.num_uncomputed > 1:
                yield job.request.promise, job.sequence.num_uncomputed

    def wait(self, job: DecodeJob) -> None:
        """Queue a newcomer, or one that has just left where it stood."""
        job.phase = Phase.WAITING
        job.turn = turn_of(job, self._policy)
        insort(self.waiting, job, key=lambda other: other.turn)

    def receive(self, job: DecodeJob) -> None:
        """A transfer may write into the job's blocks from now on."""
        self._leave(job)
        job.phase = Phase.TRANSFERRING
        job.is_receiving = True
        self.transferring.add(job)

    def received(self, job: DecodeJob) -> bool:
        """The transfer into the job's blocks has ended, whole or not; whether the job goes on."""
        job.is_receiving = False
        self.release_if_unused(job)
        return not job.has_ended

    def run(self, job: DecodeJob) -> None:
        """Let the job take part in steps."""
        self._leave(job)
        job.phase = Phase.RUNNING
        insort(self.running, job, key=lambda other: other.arrival)

    def send_back(self, job: DecodeJob) -> None:
        """Back to the queue; what is lost will be computed here."""
        self._leave(job)
        if not job.is_copying:
            job.sequence.reset(self._pool)
        job.has_place = job.keeps_blocks = job.wants_transfer = False
        self.wait(job)

    def end(self, job: DecodeJob) -> None:
        """The job gets no further; its blocks go back as soon as nothing uses them. Harmless when repeated."""
        if job.has_ended:
            return
        self._leave(job)
        job.phase = Phase.ENDED
        self.release_if_unused(job)

    def release_if_unused(self, job: DecodeJob) -> None:
        """To be called wherever something has done with a job's blocks."""
        if job.has_ended and not job.is_in_use:
            job.sequence.reset(self._pool)
            self._swapped.release(job)

    def _leave(self, job: DecodeJob) -> None:
        match job.phase:
            case Phase.WAITING:
                self.waiting.remove(job)
            case Phase.TRANSFERRING:
                self.transferring.remove(job)
            case Phase.RUNNING:
                self.running.remove(job)


class Batch:
    """At most `max_batch` requests, and no more than leave each of them the time per token that it was promised."""

    def __init__(self, max_batch: int, budget: StepBudget):
        self._max_batch = max_batch
        self._budget = budget
        self._shares = ClassShares()

    def choose(self, jobs: Sequence[DecodeJob]) -> list[DecodeJob]:
        """Those of `jobs` that are in the next step, in the order in which they are given."""
        if len(jobs) <= self._max_batch and not _is_promised(jobs):
            return list(jobs)
        places = self._budget.places()
        chosen: set[DecodeJob] = set()
        has_newcomers = False
        is_open = True  # to newcomers: none overtakes one for whom there is no room, though its own promise be looser
        for job in self._ranked(jobs):
            if len(chosen) == self._max_batch:
                break
            # Costs may have changed, or contexts grown: that stops nobody. A newcomer of a higher class does.
            if (job.has_place and not has_newcomers) or ((job.has_place or is_open) and places.allow(job)):
                has_newcomers = has_newcomers or not job.has_place
                chosen.add(job)
                places.take(job)
            elif not job.has_place:
                is_open = False
        return [job for job in jobs if job in chosen]

    def has_room(self, newcomer: DecodeJob, jobs: Iterable[DecodeJob]) -> bool:
        """Whether a newcomer would have a place beside those of `jobs` that are not of a lower class."""
        priority = newcomer.request.promise.priority
        not_lower = [job for job in jobs if job.request.promise.priority >= priority]
        if len(not_lower) >= self._max_batch:
            return False
        places = self._budget.places()
        for job in not_lower:
            places.take(job)
        return places.allow(newcomer)

    def settle(self, jobs: Sequence[DecodeJob], chosen: Sequence[DecodeJob]) -> None:
        """A step with the `chosen` of `jobs` begins."""
        given: Counter[Promise] = Counter()
        waiting: list[Promise] = []
        if len(chosen) < len(jobs):
            having = set(chosen)
            for job in jobs:
                job.has_place = job in having
                if job.has_place:
                    given[job.request.promise] += 1
                else:
                    waiting.append(job.request.promise)
        else:
            for job in jobs:
                job.has_place = True
        self._shares.settle(given, waiting)

    def _ranked(self, jobs: Sequence[DecodeJob]) -> list[DecodeJob]:
        ranked = sorted(jobs, key=_rank)
        if not self._shares:
            return ranked
        taken: Counter[str] = Counter()
        ahead: list[DecodeJob] = []
        behind: list[DecodeJob] = []
        for job in ranked:
            name = job.request.promise.class_name
            if taken[name] < self._shares.saved(name):
                taken[name] += 1
                ahead.append(job)
            else:
                behind.append(job)
        return ahead + behind


def _rank(job: DecodeJob) -> tuple[int, bool, int]:
    return (-job.request.promise.priority, not job.has_place, job.arrival)


def _is_promised(jobs: Iterable[DecodeJob]) -> bool:
    return any(job.request.promise.tpot_s is not None for job in jobs)


class OfferedPrefixes:
    """Those of one worker. An offer is taken where it spares `min_tokens` at least."""

    def __init__(self, pool: BlockPool, standings: Standings, *, min_tokens: int):
        self._pool = pool
        self._standings = standings
        self._min_tokens = min_tokens
        self._declined: list[DecodeJob] = []  # not told yet

    def offered(self, job: DecodeJob, num_tokens: int) -> None:
        """Another worker offers the KV of a waiting job's first `num_tokens` tokens."""
        job.awaits_offer = False
        job.offered_tokens = num_tokens
        if num_tokens >= len(job.sequence.token_ids):  # one must be computed, or there is nothing to draw from
            self._decline(job)

    def not_offered(self, job: DecodeJob) -> None:
        """No offer comes for a waiting job."""
        job.awaits_offer = False

    def takes(self, job: DecodeJob) -> bool:
        """Whether a job that has taken what is cached here is to receive what it is offered; else that is declined."""
        if job.offered_tokens >= job.sequence.num_computed + self._min_tokens:
            return True
        self._decline(job)
        return False

    def decline_all(self) -> None:
        """Give up the offers to all who wait."""
        for job in self._standings.waiting:
            self._decline(job)

    def take_declined(self) -> list[DecodeJob]:
        """Jobs whose offers have been declined since the last call."""
        declined, self._declined = self._declined, []
        return declined

    def pulled(self, job: DecodeJob) -> int:
        """All offered KV has come; returns how many tokens that spares, 0 where the job has ended meanwhile."""
        num_cached, num_tokens = job.sequence.num_computed, job.offered_tokens
        if not self._standings.received(job):
            return 0
        job.sequence.num_computed = job.num_cached_tokens = num_tokens
        job.sequence.publish_full_blocks(self._pool)
        self._compute_rest(job)
        return num_tokens - num_cached

    def pull_failed(self, job: DecodeJob) -> None:
        """The offered KV does not come, and nothing writes into the job's blocks any more: all is computed here."""
        if self._standings.received(job):
            self._compute_rest(job)

    def _compute_rest(self, job: DecodeJob) -> None:
        job.offered_tokens = 0
        self._standings.run(job)

    def _decline(self, job: DecodeJob) -> None:
        if job.offered_tokens:
            job.offered_tokens = 0
            self._declined.append(job)


class Reservations:
    """Blocks of `pool`. `watermark_blocks` are left free, so that running requests have some to grow into."""

    def __init__(self, pool: BlockPool, standings: Standings, prefixes: OfferedPrefixes, *, watermark_blocks: int):
        self._pool = pool
        self._standings = standings
        self._prefixes = prefixes
        self._watermark_blocks = watermark_blocks
        self.prefix_queries = 0  # counter: prompt tokens looked up
        self.prefix_hits = 0  # counter: prompt tokens found

    def ready(self) -> list[DecodeJob]:
        """Those who wait and may be admitted, by their turns.

        Not before it is offered: blocks reserved for what may still wait for blocks elsewhere could end in a circle of
        workers that wait for each other.
        """
        return [
            job
            for job in self._standings.waiting
            if not job.awaits_offer and (job.is_offered or not job.wants_transfer)
        ]

    def reserve(self, job: DecodeJob, most: int) -> bool:
        """Admit a waiting job, if there are blocks for all tokens known so far.

        With a limit `most` to its tokens, so by its class's share, it keeps them. It `is_receiving` then, or runs.
        """
        sequence = job.sequence
        matched = sequence.match_prefix(self._pool)
        if self._missing(job) > 0:
            sequence.reset(self._pool)
            self._prefixes.decline_all()
            return False
        sequence.reserve(self._pool, sequence.num_uncomputed)
        if job.num_preemptions == 0:
            job.num_cached_tokens = matched
        job.keeps_blocks = most < NO_LIMIT
        self.prefix_queries += len(sequence.token_ids)
        self.prefix_hits += matched
        if job.wants_transfer or self._prefixes.takes(job):
            self._standings.receive(job)
        else:
            self._standings.run(job)
        return True

    def who_yields_to(self, job: DecodeJob) -> list[DecodeJob]:
        """Those whose blocks a waiting job needs, where all that it lacks are these."""
        job.sequence.match_prefix(self._pool)  # what it finds of others' blocks it need not get from them
        missing = self._missing(job)
        yielding = who_yields(job, self._standings.running, missing, self._pool) if missing > 0 else []
        job.sequence.reset(self._pool)
        return yielding

    def _missing(self, job: DecodeJob) -> int:
        """Blocks that a waiting job lacks which has taken what the prefix cache holds; 0 or less: none."""
        others_grow = bool(self._standings.running or self._standings.transferring)
        wanted = job.sequence.blocks_needed(job.sequence.num_uncomputed)
        return wanted + (self._watermark_blocks if others_grow else 0) - self._pool.free_blocks
