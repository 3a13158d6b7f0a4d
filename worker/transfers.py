"""KV between a worker and others: prompts sent and received, prefixes pulled and exported.

A transfer may outlive its request. Until it has ended, the blocks stay as they are.

A pulled prefix is the beginning of a prompt that arrives from another worker's prefix cache. Where its offer does not
arrive soon, or its transfer fails, the prompt is computed here; no request fails for it.

An exported prefix is a part of this worker's cache, sent to another worker that expects it. Its blocks are referenced
from the match to the transfer's end. All its KV is there when the transfer begins.

KV of a prompt goes to the worker that goes on with it layer by layer, while it is still being computed. That worker
waits for the offer as long as the request lives: a long queue there is no reason to compute the prompt twice, and
where no KV comes, the router says so. An offer waits too, and its KV at the other worker with it, while there is no
room.

A prompt whose KV does not arrive is computed by the receiver, unless the router starts another attempt. The router
decides when, because the prompt itself may have killed the other worker; without a decision within `router_wait_s` it
is computed here."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from twostroke.kvtransfer.ranks import AwaitedOffers, Incoming, Outgoing, ReceivingSide, SendingSide
from twostroke.model.step import OnLayer
from twostroke.protocol.block_hash import BlockHash, next_hash, root_hash
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import LogContext, Ticket, about
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.scheduler import NewTokens, ScheduledStep, Scheduler
from twostroke.worker.step_loop import StepLoop
from twostroke.worker.token_server import TokenServer

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Transfers:
    """Tasks that wait for the ends of a worker's transfers. Blocks stay until then, whatever becomes of requests."""

    def __init__(self, loop: StepLoop | None = None):
        """`loop` is woken after each end: blocks may be free, or nothing left to do."""
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_busy(self) -> bool:
        """True while a transfer may still read or write blocks."""
        return bool(self._tasks)

    def track(self, transfer: Coroutine[Any, Any, ResultT], name: str) -> "asyncio.Task[ResultT]":
        """Run a transfer, and what follows from its end, in a task that outlives its request."""
        task = asyncio.create_task(transfer, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)
        return task

    async def all_ended(self) -> None:
        """Wait until no transfer is under way: soon after both sides are closed, so that none can begin."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """Have the step loop look for work."""
        if self._loop is not None:
            self._loop.wake()

    def _has_ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        self.wake()


@dataclass(eq=False)
class Pulls:
    """One worker's pulls: prefixes that arrive from other workers' caches."""

    receiver: ReceivingSide
    offers: AwaitedOffers
    transfers: Transfers
    scheduler: Scheduler
    wait_s: float  # longest wait for an offer
    admit_offered: Callable[[], None]
    on_pulled: Callable[[WorkerJob, int], None]  # a prefix that has come, and how many of its tokens were not here

    def await_offer(self, job: WorkerJob, ticket: Ticket, wait_s: float | None = None) -> None:
        """Wait for the offer to a job that awaits one, `self.wait_s` unless told; it may be here already."""
        job.pull_ticket = ticket
        self.offers.await_offer(
            ticket,
            self.wait_s if wait_s is None else wait_s,
            on_offered=lambda: self._offered(job, ticket),
            on_missing=lambda: self._not_offered(job),
        )

    def begin_pull(self, job: WorkerJob) -> None:
        """Receive the offered KV into the blocks of a job that was admitted to pull."""
        sequence, ticket = job.sequence, job.pull_ticket
        assert ticket is not None
        job.pull_ticket = None
        job.pull = self.receiver.expect_transfer(
            ticket, sequence.block_ids, job.offered_tokens, skip_tokens=sequence.num_computed
        )
        self.transfers.track(self._await_pull(job, job.pull), f"pull {job.request.request_id}")

    def refuse_offer(self, job: WorkerJob) -> None:
        """Refuse the job's offer. Harmless where none is expected, or it is taken already."""
        if job.pull_ticket is not None:
            ticket, job.pull_ticket = job.pull_ticket, None
            self.offers.refuse_offer(ticket)

    def give_up_pull(self, job: WorkerJob, reason: str) -> None:
        """Give up the job's pull, in whatever state it is. Its blocks may be written a little longer.

        Harmless where nothing is pulled.
        """
        self.refuse_offer(job)
        if job.pull is not None:
            job.pull.abort(reason)

    def _offered(self, job: WorkerJob, ticket: Ticket) -> None:
        num_tokens = self.receiver.offered_tokens(ticket.transfer_id)
        if not num_tokens:  # it was withdrawn again
            self._not_offered(job)
            return
        self.scheduler.offered_prefix(job, num_tokens)
        self.admit_offered()

    def _not_offered(self, job: WorkerJob) -> None:
        self.refuse_offer(job)
        self.scheduler.no_prefix(job)
        self.transfers.wake()

    async def _await_pull(self, job: WorkerJob, incoming: Incoming) -> None:
        """Wait for the end of a pull. Until then the blocks stay the job's, whatever becomes of the job."""
        try:
            await incoming.verified()
        except TransferFailed as error:
            _log.warning("the prefix was not received: %s", error, extra=about(job.request.log_context))
            self.scheduler.pull_failed(job)
        else:
            if num_tokens := self.scheduler.pulled(job):
                self.on_pulled(job, num_tokens)
        finally:
            job.pull = None


