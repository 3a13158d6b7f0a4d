"""All KV that comes to a decode worker and goes from it: from prefill workers, and prefixes from and to any worker."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.decode_worker.calls import Call, Calls
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.handovers import Handovers
from twostroke.decode_worker.jobs import DecodeJob, Progress
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.kvtransfer.offers import AwaitedOffers
from twostroke.kvtransfer.prefix_export import PrefixExports
from twostroke.kvtransfer.pulls import PullCallbacks, Pulls
from twostroke.kvtransfer.sides import ReceivingSide, SendingSide
from twostroke.model.block_pool import BlockPool
from twostroke.protocol.clock import Clock
from twostroke.protocol.tickets import Address, Ticket


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
