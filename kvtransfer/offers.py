"""Requests that wait for another worker to begin sending their KV, which it shows by its offer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.kvtransfer.sides import ReceivingSide
from twostroke.protocol.requests import Ticket


def _ignore() -> None:
    """Without a limit nothing is missing."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    """An offer that is waited for, perhaps not for ever."""

    ticket: Ticket
    came: Callable[[], None]
    timer: asyncio.TimerHandle | None


class AwaitedOffers:
    """Tells when a ticket's offer has come, or has not come in time. Takes the receiver's `on_offer` for itself."""

    def __init__(self, receiver: ReceivingSide):
        self._receiver = receiver
        self._awaited: dict[bytes, _Awaited] = {}  # by transfer id
        receiver.on_offer = self._on_offer

    def wait(
        self,
        ticket: Ticket,
        wait_s: float | None = None,
        *,
        came: Callable[[], None],
        missing: Callable[[], None] = _ignore,
    ) -> None:
        """Call `came` once the offer is here, which may be now, or `missing` when `wait_s` are over without it.

        None: it is waited for however long it takes. Neither is called after `refuse`. An offer that was withdrawn
        again has come: see KVReceiver.offered_tokens.
        """
        transfer_id = ticket.transfer_id
        if self._receiver.has_offer(ticket):
            came()
            return

        def give_up() -> None:
            del self._awaited[transfer_id]
            missing()

        timer = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s, give_up)
        self._awaited[transfer_id] = _Awaited(ticket, came, timer)

    def refuse(self, ticket: Ticket) -> None:
        """Wait no more, and take no offer that is here or still comes: its worker would keep its blocks for us."""
        self._take(ticket.transfer_id)
        self._receiver.refuse(ticket)

    def _on_offer(self, transfer_id: bytes) -> None:
        awaited = self._awaited.get(transfer_id)
        if awaited is None or not self._receiver.has_offer(awaited.ticket):  # somebody else has declined it
            return
        self._take(transfer_id)
        awaited.came()

    def _take(self, transfer_id: bytes) -> None:
        awaited = self._awaited.pop(transfer_id, None)
        if awaited is not None and awaited.timer is not None:
            awaited.timer.cancel()