@dataclass(frozen=True)
class PrefixExports:
    """The prefixes that one worker is sending out of its pool."""

    sender: SendingSide
    pool: BlockPool
    transfers: Transfers

    def send_prefix(self, ticket: Ticket, token_ids: Sequence[int], cache_salt: bytes, log_context: LogContext) -> bool:
        """Begin to send the longest cached prefix of `token_ids`; return whether there is one. Never waits.

        It ends before the last token: the target must compute one, or it has nothing to draw from. Where nothing is
        cached, the transfer is declined. A ticket of another source is ignored.
        """
        block_ids = self.pool.match(_matchable_hashes(token_ids, self.pool.block_size, cache_salt))
        if self.pool.free_blocks < 0:  # too many blocks of windows to share now
            self.pool.release(block_ids)
            block_ids = []
        if not block_ids:
            try:
                self.sender.decline_transfer(ticket, "nothing of the prefix is cached any more")
            except ValueError as error:
                _log.warning("a prefix was requested with a wrong ticket: %s", error, extra=about(log_context))
            return False
        num_tokens = len(block_ids) // self.pool.groups.count * self.pool.block_size
        transfer = self.sender.begin_transfer(ticket, num_tokens, block_ids, num_tokens)
        transfer.commit(None)
        self.transfers.track(
            self._await_send(transfer, block_ids, about(log_context, tokens=num_tokens)),
            f"export to {ticket.target.worker_id}",
        )
        return True

    async def _await_send(self, transfer: Outgoing, block_ids: Sequence[int], extra: dict[str, Any]) -> None:
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.info("a cached prefix was not sent: %s", error, extra=extra)
        else:
            _log.info("a cached prefix was sent", extra=extra)
        finally:
            self.pool.release(block_ids)


def _matchable_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> Iterator[BlockHash]:
    """Yield the names of the full blocks that leave at least one token."""
    parent = root_hash(salt)
    for end in range(block_size, len(token_ids), block_size):
        parent = next_hash(parent, token_ids[end - block_size : end])
        yield parent


