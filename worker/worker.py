"""What a prefill and a decode worker have in common: how it is made, and how it starts, steps, drains and stops.

A role adds its own call (`prefill`, `decode`), its scheduler, and what a step's tokens mean to it. Knows no Ray and no
torch. `cluster/` wraps workers into deployments; tests/simulation runs them on virtual time.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from twostroke.kvtransfer.link import KVStore
from twostroke.kvtransfer.sides import AwaitedOffers, ReceivingSide, SendingSide
from twostroke.model.costs.operations import MachineLimits, StepWork
from twostroke.model.step import Constraint, Engine, OnLayer
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import (
    EpochMismatch,
    RequestError,
    TicketRefused,
    TwostrokeError,
    WorkerLeaving,
    WorkerLost,
)
from twostroke.protocol.garbage import collection_seconds
from twostroke.protocol.grammars import Grammars
from twostroke.protocol.log_context import LogContext
from twostroke.protocol.network import Network
from twostroke.protocol.requests import (
    GenerateRequest,
    Peer,
    PrefillReply,
    Promise,
    ScoringParams,
    Ticket,
    TokenEvent,
    check_request,
)
from twostroke.protocol.stats import LEAST_STRETCH, GpuUse, QueuedWork, Role, StepCosts, WorkerInfo, WorkerStats
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.call_log import failed_alone
from twostroke.worker.config import WorkerConfig
from twostroke.worker.experts.expert_balance import ExpertBalance
from twostroke.worker.experts.expert_load import ExpertLoad, ReadHits
from twostroke.worker.life import EndedStep, LogitHealth, StepLoop, StepsUnderWay
from twostroke.worker.pulls import PrefixExports, Pulls, Transfers
from twostroke.worker.queue_order import JobT
from twostroke.worker.scheduler import Admitted, DrawnToken, ScheduledStep, Scheduler
from twostroke.worker.sequence import Phase
from twostroke.worker.step_costs import StepCostFit
from twostroke.worker.token_server import TokenServer, TokenServerCallbacks
from twostroke.worker.trials import LinkProbe
from twostroke.worker.utilization import Utilization

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True)
class WorkerDeps:
    """What a worker is given, of either role. Pool, store and engine belong to it alone while it runs."""

    peer: Peer  # its name
    engine: Engine
    store: KVStore
    pool: BlockPool
    network: Network
    sender: SendingSide  # closed by the worker's `stop`, like the receiver
    receiver: ReceivingSide
    clock: Clock
    max_context: int  # tokens; the model's
    weights: str | None = None  # what quantised ones are held in
    expert_share: float = 0.0  # of the model's experts, that a token takes; 0: it has none
    expert_hits: ReadHits | None = None  # None: nobody counts them
    expert_balance: ExpertBalance | None = None  # None: ranks hold no copies of experts
    grammars: Grammars | None = None  # the model's; None: requests with a grammar are refused
    vocab_size: int | None = None  # the model's; None: nothing is known of it
    work: StepWork | None = None  # the model's; None: utilisation is not told
    limits: MachineLimits | None = None  # of the machine, for all ranks together
    gpu_use: Callable[[], GpuUse | None] = lambda: None


@dataclass(eq=False, slots=True)
class WorkerCall(Generic[JobT, ReplyT]):
    """A call of a worker that has not returned, or of which a transfer has not ended."""

    job: JobT
    ticket: Ticket | None
    reply: "asyncio.Future[ReplyT]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def request(self) -> GenerateRequest:
        return self.job.request

    @property
    def has_begun(self) -> bool:
        """Whether anything has been computed or received for it, or is about to be."""
        return self.job.phase is not Phase.WAITING

    @property
    def is_over(self) -> bool:
        """Whether it may be forgotten."""
        return self.job.has_ended

    def cancelled(self) -> None:
        """Tell the call's awaiter that its router wants no answer."""
        raise NotImplementedError

    def answer(self, reply: ReplyT) -> None:
        """Return from the call, unless its awaiter is gone."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: TwostrokeError) -> None:
        """Raise `error` to the call's awaiter, unless it is gone."""
        if not self.reply.done():
            self.reply.set_exception(error)


@dataclass(slots=True)
class WorkerCounters:
    """Numbers of WorkerStats, by their names there, that a worker counts itself. They only grow."""

    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    finished_requests: int = 0
    aborted_requests: int = 0
    pulled_tokens: int = 0


_UNREAD = ScoringParams()

