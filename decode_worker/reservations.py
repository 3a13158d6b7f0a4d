"""Who holds blocks: all that a request needs so far are reserved for it at once, when its turn has come. Pure."""

from twostroke.decode_worker.jobs import DecodeJob
from twostroke.decode_worker.offered_prefixes import OfferedPrefixes
from twostroke.decode_worker.standings import Standings
from twostroke.decode_worker.yielding import who_yields
from twostroke.model.block_pool import BlockPool
from twostroke.model.queue_order import NO_LIMIT


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