@dataclass(eq=False)
class PromptSender:
    """The prompts whose KV one worker sends on."""

    sender: SendingSide
    scheduler: Scheduler
    transfers: Transfers
    token_server: TokenServer
    layers: range  # of the rank that talks to routers
    forget: Callable[[WorkerJob], None]  # a request of which a part has ended

    def begin(self, job: WorkerJob) -> None:
        """Begin the transfer of an admitted prompt whose KV is wanted elsewhere."""
        if job.ticket is None:
            return
        sequence = job.sequence
        num_there = sequence.num_computed  # whole blocks, except for tokens that are still to be copied
        if sequence.awaits_copy:
            num_there -= num_there % sequence.block_size
        job.outgoing = self.sender.begin_transfer(job.ticket, len(sequence.token_ids), sequence.block_ids, num_there)
        self.scheduler.begin_sending(job)
        self.transfers.track(self._await_end(job, job.outgoing), f"send {job.request.request_id}")

    def layers_of(self, step: ScheduledStep) -> OnLayer | None:
        """Return the function that sends each layer of a step once the engine has computed it; None: none is sent."""
        sending = [(entry, outgoing) for entry in step.entries if (outgoing := entry.job.outgoing) is not None]
        if not sending:
            return None
        for entry, outgoing in sending:
            if entry.job.sequence.groups.windowed:
                outgoing.windows_moved(entry.step.block_ids)

        def computed(layer: int) -> None:
            for entry, outgoing in sending:
                if not entry.job.has_ended:
                    outgoing.layer_ready(layer, entry.step.start + len(entry.step.token_ids))

        return computed

    def pulled(self, job: WorkerJob) -> None:
        """Send the KV of a prefix that was pulled from elsewhere."""
        if job.outgoing is not None:
            for layer in self.layers:
                job.outgoing.layer_ready(layer, job.sequence.num_computed)

    async def _await_end(self, job: WorkerJob, transfer: Outgoing) -> None:
        """Wait for the end of a transfer, and release the job's blocks."""
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.warning("the KV was not sent: %s", error, extra=about(job.request.log_context))
            if not job.is_aborted:  # else no worker waits for it
                # Through its router, since the other worker may not even know that it waits for KV.
                self.token_server.kv_not_sent(job.request.router_id, job.request.request_id)
        finally:
            job.outgoing = None
            self.scheduler.end_sending(job)
            self.forget(job)


@dataclass(eq=False)
class PromptReceiver:
    """The prompts whose KV one worker receives."""

    receiver: ReceivingSide
    offers: AwaitedOffers
    scheduler: Scheduler
    transfers: Transfers
    router_wait_s: float
    clock: Clock
    admit_offered: Callable[[], None]
    emit: Callable[[NewTokens], None]  # a token that has come with the KV

    def await_offer(self, job: WorkerJob, ticket: Ticket) -> None:
        """Wait for the offer of a new request's KV; it may be here already."""
        self.offers.await_offer(ticket, on_offered=lambda: self._offered(job, ticket))

    def begin(self, job: WorkerJob, ticket: Ticket) -> None:
        """Receive the offered KV into the blocks of a job that was just admitted."""
        sequence = job.sequence
        job.incoming = self.receiver.expect_transfer(
            ticket, sequence.block_ids, len(sequence.token_ids), skip_tokens=sequence.num_computed
        )
        self.transfers.track(self._receive(job, job.incoming), f"receive {job.request.request_id}")

    def compute_prompt(self, job: WorkerJob) -> None:
        """Have the prompt computed here, now or when its transfer has ended."""
        job.computes_prompt = True
        self.give_up(job, "the prefill failed")  # `_receive` goes on from there
        self.scheduler.compute_here(job)
        self.transfers.wake()

    def give_up(self, job: WorkerJob, reason: str) -> None:
        """Give up the request's transfer. Its blocks may be written a little longer."""
        if job.incoming is not None:
            job.incoming.abort(reason)
        elif job.ticket is not None:
            self.offers.refuse_offer(job.ticket)  # or the other worker would keep its blocks for nothing
        if job.router_wait is not None:
            job.router_wait.cancel()

    def _offered(self, job: WorkerJob, ticket: Ticket) -> None:
        self.scheduler.offered(job)
        self.admit_offered()
        if job.incoming is None:
            self.receiver.keep_offer(ticket)  # until there is room, or the request ends

    async def _receive(self, job: WorkerJob, incoming: Incoming) -> None:
        """Wait for the end of a transfer. Until then its blocks stay the job's, whatever becomes of the job."""
        started_at = self.clock()
        try:
            first_token = await incoming.verified()
            if first_token is None:
                job.computes_prompt = True  # the source takes the transfer for a success
                raise TransferFailed("it has no first token, like a cached prefix")
        except TransferFailed as error:
            _log.warning("the KV was not received: %s", error, extra=about(job.request.log_context))
            self.scheduler.transfer_failed(job)
            if not (job.computes_prompt or job.has_ended):
                self.scheduler.wait_on(job)
                job.router_wait = asyncio.get_running_loop().call_later(self.router_wait_s, self.compute_prompt, job)
        else:
            job.transfer_s = self.clock() - started_at
            drawn = self.scheduler.verified(job, first_token)
            if drawn is not None:
                self.emit(drawn)
        finally:
            job.ready_at = self.clock()
