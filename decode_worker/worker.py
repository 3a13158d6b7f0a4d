"""A decode worker: takes requests whose KV arrives, or computes it here, and writes their answers token by token.

The KV of a prompt comes from a prefill worker, which offers it. An offer is waited for as long as the request lives,
for its router watches over the prefill worker: a long queue there is no reason to compute the prompt twice, and where
no KV comes, the router says so. An offer in turn waits, and its KV at the prefill worker with it, as long as there is
no room here.

What does not come is computed here, and is nobody's error. But not before the router says so, who may know better: what
the prefill worker died of may be this very prompt.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec.structs import replace

from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.jobs import DecodeJob
from twostroke.decode_worker.preemption import HostBlocks, Swapping
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.decode_worker.step_budget import StepBudget
from twostroke.kvtransfer.sides import Incoming
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
from twostroke.worker.life import EndedStep
from twostroke.worker.scheduler import DrawnToken, ScheduledStep
from twostroke.worker.sequence import Phase
from twostroke.worker.step_costs import StepCostFit
from twostroke.worker.worker import Worker, WorkerCall, WorkerDeps, read_prompt

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DecodeCall(WorkerCall[DecodeJob, DecodeReply]):
    """A `decode` call that has not returned."""

    ready_at: float = 0.0  # when it could first have been stepped: its arrival, or when its KV was there
    stepped_at: float | None = None
    transfer_s: float = 0.0
    incoming: Incoming | None = None
    is_on_its_own: bool = False  # its prompt may be computed here
    patience: asyncio.TimerHandle | None = None  # its transfer has failed; for how long it waits for the router's word

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
    """A `read` call that has not returned: nothing of it goes out on the token channel."""

    read: "asyncio.Future[PrefillReply]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def answer_read(self, drawn: DrawnToken[DecodeJob], now: float) -> None:
        """Its prompt is computed."""
        stepped_at = now if self.stepped_at is None else self.stepped_at
        try:
            reply = read_prompt(drawn, queue_s=stepped_at - self.ready_at, prefill_s=now - stepped_at)
        except Exception as error:
            self.fail(failed_alone(self.request, error))
            return
        if not self.read.done():
            self.read.set_result(reply)

    def cancelled(self) -> None:
        self.fail(CallCancelled("the router cancelled the request"))

    def fail(self, error: TwostrokeError) -> None:
        if not self.read.done():
            self.read.set_exception(error)


class DecodeWorker(Worker[DecodeJob, DecodeCall]):
    """Runs one engine's steps. `swap_space` is the engine's; None where preempted requests' KV is not kept."""

    role: ClassVar[Role] = "decode"
    _scheduler: DecodeScheduler

    def __init__(self, config: DecodeConfig, equipment: WorkerDeps, swap_space: HostBlocks | None = None):
        costs = StepCostFit(equipment.expert_share)
        self._router_wait_s = config.router_wait_s
        self._swap_space = swap_space
        self._swapping = Swapping(swap_space, config.preemption, equipment.pool.block_size)
        budget = StepBudget(config, costs.costs)
        scheduler = DecodeScheduler(equipment.pool, config, equipment.max_context, budget, self._swapping)
        super().__init__(
            config, equipment, scheduler, costs, host_pool=self._swapping.pool, runs_ahead=config.run_ahead
        )

    async def decode(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None) -> DecodeReply:
        """Continue the request to its end; its tokens go out on its router's token channel. Cancelling it aborts.

        With a ticket the prompt's KV is expected from the prefill worker; should it not come, and without a ticket,
        the prompt is computed here. With `pull`, which comes only without a ticket, another worker has been asked to
        send the KV of the prompt's beginning; what does not come in time, or not whole, is computed here.

        A request that its router cancels returns without a finish reason. Raises RequestError (can't be served as
        asked), TicketRefused or EpochMismatch (a ticket for somebody else), WorkerLost (the worker is ending, its
        engine died, or there is no token channel to the router any more).
        """
        return await logged("decode", request, self._clock, self._decode(request, ticket, pull))

    async def read(self, request: GenerateRequest) -> PrefillReply:
        """Do what PrefillWorker.read does. Raises what it raises."""
        return await logged("read", request, self._clock, self._read(request))

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
        return await self._answered(call, call.reply, pull)

    async def _read(self, request: GenerateRequest) -> PrefillReply:
        self._check_new(request, None)
        now = self._clock()
        call = ScoreCall(self._scheduler.add(request, now=now, wants_transfer=False), None, ready_at=now)
        return await self._answered(call, call.read, None)

    def stats(self) -> WorkerStats:
        stats, space, host_pool = super().stats(), self._swap_space, self._swapping.pool
        if space is None or host_pool is None:
            return stats
        return replace(
            stats,
            swaps=self._scheduler.swaps,
            swap_bytes=space.num_bytes,
            swap_seconds=space.seconds,
            swapped_blocks=host_pool.owned_blocks,
        )

    def _decide(self) -> ScheduledStep[DecodeJob]:
        step = self._scheduler.schedule(self._under_way.last)
        now = self._clock()
        for entry in step.entries:
            call = self._call_of(entry.job)
            if call.stepped_at is None:
                call.stepped_at = now
        return step

    def _learn(self, ended: EndedStep[ScheduledStep[DecodeJob]]) -> None:
        super()._learn(ended)
        prompts_s = ended.seconds * ended.content.prompts_part(self._costs.costs())
        self._swapping.step_ended(ended.content.prompt_tokens, prompts_s)

    def _post_process(self, drawn: Sequence[DrawnToken[DecodeJob]]) -> None:
        """Send one frame to each router whose requests got on, and answer the calls that are finished."""
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
                    call.answer_read(one, self._clock())
                else:
                    call.finish(one.finish_reason)
        for router_id, of_router in events.items():
            self._token_server.emit(router_id, of_router)

    def _fail_all(self, reason: str) -> None:
        for call in self._calls.values():
            if isinstance(call, ScoreCall):
                continue
            request, index = call.request, call.job.sequence.num_output_tokens
            self._token_server.emit(request.router_id, (TokenEvent(request.request_id, index, (), error=reason),))
        super()._fail_all(reason)

    # --- KV that comes ---

    def _expect(self, call: DecodeCall, pull: Ticket | None) -> None:
        super()._expect(call, pull)
        if call.ticket is not None:
            self._offers.wait(call.ticket, came=lambda: self._offered(call))

    def _offered(self, call: DecodeCall) -> None:
        self._scheduler.offered(call.job)
        self._admit_offered()
        if call.ticket is not None and call.incoming is None:
            self._receiver.keep(call.ticket)  # until there is room, or nobody wants it
        self._life.wake()

    def _has_blocks(self, call: DecodeCall) -> None:
        job, sequence = call.job, call.job.sequence
        if not job.is_receiving:
            return
        if call.ticket is None:
            call.ready_at = self._clock()
            self._pulls.begin(job)
            return
        call.incoming = self._receiver.expect(
            call.ticket, sequence.block_ids, len(sequence.token_ids), skip_tokens=sequence.num_computed
        )
        self._transfers.see(self._receive(call, call.incoming), f"receive {call.request.request_id}")

    async def _receive(self, call: DecodeCall, incoming: Incoming) -> None:
        """See a transfer to its end: until then its blocks stay the job's, whatever becomes of the job."""
        started_at = self._clock()
        try:
            first_token = await incoming.verified()
            if first_token is None:
                call.is_on_its_own = True  # the other side believes that all is well
                raise TransferFailed("it came without a first token, as a cached prefix does")
        except TransferFailed as error:
            _log.warning("the KV did not come: %s", error, extra=about(call.request.log_context))
            self._scheduler.transfer_failed(call.job)
            if not (call.is_on_its_own or call.job.has_ended):
                self._scheduler.wait_on(call.job)
                call.patience = asyncio.get_running_loop().call_later(self._router_wait_s, self._do_without, call)
        else:
            call.transfer_s = self._clock() - started_at
            drawn = self._scheduler.verified(call.job, first_token)
            if drawn is not None:
                self._post_process([drawn])
        finally:
            call.ready_at = self._clock()

    def _pulled(self, job: DecodeJob, num_tokens: int) -> None:
        self._counters.pulled_tokens += num_tokens
        call = self._call_of(job)
        call.transfer_s = self._clock() - call.ready_at
        call.ready_at += call.transfer_s

    def _prefill_failed(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:  # the router says it again until it hears of the request
            self._do_without(call)

    def _do_without(self, call: DecodeCall) -> None:
        """Have the prompt computed here, now or when its transfer has ended."""
        call.is_on_its_own = True
        self._give_up_transfers(call, "the prefill failed")  # `_receive` goes on from there
        self._scheduler.compute_here(call.job)
        self._life.wake()

    def _give_up_transfers(self, call: DecodeCall, reason: str) -> None:
        if call.incoming is not None:
            call.incoming.abort(reason)
        elif call.ticket is not None:
            self._offers.refuse(call.ticket)  # or the prefill worker would keep its blocks for nobody
        if call.patience is not None:
            call.patience.cancel()
