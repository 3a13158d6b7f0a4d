"""`decode` calls whose KV comes from a prefill worker: the offer, the blocks it may fill, and going on without.

An offer is waited for as long as the request lives, for its router watches over the prefill worker: a long queue there
is no reason to compute the prompt twice, and where no KV comes, the router says so. An offer in turn waits, and its KV
at the prefill worker with it, as long as there is no room here.

What does not come is computed here, and is nobody's error. But not before the router says so, who may know better: what
the prefill worker died of may be this very prompt.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.decode_worker.jobs import DecodeJob
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.kvtransfer.sides import AwaitedOffers, Incoming, ReceivingSide
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import DecodeReply, FinishReason
from twostroke.worker.pulls import Transfers
from twostroke.worker.scheduler import DrawnToken
from twostroke.worker.sequence import Phase
from twostroke.worker.worker import WorkerCall

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DecodeCall(WorkerCall[DecodeJob, DecodeReply]):
    """A `decode` call that has not returned."""

    ready_at: float = 0.0  # when it could first have been stepped: its arrival, or when its KV was there
    stepped_at: float | None = None
    transfer_s: float = 0.0
    incoming: Incoming | None = None
    is_on_its_own: bool = False  # its prompt may be computed here
    patience: asyncio.TimerHandle | None = None  # its transfer has failed; for how long it waits for the router's word

    @property
    def has_begun(self) -> bool:
        return self.stepped_at is not None or self.job.is_offered or self.job.phase is not Phase.WAITING

    def finish(self, reason: FinishReason | None) -> None:
        """Return from the call, unless its awaiter is gone."""
        stepped_at = self.ready_at if self.stepped_at is None else self.stepped_at
        self.answer(
            DecodeReply(
                num_output_tokens=self.job.sequence.num_output_tokens,
                finish_reason=reason,
                num_cached_tokens=self.job.num_cached_tokens,
                transfer_s=self.transfer_s,
                queue_s=max(0.0, stepped_at - self.ready_at),
                num_preemptions=self.job.num_preemptions,
            )
        )

    def cancelled(self) -> None:
        self.finish(None)


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
        transfers: Transfers,
        scheduler: DecodeScheduler,
        clock: Clock,
        router_wait_s: float,
        admit: Callable[[], None],
        got_on: Callable[[DrawnToken[DecodeJob]], None],
        wake: Callable[[], None],
    ):
        self._receiver = receiver
        self._offers = offers
        self._transfers = transfers
        self._scheduler = scheduler
        self._clock = clock
        self._router_wait_s = router_wait_s
        self._admit = admit
        self._got_on = got_on
        self._wake = wake

    def expect(self, call: DecodeCall) -> None:
        """Wait for the offer to a call with a ticket; it may be here already."""
        if call.ticket is not None:
            self._offers.wait(call.ticket, came=lambda: self._offered(call))

    def begin(self, call: DecodeCall) -> None:
        """Let KV into the blocks that the call's job now holds."""
        sequence = call.job.sequence
        if call.ticket is not None:
            call.incoming = self._receiver.expect(
                call.ticket, sequence.block_ids, len(sequence.token_ids), skip_tokens=sequence.num_computed
            )
            self._transfers.see(self._receive(call, call.incoming), f"receive {call.request.request_id}")

    def do_without(self, call: DecodeCall) -> None:
        """Have the prompt computed here, now or when its transfer has ended."""
        call.is_on_its_own = True
        if call.incoming is not None:
            call.incoming.abort("the prefill failed")  # `_receive` goes on from there
        self._refuse(call)
        self._scheduler.compute_here(call.job)
        self._wake()

    def forget(self, call: DecodeCall, reason: str) -> None:
        """Nobody wants a call's KV any more, if it is not there; its blocks may be written a little longer."""
        if call.incoming is not None:
            call.incoming.abort(reason)
        self._refuse(call)

    def _refuse(self, call: DecodeCall) -> None:
        """Or the prefill worker would keep its blocks for nobody. Harmless once the transfer has begun."""
        if call.ticket is not None and call.incoming is None:
            self._offers.refuse(call.ticket)
        if call.patience is not None:
            call.patience.cancel()

    def _offered(self, call: DecodeCall) -> None:
        self._scheduler.offered(call.job)
        self._admit()
        if call.ticket is not None and call.incoming is None:
            self._receiver.keep(call.ticket)  # until there is room: `begin`, or nobody wants it: `forget`
        self._wake()

    async def _receive(self, call: DecodeCall, incoming: Incoming) -> None:
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
            drawn = self._scheduler.verified(call.job, first_token)
            if drawn is not None:
                self._got_on(drawn)
        finally:
            call.ready_at = self._clock()
