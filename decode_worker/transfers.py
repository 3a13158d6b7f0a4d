"""All KV that comes to a decode worker and goes from it: from prefill workers, and prefixes from and to any worker.

Prompts whose KV comes from a prefill worker: the offer, the blocks it may fill, the transfer, and going on without.

An offer is waited for as long as the request lives, for its router watches over the prefill worker: a long queue there
is no reason to compute the prompt twice, and where no KV comes, the router says so. An offer in turn waits, and its KV
at the prefill worker with it, as long as there is no room here.

What does not come is computed here, and is nobody's error. But not before the router says so, who may know better: what
the prefill worker died of may be this very prompt.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.decode_worker.calls import Call, Calls
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.jobs import DecodeJob, Progress
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.kvtransfer.offers import AwaitedOffers
from twostroke.kvtransfer.sides import Incoming, ReceivingSide, SendingSide
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import Address, Ticket
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.pulls import PrefixExports, PullCallbacks, Pulls

_log = logging.getLogger(__name__)


class Handovers:
    """One worker's. After a transfer that failed the router's word is waited for `router_wait_s`.

    `admit` is called where an offer has come, to let in whose turn it is though a step may be under way; `got_on` with
    what a request's first token makes of it; `wake` where there may be something to do. All are called on the event
    loop and must not wait.
    """

    def __init__(
        self,
        *,
        receiver: ReceivingSide,
        offers: AwaitedOffers,
        scheduler: DecodeScheduler,
        clock: Clock,
        router_wait_s: float,
        admit: Callable[[], None],
        got_on: Callable[[Progress], None],
        wake: Callable[[], None],
    ):
        self._receiver = receiver
        self._scheduler = scheduler
        self._clock = clock
        self._admit = admit
        self._got_on = got_on
        self._wake = wake
        self._router_wait_s = router_wait_s
        self._offers = offers
        self._receiving: dict[Call, asyncio.Task[None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any KV may still be written."""
        return bool(self._receiving)

    def expect(self, call: Call) -> None:
        """Wait for the offer to a call with a ticket; it may be here already."""
        if call.ticket is not None:
            self._offers.wait(call.ticket, came=lambda: self._offered(call))

    def begin(self, call: Call) -> None:
        """Let KV into the blocks that the call's job now holds."""
        sequence = call.job.sequence
        if call.ticket is not None:
            call.incoming = self._receiver.expect(
                call.ticket, sequence.block_ids, len(sequence.token_ids), skip_tokens=sequence.num_computed
            )
            self._receiving[call] = asyncio.create_task(
                self._receive(call, call.incoming), name=f"receive {call.request.request_id}"
            )

    def do_without(self, call: Call) -> None:
        """Have the prompt computed here, now or when its transfer has ended."""
        call.is_on_its_own = True
        if call.incoming is not None:
            call.incoming.abort("the prefill failed")  # `_receive` goes on from there
        self.refuse(call)
        self._scheduler.compute_here(call.job)
        self._wake()

    def refuse(self, call: Call) -> None:
        """Or the prefill worker would keep its blocks for nobody. Harmless once the transfer has begun."""
        if call.ticket is not None and call.incoming is None:
            self._offers.refuse(call.ticket)
        if call.patience is not None:
            call.patience.cancel()

    async def ended(self) -> None:
        """Wait until no transfer is under way; the receiver is closed, so none begins."""
        await asyncio.gather(*self._receiving.values())

    def _offered(self, call: Call) -> None:
        self._scheduler.offered(call.job)
        self._admit()
        if call.ticket is not None and call.incoming is None:
            self._receiver.keep(call.ticket)  # until there is room: `begin`, or nobody wants it: `refuse`
        self._wake()

    async def _receive(self, call: Call, incoming: Incoming) -> None:
        """See a transfer to its end: until then its blocks stay the job's, whatever becomes of the job."""
        started_at = self._clock()
        try:
            first_token = await incoming.verified()
            if first_token is None:
                call.is_on_its_own = True  # the other side believes that all is well
                raise TransferFailed("it came without a first token, as a cached prefix does")
        except TransferFailed as error:
            _log.warning("the KV of request %s did not come: %s", call.request.request_id, error)
            self._scheduler.transfer_failed(call.job)
            if not (call.is_on_its_own or call.job.has_ended):
                self._scheduler.wait_on(call.job)
                call.patience = asyncio.get_running_loop().call_later(self._router_wait_s, self.do_without, call)
        else:
            call.transfer_s = self._clock() - started_at
            progress = self._scheduler.verified(call.job, first_token)
            if progress is not None:
                self._got_on(progress)
        finally:
            call.ready_at = self._clock()
            del self._receiving[call]
            self._wake()


