"""A prefill worker: reads prompts, draws the first token, and sends the KV on while it is still being computed.

Knows no Ray. `cluster/` wraps it into a deployment; tests/simulation runs it on virtual time.
"""

import asyncio
from collections.abc import Sequence

from twostroke.kvtransfer.offers import AwaitedOffers
from twostroke.kvtransfer.sides import ReceivingSide, SendingSide
from twostroke.kvtransfer.store import KVStore
from twostroke.model.step import Engine
from twostroke.prefill_worker.calls import Call, Calls, SendingCallbacks, Sendings
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.scheduler import Admission, PrefillJob, PrefillScheduler, PrefillStep
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import EpochMismatch, RequestError, TicketRefused, WorkerLeaving, WorkerLost
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Address, GenerateRequest, Peer, PrefillReply, SampledToken, Ticket
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.life import WorkerCallbacks, WorkerLife
from twostroke.worker.numbers import WorkerCounters, worker_stats
from twostroke.worker.pulls import PrefixExports, PullCallbacks, Pulls
from twostroke.worker.step_costs import StepContent
from twostroke.worker.token_server import TokenServer, TokenServerCallbacks
from twostroke.worker.trials import LinkProbe


class PrefillWorker:
    """Runs one engine's prefill steps. `sender` is None where KV stays here (a worker that only draws first tokens).

    `receiver` is None where no prefix is pulled from another worker. `max_context` is the model's, in tokens. Pool,
    store and engine belong to this worker alone while it runs; `start` starts the receiver, `stop` closes receiver and
    sender and leaves the others to their maker.
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
        sender: SendingSide | None,
        receiver: ReceivingSide | None,
        clock: Clock,
        max_context: int,
    ):
        self._peer = peer
        self._config = config
        self._engine = engine
        self._store = store
        self._pool = pool
        self._sender = sender
        self._receiver = receiver
        self._clock = clock
        self._max_context = max_context
        self._scheduler = PrefillScheduler(
            pool,
            max_step_tokens=config.max_step_tokens,
            max_batch=config.max_batch,
            max_context=max_context,
            max_waiting=config.max_waiting,
            min_pull_tokens=config.min_pull_tokens,
            queue=config.queue,
        )
        self._token_server = TokenServer(
            peer=peer,
            network=network,
            config=config.token_channel,
            callbacks=TokenServerCallbacks(
                cancel=self._cancel,
                prefill_failed=_ignore,
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
            pools=(pool,),
            clock=clock,
            integrity_interval_s=config.integrity_interval_s,
            max_step_s=config.max_step_s,
            callbacks=WorkerCallbacks(
                step=self._step, is_busy=self._is_busy, died=self._fail_all, hang_up=self._token_server.close
            ),
        )
        self._calls = Calls()
        self._sendings: Sendings | None = None
        if sender is not None:
            self._sendings = Sendings(
                sender=sender,
                scheduler=self._scheduler,
                num_layers=store.layout.num_layers,
                told=SendingCallbacks(failed=self._not_sent, ended=self._transfer_ended),
            )
        self._pulls: Pulls[PrefillJob] | None = None
        if receiver is not None:
            self._pulls = Pulls(
                receiver=receiver,
                offers=AwaitedOffers(receiver),
                scheduler=self._scheduler,
                wait_s=config.pull_wait_s,
                told=PullCallbacks(admit=self._admit_offered, pulled=self._pulled, ended=self._pull_ended),
            )
        self._exports: PrefixExports | None = None
        if sender is not None:
            self._exports = PrefixExports(sender=sender, pool=pool, ended=self._life.wake)
        self.probe = LinkProbe(
            pool=pool, sender=sender, receiver=receiver, store=store, clock=clock, on_released=self._life.wake
        )
        self._is_computing = False  # a step is under way, which may hold blocks of requests that have ended
        self._counters = WorkerCounters()

    async def start(self, host: str) -> WorkerInfo:
        """Listen on `host` and begin to step. Raises ConnectionLost where `host` can't be listened on."""
        transfer_addresses: tuple[Address, ...] = ()
        if self._receiver is not None:
            transfer_addresses = await self._receiver.start(host)
        token_address = await self._token_server.start(host)
        self._life.start()
        return WorkerInfo(
            role="prefill",
            peer=self._peer,
            token_address=token_address,
            transfer_addresses=transfer_addresses,
            layout=self._store.layout,
            num_blocks=self._pool.num_blocks,
            max_context=self._max_context,
            max_step_tokens=self._config.max_step_tokens,
            max_batch=self._config.max_batch,
        )

    async def prefill(
        self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        """Compute the prompt and return its first token; with a ticket, send its KV on. Cancelling it aborts both.

        With `pull`, another worker has been asked to send the KV of the prompt's beginning; what does not come in time,
        or not whole, is computed here. Returns before the KV has been sent on: a transfer that fails is the decode
        worker's to mend. Raises RequestError (can't be served as asked), TicketRefused or EpochMismatch (a ticket for
        somebody else), WorkerLost (the worker is ending, its engine died, or the request's router is gone).
        """
        self._life.check_takes_requests()
        if ticket is not None:
            if self._sender is None:
                raise TicketRefused(f"worker {self._peer.worker_id} sends no KV")
            self._check_ticket(request, ticket, ticket.source)
        if pull is not None:
            self._check_ticket(request, pull, pull.target)
        if self._calls.find(request.request_id) is not None:
            raise RequestError(f"request {request.request_id} is here already", code="duplicate_request", status=409)
        now = self._clock()
        try:
            job = self._scheduler.add(request, now=now, awaits_offer=pull is not None and self._pulls is not None)
        except RequestError:
            if pull is not None and self._pulls is not None:
                self._pulls.decline(pull)
            raise
        call = Call(job, ticket, now, asyncio.get_running_loop().create_future())
        self._calls.add(call)
        if pull is not None and self._pulls is not None:
            self._pulls.expect(job, pull)
        self._life.wake()
        try:
            return await call.reply
        except asyncio.CancelledError:
            self._abort(call, "the request was cancelled")
            raise

    def stats(self) -> WorkerStats:
        """The worker's numbers now."""
        transfers = [side.stats for side in (self._sender, self._receiver) if side is not None]
        return worker_stats(
            self._counters,
            self._scheduler,
            self._pool,
            transfers,
            self._engine,
            is_draining=self._life.is_draining,
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
        if self._sender is not None:
            await self._sender.close()
        if self._receiver is not None:
            await self._receiver.close()
        await asyncio.gather(*(call.sending for call in self._calls if call.sending is not None))
        if self._pulls is not None:
            await self._pulls.ended()
        if self._exports is not None:
            await self._exports.outlive()

    async def _step(self) -> bool:
        step = self._schedule()
        if not step.chunks:
            return False
        self._post_process(step, await self._run(step))
        return True

    def _schedule(self) -> PrefillStep:
        step = self._scheduler.schedule()
        self._begin_transfers(step.admission)
        return step

    def _admit_offered(self) -> None:
        self._begin_transfers(self._scheduler.admit_offered())

    def _begin_transfers(self, admission: Admission) -> None:
        for job in admission.declined:
            if self._pulls is not None:
                self._pulls.refuse(job)
        for job in admission.admitted:
            call = self._calls.of_job(job)
            call.started_at = self._clock()
            if job.is_pulling and self._pulls is not None:
                self._pulls.begin(job)
            if self._sendings is not None:
                self._sendings.begin(call)

    async def _run(self, step: PrefillStep) -> Sequence[SampledToken | None]:
        def on_layer(layer: int) -> None:
            if self._sendings is not None:
                going_on = [chunk for chunk in step.chunks if not chunk.job.has_ended]
                self._sendings.layer_computed(
                    layer, [(self._calls.of_job(chunk.job), chunk.num_tokens_after) for chunk in going_on]
                )

        batch = [chunk.step for chunk in step.chunks]
        started_at = self._clock()
        self._is_computing = True
        try:
            sampled = await self._engine.step(batch, on_layer)
        except Exception:
            self._scheduler.abandon(step)
            raise
        finally:
            self._is_computing = False
        seconds = self._clock() - started_at
        self._counters.costs.add(StepContent.of(batch), seconds)
        self._counters.count_step(seconds, sum(len(one.token_ids) for one in batch))
        return sampled

    def _post_process(self, step: PrefillStep, sampled: Sequence[SampledToken | None]) -> None:
        first_tokens = {
            chunk.job: token for chunk, token in zip(step.chunks, sampled, strict=True) if token is not None
        }
        for job in self._scheduler.complete(step):
            call = self._calls.of_job(job)
            first_token = first_tokens[job]
            if call.outgoing is not None:
                call.outgoing.commit(first_token)
            self._counters.generated_tokens += 1
            self._counters.finished_requests += 1
            self._end(call)
            call.answer(first_token, self._clock())

    def _pulled(self, job: PrefillJob, num_tokens: int) -> None:
        self._counters.pulled_tokens += num_tokens
        if self._sendings is not None:
            self._sendings.prefix_came(self._calls.of_job(job))

    def _pull_ended(self, job: PrefillJob) -> None:
        call = self._calls.find(job.request.request_id)
        if call is not None:
            self._transfer_ended(call)

    def _not_sent(self, call: Call) -> None:
        """The router is told: the decode worker may not know even that there was something to wait for."""
        self._token_server.kv_not_sent(call.job.request.router_id, call.request_id)

    def _transfer_ended(self, call: Call) -> None:
        self._calls.forget_if_over(call)
        self._life.wake()  # its blocks may be what another prompt waits for

    def _check_ticket(self, request: GenerateRequest, ticket: Ticket, mine: Peer) -> None:
        """`mine` is the ticket's end that should be here. A forged one is for its target to find, whose blocks it is
        about."""
        if mine.worker_id != self._peer.worker_id or ticket.request_id != request.request_id:
            raise TicketRefused(f"the ticket is for {ticket.request_id} on {mine.worker_id}")
        if mine.epoch != self._peer.epoch:
            raise EpochMismatch(f"worker {self._peer.worker_id} has restarted since the ticket was made out")

    def _cancel(self, request_id: str) -> None:
        call = self._calls.find(request_id)
        if call is not None:
            self._abort(call, "the router cancelled the request", WorkerLost("the router cancelled the request"))

    def _router_lost(self, router_id: str) -> None:
        for call in self._calls:
            if call.job.request.router_id == router_id:
                self._abort(call, "its router is gone", WorkerLost(f"router {router_id} is gone"))

    def _abort(self, call: Call, reason: str, error: WorkerLost | None = None) -> None:
        """End a call wherever it stands, and its transfers, which may outlive it.

        `error` tells the call's awaiter, who needs none where it was cancelled itself.
        """
        call.is_aborted = True
        if call.outgoing is not None:
            call.outgoing.abort(reason)
        if self._pulls is not None:
            self._pulls.give_up(call.job, reason)
        if call.job.has_ended:
            return
        self._counters.aborted_requests += 1
        self._end(call)
        if error is not None:
            call.fail(error)

    def _end(self, call: Call) -> None:
        self._scheduler.end(call.job)
        self._calls.returned(call)
        self._life.wake()

    def _send_prefix(self, ticket: Ticket, token_ids: Sequence[int], cache_salt: bytes) -> None:
        if self._exports is not None:
            self._exports.send(ticket, token_ids, cache_salt)

    def _leave(self) -> None:
        """The worker is being taken down: what it has not begun is given back, to be begun elsewhere."""
        self._life.take_no_more()
        for call in self._calls.not_returned():
            if not call.job.is_admitted:
                reason = f"worker {self._peer.worker_id} is leaving"
                self._abort(call, reason, WorkerLeaving(reason))
        self._token_server.tell_stats()

    def _fail_all(self, reason: str) -> None:
        for call in self._calls.not_returned():
            self._abort(call, reason, WorkerLost(reason))

    def _is_busy(self) -> bool:
        is_exporting = self._exports is not None and self._exports.is_busy
        return self._is_computing or bool(self._calls) or is_exporting or self.probe.is_busy


def _ignore(_: str) -> None:
    """Routers send PrefillFailed to decode workers; here it means nothing."""
