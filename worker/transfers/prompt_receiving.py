"""KV of prompts that other workers compute, on its way here.

The other worker offers the KV. This one waits for the offer as long as the request lives: a long queue there is no
reason to compute the prompt twice, and where no KV comes, the router says so. An offer waits too, and its KV at the
other worker with it, while there is no room here.

A prompt whose KV does not arrive is computed here, unless the router starts another attempt. The router decides when,
because the prompt itself may have killed the other worker; without a decision within `router_wait_s` it is computed
here.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.kvtransfer.ranks import AwaitedOffers, Incoming, ReceivingSide
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import Ticket, about
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.scheduler import Scheduler
from twostroke.worker.scheduling.step import NewTokens
from twostroke.worker.transfers.pulls import Transfers

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PromptReceiver:
    """The prompts whose KV one worker receives."""

    receiver: ReceivingSide
    offers: AwaitedOffers
    scheduler: Scheduler
    transfers: Transfers
    router_wait_s: float
    clock: Clock
    admit_offered: Callable[[], None]
    emit: Callable[[NewTokens], None]  # a token that has come with the KV

    def await_offer(self, job: WorkerJob, ticket: Ticket) -> None:
        """Wait for the offer of a new request's KV; it may be here already."""
        self.offers.await_offer(ticket, on_offered=lambda: self._offered(job, ticket))

    def begin(self, job: WorkerJob, ticket: Ticket) -> None:
        """Receive the offered KV into the blocks of a job that was just admitted."""
        sequence = job.sequence
        job.incoming = self.receiver.expect_transfer(
            ticket, sequence.block_ids, len(sequence.token_ids), skip_tokens=sequence.num_computed
        )
        self.transfers.track(self._receive(job, job.incoming), f"receive {job.request.request_id}")

    def compute_prompt(self, job: WorkerJob) -> None:
        """Have the prompt computed here, now or when its transfer has ended."""
        job.computes_prompt = True
        self.give_up(job, "the prefill failed")  # `_receive` goes on from there
        self.scheduler.compute_here(job)
        self.transfers.wake()

    def give_up(self, job: WorkerJob, reason: str) -> None:
        """Give up the request's transfer. Its blocks may be written a little longer."""
        if job.incoming is not None:
            job.incoming.abort(reason)
        elif job.ticket is not None:
            self.offers.refuse_offer(job.ticket)  # or the other worker would keep its blocks for nothing
        if job.router_wait is not None:
            job.router_wait.cancel()

    def _offered(self, job: WorkerJob, ticket: Ticket) -> None:
        self.scheduler.offered(job)
        self.admit_offered()
        if job.incoming is None:
            self.receiver.keep_offer(ticket)  # until there is room, or the request ends

    async def _receive(self, job: WorkerJob, incoming: Incoming) -> None:
        """Wait for the end of a transfer. Until then its blocks stay the job's, whatever becomes of the job."""
        started_at = self.clock()
        try:
            first_token = await incoming.verified()
            if first_token is None:
                job.computes_prompt = True  # the source takes the transfer for a success
                raise TransferFailed("it has no first token, like a cached prefix")
        except TransferFailed as error:
            _log.warning("the KV was not received: %s", error, extra=about(job.request.log_context))
            self.scheduler.transfer_failed(job)
            if not (job.computes_prompt or job.has_ended):
                self.scheduler.wait_on(job)
                job.router_wait = asyncio.get_running_loop().call_later(self.router_wait_s, self.compute_prompt, job)
        else:
            job.transfer_s = self.clock() - started_at
            drawn = self.scheduler.verified(job, first_token)
            if drawn is not None:
                self.emit(drawn)
        finally:
            job.ready_at = self.clock()
