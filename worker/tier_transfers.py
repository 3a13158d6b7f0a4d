"""A worker's KV to and from its tiers (kvtiers/): prefixes that are read, and objects that are written.

A prompt's read is a pull whose source is the worker's own tiers; the wait for its offer is bounded by what computing
would take. Writes come behind requests, one transfer at a time, so that blocks are held for moments.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twostroke.kvtiers.kv_tiers import KVTiers, ObjectRun, TieredWorker
from twostroke.kvtransfer.ranks import SendingSide
from twostroke.protocol.block_hash import BlockHash
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.kv_layout import NO_BLOCK, TYPICAL_TOKENS
from twostroke.protocol.stats import StepCosts
from twostroke.worker.config import WorkerConfig
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.transfers import Pulls, Transfers

_log = logging.getLogger(__name__)

OFFER_S = 0.25
"""Seconds by which the wait for an offer exceeds the read's own deadline: the way of messages on a busy event loop."""
MAX_RUNS = 64
"""Runs of objects that wait for their transfer; more are dropped."""


@dataclass(eq=False)
class TierTransfers:
    """The transfers between one worker and its tiers."""

    tiers: KVTiers
    pool: BlockPool
    sender: SendingSide
    pulls: Pulls
    transfers: Transfers
    costs: Callable[[], StepCosts | None]
    config: WorkerConfig
    _runs: deque[tuple[ObjectRun, Sequence[BlockHash]]] = field(default_factory=deque, init=False)
    _is_sending: bool = field(default=False, init=False)

    async def start(self, host: str, worker: TieredWorker) -> None:
        """Let the tiers listen for the worker's KV. Raises ConnectionLost where `host` can't be listened on."""
        await self.tiers.start(host, worker)

    async def close(self) -> None:
        """End the tiers' transfers."""
        self._runs.clear()
        await self.tiers.close()

    def begin_read(self, job: WorkerJob) -> None:
        """Have a new job wait for what the tiers hold of its prompt, where that is quicker than computing. Never waits.

        A job whose KV comes from elsewhere, or that needs all of its prompt computed, is left alone.
        """
        sequence, hashes = job.sequence, job.sequence.matchable_hashes
        num_cached = len(sequence.token_ids) - job.num_uncached
        if job.wants_transfer or len(hashes) * sequence.block_size < num_cached + self.config.min_pull_tokens:
            return
        spare_s = math.inf  # that a read may take and fail, so that the first token still comes in time
        if (left_s := job.request.promise.ttft_left_s) is not None:
            computing_s = self.computing_s(num_cached, len(sequence.token_ids))
            spare_s = max(0.0, left_s - computing_s if computing_s < left_s else left_s)
        read = self.tiers.begin_read(
            job.request.request_id,
            hashes,
            job.request.client,
            num_cached=num_cached,
            spared_s=lambda end: self.computing_s(num_cached, end),
            most_wait_s=spare_s,
        )
        if read is not None:
            job.awaits_offer = job.reads_tiers = True
            self.pulls.await_offer(job, read.ticket, read.wait_s + OFFER_S)

    def computing_s(self, num_before: int, end: int) -> float:
        """Return the seconds that computing the tokens from `num_before` up to `end` takes; infinite where unknown."""
        costs = self.costs()
        if costs is None:
            return math.inf
        return costs.prefill_s(end - num_before, num_before, self.config.max_step_tokens)

    def request_ended(self, job: WorkerJob) -> None:
        """Count the use of a sequence's objects, and send the tiers what is to be written. Never waits.

        The choices of one request count once: it is their prompt that may come again.
        """
        if job.request.log_context.choice > 0:
            return
        costs, names = self.costs(), job.sequence.block_hashes
        hashes = names[: self.pool.lookup(names)]  # not the last token's block, nor what was never computed
        token_s = 0.0 if costs is None else costs.prompt_s(TYPICAL_TOKENS) / TYPICAL_TOKENS
        keeps = job.request.keep_s > 0
        for run in self.tiers.request_ended(hashes, job.request.client, keeps=keeps, token_s=token_s):
            if len(self._runs) >= MAX_RUNS:
                self.tiers.drop(run)
            else:
                self._runs.append((run, hashes[run.first_row : run.end_row]))
        if self._runs and not self._is_sending:
            self._is_sending = True
            self.transfers.track(self._send_runs(), "KV to the tiers")

    async def _send_runs(self) -> None:
        try:
            while self._runs:
                await self._send(*self._runs.popleft())
        finally:
            self._is_sending = False

    async def _send(self, run: ObjectRun, hashes: Sequence[BlockHash]) -> None:
        """Send one run's KV, where it is still cached."""
        taken = self.pool.take_rows(run.first_row, hashes)
        if taken is None:
            self.tiers.drop(run)
            return
        table, lacking = taken
        held = [block_id for block_id in table if block_id != NO_BLOCK]
        try:
            if not held or self.pool.free_blocks < 0:  # too many blocks of windows to share now
                self.tiers.drop(run)
                return
            ticket = self.tiers.begin_write(run, lacking)
            if ticket is None:
                self.tiers.drop(run)
                return
            count, size = self.pool.groups.count, self.pool.block_size
            end = run.end_row * size
            sent = table[: (run.end_row - run.first_row) * count]
            rows = [held[0] if block_id == NO_BLOCK else block_id for block_id in sent]
            transfer = self.sender.begin_transfer(ticket, end, [NO_BLOCK] * (run.first_row * count) + rows, end)
            transfer.commit(None)
            await transfer.done()
        except TransferFailed as error:
            _log.info("KV was not sent to the tiers: %s", error)
        finally:
            self.pool.release(table)
