"""Requests that wait for another worker to begin sending their KV, which it shows by its offer."""

import asyncio
from collections.abc import Callable

from kvtransfer.sides import ReceivingSide
from protocol.tickets import Ticket


class AwaitedOffers:
    """Tells when a ticket's offer has come, or has not come in `wait_s`. Takes the receiver's `on_offer` for itself."""

    def __init__(self, receiver: ReceivingSide, wait_s: float):
        self._receiver = receiver
        self._wait_s = wait_s
        self._awaited: dict[bytes, tuple[Ticket, Callable[[], None], asyncio.TimerHandle]] = {}  # by transfer id
        receiver.on_offer = self._on_offer

    def wait(self, ticket: Ticket, *, came: Callable[[], None], missing: Callable[[], None]) -> None:
        """Call `came` once the offer is here, which may be now, or `missing` when the wait is over without it.

        Neither is called after `refuse`. An offer that was withdrawn again has come: see KVReceiver.offered_tokens.
        """
        transfer_id = ticket.transfer_id
        if self._receiver.has_offer(ticket):
            came()
            return

        def give_up() -> None:
            del self._awaited[transfer_id]
            missing()

        self._awaited[transfer_id] = ticket, came, asyncio.get_running_loop().call_later(self._wait_s, give_up)

    def refuse(self, ticket: Ticket) -> None:
        """Wait no more, and take no offer that is here or still comes: its worker would keep its blocks for us."""
        awaited = self._awaited.pop(ticket.transfer_id, None)
        if awaited is not None:
            awaited[2].cancel()
        self._receiver.refuse(ticket)

    def _on_offer(self, transfer_id: bytes) -> None:
        awaited = self._awaited.get(transfer_id)
        if awaited is None or not self._receiver.has_offer(awaited[0]):  # somebody else has declined it
            return
        del self._awaited[transfer_id]
        _, came, timer = awaited
        timer.cancel()
        came()