@dataclass(frozen=True, slots=True)
class TransferCallbacks:
    """What the worker wants to hear. All are called on the event loop and must not wait."""

    got_on: Callable[[Progress], None]  # a request's first token has come, with its KV
    pulled: Callable[[int], None]  # so many tokens more than were here
    wake: Callable[[], None]  # there may be something to do


class Transfers:
    """One worker's. `receiver` is None where no KV comes, `sender` where none goes; `close` closes both."""

    def __init__(
        self,
        *,
        receiver: ReceivingSide | None,
        sender: SendingSide | None,
        scheduler: DecodeScheduler,
        calls: Calls,
        pool: BlockPool,
        clock: Clock,
        config: DecodeConfig,
        told: TransferCallbacks,
    ):
        self._receiver = receiver
        self._sender = sender
        self._scheduler = scheduler
        self._calls = calls
        self._clock = clock
        self._told = told
        self._handovers: Handovers | None = None
        self._pulls: Pulls[DecodeJob] | None = None
        self._exports: PrefixExports | None = None
        if receiver is not None:
            offers = AwaitedOffers(receiver)
            self._handovers = Handovers(
                receiver=receiver,
                offers=offers,
                scheduler=scheduler,
                clock=clock,
                router_wait_s=config.router_wait_s,
                admit=self._admit_offered,
                got_on=told.got_on,
                wake=told.wake,
            )
            self._pulls = Pulls(
                receiver=receiver,
                offers=offers,
                scheduler=scheduler.prefixes,
                wait_s=config.pull_wait_s,
                told=PullCallbacks(admit=self._admit_offered, pulled=self._pulled, ended=lambda _: told.wake()),
            )
        if sender is not None:
            self._exports = PrefixExports(sender=sender, pool=pool, ended=told.wake)

    @property
    def can_receive(self) -> bool:
        """Whether any KV comes from elsewhere."""
        return self._receiver is not None

    @property
    def is_busy(self) -> bool:
        """Whether any KV may still be read or written."""
        parts = (self._handovers, self._pulls, self._exports)
        return any(part is not None and part.is_busy for part in parts)

    async def start(self, host: str) -> tuple[Address, ...]:
        """Where KV may be offered, if any comes. Raises ConnectionLost where `host` can't be listened on."""
        return () if self._receiver is None else await self._receiver.start(host)

    async def close(self) -> None:
        """End all transfers; returns once nothing reads or writes the blocks any more."""
        for side in (self._receiver, self._sender):
            if side is not None:
                await side.close()
        if self._handovers is not None:
            await self._handovers.ended()
        if self._pulls is not None:
            await self._pulls.ended()
        if self._exports is not None:
            await self._exports.outlive()

    def expect(self, call: Call, pull: Ticket | None) -> None:
        """Wait for the offer of what a new call's job is waiting for."""
        if self._handovers is not None:
            self._handovers.expect(call)
        if self._pulls is not None and pull is not None:
            self._pulls.expect(call.job, pull)

    def decline(self, pull: Ticket) -> None:
        """Take no offer to a request that is refused."""
        if self._pulls is not None:
            self._pulls.decline(pull)

    def begin(self, reserved: Iterable[DecodeJob]) -> None:
        """Let KV into the blocks that these jobs now hold, and tell of offers that the scheduler has declined."""
        if self._handovers is None or self._pulls is None:
            return
        for job in self._scheduler.prefixes.take_declined():
            self._pulls.refuse(job)
        for job in reserved:
            if job.wants_transfer:
                self._handovers.begin(self._calls.of_job(job))
            else:
                self._calls.of_job(job).ready_at = self._clock()
                self._pulls.begin(job)

    def do_without(self, call: Call) -> None:
        """No KV comes from the call's prefill worker."""
        if self._handovers is not None:
            self._handovers.do_without(call)

    def give_up(self, call: Call, reason: str) -> None:
        """Nobody wants a call's KV any more; its blocks may be written until its transfers have ended."""
        if call.incoming is not None:
            call.incoming.abort(reason)
        if self._pulls is not None:
            self._pulls.give_up(call.job, reason)

    def forget(self, call: Call) -> None:
        """The call has returned: take no offer to it any more."""
        if self._handovers is not None:
            self._handovers.refuse(call)

    def send_prefix(self, ticket: Ticket, token_ids: Sequence[int], cache_salt: bytes) -> None:
        """Send what is cached here of these tokens to another worker."""
        if self._exports is not None:
            self._exports.send(ticket, token_ids, cache_salt)

    def _admit_offered(self) -> None:
        self.begin(self._scheduler.reserve_offered())

    def _pulled(self, job: DecodeJob, num_tokens: int) -> None:
        call = self._calls.of_job(job)
        call.transfer_s = self._clock() - call.ready_at
        call.ready_at += call.transfer_s
        self._told.pulled(num_tokens)
