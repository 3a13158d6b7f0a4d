"""A prefill worker: reads prompts, draws the first token, and sends the KV on while it is still being computed.

A transfer may outlive the call that it belongs to. Until it has ended the job's blocks stay as they are.
"""

import logging
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from twostroke.kvtransfer.sides import Outgoing
from twostroke.model.step import OnLayer
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.scheduler import PrefillJob, PrefillScheduler
from twostroke.protocol.errors import CallCancelled, TransferFailed
from twostroke.protocol.requests import GenerateRequest, PrefillReply, Ticket, about
from twostroke.protocol.stats import Role
from twostroke.worker.call_log import failed_alone, logged
from twostroke.worker.life import EndedStep
from twostroke.worker.scheduler import DrawnToken, ScheduledStep
from twostroke.worker.step_costs import StepCostFit
from twostroke.worker.worker import Worker, WorkerCall, WorkerDeps, read_prompt

_log = logging.getLogger(__name__)

MOST_CHUNKS = 64
"""A reply tells when so many have ended; for people to look at, so the others don't matter."""


@dataclass(eq=False, slots=True)
class PrefillCall(WorkerCall[PrefillJob, PrefillReply]):
    """A `prefill` call that has not returned, or of which a transfer has not ended."""

    started_at: float = 0.0
    chunk_ends_s: list[float] = field(default_factory=list)
    outgoing: Outgoing | None = None
    is_aborted: bool = False  # its transfer has been given up here, on purpose

    @property
    def is_over(self) -> bool:
        """Whether it has returned, and nothing sends its KV."""
        return self.job.has_ended and not self.job.is_sending

    def cancelled(self) -> None:
        self.fail(CallCancelled("the router cancelled the request"))


class PrefillWorker(Worker[PrefillJob, PrefillCall]):
    """Runs one engine's prefill steps."""

    role: ClassVar[Role] = "prefill"
    _scheduler: PrefillScheduler

    def __init__(self, config: PrefillConfig, equipment: WorkerDeps):
        scheduler = PrefillScheduler(equipment.pool, config, equipment.max_context)
        super().__init__(config, equipment, scheduler, StepCostFit(equipment.expert_share), runs_ahead=config.run_ahead)
        self._layers = equipment.store.layout.layers_of(equipment.store.rank)

    async def prefill(
        self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        """Compute the prompt and return its first token; with a ticket, send its KV on. Cancelling it aborts both.

        With `pull`, another worker has been asked to send the KV of the prompt's beginning; what does not come in time,
        or not whole, is computed here. Returns before the KV has been sent on: a transfer that fails is the decode
        worker's to mend. Raises RequestError (can't be served as asked), TicketRefused or EpochMismatch (a ticket for
        somebody else), WorkerLost (the worker is ending, its engine died, or the request's router is gone).
        """
        return await logged("prefill", request, self._clock, self._prefill(request, ticket, pull))

    async def read(self, request: GenerateRequest) -> PrefillReply:
        """Compute a prompt that something is read off, and whose KV nobody else needs. Raises what `prefill` does."""
        return await logged("read", request, self._clock, self._prefill(request, None, None))

    async def _prefill(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None) -> PrefillReply:
        self._check_new(request, pull)
        if ticket is not None:
            self._check_ticket(request, ticket, ticket.source)
        with self._declining(pull):
            job = self._scheduler.add(request, now=self._clock(), awaits_offer=pull is not None)
        call = PrefillCall(job, ticket)
        return await self._answered(call, call.reply, pull)

    def _decide(self) -> ScheduledStep[PrefillJob]:
        return self._scheduler.schedule()

    def _learn(self, ended: EndedStep[ScheduledStep[PrefillJob]]) -> None:
        super()._learn(ended)
        self._counters.computed_tokens += ended.content.rows  # here, prompts of which a single token was left
        now = self._clock()
        for entry in ended.step.entries:
            if not entry.job.has_ended:
                call = self._call_of(entry.job)
                if len(call.chunk_ends_s) < MOST_CHUNKS:
                    call.chunk_ends_s.append(now - call.started_at)

    def _post_process(self, drawn: list[DrawnToken[PrefillJob]]) -> None:
        now = self._clock()
        for one in drawn:
            call = self._call_of(one.job)
            if call.outgoing is not None:
                call.outgoing.commit(one.token)
            self._counters.generated_tokens += 1
            self._counters.finished_requests += 1
            self._forget(call)
            queue_s, prefill_s = call.started_at - one.job.arrived_at, now - call.started_at
            try:
                reply = read_prompt(one, queue_s=queue_s, prefill_s=prefill_s)
            except Exception as error:
                call.fail(failed_alone(call.request, error))
                continue
            call.answer(msgspec.structs.replace(reply, chunk_ends_s=tuple(call.chunk_ends_s[:-1])))

    # --- KV on its way to decode workers ---

    def _has_blocks(self, call: PrefillCall) -> None:
        job = call.job
        call.started_at = self._clock()
        if job.is_receiving:
            self._pulls.begin(job)
        if call.ticket is not None:
            sequence = job.sequence
            num_there = sequence.num_computed  # whole blocks, but for tokens that are still to be copied
            if sequence.awaits_copy:
                num_there -= num_there % sequence.block_size
            call.outgoing = self._sender.open(call.ticket, len(sequence.token_ids), sequence.block_ids, num_there)
            self._scheduler.begin_sending(job)
            self._transfers.see(self._see_off(call, call.outgoing), f"send {call.request.request_id}")

    def _on_layer(self, step: ScheduledStep[PrefillJob]) -> OnLayer:
        for entry in step.entries:
            if entry.job.sequence.groups.windowed and (outgoing := self._call_of(entry.job).outgoing) is not None:
                outgoing.windows_moved(entry.step.block_ids)

        def computed(layer: int) -> None:
            for entry in step.entries:
                if not entry.job.has_ended:
                    self._layer_is_there(entry.job, layer, entry.step.start + len(entry.step.token_ids))

        return computed

    def _pulled(self, job: PrefillJob, num_tokens: int) -> None:
        self._counters.pulled_tokens += num_tokens
        for layer in self._layers:
            self._layer_is_there(job, layer, job.sequence.num_computed)

    def _layer_is_there(self, job: PrefillJob, layer: int, num_tokens: int) -> None:
        """A layer's KV of the job's first tokens is in its blocks."""
        outgoing = self._call_of(job).outgoing
        if outgoing is not None:
            outgoing.layer_ready(layer, num_tokens)

    async def _see_off(self, call: PrefillCall, transfer: Outgoing) -> None:
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.warning("the KV was not sent: %s", error, extra=about(call.request.log_context))
            if not call.is_aborted:  # else nobody waits for it
                # The router is told: the decode worker may not know even that there was something to wait for.
                self._token_server.kv_not_sent(call.request.router_id, call.request.request_id)
        finally:
            self._scheduler.end_sending(call.job)
            self._forget(call)

    def _give_up_transfers(self, call: PrefillCall, reason: str) -> None:
        call.is_aborted = True
        if call.outgoing is not None:
            call.outgoing.abort(reason)
