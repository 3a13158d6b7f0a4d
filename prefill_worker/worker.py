"""A prefill worker: reads prompts, draws the first token, and sends the KV on while it is still being computed.

Knows no Ray. `cluster/` wraps it into a deployment; tests/simulation runs it on virtual time.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.sender import KVSender, OutgoingTransfer
from kvtransfer.store import KVStore
from model.block_pool import BlockPool
from model.step import Engine
from model.worker_life import WorkerCallbacks, WorkerLife
from model.worker_numbers import WorkerCounters, worker_stats
from prefill_worker.config import PrefillConfig
from prefill_worker.scheduler import PrefillJob, PrefillScheduler, PrefillStep
from protocol.clock import Clock
from protocol.errors import EpochMismatch, RequestError, TicketRefused, TransferFailed, WorkerLost
from protocol.network import Network
from protocol.requests import GenerateRequest, PrefillReply, SampledToken, TokenEvent, finish_reason
from protocol.stats import WorkerInfo, WorkerStats
from protocol.tickets import Peer, Ticket
from protocol.token_server import TokenServer, TokenServerCallbacks

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    """A `prefill` call that has not returned, or whose transfer has not ended."""

    job: PrefillJob
    ticket: Ticket | None
    arrived_at: float
    reply: "asyncio.Future[PrefillReply]"
    started_at: float = 0.0
    transfer: OutgoingTransfer | None = None
    sending: "asyncio.Task[None] | None" = None  # ends with the transfer, by releasing the job's blocks


class PrefillWorker:
    """Runs one engine's prefill steps. `sender` is None where KV stays here (a worker that only draws first tokens).

    `max_context` is the model's, in tokens. Pool, store and engine belong to this worker alone while it runs; `stop`
    closes the sender and leaves the others to their maker.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        config: PrefillConfig,
        engine: Engine,
        store: KVStore,
        pool: BlockPool,
        network: Network,
        sender: KVSender | None,
        clock: Clock,
        max_context: int,
    ):
        self._peer = peer
        self._config = config
        self._engine = engine
        self._store = store
        self._pool = pool
        self._sender = sender
        self._clock = clock
        self._max_context = max_context
        self._scheduler = PrefillScheduler(
            pool,
            max_step_tokens=config.max_step_tokens,
            max_batch=config.max_batch,
            max_context=max_context,
            max_waiting=config.max_waiting,
        )
        self._token_server = TokenServer(
            peer=peer,
            network=network,
            config=config.token_channel,
            callbacks=TokenServerCallbacks(
                cancel=self._cancel, prefill_failed=_ignore, router_lost=self._router_lost, stats=self.stats
            ),
        )
        self._life = WorkerLife(
            worker_id=peer.worker_id,
            pool=pool,
            clock=clock,
            integrity_interval_s=config.integrity_interval_s,
            max_step_s=config.max_step_s,
            callbacks=WorkerCallbacks(
                step=self._step, is_busy=self._is_busy, died=self._fail_all, hang_up=self._token_server.close
            ),
        )
        self._calls: dict[str, _Call] = {}  # by request id, until call and transfer have ended
        self._calls_by_job: dict[PrefillJob, _Call] = {}  # until the call returns
        self._counters = WorkerCounters()

    async def start(self, host: str) -> WorkerInfo:
        """Listen on `host` and begin to step. Raises ConnectionLost where `host` can't be listened on."""
        address = await self._token_server.start(host)
        self._life.start()
        return WorkerInfo(
            role="prefill",
            peer=self._peer,
            token_address=address,
            transfer_address=None,
            fingerprint=self._store.fingerprint,
            block_size=self._store.block_size,
            num_blocks=self._pool.num_blocks,
            max_context=self._max_context,
        )

    async def prefill(self, request: GenerateRequest, ticket: Ticket | None) -> PrefillReply:
        """Compute the prompt and return its first token; with a ticket, send its KV on. Cancelling it aborts both.

        Returns before the KV has arrived: a transfer that fails is the decode worker's to mend. Raises RequestError
        (can't be served as asked), TicketRefused or EpochMismatch (a ticket for somebody else), WorkerLost (the worker
        is ending, its engine died, or the request's router is gone).
        """
        self._life.check_takes_requests()
        self._check_ticket(request, ticket)
        if request.request_id in self._calls:
            raise RequestError(f"request {request.request_id} is here already", code="duplicate_request", status=409)
        job = self._scheduler.add(request)
        call = _Call(job, ticket, self._clock(), asyncio.get_running_loop().create_future())
        self._calls[request.request_id] = call
        self._calls_by_job[job] = call
        self._life.begin_request()
        try:
            return await call.reply
        except asyncio.CancelledError:
            self._abort(call, "the request was cancelled")
            raise

    def stats(self) -> WorkerStats:
        """The worker's numbers now."""
        transfers = None if self._sender is None else self._sender.stats
        return worker_stats(self._counters, self._scheduler, self._pool, transfers, self._engine)

    def check_health(self) -> None:
        """Raises WorkerLost where the step loop has died, does not run, or is stuck in a step."""
        self._life.check_health()

    async def drain(self) -> None:
        """Take no new requests, and return once every call and transfer under way has ended."""
        await self._life.drain()

    async def stop(self) -> None:
        """End everything, wherever it stands; a step under way finishes first, unless stuck. May be called again."""
        self._fail_all(f"worker {self._peer.worker_id} is ending")
        await self._life.stop()
        if self._sender is not None:
            await self._sender.close()
        await asyncio.gather(*(call.sending for call in self._calls.values() if call.sending is not None))
        await self._token_server.close()

    async def _step(self) -> bool:
        step = self._schedule()
        if not step.chunks:
            return False
        self._post_process(step, await self._run(step))
        return True

    def _schedule(self) -> PrefillStep:
        step = self._scheduler.schedule()
        for job in step.admitted:
            call = self._calls_by_job[job]
            call.started_at = self._clock()
            if call.ticket is not None and self._sender is not None:
                sequence = job.sequence
                call.transfer = self._sender.open(
                    call.ticket, job.num_tokens, sequence.block_ids, sequence.num_computed
                )
                self._scheduler.begin_sending(job)
                call.sending = asyncio.create_task(
                    self._see_off(call, call.transfer), name=f"send {job.request.request_id}"
                )
        return step

    async def _run(self, step: PrefillStep) -> Sequence[SampledToken | None]:
        def on_layer(layer: int) -> None:
            for chunk in step.chunks:
                call = self._calls_by_job.get(chunk.job)
                if call is not None and call.transfer is not None:
                    call.transfer.layer_ready(layer, chunk.num_tokens_after)

        started_at = self._clock()
        try:
            sampled = await self._engine.step([chunk.step for chunk in step.chunks], on_layer)
        except Exception:
            self._scheduler.abandon(step)
            raise
        self._counters.count_step(self._clock() - started_at, sum(len(chunk.step.token_ids) for chunk in step.chunks))
        return sampled

    def _post_process(self, step: PrefillStep, sampled: Sequence[SampledToken | None]) -> None:
        first_tokens = {
            chunk.job: token for chunk, token in zip(step.chunks, sampled, strict=True) if token is not None
        }
        for job in self._scheduler.complete(step):
            call = self._calls_by_job[job]
            first_token = first_tokens[job]
            if call.transfer is not None:
                call.transfer.commit(first_token)
            self._counters.generated_tokens += 1
            self._counters.finished_requests += 1
            self._end(call)
            if not call.reply.done():
                call.reply.set_result(self._reply(call, first_token))

    def _reply(self, call: _Call, first_token: SampledToken) -> PrefillReply:
        request = call.job.request
        given = request.num_output_tokens_given
        event = TokenEvent(
            request_id=request.request_id,
            index=given,
            tokens=(first_token,),
            finish_reason=finish_reason(request, given + 1, first_token.token_id),
        )
        return PrefillReply(
            event=event,
            num_cached_tokens=call.job.num_cached_tokens,
            queue_s=call.started_at - call.arrived_at,
            prefill_s=self._clock() - call.started_at,
        )

    async def _see_off(self, call: _Call, transfer: OutgoingTransfer) -> None:
        """Keep the job's blocks until nothing reads them any more."""
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.warning("the KV of request %s was not sent: %s", call.job.request.request_id, error)
        finally:
            self._scheduler.end_sending(call.job)
            call.sending = None
            if call.job.has_ended:
                del self._calls[call.job.request.request_id]
            self._life.wake()  # its blocks may be what another prompt waits for

    def _check_ticket(self, request: GenerateRequest, ticket: Ticket | None) -> None:
        """A forged ticket is the decode worker's to refuse: only there blocks are at stake."""
        if ticket is None:
            return
        if self._sender is None:
            raise TicketRefused(f"worker {self._peer.worker_id} sends no KV")
        if ticket.prefill.worker_id != self._peer.worker_id or ticket.request_id != request.request_id:
            raise TicketRefused(f"the ticket is for {ticket.request_id} on {ticket.prefill.worker_id}")
        if ticket.prefill.epoch != self._peer.epoch:
            raise EpochMismatch(f"worker {self._peer.worker_id} has restarted since the ticket was made out")

    def _cancel(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            self._abort(call, "the router cancelled the request", WorkerLost("the router cancelled the request"))

    def _router_lost(self, router_id: str) -> None:
        for call in list(self._calls.values()):
            if call.job.request.router_id == router_id:
                self._abort(call, "its router is gone", WorkerLost(f"router {router_id} is gone"))

    def _abort(self, call: _Call, reason: str, error: WorkerLost | None = None) -> None:
        """End a call wherever it stands, and its transfer, which may outlive it.

        `error` tells the call's awaiter, who needs none where it was cancelled itself.
        """
        if call.transfer is not None:
            call.transfer.abort(reason)
        if call.job.has_ended:
            return
        self._counters.aborted_requests += 1
        self._end(call)
        if error is not None and not call.reply.done():
            call.reply.set_exception(error)

    def _end(self, call: _Call) -> None:
        self._scheduler.end(call.job)
        del self._calls_by_job[call.job]
        if call.sending is None:
            del self._calls[call.job.request.request_id]
        self._life.wake()

    def _fail_all(self, reason: str) -> None:
        for call in list(self._calls_by_job.values()):
            self._abort(call, reason, WorkerLost(reason))

    def _is_busy(self) -> bool:
        return bool(self._calls)


def _ignore(_: str) -> None:
    """Routers send PrefillFailed to decode workers; here it means nothing."""
