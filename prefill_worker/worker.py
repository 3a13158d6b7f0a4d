"""A prefill worker: computes prompts, draws the first token, and sends the KV on while it is still being computed.

A transfer may outlive the call that it belongs to. Until it has ended, the job's blocks stay as they are.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from twostroke.kvtransfer.ranks import Outgoing
from twostroke.model.step import OnLayer
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.policy import PrefillPolicy
from twostroke.protocol.errors import CallCancelled, TransferFailed
from twostroke.protocol.requests import GenerateRequest, PrefillReply, Ticket, about
from twostroke.protocol.stats import Role
from twostroke.worker.call_log import failed_alone, logged
from twostroke.worker.calls import WorkerCall, prompt_reply
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.preemption import Swapping
from twostroke.worker.scheduling.step import DrawnToken, ScheduledStep
from twostroke.worker.step_costs import StepCostFit
from twostroke.worker.worker import Worker, WorkerDeps

_log = logging.getLogger(__name__)

MOST_CHUNKS = 64
"""Chunks whose ends a reply has; people look at them, so further ones don't matter."""


@dataclass(eq=False, slots=True)
class PrefillCall(WorkerCall[PrefillReply]):
    """A `prefill` call that has not returned, or of which a transfer has not ended."""

    started_at: float = 0.0
    chunk_ends_s: list[float] = field(default_factory=list)
    outgoing: Outgoing | None = None
    is_aborted: bool = False  # its transfer has been given up here, on purpose

    @property
    def is_over(self) -> bool:
        """True once it has returned, and nothing sends its KV."""
        return self.job.has_ended and not self.job.is_sending

    def cancelled(self) -> None:
        self.fail(CallCancelled("the router cancelled the request"))


class PrefillWorker(Worker[PrefillCall]):
    """Runs one engine's prefill steps."""

    role: ClassVar[Role] = "prefill"

    def __init__(self, config: PrefillConfig, deps: WorkerDeps):
        super().__init__(
            config,
            deps,
            PrefillPolicy(config),
            StepCostFit(deps.expert_share),
            Swapping(None, "recompute", deps.pool.block_size),
            runs_ahead=config.run_ahead,
        )
        self._layers = deps.store.layout.layers_of(deps.store.rank)

    async def prefill(
        self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        """Compute the prompt and return its first token; with a ticket, send its KV on. Cancelling it aborts both.

        With `pull`, another worker was requested to send the KV of the prompt's prefix; what does not arrive in time,
        or not whole, is computed here. Returns before the KV has been sent on. A transfer that fails later is
        reported to the router (`KVNotSent`), which decides what happens. Raises RequestError (can't be served),
        TicketRefused or EpochMismatch (a ticket for another worker), WorkerLost (the worker is ending, its engine
        died, or the request's router is gone)."""
        return await logged("prefill", request, self._clock, self._prefill(request, ticket, pull))

    async def score_prompt(self, request: GenerateRequest) -> PrefillReply:
        """Score or embed a prompt whose KV no other worker needs. Raises what `prefill` does."""
        return await logged("score", request, self._clock, self._prefill(request, None, None))

    async def _prefill(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None) -> PrefillReply:
        self._check_new(request, pull)
        if ticket is not None:
            self._check_ticket(request, ticket, ticket.source)
        with self._declining(pull):
            job = self._scheduler.add(request, now=self._clock(), awaits_offer=pull is not None)
        call = PrefillCall(job, ticket)
        self._begin_call(call, pull)
        return await self._reply_to(call, call.reply)

    # --- a step ---

    async def step(self) -> bool:
        if not self._steps:
            await self._begin(self._scheduler.schedule())
        if await self._may_begin_ahead():
            await self._begin(self._scheduler.schedule(self._steps.last))
        if not self._steps:
            return False
        ended = await self._wait_for_step()
        self._learn(ended)
        self._counters.computed_tokens += ended.content.rows  # here, prompts of which a single token was left
        self._note_chunks(ended.step)
        self._end_failed(ended.step)
        self._reply(self._scheduler.complete(ended.step, ended.sampled))
        return True

    async def _begin(self, step: ScheduledStep) -> None:
        await self._begin_step(step, self._send_layers_of(step))

    def _note_chunks(self, step: ScheduledStep) -> None:
        now = self._clock()
        for entry in step.entries:
            if not entry.job.has_ended:
                call = self._call_of(entry.job)
                if len(call.chunk_ends_s) < MOST_CHUNKS:
                    call.chunk_ends_s.append(now - call.started_at)

    def _reply(self, drawn: Sequence[DrawnToken]) -> None:
        """Commit the transfers of prompts that are computed, and answer their calls."""
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
                reply = prompt_reply(one, queue_s=queue_s, prefill_s=prefill_s)
            except Exception as error:
                call.fail(failed_alone(call.request, error))
                continue
            call.answer(msgspec.structs.replace(reply, chunk_ends_s=tuple(call.chunk_ends_s[:-1])))

    # --- KV on its way to decode workers ---

    def _begin_transfer(self, call: PrefillCall) -> None:
        job = call.job
        call.started_at = self._clock()
        if job.is_receiving:
            self._pulls.begin_pull(job)
        if call.ticket is not None:
            sequence = job.sequence
            num_there = sequence.num_computed  # whole blocks, except for tokens that are still to be copied
            if sequence.awaits_copy:
                num_there -= num_there % sequence.block_size
            call.outgoing = self._deps.sender.begin_transfer(
                call.ticket, len(sequence.token_ids), sequence.block_ids, num_there
            )
            self._scheduler.begin_sending(job)
            self._transfers.track(self._await_send(call, call.outgoing), f"send {call.request.request_id}")

    def _send_layers_of(self, step: ScheduledStep) -> OnLayer:
        """Return the function that sends each layer of a step once the engine has computed it."""
        for entry in step.entries:
            if entry.job.sequence.groups.windowed and (outgoing := self._call_of(entry.job).outgoing) is not None:
                outgoing.windows_moved(entry.step.block_ids)

        def computed(layer: int) -> None:
            for entry in step.entries:
                if not entry.job.has_ended:
                    self._send_layer(entry.job, layer, entry.step.start + len(entry.step.token_ids))

        return computed

    def pulled(self, job: WorkerJob, num_tokens: int) -> None:
        self._counters.pulled_tokens += num_tokens
        for layer in self._layers:
            self._send_layer(job, layer, job.sequence.num_computed)

    def _send_layer(self, job: WorkerJob, layer: int, num_tokens: int) -> None:
        """Send a layer's KV of the job's first tokens, which is in its blocks."""
        outgoing = self._call_of(job).outgoing
        if outgoing is not None:
            outgoing.layer_ready(layer, num_tokens)

    async def _await_send(self, call: PrefillCall, transfer: Outgoing) -> None:
        """Wait for the end of a transfer, and release the job's blocks."""
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.warning("the KV was not sent: %s", error, extra=about(call.request.log_context))
            if not call.is_aborted:  # else no decode worker waits for it
                # Through its router, since the decode worker may not even know that it waits for KV.
                self._token_server.kv_not_sent(call.request.router_id, call.request.request_id)
        finally:
            self._scheduler.end_sending(call.job)
            self._forget(call)

    def _give_up_transfers(self, call: PrefillCall, reason: str) -> None:
        call.is_aborted = True
        if call.outgoing is not None:
            call.outgoing.abort(reason)
