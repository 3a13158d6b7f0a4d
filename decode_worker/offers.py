"""Calls that wait for their prefill worker to begin, which it shows by its offer."""

import asyncio
from collections.abc import Callable

from decode_worker.calls import Call
from kvtransfer.receiver import KVReceiver
from protocol.tickets import Ticket


class AwaitedOffers:
    """Tells when a call's offer has come, or has not come in `wait_s`. Takes the receiver's `on_offer` for itself."""

    def __init__(
        self, receiver: KVReceiver, wait_s: float, *, came: Callable[[Call], None], missing: Callable[[str], None]
    ):
        """`came` is called with the call, `missing` with its request id."""
        self._receiver = receiver
        self._wait_s = wait_s
        self._came = came
        self._missing = missing
        self._awaited: dict[bytes, tuple[Call, asyncio.TimerHandle]] = {}  # by transfer id
        receiver.on_offer = self._on_offer

    def expect(self, call: Call, ticket: Ticket) -> None:
        """Wait for the call's offer; it may be here already."""
        if self._receiver.has_offer(ticket.transfer_id):
            self._came(call)
            return
        timer = asyncio.get_running_loop().call_later(self._wait_s, self._missing, call.request.request_id)
        self._awaited[ticket.transfer_id] = call, timer

    def give_up(self, call: Call) -> None:
        """Wait no more. Harmless for a call that never waited, and for one whose transfer has begun."""
        if call.ticket is None:
            return
        _, timer = self._awaited.pop(call.ticket.transfer_id, (None, None))
        if timer is not None:
            timer.cancel()
        if call.incoming is None:
            self._receiver.refuse(call.ticket)  # or the prefill worker would keep its blocks for a whole lease

    def _on_offer(self, transfer_id: bytes) -> None:
        call, timer = self._awaited.pop(transfer_id, (None, None))
        if call is not None and timer is not None:
            timer.cancel()
            self._came(call)
