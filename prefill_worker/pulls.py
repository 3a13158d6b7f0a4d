"""Prompts whose beginning comes from another worker's prefix cache: the offer, the transfer, and going on without.

Nobody waits for a pull in vain for long, and none that fails is anybody's error: the prompt is computed here.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.offers import AwaitedOffers
from kvtransfer.sides import Incoming, ReceivingSide
from prefill_worker.calls import Call
from prefill_worker.jobs import Admission
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import TransferFailed
from protocol.tickets import Ticket

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullCallbacks:
    """What the worker wants to hear. All are called on the event loop and must not wait."""

    admitted: Callable[[Admission], None]  # at once, though a step may be under way
    pulled: Callable[[Call, int], None]  # so many tokens more than were here; their KV is in the job's blocks
    ended: Callable[[Call], None]  # a call waits no more, or nothing writes into its blocks any more


class Pulls:
    """One worker's pulls. An offer is waited for `wait_s`. Takes the receiver's `on_offer` for itself."""

    def __init__(
        self,
        *,
        receiver: ReceivingSide,
        scheduler: PrefillScheduler,
        block_size: int,
        wait_s: float,
        told: PullCallbacks,
    ):
        self._receiver = receiver
        self._scheduler = scheduler
        self._block_size = block_size
        self._told = told
        self._wait_s = wait_s
        self._offers = AwaitedOffers(receiver)

    def expect(self, call: Call, ticket: Ticket) -> None:
        """Wait for the offer to a call whose job awaits one; it may be here already."""
        call.pull = ticket
        self._offers.wait(
            ticket,
            self._wait_s,
            came=lambda: self._offered(call, ticket),
            missing=lambda: self._not_offered(call),
        )

    def refuse(self, call: Call) -> None:
        """Take no offer any more. Harmless where none was expected, or it is taken already."""
        if call.pull is not None:
            self._offers.refuse(call.pull)
            call.pull = None

    def begin(self, call: Call) -> None:
        """Let the offered KV into the blocks of a job that was admitted to pull.

        Raises RuntimeError for a call that expects no offer.
        """
        if call.pull is None:
            raise RuntimeError(f"request {call.request_id} expects no offer")
        sequence, num_tokens = call.job.sequence, call.job.offered_tokens
        num_blocks = -(-num_tokens // self._block_size)
        call.incoming = self._receiver.expect(
            call.pull, sequence.block_ids[:num_blocks], num_tokens, skip_tokens=sequence.num_computed
        )
        call.pull = None
        call.pulling = asyncio.create_task(self._see_in(call, call.incoming), name=f"pull {call.request_id}")

    def _offered(self, call: Call, ticket: Ticket) -> None:
        num_tokens = self._receiver.offered_tokens(ticket.transfer_id)
        if not num_tokens:  # it was withdrawn again
            self._not_offered(call)
            return
        self._scheduler.offered(call.job, num_tokens)
        self._told.admitted(self._scheduler.admit_offered())
        self._told.ended(call)

    def _not_offered(self, call: Call) -> None:
        self.refuse(call)
        self._scheduler.not_offered(call.job)
        self._told.ended(call)

    async def _see_in(self, call: Call, incoming: Incoming) -> None:
        """Until the transfer ends the blocks stay the job's, whatever becomes of the job."""
        try:
            await incoming.verified()
        except TransferFailed as error:
            _log.warning("the prefix of request %s did not come: %s", call.request_id, error)
            self._scheduler.pull_failed(call.job)
        else:
            num_tokens = self._scheduler.pulled(call.job)
            if num_tokens:
                self._told.pulled(call, num_tokens)
        finally:
            call.pulling = None
            self._told.ended(call)
