"""A decode worker: takes requests whose KV arrives, or computes it here, and generates their answers token by token.

A prompt's KV comes from a prefill worker, which offers it. The decode worker waits for the offer as long as the request
lives: a long queue at the prefill worker is no reason to compute the prompt twice, and where no KV comes, the router
says so. An offer waits too, and its KV at the prefill worker with it, while there is no room here.

A prompt whose KV does not arrive is computed here, unless the router starts another attempt. The router decides when,
because the prompt itself may have killed the prefill worker; without a decision within `router_wait_s` it is computed
here.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec.structs import replace

from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import DecodePolicy, StepBudget
from twostroke.kvtransfer.ranks import Incoming
from twostroke.protocol.errors import CallCancelled, TicketRefused, TransferFailed, TwostrokeError, WorkerLost
from twostroke.protocol.requests import (
    DecodeReply,
    FinishReason,
    GenerateRequest,
    PrefillReply,
    Ticket,
    TokenEvent,
    about,
)
from twostroke.protocol.stats import Role, WorkerStats
from twostroke.worker.call_log import failed_alone, logged
from twostroke.worker.calls import WorkerCall, prompt_reply
from twostroke.worker.scheduling.job import Phase, WorkerJob
from twostroke.worker.scheduling.preemption import HostBlocks, Swapping
from twostroke.worker.scheduling.step import DrawnToken, ScheduledStep
from twostroke.worker.step_costs import StepCostFit
from twostroke.worker.worker import Worker, WorkerDeps

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DecodeCall(WorkerCall[DecodeReply]):
    """A `decode` call that has not returned."""

    ready_at: float = 0.0  # when it could first have been stepped: its arrival, or the arrival of its KV
    stepped_at: float | None = None
    transfer_s: float = 0.0
    incoming: Incoming | None = None
    computes_prompt: bool = False  # its prompt may be computed here
    router_wait: asyncio.TimerHandle | None = None  # its transfer has failed; runs until its router must have answered

    @property
    def has_begun(self) -> bool:
        return self.stepped_at is not None or self.job.is_offered or self.job.phase is not Phase.WAITING

    def finish(self, reason: FinishReason | None) -> None:
        """Return from the call, unless its awaiter is gone."""
        stepped_at = self.ready_at if self.stepped_at is None else self.stepped_at
        self.answer(
            DecodeReply(
                num_output_tokens=self.job.sequence.num_output_tokens,
                finish_reason=reason,
                num_cached_tokens=self.job.num_cached_tokens,
                transfer_s=self.transfer_s,
                queue_s=max(0.0, stepped_at - self.ready_at),
                num_preemptions=self.job.num_preemptions,
            )
        )

    def cancelled(self) -> None:
        self.finish(None)


@dataclass(eq=False, slots=True)
class ScoreCall(DecodeCall):
    """A `score_prompt` call that has not returned: no event of it goes out on the token channel."""

    scored: "asyncio.Future[PrefillReply]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def finish_scoring(self, drawn: DrawnToken, now: float) -> None:
        """Return from the call, whose prompt is computed."""
        stepped_at = now if self.stepped_at is None else self.stepped_at
        try:
            reply = prompt_reply(drawn, queue_s=stepped_at - self.ready_at, prefill_s=now - stepped_at)
        except Exception as error:
            self.fail(failed_alone(self.request, error))
            return
        if not self.scored.done():
            self.scored.set_result(reply)

    def cancelled(self) -> None:
        self.fail(CallCancelled("the router cancelled the request"))

    def fail(self, error: TwostrokeError) -> None:
        if not self.scored.done():
            self.scored.set_exception(error)


class DecodeWorker(Worker[DecodeCall]):
    """Decodes requests, and computes prompts that no prefill worker computes.

    `swap_space` is the engine's; None where preempted requests' KV is not kept."""

    role: ClassVar[Role] = "decode"

    def __init__(self, config: DecodeConfig, deps: WorkerDeps, swap_space: HostBlocks | None = None):
        costs = StepCostFit(deps.expert_share)
        self._router_wait_s = config.router_wait_s
        self._swap_space = swap_space
        self._swapping = Swapping(swap_space, config.preemption, deps.pool.block_size)
        policy = DecodePolicy(StepBudget(config, costs.costs), deps.pool)
        super().__init__(config, deps, policy, costs, self._swapping, runs_ahead=config.run_ahead)

    async def decode(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None) -> DecodeReply:
        """Continue the request to its end; its tokens go out on its router's token channel. Cancelling it aborts.

        With a ticket the prompt's KV is expected from the prefill worker; should it not arrive, and without a ticket,
        the prompt is computed here. With `pull`, which comes only without a ticket, another worker was requested to
        send the KV of the prompt's prefix; what does not arrive in time, or not whole, is computed here.

        A request that its router cancels returns without a finish reason. Raises RequestError (can't be served),
        TicketRefused or EpochMismatch (a ticket for another worker), WorkerLost (the worker is ending, its engine died,
        or there is no token channel to the router any more).
        """
        return await logged("decode", request, self._clock, self._decode(request, ticket, pull))

    async def score_prompt(self, request: GenerateRequest) -> PrefillReply:
        """Score or embed a prompt. Raises RequestError (can't be served) or WorkerLost (the worker is ending)."""
        return await logged("score", request, self._clock, self._score_prompt(request))

    async def _decode(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None) -> DecodeReply:
        if ticket is not None and pull is not None:
            raise TicketRefused(f"the KV of request {request.request_id} can't come from two workers")
        self._check_new(request, pull)
        if not self._token_server.is_connected(request.router_id):
            raise WorkerLost(f"router {request.router_id} has no token channel to worker {self._peer.worker_id}")
        if ticket is not None and ticket.request_id != request.request_id:
            raise TicketRefused(f"the ticket is for request {ticket.request_id}")
        now = self._clock()
        with self._declining(pull):
            job = self._scheduler.add(
                request, now=now, wants_transfer=ticket is not None, awaits_offer=pull is not None
            )
        call = DecodeCall(job, ticket, ready_at=now)
        self._begin_call(call, pull)
        if ticket is not None:
            self._await_offer(call, ticket)
        return await self._reply_to(call, call.reply)

    async def _score_prompt(self, request: GenerateRequest) -> PrefillReply:
        self._check_new(request, None)
        now = self._clock()
        call = ScoreCall(self._scheduler.add(request, now=now), None, ready_at=now)
        self._begin_call(call)
        return await self._reply_to(call, call.scored)

    def stats(self) -> WorkerStats:
        stats, space, host_pool = super().stats(), self._swap_space, self._swapping.pool
        if space is None or host_pool is None:
            return stats
        return replace(
            stats,
            swaps=self._swapping.num_swaps,
            swap_bytes=space.num_bytes,
            swap_seconds=space.seconds,
            swapped_blocks=host_pool.owned_blocks,
        )

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
        prompts_s = ended.seconds * ended.content.prompts_part(self._costs.costs())
        self._swapping.step_ended(ended.content.prompt_tokens, prompts_s)
        self._end_failed(ended.step)
        self._emit(self._scheduler.complete(ended.step, ended.sampled))
        return True

    async def _begin(self, step: ScheduledStep) -> None:
        now = self._clock()
        for entry in step.entries:
            call = self._call_of(entry.job)
            if call.stepped_at is None:
                call.stepped_at = now
        await self._begin_step(step)

    def _emit(self, drawn: Sequence[DrawnToken]) -> None:
        """Send one frame to each router whose requests have new tokens, and answer the calls that are finished."""
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        for one in drawn:
            call = self._call_of(one.job) if one.finish_reason is not None else None
            if not isinstance(call, ScoreCall):
                events[one.job.request.router_id].append(one.event)
            self._counters.generated_tokens += 1
            if call is not None and one.finish_reason is not None:
                self._counters.finished_requests += 1
                self._forget(call)
                if isinstance(call, ScoreCall):
                    call.finish_scoring(one, self._clock())
                else:
                    call.finish(one.finish_reason)
        for router_id, of_router in events.items():
            self._token_server.emit(router_id, of_router)

    def fail_all(self, reason: str) -> None:
        for call in self._calls.values():
            if isinstance(call, ScoreCall):
                continue
            request, index = call.request, call.job.sequence.num_output_tokens
            self._token_server.emit(request.router_id, (TokenEvent(request.request_id, index, (), error=reason),))
        super().fail_all(reason)

    # --- KV from prefill workers ---

    def _await_offer(self, call: DecodeCall, ticket: Ticket) -> None:
        self._offers.await_offer(ticket, on_offered=lambda: self._offered(call))

    def _offered(self, call: DecodeCall) -> None:
        self._scheduler.offered(call.job)
        self.admit_offered()
        if call.ticket is not None and call.incoming is None:
            self._deps.receiver.keep_offer(call.ticket)  # until there is room, or the request ends

    def _begin_transfer(self, call: DecodeCall) -> None:
        job, sequence = call.job, call.job.sequence
        if not job.is_receiving:
            return
        if call.ticket is None:
            call.ready_at = self._clock()
            self._pulls.begin_pull(job)
            return
        call.incoming = self._deps.receiver.expect_transfer(
            call.ticket, sequence.block_ids, len(sequence.token_ids), skip_tokens=sequence.num_computed
        )
        self._transfers.track(self._receive(call, call.incoming), f"receive {call.request.request_id}")

    async def _receive(self, call: DecodeCall, incoming: Incoming) -> None:
        """Wait for the end of a transfer. Until then its blocks stay the job's, whatever becomes of the job."""
        started_at = self._clock()
        try:
            first_token = await incoming.verified()
            if first_token is None:
                call.computes_prompt = True  # the source takes the transfer for a success
                raise TransferFailed("it has no first token, like a cached prefix")
        except TransferFailed as error:
            _log.warning("the KV was not received: %s", error, extra=about(call.request.log_context))
            self._scheduler.transfer_failed(call.job)
            if not (call.computes_prompt or call.job.has_ended):
                self._scheduler.wait_on(call.job)
                call.router_wait = asyncio.get_running_loop().call_later(
                    self._router_wait_s, self._compute_prompt, call
                )
        else:
            call.transfer_s = self._clock() - started_at
            drawn = self._scheduler.verified(call.job, first_token)
            if drawn is not None:
                self._emit([drawn])
        finally:
            call.ready_at = self._clock()

    def pulled(self, job: WorkerJob, num_tokens: int) -> None:
        self._counters.pulled_tokens += num_tokens
        call = self._call_of(job)
        call.transfer_s = self._clock() - call.ready_at
        call.ready_at += call.transfer_s

    def prefill_failed(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:  # the router repeats it until it hears of the request
            self._compute_prompt(call)

    def _compute_prompt(self, call: DecodeCall) -> None:
        """Have the prompt computed here, now or when its transfer has ended."""
        call.computes_prompt = True
        self._give_up_transfers(call, "the prefill failed")  # `_receive` goes on from there
        self._scheduler.compute_here(call.job)
        self.wake()

    def _give_up_transfers(self, call: DecodeCall, reason: str) -> None:
        if call.incoming is not None:
            call.incoming.abort(reason)
        elif call.ticket is not None:
            self._offers.refuse_offer(call.ticket)  # or the prefill worker would keep its blocks for nothing
        if call.router_wait is not None:
            call.router_wait.cancel()
