"""A decode worker: takes requests whose KV arrives, or computes it here, and writes their answers token by token.

Knows no Ray. `cluster/` wraps it into a deployment; tests/simulation runs it on virtual time.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from twostroke.decode_worker.calls import Call, Calls
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.jobs import DecodeStep, Progress
from twostroke.decode_worker.preemption import Swapping
from twostroke.decode_worker.scheduler import DecodeScheduler, EndedStep, StepsUnderWay
from twostroke.decode_worker.step_budget import StepBudget
from twostroke.decode_worker.transfers import TransferCallbacks, Transfers
from twostroke.kvtransfer.sides import ReceivingSide, SendingSide
from twostroke.kvtransfer.store import KVStore
from twostroke.model.step import Engine
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import (
    EpochMismatch,
    RequestError,
    TicketRefused,
    TwostrokeError,
    WorkerLeaving,
    WorkerLost,
)
from twostroke.protocol.network import Network
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, Ticket, TokenEvent
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.life import WorkerCallbacks, WorkerLife
from twostroke.worker.numbers import HostBlocks, WorkerCounters, worker_stats
from twostroke.worker.step_costs import StepContent
from twostroke.worker.token_server import TokenServer, TokenServerCallbacks
from twostroke.worker.trials import LinkProbe

_log = logging.getLogger(__name__)


class DecodeWorker:
    """Runs one engine's steps. `receiver` is None where no KV ever comes: every prompt is computed here.

    `sender` is None where no cached prefix is sent to others. `max_context` is the model's, in tokens. `swap_space` is
    the engine's; None where preempted requests' KV is not kept. Pool, store and engine belong to this worker alone
    while it runs; `start` starts the receiver, `stop` closes receiver and sender and leaves the others to their maker.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        config: DecodeConfig,
        engine: Engine,
        store: KVStore,
        pool: BlockPool,
        network: Network,
        receiver: ReceivingSide | None,
        sender: SendingSide | None,
        clock: Clock,
        max_context: int,
        swap_space: HostBlocks | None = None,
    ):
        self._peer = peer
        self._config = config
        self._engine = engine
        self._store = store
        self._pool = pool
        self._receiver = receiver
        self._sender = sender
        self._clock = clock
        self._max_context = max_context
        self._swapping = Swapping(swap_space, config.preemption, pool.block_size)
        self._counters = WorkerCounters()
        self._scheduler = DecodeScheduler(
            pool,
            budget=StepBudget(
                max_step_tokens=config.max_step_tokens,
                costs=self._counters.costs.costs,
                tpot_safety=config.tpot_safety,
                stall_factor=config.stall_factor,
                min_chunk_tokens=config.min_chunk_tokens,
            ),
            max_batch=config.max_batch,
            watermark_blocks=int(config.watermark * pool.num_blocks),
            max_context=max_context,
            max_waiting=config.max_waiting,
            swapped=self._swapping.blocks,
            min_pull_tokens=config.min_pull_tokens,
            queue=config.queue,
        )
        self._token_server = TokenServer(
            peer=peer,
            network=network,
            config=config.token_channel,
            callbacks=TokenServerCallbacks(
                cancel=self._cancel,
                prefill_failed=self._prefill_failed,
                send_prefix=self._send_prefix,
                router_lost=self._router_lost,
                stats=self.stats,
                drain=self._leave,
            ),
            blocks=pool,
            clock=clock,
        )
        self._life = WorkerLife(
            worker_id=peer.worker_id,
            pools=(pool, *self._swapping.pools),
            clock=clock,
            integrity_interval_s=config.integrity_interval_s,
            max_step_s=config.max_step_s,
            callbacks=WorkerCallbacks(
                step=self._step,
                is_busy=self._is_busy,
                died=self._fail_all,
                hang_up=self._token_server.close,
                is_ahead=lambda: bool(self._under_way),
            ),
        )
        self._calls = Calls()
        self._transfers = Transfers(
            receiver=receiver,
            sender=sender,
            scheduler=self._scheduler,
            calls=self._calls,
            pool=pool,
            clock=clock,
            config=config,
            told=TransferCallbacks(
                got_on=lambda progress: self._report((progress,)), pulled=self._pulled, wake=self._life.wake
            ),
        )
        self.probe = LinkProbe(
            pool=pool, sender=sender, receiver=receiver, store=store, clock=clock, on_released=self._life.wake
        )
        self._under_way = StepsUnderWay(engine, clock)  # they may hold blocks of requests that have ended

    async def start(self, host: str) -> WorkerInfo:
        """Listen on `host` and begin to step. Raises ConnectionLost where `host` can't be listened on."""
        transfer_addresses = await self._transfers.start(host)
        token_address = await self._token_server.start(host)
        self._life.start()
        return WorkerInfo(
            role="decode",
            peer=self._peer,
            token_address=token_address,
            transfer_addresses=transfer_addresses,
            layout=self._store.layout,
            num_blocks=self._pool.num_blocks,
            max_context=self._max_context,
            max_step_tokens=self._config.max_step_tokens,
            max_batch=self._config.max_batch,
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
        self._life.check_takes_requests()
        if not self._token_server.is_connected(request.router_id):
            raise WorkerLost(f"router {request.router_id} has no token channel to worker {self._peer.worker_id}")
        if self._calls.find(request.request_id) is not None:
            raise RequestError(f"request {request.request_id} is here already", code="duplicate_request", status=409)
        if ticket is not None and ticket.request_id != request.request_id:
            raise TicketRefused(f"the ticket is for request {ticket.request_id}")
        if pull is not None:
            self._check_pull(request, ticket, pull)
        now = self._clock()
        try:
            job = self._scheduler.add(
                request,
                now=now,
                wants_transfer=ticket is not None and self._transfers.can_receive,
                awaits_offer=pull is not None and self._transfers.can_receive,
            )
        except RequestError:
            if pull is not None:
                self._transfers.decline(pull)
            raise
        call = Call(job, ticket, asyncio.get_running_loop().create_future(), now)
        self._calls.add(call)
        self._transfers.expect(call, pull)
        self._life.wake()
        try:
            return await call.reply
        except asyncio.CancelledError:
            self._abort(call, "the request was cancelled")
            raise

    def stats(self) -> WorkerStats:
        """The worker's numbers now."""
        transfers = [side.stats for side in (self._receiver, self._sender) if side is not None]
        return worker_stats(
            self._counters,
            self._scheduler,
            self._pool,
            transfers,
            self._engine,
            is_draining=self._life.is_draining,
            decoding=[(job.request.promise, len(job.sequence.token_ids)) for job in self._scheduler.decoding],
            swaps=self._swapping.numbers(self._scheduler.swaps),
        )

    def check_health(self) -> None:
        """Raises WorkerLost where the step loop has died, does not run, or is stuck in a step."""
        self._life.check_health()

    def stay(self) -> None:
        """As WorkerLife.stay."""
        self._life.stay()

    def engine_lost(self, reason: str) -> None:
        """As WorkerLife.engine_lost."""
        self._life.engine_lost(reason)

    async def drain(self) -> None:
        """Take no new requests, tell routers so, and return once every call, transfer and trial under way has ended."""
        self._life.take_no_more()
        self._token_server.tell_stats()
        await self._life.drain()

    async def stop(self) -> None:
        """End everything, wherever it stands; a step under way finishes first, unless stuck. May be called again."""
        self._fail_all(f"worker {self._peer.worker_id} is ending")
        await self._life.stop()
        await self._token_server.close()  # nobody asks for a prefix any more
        await self._transfers.close()

    async def _step(self) -> bool:
        """Schedule, run, post-process; where it can, the next step is scheduled while one runs."""
        if not self._under_way:
            await self._under_way.begin(self._schedule())
        if not self._under_way:
            return False
        if self._config.run_ahead:
            await self._under_way.begin(self._schedule())
        ended = await self._run()
        self._report(self._scheduler.complete(ended.step, ended.sampled))
        return True

    def _schedule(self) -> DecodeStep:
        step = self._scheduler.schedule(self._under_way.last)
        self._transfers.begin(step.reserved)
        now = self._clock()
        for entry in step.entries:
            call = self._calls.of_job(entry.job)
            if call.stepped_at is None:
                call.stepped_at = now
        return step

    async def _run(self) -> EndedStep:
        try:
            ended = await self._under_way.first_ended()
        except Exception:
            for step in self._under_way.give_up():
                self._scheduler.abandon(step)
            raise
        content = StepContent.of([entry.step for entry in ended.step.entries])
        self._counters.count_step(ended.seconds, content.prompt_tokens)
        if not ended.step.swaps:  # what copies take says nothing about other steps
            self._counters.costs.add(content, ended.seconds)
        prompts_s = ended.seconds * content.prompts_part(self._counters.costs.costs())
        self._swapping.step_ended(content.prompt_tokens, prompts_s)
        return ended

    def _report(self, progress: Iterable[Progress]) -> None:
        """Send one frame to each router whose requests got on, and answer the calls that are finished."""
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        for one in progress:
            events[one.job.request.router_id].append(one.event)
            self._counters.generated_tokens += 1
            if one.finish_reason is not None:
                call = self._calls.of_job(one.job)
                self._counters.finished_requests += 1
                self._forget(call)
                call.answer(one.finish_reason)
        for router_id, of_router in events.items():
            self._token_server.emit(router_id, of_router)

    def _check_pull(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket) -> None:
        """A forged one is for the receiver to find, whose blocks it is about."""
        if ticket is not None:
            raise TicketRefused(f"the KV of request {request.request_id} can't come from two workers")
        if pull.target.worker_id != self._peer.worker_id or pull.request_id != request.request_id:
            raise TicketRefused(f"the ticket is for {pull.request_id} on {pull.target.worker_id}")
        if pull.target.epoch != self._peer.epoch:
            raise EpochMismatch(f"worker {self._peer.worker_id} has restarted since the ticket was made out")

    def _pulled(self, num_tokens: int) -> None:
        self._counters.pulled_tokens += num_tokens

    def _prefill_failed(self, request_id: str) -> None:
        call = self._calls.find(request_id)
        if call is not None:  # the router says it again until it hears of the request
            self._transfers.do_without(call)

    def _cancel(self, request_id: str) -> None:
        call = self._calls.find(request_id)
        if call is not None:
            self._abort(call, "its router cancelled it")
            call.answer(None)

    def _router_lost(self, router_id: str) -> None:
        for call in self._calls:
            if call.request.router_id == router_id:
                self._abort(call, "its router is gone", WorkerLost(f"router {router_id} is gone"))

    def _abort(self, call: Call, reason: str, error: TwostrokeError | None = None) -> None:
        """End a call wherever it stands; `error` is raised to its awaiter, where there is still one to tell."""
        if call.job.has_ended:
            return
        self._counters.aborted_requests += 1
        self._transfers.give_up(call, reason)  # its blocks go back once nothing can write into them
        self._scheduler.end(call.job)
        self._forget(call)
        if error is not None:
            call.fail(error)

    def _forget(self, call: Call) -> None:
        self._calls.remove(call)
        self._transfers.forget(call)
        self._life.wake()

    def _send_prefix(self, ticket: Ticket, token_ids: Sequence[int], cache_salt: bytes) -> None:
        self._transfers.send_prefix(ticket, token_ids, cache_salt)

    def _leave(self) -> None:
        """The worker is being taken down: what has not begun, here or on its way here, is begun elsewhere."""
        self._life.take_no_more()
        for call in self._calls:
            if not call.has_begun:
                reason = f"worker {self._peer.worker_id} is leaving"
                self._abort(call, reason, WorkerLeaving(reason))
        self._token_server.tell_stats()

    def _fail_all(self, reason: str) -> None:
        """Give every request up: an error event to its router, WorkerLost to its caller."""
        for call in self._calls:
            request = call.request
            index = call.job.sequence.num_output_tokens
            self._token_server.emit(request.router_id, (TokenEvent(request.request_id, index, (), error=reason),))
            self._abort(call, reason, WorkerLost(reason))

    def _is_busy(self) -> bool:
        return bool(self._under_way or self._calls) or self._transfers.is_busy or self.probe.is_busy