CallT = TypeVar("CallT", bound=WorkerCall[Any, Any])


class Worker(ABC, Generic[JobT, CallT]):
    """Runs one engine's steps. `start` starts the receiver, `stop` closes receiver and sender."""

    role: ClassVar[Role]

    def __init__(
        self,
        config: WorkerConfig,
        equipment: WorkerDeps,
        scheduler: Scheduler[JobT],
        costs: StepCostFit,
        *,
        host_pool: BlockPool | None = None,
        runs_ahead: bool = False,
    ):
        """`costs` learns from the worker's steps; `host_pool` accounts for host memory.

        A worker that `runs_ahead` schedules a step while one runs.
        """
        self._peer = equipment.peer
        self._equipment = equipment
        self._config = config
        self._pool = equipment.pool
        self._sender = equipment.sender
        self._receiver = equipment.receiver
        self._clock = equipment.clock
        self._scheduler = scheduler
        self._costs = costs
        self._counters = WorkerCounters()
        self._utilization = Utilization(equipment.work, equipment.limits, equipment.clock)
        self._runs_ahead = runs_ahead
        hits = equipment.expert_hits
        self._expert_load = None if hits is None else ExpertLoad(hits, self._clock)
        self._calls: dict[str, CallT] = {}  # by request
        self._under_way = StepsUnderWay[ScheduledStep[JobT]](equipment.engine, self._clock)
        self._logits = LogitHealth()
        self._compiling: set[asyncio.Task[None]] = set()  # for requests with grammars
        self._token_server = TokenServer(
            peer=self._peer,
            network=equipment.network,
            config=config.token_channel,
            callbacks=TokenServerCallbacks(
                cancel=self._cancel,
                prefill_failed=self._prefill_failed,
                send_prefix=self._send_prefix,
                router_lost=self._router_lost,
                stats=self.stats,
                drain=self._leave,
            ),
            blocks=self._pool,
            clock=self._clock,
        )
        self._life = StepLoop(
            worker_id=self._peer.worker_id,
            pools=(self._pool,) if host_pool is None else (self._pool, host_pool),
            clock=self._clock,
            config=config,
            step=self._step,
            # Steps under way may hold blocks of requests that have ended.
            is_busy=lambda: bool(self._under_way or self._calls or self._transfers.is_busy),
            is_ahead=lambda: bool(self._under_way),
            died=self._fail_all,
            hang_up=self._token_server.close,
        )
        self._transfers = Transfers(self._life.wake)
        self._offers = AwaitedOffers(self._receiver)
        self._pulls = Pulls[JobT](
            receiver=self._receiver,
            offers=self._offers,
            transfers=self._transfers,
            scheduler=scheduler,
            wait_s=config.pull_wait_s,
            admit=self._admit_offered,
            came=self._pulled,
            wake=self._life.wake,
        )
        self._exports = PrefixExports(sender=self._sender, pool=self._pool, transfers=self._transfers)
        self.probe = LinkProbe(
            pool=self._pool,
            sender=self._sender,
            receiver=self._receiver,
            transfers=self._transfers,
            clock=self._clock,
        )

    async def start(self, host: str) -> WorkerInfo:
        """Listen on `host` and begin to step. Raises ConnectionLost where `host` can't be listened on."""
        transfer_addresses = await self._receiver.start(host)
        token_address = await self._token_server.start(host)
        self._life.start()
        return WorkerInfo(
            role=self.role,
            peer=self._peer,
            token_address=token_address,
            transfer_addresses=transfer_addresses,
            layout=self._equipment.store.layout,
            num_blocks=self._pool.num_blocks,
            max_context=self._equipment.max_context,
            max_step_tokens=self._config.max_step_tokens,
            max_batch=self._config.max_batch,
            weights=self._equipment.weights,
            vocab_size=self._equipment.vocab_size,
        )

    def stats(self) -> WorkerStats:
        """The worker's numbers now."""
        transfers = self._sender.stats, self._receiver.stats
        queued = queued_work(self._scheduler.waiting_work())
        contexts = [(job.request.promise, len(job.sequence.token_ids)) for job in self._scheduler.decoding]
        self._costs.take_in()  # a router that sends nothing here for its costs would have to wait for ever for better
        costs = self._costs.costs()
        balance = self._equipment.expert_balance
        return WorkerStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_waiting_tokens=sum(of_class.tokens for of_class in queued),
            free_blocks=self._pool.free_blocks,
            total_blocks=self._pool.num_blocks,
            owned_blocks=self._pool.owned_blocks,
            num_transfers=sum(side.in_flight for side in transfers),
            prefix_queries=self._scheduler.prefix_queries,
            prefix_hits=self._scheduler.prefix_hits,
            preemptions=self._scheduler.preemptions,
            transfers_done=sum(side.done for side in transfers),
            transfers_failed=sum(side.failed for side in transfers),
            transfers_given_up=sum(side.given_up for side in transfers),
            transfer_bytes=sum(side.bytes for side in transfers),
            transfer_seconds=sum((side.seconds for side in transfers), 0.0),
            transfer_digest_failures=sum(side.digest_failures for side in transfers),
            transfer_links_lost=sum(side.links_lost for side in transfers),
            broken_logit_rows=self._equipment.engine.num_broken_rows,
            collection_seconds=collection_seconds(),
            queued=queued,
            context_tokens=sum(num_tokens for _, num_tokens in contexts),
            tightest_tpot_s=_tightest_tpot_s(contexts, costs),
            costs=costs,
            is_draining=self._life.is_draining,
            gpu=self._equipment.gpu_use(),
            expert_skews=() if self._expert_load is None else self._expert_load.skews(),
            expert_copies=0 if balance is None else balance.num_copies,
            expert_imbalances=() if balance is None else balance.imbalances(),
            **asdict(self._counters),
            **self._utilization.told(),
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
        for compiling in self._compiling:
            compiling.cancel()
        await asyncio.gather(*self._compiling, return_exceptions=True)
        await self._token_server.close()  # nobody asks for a prefix any more
        await self._sender.close()
        await self._receiver.close()
        await self._transfers.ended()

    # --- a step ---

    async def _step(self) -> bool:
        """Schedule, run, post-process; whether there was anything to do."""
        if not await self._schedule():
            return False
        ended = await self._run()
        self._end_failed(ended.step)
        drawing = [one.job.request.request_id for one in ended.step.entries if one.step.draw is not None]
        broken = self._logits.step_ended(self._equipment.engine.num_broken_rows, drawing)
        if broken is not None:
            self._life.engine_lost(broken)
        self._post_process(self._scheduler.complete(ended.step, ended.sampled))
        return True

    async def _schedule(self) -> bool:
        """Have the engine run the next step, and where it can, know the one after that; False where there is none."""
        if not self._under_way:
            await self._begin_next()
        if self._under_way and self._runs_ahead and await self._under_way.nears_its_end(self._costs.costs()):
            await self._begin_next()
        return bool(self._under_way)

    async def _begin_next(self) -> None:
        step = self._decide()
        self._begin_transfers(step.admitted)
        if not step.is_empty:
            batch, copies = [entry.step for entry in step.entries], [swap.copy for swap in step.swaps]
            await self._under_way.begin(step, batch, self._on_layer(step), copies)

    async def _run(self) -> EndedStep[ScheduledStep[JobT]]:
        """Wait for the step that runs, and learn from it."""
        try:
            ended = await self._under_way.first_ended()
        except Exception:
            for step in self._under_way.give_up():
                self._scheduler.abandon(step)
            raise
        self._learn(ended)
        return ended

    def _learn(self, ended: EndedStep[ScheduledStep[JobT]]) -> None:
        self._counters.steps += 1
        self._counters.step_seconds += ended.seconds
        self._counters.computed_tokens += ended.content.prompt_tokens
        self._utilization.add(ended.content)
        is_scored = any((one.job.request.reading or _UNREAD).logprobs is not None for one in ended.step.entries)
        if not ended.step.swaps:  # what copies take says nothing about other steps
            self._costs.add(ended.content, ended.seconds, is_plain=not is_scored)

    def _end_failed(self, step: ScheduledStep[JobT]) -> None:
        """End those at whom a step has failed, or drawn a token that their grammar had no say in."""
        for job, part in ((entry.job, entry.step) for entry in step.entries):
            if (error := job.sequence.fault.error) is not None and not job.has_ended:
                self._fail_alone(self._call_of(job), error)
            constraint = None if part.draw is None else part.draw.constraint
            if constraint is None or job.has_ended:
                continue
            if constraint.has_failed(part.start + len(part.token_ids)):
                self._abort(self._call_of(job), "its grammar can't be followed", _unfollowable())

    def _fail_alone(self, call: CallT, error: BaseException) -> None:
        """End one request that can't be computed."""
        told = failed_alone(call.request, error)
        self._abort(call, str(told), told)

    def _admit_offered(self) -> None:
        self._begin_transfers(self._scheduler.admit_offered())

    def _begin_transfers(self, admitted: Admitted[JobT]) -> None:
        for job in admitted.declined:
            self._pulls.refuse(job)
        for job in admitted.jobs:
            self._has_blocks(self._call_of(job))

    # --- a call ---

    def _check_new(self, request: GenerateRequest, pull: Ticket | None) -> None:
        """Raises RequestError, TicketRefused, EpochMismatch or WorkerLost for a call that can't be."""
        self._life.check_takes_requests()
        check_request(request, self._equipment.vocab_size)
        if request.request_id in self._calls:
            raise RequestError(f"request {request.request_id} is here already", code="duplicate_request", status=409)
        if request.grammar and self._equipment.grammars is None:
            raise RequestError("this worker can't hold an answer to a grammar", code="grammar_unsupported")
        if pull is not None:
            self._check_ticket(request, pull, pull.target)

    def _check_ticket(self, request: GenerateRequest, ticket: Ticket, mine: Peer) -> None:
        """`mine` is the ticket's end that should be here. A forged one is for its target to find, whose blocks it is
        about."""
        if mine.worker_id != self._peer.worker_id or ticket.request_id != request.request_id:
            raise TicketRefused(f"the ticket is for {ticket.request_id} on {mine.worker_id}")
        if mine.epoch != self._peer.epoch:
            raise EpochMismatch(f"worker {self._peer.worker_id} has restarted since the ticket was made out")

    @contextmanager
    def _declining(self, pull: Ticket | None) -> Iterator[None]:
        """Take no offer to a request that is refused: its source would keep the blocks for nobody."""
        try:
            yield
        except RequestError:
            if pull is not None:
                self._offers.refuse(pull)
            raise

    async def _answered(self, call: CallT, reply: "asyncio.Future[ReplyT]", pull: Ticket | None) -> ReplyT:
        """See a new call to its end. Being cancelled aborts it."""
        self._calls[call.request.request_id] = call
        grammars = self._equipment.grammars
        compiling: asyncio.Task[None] | None = None
        if call.request.grammar and grammars is not None:
            call.job.awaits_grammar = True
            compiling = asyncio.create_task(self._compile(call, grammars), name=f"grammar of {call.request.request_id}")
            self._compiling.add(compiling)
            compiling.add_done_callback(self._compiling.discard)
        self._expect(call, pull)
        self._life.wake()
        try:
            return await reply
        except asyncio.CancelledError:
            self._abort(call, "the request was cancelled")
            raise
        finally:
            if compiling is not None:  # nobody waits for it any more
                compiling.cancel()

    def _expect(self, call: CallT, pull: Ticket | None) -> None:
        """Wait for what others offer to a new call."""
        if pull is not None:
            self._pulls.expect(call.job, pull)

    async def _compile(self, call: CallT, grammars: Grammars) -> None:
        """Let a call take its turn once its grammar is ready."""
        job = call.job
        try:
            asked = (call.request.grammar, call.request.cache_salt, call.request.client)
            matcher = await grammars.matcher(*asked)
            job.sequence.constraint = Constraint(
                matcher, partial(grammars.renewed, *asked), call.request.stop_token_ids
            )
        except RequestError as error:
            self._abort(call, "its grammar can't be taken", error)
            return
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # llguidance may panic, which is no Exception
            self._fail_alone(call, error)
            return
        job.awaits_grammar = False
        self._admit_offered()
        self._life.wake()

    def _call_of(self, job: JobT) -> CallT:
        """The call of a job that has not ended."""
        return self._calls[job.request.request_id]

    def _abort(self, call: CallT, reason: str, error: TwostrokeError | None = None) -> None:
        """End a call wherever it stands, and its transfers, which may outlive it.

        `error` is raised to the call's awaiter, where there is still one to tell.
        """
        self._give_up_transfers(call, reason)
        self._pulls.give_up(call.job, reason)
        if call.job.has_ended:
            return
        self._counters.aborted_requests += 1
        self._scheduler.end(call.job)
        self._forget(call)
        if error is not None:
            call.fail(error)

    def _forget(self, call: CallT) -> None:
        """A part of the call has ended, perhaps its last."""
        if call.is_over:
            self._calls.pop(call.request.request_id, None)
        self._life.wake()

    # --- what is told from outside ---

    def _cancel(self, request_id: str) -> None:
        if (call := self._calls.get(request_id)) is not None:
            self._abort(call, "its router cancelled it")
            call.cancelled()

    def _router_lost(self, router_id: str) -> None:
        for call in list(self._calls.values()):
            if call.request.router_id == router_id:
                self._abort(call, "its router is gone", WorkerLost(f"router {router_id} is gone"))

    def _send_prefix(self, ticket: Ticket, token_ids: Sequence[int], salt: bytes, log_context: LogContext) -> None:
        self._exports.send(ticket, token_ids, salt, log_context)

    def _leave(self) -> None:
        """The worker is being taken down: what has not begun, here or on its way here, is begun elsewhere."""
        self._life.take_no_more()
        for call in list(self._calls.values()):
            if not call.has_begun:
                reason = f"worker {self._peer.worker_id} is leaving"
                self._abort(call, reason, WorkerLeaving(reason))
        self._token_server.tell_stats()

    def _fail_all(self, reason: str) -> None:
        """Give every request up that has no answer yet: WorkerLost to its caller."""
        for call in list(self._calls.values()):
            if not call.job.has_ended:
                self._abort(call, reason, WorkerLost(reason))

    # --- what the roles differ in ---

    @abstractmethod
    def _decide(self) -> ScheduledStep[JobT]:
        """The next step, to run behind those under way."""

    @abstractmethod
    def _post_process(self, drawn: list[DrawnToken[JobT]]) -> None:
        """A step has ended that has drawn these."""

    @abstractmethod
    def _has_blocks(self, call: CallT) -> None:
        """The call's job was just admitted: begin its transfers."""

    @abstractmethod
    def _pulled(self, job: JobT, num_tokens: int) -> None:
        """So many tokens more than were here have been pulled; their KV is in the job's blocks."""

    @abstractmethod
    def _give_up_transfers(self, call: CallT, reason: str) -> None:
        """Nobody wants the KV of a call any more, pulls aside. Its blocks may be in use a little longer."""

    def _on_layer(self, step: ScheduledStep[JobT]) -> OnLayer | None:
        """Whom the engine tells of each layer of a step."""
        return None

    def _prefill_failed(self, request_id: str) -> None:
        """No KV comes from the request's prefill worker."""


