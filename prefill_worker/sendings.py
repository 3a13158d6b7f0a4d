"""The KV of prompts on its way to decode workers, layer by layer while it is being computed.

A transfer may outlive the call that it belongs to. Until it has ended the job's blocks stay as they are.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twostroke.kvtransfer.sides import Outgoing, SendingSide
from twostroke.prefill_worker.calls import Call
from twostroke.prefill_worker.scheduler import PrefillScheduler
from twostroke.protocol.errors import TransferFailed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SendingCallbacks:
    """What the worker wants to hear. Both are called on the event loop and must not wait."""

    failed: Callable[[Call], None]  # the KV has not come whole, and somebody may still wait for it
    ended: Callable[[Call], None]  # nothing reads the job's blocks any more


class Sendings:
    """One worker's transfers to decode workers. `num_layers` are the model's."""

    def __init__(self, *, sender: SendingSide, scheduler: PrefillScheduler, num_layers: int, told: SendingCallbacks):
        self._sender = sender
        self._scheduler = scheduler
        self._layers = range(num_layers)
        self._told = told

    def begin(self, call: Call) -> None:
        """Offer the KV of a job that was just admitted, unless nobody wants it."""
        if call.ticket is None:
            return
        sequence = call.job.sequence
        call.outgoing = self._sender.open(call.ticket, call.job.num_tokens, sequence.block_ids, sequence.num_computed)
        self._scheduler.begin_sending(call.job)
        call.sending = asyncio.create_task(self._see_off(call, call.outgoing), name=f"send {call.request_id}")

    def layer_computed(self, layer: int, calls: Iterable[tuple[Call, int]]) -> None:
        """This layer's KV is there for so many tokens of each call."""
        for call, num_tokens in calls:
            if call.outgoing is not None:
                call.outgoing.layer_ready(layer, num_tokens)

    def prefix_came(self, call: Call) -> None:
        """All layers' KV is there for what the job has computed or pulled so far."""
        for layer in self._layers:
            self.layer_computed(layer, [(call, call.job.sequence.num_computed)])

    async def _see_off(self, call: Call, transfer: Outgoing) -> None:
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.warning("the KV of request %s was not sent: %s", call.request_id, error)
            if not call.is_aborted:  # else nobody waits for it
                self._told.failed(call)
        finally:
            self._scheduler.end_sending(call.job)
            call.sending = None
            self._told.ended(call)
