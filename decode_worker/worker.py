"""A decode worker: takes requests whose KV arrives, or computes it here, and writes their answers token by token."""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.handovers import DecodeCall, Handovers
from twostroke.decode_worker.jobs import DecodeJob
from twostroke.decode_worker.preemption import Swapping
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.decode_worker.step_budget import StepBudget
from twostroke.protocol.errors import TicketRefused, WorkerLost
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Ticket, TokenEvent
from twostroke.protocol.stats import Role
from twostroke.worker.life import EndedStep
from twostroke.worker.numbers import HostBlocks, SwapNumbers, WorkerCounters
from twostroke.worker.scheduler import DrawnToken, ScheduledStep
from twostroke.worker.step_costs import StepContent
from twostroke.worker.worker import Equipment, Worker


class DecodeWorker(Worker[DecodeJob, DecodeCall]):
    """Runs one engine's steps. `swap_space` is the engine's; None where preempted requests' KV is not kept."""

    role: ClassVar[Role] = "decode"
    _scheduler: DecodeScheduler

    def __init__(self, config: DecodeConfig, equipment: Equipment, swap_space: HostBlocks | None = None):
        counters = WorkerCounters()
        self._swapping = Swapping(swap_space, config.preemption, equipment.pool.block_size)
        scheduler = DecodeScheduler(
            equipment.pool,
            budget=StepBudget.of(config, counters.costs.costs),
            max_batch=config.max_batch,
            watermark_blocks=int(config.watermark * equipment.pool.num_blocks),
            max_context=equipment.max_context,
            max_waiting=config.max_waiting,
            swapping=self._swapping,
            min_pull_tokens=config.min_pull_tokens,
            queue=config.queue,
        )
        super().__init__(
            config, equipment, scheduler, counters, host_pool=self._swapping.pool, runs_ahead=config.run_ahead
        )
        self._handovers = Handovers(
            receiver=self._receiver,
            offers=self._offers,
            transfers=self._transfers,
            scheduler=scheduler,
            clock=self._clock,
            router_wait_s=config.router_wait_s,
            admit=self._admit_offered,
            got_on=lambda drawn: self._post_process([drawn]),
            wake=self._life.wake,
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

    def _expect(self, call: DecodeCall, pull: Ticket | None) -> None:
        super()._expect(call, pull)
        self._handovers.expect(call)

    def _decide(self) -> ScheduledStep[DecodeJob]:
        step = self._scheduler.schedule(self._under_way.last)
        now = self._clock()
        for entry in step.entries:
            call = self._call_of(entry.job)
            if call.stepped_at is None:
                call.stepped_at = now
        return step

    def _learn(self, ended: EndedStep[ScheduledStep[DecodeJob]], content: StepContent) -> None:
        super()._learn(ended, content)
        prompts_s = ended.seconds * content.prompts_part(self._counters.costs.costs())
        self._swapping.step_ended(content.prompt_tokens, prompts_s)

    def _post_process(self, drawn: Sequence[DrawnToken[DecodeJob]]) -> None:
        """Send one frame to each router whose requests got on, and answer the calls that are finished."""
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        for one in drawn:
            events[one.job.request.router_id].append(one.event)
            self._counters.generated_tokens += 1
            if one.finish_reason is not None:
                call = self._call_of(one.job)
                self._counters.finished_requests += 1
                self._forget(call)
                call.finish(one.finish_reason)
        for router_id, of_router in events.items():
            self._token_server.emit(router_id, of_router)

    def _has_blocks(self, call: DecodeCall) -> None:
        if not call.job.is_receiving:
            return
        if call.job.wants_transfer:
            self._handovers.begin(call)
        else:
            call.ready_at = self._clock()
            self._pulls.begin(call.job)

    def _pulled(self, job: DecodeJob, num_tokens: int) -> None:
        self._counters.pulled_tokens += num_tokens
        call = self._call_of(job)
        call.transfer_s = self._clock() - call.ready_at
        call.ready_at += call.transfer_s

    def _give_up_transfers(self, call: DecodeCall, reason: str) -> None:
        self._handovers.forget(call, reason)

    def _prefill_failed(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:  # the router says it again until it hears of the request
            self._handovers.do_without(call)

    def _fail_all(self, reason: str) -> None:
        for call in self._calls.values():
            request, index = call.request, call.job.sequence.num_output_tokens
            self._token_server.emit(request.router_id, (TokenEvent(request.request_id, index, (), error=reason),))
        super()._fail_all(reason)

    def _swap_numbers(self) -> SwapNumbers:
        return self._swapping.numbers(self._scheduler.swaps)
