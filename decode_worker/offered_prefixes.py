"""Prompts computed here whose beginning another worker offers: what of it is taken, and what becomes of it. Pure.

Such a prompt waits for the offer without holding anything or anybody up. Admitted in its turn, it takes part in no step
until the KV is in its blocks, or does not come; then the rest is computed in the same blocks.

An offer holds blocks at the other worker. So where blocks are short here all offers that wait are given up: workers
would else wait for each other's blocks in a circle.
"""

from twostroke.decode_worker.jobs import DecodeJob
from twostroke.decode_worker.standings import Standings
from twostroke.model.block_pool import BlockPool


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
