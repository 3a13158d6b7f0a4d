"""A decode worker: takes requests whose KV arrives, or computes it here, and writes their answers token by token.

Knows no Ray. `cluster/` wraps it into a deployment; tests/simulation runs it on virtual time.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from decode_worker.config import DecodeConfig
from decode_worker.scheduler import DecodeJob, DecodeScheduler, DecodeStep, Progress
from kvtransfer.receiver import IncomingTransfer, KVReceiver
from kvtransfer.store import KVStore
from model.block_pool import BlockPool
from model.step import Engine
from model.step_loop import StepLoop
from protocol.clock import Clock
from protocol.errors import RequestError, TicketRefused, TransferFailed, TwostrokeError, WorkerLost
from protocol.network import Network
from protocol.requests import DecodeReply, FinishReason, GenerateRequest, SampledToken, TokenEvent
from protocol.stats import WorkerInfo, WorkerStats
from protocol.tickets import Address, Peer, Ticket
from protocol.token_server import TokenServer, TokenServerCallbacks

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    """A `decode` call that has not returned."""

    job: DecodeJob
    ticket: Ticket | None
    reply: "asyncio.Future[DecodeReply]"
    ready_at: float  # when it could first have been stepped: its arrival, or when its KV was there
    stepped_at: float | None = None
    transfer_s: float = 0.0
    incoming: IncomingTransfer | None = None
    offer_timer: asyncio.TimerHandle | None = None

    @property
    def request(self) -> GenerateRequest:
        return self.job.request


@dataclass(slots=True)
class _Counters:
    """Numbers of WorkerStats that only grow."""

    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    finished_requests: int = 0
    aborted_requests: int = 0


class DecodeWorker:
    """Runs one engine's steps. `receiver` is None where no KV ever comes: every prompt is computed here.

    `max_context` is the model's, in tokens. Pool, store and engine belong to this worker alone while it runs; `start`
    starts the receiver, `stop` closes it and leaves the others to their maker.
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
        receiver: KVReceiver | None,
        clock: Clock,
        max_context: int,
    ):
        self._peer = peer
        self._config = config
        self._engine = engine
        self._store = store
        self._pool = pool
        self._receiver = receiver
        self._clock = clock
        self._max_context = max_context
        self._scheduler = DecodeScheduler(
            pool,
            max_step_tokens=config.max_step_tokens,
            max_batch=config.max_batch,
            watermark_blocks=int(config.watermark * pool.num_blocks),
            max_context=max_context,
        )
        self._token_server = TokenServer(
            peer=peer,
            network=network,
            config=config.token_channel,
            callbacks=TokenServerCallbacks(
                cancel=self._cancel,
                prefill_failed=self._prefill_failed,
                router_lost=self._router_lost,
                stats=self.stats,
            ),
        )
        self._loop = StepLoop(step=self._step, idle=self._idle, died=self._died)
        self._calls: dict[str, _Call] = {}  # by request id, until the call returns
        self._calls_by_job: dict[DecodeJob, _Call] = {}
        self._calls_by_transfer: dict[bytes, _Call] = {}
        if receiver is not None:
            receiver.on_offer = self._offered
        self._receiving: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()  # set once the step loop has found that nothing is under way
        self._counters = _Counters()
        self._hanging_up: asyncio.Task[None] | None = None
        self._is_draining = False
        self._checked_at = float("-inf")

    async def start(self, host: str) -> WorkerInfo:
        """Listen on `host` and begin to step. Raises ConnectionLost where `host` can't be listened on."""
        transfer_address: Address | None = None
        if self._receiver is not None:
            transfer_address = await self._receiver.start(host)
        token_address = await self._token_server.start(host)
        self._loop.start()
        return WorkerInfo(
            role="decode",
            peer=self._peer,
            token_address=token_address,
            transfer_address=transfer_address,
            fingerprint=self._store.fingerprint,
            block_size=self._store.block_size,
            num_blocks=self._pool.num_blocks,
            max_context=self._max_context,
        )

    async def decode(self, request: GenerateRequest, ticket: Ticket | None) -> DecodeReply:
        """Continue the request to its end; its tokens go out on its router's token channel. Cancelling it aborts.

        With a ticket the prompt's KV is expected from the prefill worker; should it not come, and without a ticket,
        the prompt is computed here. A request that its router cancels returns without a finish reason. Raises
        RequestError (can't be served as asked), TicketRefused (another request's ticket), WorkerLost (the worker is
        ending, its engine died, or there is no token channel to the router any more).
        """
        self.check_health()
        if self._is_draining:
            raise WorkerLost(f"worker {self._peer.worker_id} is draining")
        if not self._token_server.is_connected(request.router_id):
            raise WorkerLost(f"router {request.router_id} has no token channel to worker {self._peer.worker_id}")
        if request.request_id in self._calls:
            raise RequestError(f"request {request.request_id} is here already", code="duplicate_request", status=409)
        if ticket is not None and ticket.request_id != request.request_id:
            raise TicketRefused(f"the ticket is for request {ticket.request_id}")
        job = self._scheduler.add(request, wants_transfer=ticket is not None and self._receiver is not None)
        call = _Call(job, ticket, asyncio.get_running_loop().create_future(), self._clock())
        self._calls[request.request_id] = call
        self._calls_by_job[job] = call
        if ticket is not None and self._receiver is not None:
            self._await_offer(call, ticket, self._receiver)
        self._quiet.clear()
        self._loop.wake()
        try:
            return await call.reply
        except asyncio.CancelledError:
            self._abort(call, "the request was cancelled")
            raise

    def stats(self) -> WorkerStats:
        """The worker's numbers now."""
        counters, pool, scheduler = self._counters, self._pool, self._scheduler
        received = None if self._receiver is None else self._receiver.stats
        return WorkerStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            free_blocks=pool.free_blocks,
            total_blocks=pool.num_blocks,
            owned_blocks=pool.owned_blocks,
            num_transfers=0 if received is None else received.in_flight,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            steps=counters.steps,
            step_seconds=counters.step_seconds,
            preemptions=scheduler.preemptions,
            finished_requests=counters.finished_requests,
            aborted_requests=counters.aborted_requests,
            transfers_done=0 if received is None else received.done,
            transfers_failed=0 if received is None else received.failed,
            transfer_bytes=0 if received is None else received.bytes,
            transfer_seconds=0.0 if received is None else received.seconds,
        )

    def check_health(self) -> None:
        """Raises WorkerLost where the step loop has died, or does not run."""
        self._loop.check_health()

    async def drain(self) -> None:
        """Take no new requests, and return once every call under way has ended."""
        self._is_draining = True
        await self._quiet.wait()

    async def stop(self) -> None:
        """End everything, wherever it stands; a step under way finishes first. May be called more than once."""
        self._is_draining = True
        self._fail_all(f"worker {self._peer.worker_id} is ending")
        await self._loop.stop()
        if self._receiver is not None:
            await self._receiver.close()
        await asyncio.gather(*self._receiving)
        if self._hanging_up is not None:
            await self._hanging_up
        await self._token_server.close()
        self._quiet.set()

    async def _step(self) -> bool:
        step = self._schedule()
        if not step.entries:
            return False
        self._post_process(step, await self._run(step))
        return True

    def _schedule(self) -> DecodeStep:
        step = self._scheduler.schedule()
        for job in step.reserved:
            call = self._calls_by_job[job]
            if call.ticket is not None and self._receiver is not None:
                sequence = job.sequence
                call.incoming = self._receiver.expect(
                    call.ticket,
                    sequence.block_ids,
                    len(sequence.token_ids),
                    sequence.num_computed // self._pool.block_size,
                )
                task = asyncio.create_task(
                    self._receive(call, call.incoming), name=f"receive {call.request.request_id}"
                )
                self._receiving.add(task)
        now = self._clock()
        for entry in step.entries:
            call = self._calls_by_job[entry.job]
            if call.stepped_at is None:
                call.stepped_at = now
        return step

    async def _run(self, step: DecodeStep) -> list[SampledToken | None]:
        started_at = self._clock()
        try:
            sampled = await self._engine.step([entry.step for entry in step.entries])
        except Exception:
            self._scheduler.abandon(step)
            raise
        self._counters.steps += 1
        self._counters.step_seconds += self._clock() - started_at
        # A step that draws a token past the prompt computes a decode's single token; everything else is prompt.
        self._counters.computed_tokens += sum(
            len(entry.step.token_ids) for entry in step.entries if len(entry.step.token_ids) > 1
        )
        return sampled

    def _post_process(self, step: DecodeStep, sampled: list[SampledToken | None]) -> None:
        self._report(self._scheduler.complete(step, sampled))

    def _report(self, progress: Iterable[Progress]) -> None:
        """Send one frame to each router whose requests got on, and answer the calls that are finished."""
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        finished: list[tuple[_Call, FinishReason]] = []
        for one in progress:
            request = one.job.request
            events[request.router_id].append(TokenEvent(request.request_id, one.index, (one.token,), one.finish_reason))
            self._counters.generated_tokens += 1
            if one.finish_reason is not None:
                finished.append((self._calls_by_job[one.job], one.finish_reason))
        for call, reason in finished:
            self._counters.finished_requests += 1
            self._finish(call, reason)
        for router_id, of_router in events.items():
            self._token_server.emit(router_id, of_router)

    def _await_offer(self, call: _Call, ticket: Ticket, receiver: KVReceiver) -> None:
        if receiver.has_offer(ticket.transfer_id):
            self._scheduler.offered(call.job)
            return
        self._calls_by_transfer[ticket.transfer_id] = call
        loop = asyncio.get_running_loop()
        call.offer_timer = loop.call_later(self._config.offer_wait_s, self._prefill_failed, call.request.request_id)

    def _offered(self, transfer_id: bytes) -> None:
        call = self._calls_by_transfer.get(transfer_id)
        if call is not None:
            self._stop_awaiting_offer(call, given_up=False)
            self._scheduler.offered(call.job)
            self._loop.wake()

    def _stop_awaiting_offer(self, call: _Call, *, given_up: bool) -> None:
        if call.ticket is not None:
            self._calls_by_transfer.pop(call.ticket.transfer_id, None)
            if given_up and call.incoming is None and self._receiver is not None:
                self._receiver.refuse(call.ticket)  # or the prefill worker would keep its blocks for a whole lease
        if call.offer_timer is not None:
            call.offer_timer.cancel()
            call.offer_timer = None

    async def _receive(self, call: _Call, incoming: IncomingTransfer) -> None:
        """See a transfer to its end: until then its blocks stay the job's, whatever becomes of the job."""
        job = call.job
        started_at = self._clock()
        try:
            first_token = await incoming.verified()
        except TransferFailed as error:
            _log.warning("the KV of request %s did not come: %s", call.request.request_id, error)
            self._scheduler.transfer_failed(job)
        else:
            call.transfer_s = self._clock() - started_at
            progress = self._scheduler.verified(job, first_token)
            if progress is not None:
                self._report((progress,))
        finally:
            call.ready_at = self._clock()
            task = asyncio.current_task()
            if task is not None:
                self._receiving.discard(task)
            self._loop.wake()

    def _prefill_failed(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return  # the router says it again until it hears of the request
        if call.incoming is not None:
            call.incoming.abort("the prefill failed")  # `_receive` goes on from there
        self._stop_awaiting_offer(call, given_up=True)
        self._scheduler.compute_here(call.job)
        self._loop.wake()

    def _cancel(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            self._abort(call, "its router cancelled it")
            self._answer(call, None)

    def _router_lost(self, router_id: str) -> None:
        for call in list(self._calls.values()):
            if call.request.router_id == router_id:
                self._abort(call, "its router is gone", WorkerLost(f"router {router_id} is gone"))

    def _abort(self, call: _Call, reason: str, error: TwostrokeError | None = None) -> None:
        """End a call wherever it stands; `error` is raised to its awaiter, where there is still one to tell."""
        if call.request.request_id not in self._calls:
            return
        self._counters.aborted_requests += 1
        if call.incoming is not None:
            call.incoming.abort(reason)  # `_receive` gives the blocks back, once nothing can write into them
        self._scheduler.end(call.job)
        self._forget(call)
        if error is not None and not call.reply.done():
            call.reply.set_exception(error)

    def _finish(self, call: _Call, reason: FinishReason) -> None:
        self._forget(call)
        self._answer(call, reason)

    def _answer(self, call: _Call, reason: FinishReason | None) -> None:
        """Return from the `decode` call."""
        if call.reply.done():
            return
        stepped_at = call.ready_at if call.stepped_at is None else call.stepped_at
        call.reply.set_result(
            DecodeReply(
                num_output_tokens=call.job.sequence.num_output_tokens,
                finish_reason=reason,
                num_cached_tokens=call.job.num_cached_tokens,
                transfer_s=call.transfer_s,
                queue_s=max(0.0, stepped_at - call.ready_at),
                num_preemptions=call.job.num_preemptions,
            )
        )

    def _forget(self, call: _Call) -> None:
        del self._calls[call.request.request_id]
        del self._calls_by_job[call.job]
        self._stop_awaiting_offer(call, given_up=True)
        self._loop.wake()

    def _fail_all(self, reason: str) -> None:
        """Give every request up: an error event to its router, WorkerLost to its caller."""
        for call in list(self._calls.values()):
            request = call.request
            index = call.job.sequence.num_output_tokens
            self._token_server.emit(request.router_id, (TokenEvent(request.request_id, index, (), error=reason),))
            self._abort(call, reason, WorkerLost(reason))

    def _idle(self) -> None:
        now = self._clock()
        if self._calls or self._receiving:
            return
        self._quiet.set()
        if now - self._checked_at >= self._config.integrity_interval_s:
            self._checked_at = now
            self._pool.check_integrity()
            if self._pool.owned_blocks:
                _log.error("%d blocks are owned although the worker is idle", self._pool.owned_blocks)

    def _died(self, error: Exception) -> None:
        self._fail_all(f"the engine of worker {self._peer.worker_id} died: {error!r}")
        self._quiet.set()
        # Routers see the channel go and turn elsewhere, well before anybody has asked for our health.
        self._hanging_up = asyncio.create_task(self._token_server.close(), name="hang up")