def _unfollowable() -> RequestError:
    return RequestError(
        "the answer has come to where its schema or grammar can't be followed: nothing may come next there, or to find "
        "out what takes too long: make it simpler",
        code="grammar_too_complex",
    )


def read_prompt(drawn: DrawnToken[JobT], *, queue_s: float, prefill_s: float) -> PrefillReply:
    """What the call that computed a prompt returns. Where no token is wanted the one that was drawn is nobody's."""
    event, reading = drawn.event, drawn.job.sequence.reading
    if drawn.job.request.max_tokens == 0:
        event = TokenEvent(event.request_id, event.index, (), "length")
    return PrefillReply(
        event,
        drawn.job.num_cached_tokens,
        queue_s,
        prefill_s,
        scores=None if reading is None else reading.scores(),
        embedding=b"" if reading is None else reading.embedding(),
    )


def _tightest_tpot_s(decoding: Sequence[tuple[Promise, int]], costs: StepCosts | None) -> float | None:
    """What the worker keeps: else one request with a promise that nobody could keep would have all others refused."""
    promised_s = [promise.tpot_s for promise, _ in decoding if promise.tpot_s is not None]
    if not promised_s or costs is None:
        return min(promised_s, default=None)
    context_tokens = sum(num_tokens for _, num_tokens in decoding) // len(decoding)
    return max(min(promised_s), LEAST_STRETCH * (costs.reading_s(1) + costs.decode_s(1, context_tokens)))


def queued_work(work: Iterable[tuple[Promise, int]]) -> tuple[QueuedWork, ...]:
    """Tokens of each request, summed up by what the requests' classes are: the highest priority first."""
    tokens: Counter[tuple[str, int, float]] = Counter()
    requests: Counter[tuple[str, int, float]] = Counter()
    for promise, num_tokens in work:
        of_class = (promise.class_name, promise.priority, promise.share)
        tokens[of_class] += num_tokens
        requests[of_class] += 1
    order = sorted(requests, key=lambda of_class: (-of_class[1], of_class))
    return tuple(QueuedWork(*of_class, tokens[of_class], requests[of_class]) for of_class in order)
