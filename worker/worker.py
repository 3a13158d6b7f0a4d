"""A worker of either role: it computes prompts, decodes, and sends and receives KV.

A worker composes these parts:

    StepLoop        calls `step` while there is work, and notices an engine that dies or hangs
    StepsUnderWay   the steps that the engine has been given: one that runs, and perhaps the next behind it
    Scheduler       decides each step, with the role's policy
    TokenServer     the routers' connections: tokens and statistics out, cancellations in
    PromptSender    KV of prompts computed here, for the workers that go on with them
    PromptReceiver  KV of prompts computed elsewhere
    Pulls           prefixes from other workers' caches
    PrefixExports   prefixes from this worker's cache
    TierTransfers   KV from and to storage that outlives the worker
    Transfers       the tasks that wait for the ends of KV transfers

Routers call `prefill`, `decode` and `score_prompt`. No Ray and no torch here. `cluster/` wraps workers into
deployments; tests/simulation runs them on virtual time.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from twostroke.kvtiers.kv_tiers import TieredWorker
from twostroke.kvtransfer.ranks import AwaitedOffers
from twostroke.protocol.errors import (
    CallCancelled,
    RequestError,
    TicketRefused,
    TwostrokeError,
    WorkerLeaving,
    WorkerLost,
)
from twostroke.protocol.garbage import collection_seconds
from twostroke.protocol.messages import Cancel, ChangeRole, Drain, PrefillFailed, Resume, SendPrefix
from twostroke.protocol.requests import (
    DecodeReply,
    GenerateRequest,
    PrefillReply,
    ScoringParams,
    Ticket,
    TokenEvent,
    check_request,
)
from twostroke.protocol.stats import StepRole, WorkerInfo, WorkerStats
from twostroke.worker.calls import (
    GrammarCompiler,
    check_ticket,
    decode_reply,
    failed_alone,
    grammar_too_complex,
    logged,
    note_chunk,
    prefill_reply,
)
from twostroke.worker.deps import WorkerDeps
from twostroke.worker.experts import ExpertLoad
from twostroke.worker.link_probe import LinkProbe
from twostroke.worker.role import NO_OTHERS, Policies, WorkerRole
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.scheduler import Admitted, HostBlocks, NewTokens, ScheduledStep, Scheduler, Swapping
from twostroke.worker.speculator import speculator_of
from twostroke.worker.step_costs import StepCostFit, Utilization
from twostroke.worker.step_loop import EndedStep, LogitHealth, StepLoop, StepsUnderWay
from twostroke.worker.tier_transfers import TierTransfers
from twostroke.worker.token_server import FromRouter, TokenServer
from twostroke.worker.transfers import PrefixExports, PromptReceiver, PromptSender, Pulls, Transfers
from twostroke.worker.worker_stats import WorkerCounters, scheduler_fields, swap_fields, transfer_fields

_log = logging.getLogger(__name__)


class Worker:
    """Runs one engine's steps. `start` starts the receiver, `stop` closes receiver and sender."""

    def __init__(
        self,
        role: WorkerRole,
        deps: WorkerDeps,
        swap_space: HostBlocks | None = None,
        policies: Policies = NO_OTHERS,
    ):
        """`swap_space` is the engine's; None where preempted requests' KV is not kept.

        `policies` are those of the roles that the worker can change to.
        """
        config = role.config
        self._deps = deps
        self._role = role
        self._step_role: StepRole = role.name
        self._policies = policies
        self._config = config
        self._peer = deps.peer
        self._clock = deps.clock
        self._costs = StepCostFit(deps.expert_share)
        self._swap_space = swap_space
        self._swapping = Swapping(swap_space, role.preemption, deps.pool.block_size)
        self._jobs: dict[str, WorkerJob] = {}  # by request
        self._counters = WorkerCounters()
        self._logits = LogitHealth()
        self._utilization = Utilization(deps.work, deps.limits, deps.clock)
        self._expert_load = None if deps.expert_hits is None else ExpertLoad(deps.expert_hits, deps.clock)
        policy = role.make_policy(config, self._costs.costs, deps.pool)
        speculator = speculator_of(config.speculation, config.tpot_safety, self._costs.costs, deps.pool.groups)
        self._scheduler = Scheduler(deps.pool, config, deps.max_context, policy, self._swapping, speculator)
        self._steps = StepsUnderWay[ScheduledStep](deps.engine, deps.clock)
        pools = (deps.pool,) if self._swapping.pool is None else (deps.pool, self._swapping.pool)
        bound = partial(self._steps.bound_s, self._costs, config)
        self._loop = StepLoop(
            step=self._step,
            is_busy=self._is_busy,
            fail_all=self.fail_all,
            hang_up=self._hang_up,
            steps=self._steps,
            worker_id=deps.peer.worker_id,
            pools=pools,
            clock=deps.clock,
            config=config,
            step_bound_s=bound,
        )
        in_tiers = None if deps.tiers is None else deps.tiers.index
        self._token_server = TokenServer(
            on_message=self.on_message,
            on_router_lost=self._router_lost,
            stats=self.stats,
            peer=deps.peer,
            network=deps.network,
            config=config.token_channel,
            blocks=deps.pool,
            clock=deps.clock,
            tier_blocks=in_tiers,
        )
        self._transfers = Transfers(self._loop)
        self._offers = AwaitedOffers(deps.receiver)
        self._pulls = Pulls(
            deps.receiver,
            self._offers,
            self._transfers,
            self._scheduler,
            config.pull_wait_s,
            admit_offered=self._admit_offered,
            on_pulled=self._on_pulled,
        )
        self._exports = PrefixExports(deps.sender, deps.pool, self._transfers)
        self._tiers: TierTransfers | None = None
        if deps.tiers is not None:
            self._tiers = TierTransfers(
                deps.tiers, deps.pool, deps.sender, self._pulls, self._transfers, self._costs.costs, config
            )
        self._grammars: GrammarCompiler | None = None
        if deps.grammars is not None:
            self._grammars = GrammarCompiler(
                deps.grammars, speculator is not None, deps.clock, self._admit_offered, self._fail_alone
            )
        layers = deps.store.layout.layers_of(deps.store.rank)
        self._sending = PromptSender(
            deps.sender, self._scheduler, self._transfers, self._token_server, layers, self._forget
        )
        self._receiving = PromptReceiver(
            deps.receiver,
            self._offers,
            self._scheduler,
            self._transfers,
            config.router_wait_s,
            deps.clock,
            admit_offered=self._admit_offered,
            emit=lambda drawn: self._emit([drawn]),
        )
        self.probe = LinkProbe(deps.pool, deps.sender, deps.receiver, self._transfers, deps.clock)

    async def start(self, host: str) -> WorkerInfo:
        """Listen on `host` and begin to step. Raises ConnectionLost where `host` can't be listened on."""
        deps = self._deps
        transfer_addresses = await deps.receiver.start(host)
        if self._tiers is not None:
            await self._tiers.start(host, TieredWorker(self._peer, transfer_addresses, deps.store.layout.cut))
        token_address = await self._token_server.start(host)
        self._loop.start()
        return WorkerInfo(
            role=self._role.name,
            peer=self._peer,
            token_address=token_address,
            transfer_addresses=transfer_addresses,
            layout=deps.store.layout,
            num_blocks=deps.pool.num_blocks,
            max_context=deps.max_context,
            max_step_tokens=self._config.max_step_tokens,
            max_batch=self._config.max_batch,
            weights=deps.weights,
            vocab_size=deps.vocab_size,
            machine=deps.machine,
        )

    def stats(self) -> WorkerStats:
        """Return the worker's numbers now."""
        deps, balance = self._deps, self._deps.expert_balance
        self._costs.take_in()  # a router that sends nothing here for its costs would otherwise never see better ones
        costs = self._costs.costs()
        return WorkerStats(
            free_blocks=deps.pool.free_blocks,
            total_blocks=deps.pool.num_blocks,
            owned_blocks=deps.pool.owned_blocks,
            broken_logit_rows=deps.engine.num_broken_rows,
            collection_seconds=collection_seconds(),
            costs=costs,
            is_draining=self._loop.is_draining,
            dropped_log_lines=deps.dropped_log_lines(),
            has_hung=self._loop.has_hung,
            step_role=self._step_role,
            gpu=deps.gpu_use(),
            expert_skews=() if self._expert_load is None else self._expert_load.skews(),
            expert_copies=0 if balance is None else balance.num_copies,
            expert_imbalances=() if balance is None else balance.imbalances(),
            tiers=() if deps.tiers is None else deps.tiers.stats(),
            **scheduler_fields(self._scheduler, costs),
            **swap_fields(self._swapping, self._swap_space),
            **transfer_fields((deps.sender.stats, deps.receiver.stats)),
            **asdict(self._counters),
            **self._utilization.fields(),
        )

    def check_health(self) -> None:
        """Raises WorkerLost where the step loop has died, or does not run."""
        self._loop.check_health()

    def resume(self, *, is_ordered: bool = False) -> None:
        """Take requests again, unless the worker is to end, or an operator has it drain (`is_ordered` ends that)."""
        self._loop.resume(is_ordered=is_ordered)
        if is_ordered:
            self._token_server.send_stats()

    def change_role(self, role: StepRole) -> None:
        """Let steps prefer prompts, streams or neither from now on.

        Weights, compiled kernels, the prefix cache and all requests stay; so do the settings of the role that the
        worker began with. A role without a policy here is ignored.
        """
        if role == self._step_role or role not in self._policies:
            return
        _log.info("worker %s changes its role from %s to %s", self._peer.worker_id, self._step_role, role)
        self._step_role = role
        self._scheduler.policy = self._policies[role](self._config, self._costs.costs, self._deps.pool)
        self._token_server.send_stats()
        self._loop.wake()

    def engine_lost(self, reason: str) -> None:
        """Let the worker die of an engine that can't go on."""
        self._loop.engine_lost(reason)

    async def drain(self) -> None:
        """Take no new requests, and return once every call, transfer and probe under way has ended."""
        self._loop.stop_taking_requests()
        self._token_server.send_stats()
        await self._loop.drain()

    async def stop(self) -> None:
        """End everything; a step under way finishes first, unless stuck. May be called again."""
        self.fail_all(f"worker {self._peer.worker_id} is ending")
        await self._loop.stop()
        if self._grammars is not None:
            await self._grammars.close()
        await self._token_server.close()  # no router asks for a prefix any more
        if self._tiers is not None:
            await self._tiers.close()
        await self._deps.sender.close()
        await self._deps.receiver.close()
        await self._transfers.all_ended()

    # --- calls ---

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

    async def decode(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None) -> DecodeReply:
        """Continue the request to its end; its tokens go out on its router's token channel. Cancelling it aborts.

        With a ticket the prompt's KV is expected from the worker that computes it; should it not arrive, and without a
        ticket, the prompt is computed here. With `pull`, which comes only without a ticket, another worker was
        requested to send the KV of the prompt's prefix; what does not arrive in time, or not whole, is computed here.

        A request that its router cancels returns without a finish reason. Raises RequestError (can't be served),
        TicketRefused or EpochMismatch (a ticket for another worker), WorkerLost (the worker is ending, its engine died,
        or there is no token channel to the router any more)."""
        return await logged("decode", request, self._clock, self._decode(request, ticket, pull))

    async def _prefill(self, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None) -> PrefillReply:
        self._check_new(request, pull)
        if ticket is not None:
            check_ticket(request, ticket, ticket.source, self._peer)
        now = self._clock()
        with self._declining(pull):
            job = self._scheduler.add(request, now=now, is_prefill_only=True, awaits_offer=pull is not None)
        job.ticket, job.ready_at = ticket, now
        reply: PrefillReply = await self._reply_to(job, pull)
        return reply

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
        job.ticket, job.ready_at = ticket, now
        reply: DecodeReply = await self._reply_to(job, pull)
        return reply

    # --- a step: called by the step loop ---

    async def _step(self) -> bool:
        """Run one step: schedule, begin, wait, learn, post-process. Return False where there is nothing to do."""
        if not self._steps:
            await self._begin_step(self._scheduler.schedule())
        if await self._may_begin_ahead():
            await self._begin_step(self._scheduler.schedule(self._steps.last))
        if not self._steps:
            return False
        ended = await self._wait_for_step()
        self._learn(ended)
        self._note_chunks(ended.step)
        self._end_failed(ended.step)
        self._emit(self._scheduler.complete(ended.step, ended.sampled))
        return True

    def _is_busy(self) -> bool:
        """True while any call, transfer or probe is under way. Steps may use blocks of requests that have ended."""
        return bool(self._steps or self._jobs or self._transfers.is_busy)

    async def _may_begin_ahead(self) -> bool:
        """Wait until it is time to schedule behind the step that runs; return False where that ends before."""
        return bool(self._steps) and self._config.run_ahead and await self._steps.nears_its_end(self._costs.costs())

    async def _begin_step(self, step: ScheduledStep) -> None:
        """Begin the transfers of admitted jobs, and hand the step to the engine."""
        self._begin_transfers(step.admitted)
        if step.is_empty:
            return
        now = self._clock()
        for job in (entry.job for entry in step.entries):
            job.note_step(now)
        copies = [swap.copy for swap in step.swaps]
        await self._steps.begin(step, step.batch, self._sending.layers_of(step), copies)

    async def _wait_for_step(self) -> EndedStep[ScheduledStep]:
        """Wait for the step that runs. Where the engine fails, its steps are abandoned and its error is raised."""
        try:
            return await self._steps.first_ended()
        except Exception:
            for step in self._steps.give_up():
                self._scheduler.abandon(step)
            raise

    def _learn(self, ended: EndedStep[ScheduledStep]) -> None:
        """Count a step that has run, and learn what steps cost."""
        self._counters.steps += 1
        self._counters.step_seconds += ended.seconds
        self._counters.computed_tokens += ended.content.prompt_tokens
        self._utilization.add(ended.content)
        is_scored = any((one.job.request.scoring or _NO_SCORES).logprobs is not None for one in ended.step.entries)
        if not ended.step.swaps:  # the time of copies says nothing about other steps
            self._costs.add(ended.content, ended.seconds, is_plain=not is_scored)
            if not ended.content.prompt_tokens:
                self._scheduler.learn_rows(ended.step, ended.seconds)
        prompts_s = ended.seconds * ended.content.prompts_part(self._costs.costs())
        self._swapping.step_ended(ended.content.prompt_tokens, prompts_s)

    def _note_chunks(self, step: ScheduledStep) -> None:
        now = self._clock()
        for entry in (one for one in step.entries if one.job.is_prefill_only):
            self._counters.computed_tokens += len(entry.step.token_ids) == 1  # its content counts that as a row
            if not entry.job.has_ended:
                note_chunk(entry.job, now)

    def _emit(self, drawn: Sequence[NewTokens]) -> None:
        """Send one frame to each router whose requests have new tokens, and answer the calls that are finished."""
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        for one in drawn:
            self._counters.generated_tokens += len(one.tokens)
            if one.job.is_prefill_only:
                self._finish_prefill(one)
                continue
            events[one.job.request.router_id].append(one.event)
            if one.finish_reason is not None:
                self._counters.finished_requests += 1
                self._forget(one.job)
                one.job.answer(decode_reply(one.job, one.finish_reason))
        for router_id, of_router in events.items():
            self._token_server.emit(router_id, of_router)

    def _finish_prefill(self, drawn: NewTokens) -> None:
        """Commit the transfer of a prompt that is computed, and answer its call."""
        job = drawn.job
        if job.outgoing is not None:
            job.outgoing.commit(drawn.tokens[0])
        self._counters.finished_requests += 1
        self._forget(job)
        try:
            job.answer(prefill_reply(drawn, self._clock()))
        except Exception as error:
            job.fail(failed_alone(job.request, error))

    def _end_failed(self, step: ScheduledStep) -> None:
        """End requests for which the step has failed, or whose grammar did not constrain the token that was drawn.

        Where all logits are broken, request after request, the worker itself dies.
        """
        for job, part in ((entry.job, entry.step) for entry in step.entries):
            if (error := job.sequence.fault.error) is not None and not job.has_ended:
                self._fail_alone(job, error)
            constraint = None if part.draw is None else part.draw.constraint
            if constraint is None or job.has_ended:
                continue
            if constraint.has_failed(part.start + len(part.token_ids)):
                self._abort(job, "its grammar can't be followed", grammar_too_complex())
        drawing = [one.job.request.request_id for one in step.entries for row in one.rows if row.draw is not None]
        broken = self._logits.step_ended(self._deps.engine.num_broken_rows, drawing)
        if broken is not None:
            self._loop.engine_lost(broken)

    # --- inside a call ---

    def _check_new(self, request: GenerateRequest, pull: Ticket | None) -> None:
        """Raises RequestError, TicketRefused, EpochMismatch or WorkerLost for a call that can't be served."""
        self._loop.check_takes_requests()
        check_request(request, self._deps.vocab_size)
        if request.request_id in self._jobs:
            raise RequestError(f"request {request.request_id} is here already", code="duplicate_request", status=409)
        if request.grammar and self._deps.grammars is None:
            raise RequestError("this worker can't hold an answer to a grammar", code="grammar_unsupported")
        if pull is not None:
            check_ticket(request, pull, pull.target, self._peer)

    @contextmanager
    def _declining(self, pull: Ticket | None) -> Iterator[None]:
        """Decline the offer to a request that is refused: its source would keep the blocks for nothing."""
        try:
            yield
        except RequestError:
            if pull is not None:
                self._offers.refuse_offer(pull)
            raise

    async def _reply_to(self, job: WorkerJob, pull: Ticket | None) -> Any:
        """Begin a new call, and wait for its reply. Being cancelled aborts it."""
        job.reply = asyncio.get_running_loop().create_future()
        self._jobs[job.request.request_id] = job
        if self._grammars is not None:
            self._grammars.begin(job)
        if pull is not None:
            self._pulls.await_offer(job, pull)
        elif self._tiers is not None:
            self._tiers.begin_read(job)
        if job.wants_transfer and job.ticket is not None:
            self._receiving.await_offer(job, job.ticket)
        self._loop.wake()
        try:
            return await job.reply
        except asyncio.CancelledError:
            self._abort(job, "the request was cancelled")
            raise
        finally:
            if job.compiling is not None:
                job.compiling.cancel()

    def _fail_alone(self, job: WorkerJob, error: BaseException) -> None:
        """End one request that can't be computed."""
        refusal = error if isinstance(error, RequestError) else failed_alone(job.request, error)
        self._abort(job, str(refusal), refusal)

    def _abort(self, job: WorkerJob, reason: str, error: TwostrokeError | None = None) -> None:
        """End a request in whatever phase it is, and give up its transfers, which may outlive it.

        `error` is raised to its call's awaiter, where there still is one.
        """
        self._give_up_transfers(job, reason)
        self._pulls.give_up_pull(job, reason)
        if job.has_ended:
            return
        self._counters.aborted_requests += 1
        self._scheduler.end(job)
        self._forget(job)
        if error is not None:
            job.fail(error)

    def _forget(self, job: WorkerJob) -> None:
        """Forget a request of which a part has ended, if that was its last."""
        if job.is_over and job.request.request_id in self._jobs:
            del self._jobs[job.request.request_id]
            if self._tiers is not None:
                self._tiers.request_ended(job)
        self._loop.wake()

    # --- called by the token server and the step loop ---

    def on_message(self, message: FromRouter) -> None:
        """Do what a router wants. Never waits."""
        match message:
            case Cancel(request_id):
                self._abort_request(request_id)
            case Drain(is_ordered):
                self.leave(is_ordered=is_ordered)
            case Resume():
                self.resume(is_ordered=True)
            case ChangeRole(role):
                self.change_role(role)
            case PrefillFailed(request_id):  # the router repeats it until it hears of the request
                if (job := self._jobs.get(request_id)) is not None and not job.is_prefill_only:
                    self._receiving.compute_prompt(job)
            case SendPrefix(ticket, token_ids, cache_salt, log_context):
                self._exports.send_prefix(ticket, token_ids, cache_salt, log_context)

    def _abort_request(self, request_id: str) -> None:
        """End a request whose client has left, or whose attempt its router has ended."""
        if (job := self._jobs.get(request_id)) is None:
            return
        self._abort(job, "its router cancelled it")
        if job.is_prefill_only:
            job.fail(CallCancelled("the router cancelled the request"))
        else:
            job.answer(decode_reply(job, None))

    def _router_lost(self, router_id: str) -> None:
        """End the requests of a router that is gone: no event reaches it any more."""
        for job in list(self._jobs.values()):
            if job.request.router_id == router_id:
                self._abort(job, "its router is gone", WorkerLost(f"router {router_id} is gone"))

    def leave(self, *, is_ordered: bool = False) -> None:
        """Take no new requests until `resume`. Requests that have not begun go elsewhere.

        `is_ordered`: an operator's order, which `resume` does not take back unless the operator does.
        """
        self._loop.stop_taking_requests(is_ordered=is_ordered)
        for job in list(self._jobs.values()):
            if not job.has_begun:
                reason = f"worker {self._peer.worker_id} is leaving"
                self._abort(job, reason, WorkerLeaving(reason))
        self._token_server.send_stats()

    def fail_all(self, reason: str) -> None:
        """Raise WorkerLost to the caller of every request that has no answer yet, and say so on token channels."""
        for job in list(self._jobs.values()):
            if not job.is_prefill_only:
                request, index = job.request, job.sequence.num_output_tokens
                self._token_server.emit(request.router_id, (TokenEvent(request.request_id, index, (), error=reason),))
        for job in list(self._jobs.values()):
            if not job.has_ended:
                self._abort(job, reason, WorkerLost(reason))

    async def _hang_up(self) -> None:
        """Close the token channel, after the last numbers: routers see it go, and turn elsewhere."""
        self._token_server.send_stats()
        await self._token_server.close()

    # --- KV transfer ---

    def _admit_offered(self) -> None:
        """Admit requests whose KV is offered, though a step may be under way."""
        self._begin_transfers(self._scheduler.admit_offered())
        self._loop.wake()

    def _begin_transfers(self, admitted: Admitted) -> None:
        for job in admitted.declined:
            self._pulls.refuse_offer(job)
        for job in admitted.jobs:
            self._begin_transfer(job)

    def _begin_transfer(self, job: WorkerJob) -> None:
        """Begin the transfers of a request that was just admitted."""
        if job.is_prefill_only:
            job.note_step(self._clock())
            if job.is_receiving:
                self._pulls.begin_pull(job)
            self._sending.begin(job)
        elif job.is_receiving and job.ticket is not None:
            self._receiving.begin(job, job.ticket)
        elif job.is_receiving:
            job.ready_at = self._clock()
            self._pulls.begin_pull(job)

    def _on_pulled(self, job: WorkerJob, num_tokens: int) -> None:
        """Account for a pulled prefix, of which `num_tokens` tokens were not here; their KV is in the job's blocks."""
        if job.reads_tiers:
            job.tier_tokens = num_tokens
        else:
            self._counters.pulled_tokens += num_tokens
        if job.is_prefill_only:
            self._sending.pulled(job)
        else:
            job.transfer_s = self._clock() - job.ready_at
            job.ready_at += job.transfer_s

    def _give_up_transfers(self, job: WorkerJob, reason: str) -> None:
        """Give up the KV transfer of a request, pulls aside. Its blocks may be in use a little longer."""
        if not job.is_prefill_only:
            self._receiving.give_up(job, reason)
        else:
            job.is_aborted = True
            if job.outgoing is not None:
                job.outgoing.abort(reason)


_NO_SCORES = ScoringParams()
