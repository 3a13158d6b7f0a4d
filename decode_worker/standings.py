"""Where each request stands: it waits, its KV is on its way, it runs, or it has ended and its blocks go back. Pure."""

from bisect import insort
from collections.abc import Iterable

from twostroke.decode_worker.jobs import DecodeJob, Phase
from twostroke.decode_worker.swapped_blocks import SwappedBlocks
from twostroke.model.block_pool import BlockPool
from twostroke.model.queue_order import QueuePolicy, turn_of
from twostroke.protocol.requests import Promise


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
