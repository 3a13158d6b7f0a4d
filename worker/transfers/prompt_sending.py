"""KV of prompts on its way to the workers that go on with them: sent layer by layer while it is still being computed.

A transfer may outlive the call that it belongs to. Until it has ended, the job's blocks stay as they are.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.kvtransfer.ranks import Outgoing, SendingSide
from twostroke.model.step import OnLayer
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import about
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.scheduler import Scheduler
from twostroke.worker.scheduling.step import ScheduledStep
from twostroke.worker.token_server import TokenServer
from twostroke.worker.transfers.pulls import Transfers

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PromptSender:
    """The prompts whose KV one worker sends on."""

    sender: SendingSide
    scheduler: Scheduler
    transfers: Transfers
    token_server: TokenServer
    layers: range  # of the rank that talks to routers
    forget: Callable[[WorkerJob], None]  # a request of which a part has ended

    def begin(self, job: WorkerJob) -> None:
        """Begin the transfer of an admitted prompt whose KV is wanted elsewhere."""
        if job.ticket is None:
            return
        sequence = job.sequence
        num_there = sequence.num_computed  # whole blocks, except for tokens that are still to be copied
        if sequence.awaits_copy:
            num_there -= num_there % sequence.block_size
        job.outgoing = self.sender.begin_transfer(job.ticket, len(sequence.token_ids), sequence.block_ids, num_there)
        self.scheduler.begin_sending(job)
        self.transfers.track(self._await_end(job, job.outgoing), f"send {job.request.request_id}")

    def layers_of(self, step: ScheduledStep) -> OnLayer | None:
        """Return the function that sends each layer of a step once the engine has computed it; None: none is sent."""
        sending = [(entry, outgoing) for entry in step.entries if (outgoing := entry.job.outgoing) is not None]
        if not sending:
            return None
        for entry, outgoing in sending:
            if entry.job.sequence.groups.windowed:
                outgoing.windows_moved(entry.step.block_ids)

        def computed(layer: int) -> None:
            for entry, outgoing in sending:
                if not entry.job.has_ended:
                    outgoing.layer_ready(layer, entry.step.start + len(entry.step.token_ids))

        return computed

    def pulled(self, job: WorkerJob) -> None:
        """Send the KV of a prefix that was pulled from elsewhere."""
        if job.outgoing is not None:
            for layer in self.layers:
                job.outgoing.layer_ready(layer, job.sequence.num_computed)

    async def _await_end(self, job: WorkerJob, transfer: Outgoing) -> None:
        """Wait for the end of a transfer, and release the job's blocks."""
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.warning("the KV was not sent: %s", error, extra=about(job.request.log_context))
            if not job.is_aborted:  # else no worker waits for it
                # Through its router, since the other worker may not even know that it waits for KV.
                self.token_server.kv_not_sent(job.request.router_id, job.request.request_id)
        finally:
            job.outgoing = None
            self.scheduler.end_sending(job)
            self.forget(job)
