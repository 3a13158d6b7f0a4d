"""Prompts whose KV comes from a prefill worker: the offer, the blocks it may fill, the transfer, and going on without.

An offer is waited for as long as the request lives, for its router watches over the prefill worker: a long queue there
is no reason to compute the prompt twice, and where no KV comes, the router says so. An offer in turn waits, and its KV
at the prefill worker with it, as long as there is no room here.

What does not come is computed here, and is nobody's error. But not before the router says so, who may know better: what
the prefill worker died of may be this very prompt.
"""

import asyncio
import logging
from collections.abc import Callable

from twostroke.decode_worker.calls import Call
from twostroke.decode_worker.jobs import Progress
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.kvtransfer.offers import AwaitedOffers
from twostroke.kvtransfer.sides import Incoming, ReceivingSide
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed

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
