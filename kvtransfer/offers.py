"""Requests of a worker that wait for another worker's offer of their KV."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.kvtransfer.ranks import ReceivingSide
from twostroke.protocol.requests import Ticket


def _ignore() -> None:
    """Do nothing: an offer without a time limit is never missing."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A wait for an offer, perhaps with a time limit."""

    ticket: Ticket
    on_offered: Callable[[], None]
    timer: asyncio.TimerHandle | None


class AwaitedOffers:
    """Calls back when a ticket's offer arrives, or fails to in time. Takes the receiver's `on_offer` for itself."""

    def __init__(self, receiver: ReceivingSide):
        self._receiver = receiver
        self._awaited: dict[bytes, _Awaited] = {}  # by transfer id
        receiver.on_offer = self._on_offer

    def await_offer(
        self,
        ticket: Ticket,
        wait_s: float | None = None,
        *,
        on_offered: Callable[[], None],
        on_missing: Callable[[], None] = _ignore,
    ) -> None:
        """Call `on_offered` once the offer is here, perhaps at once, or `on_missing` after `wait_s` without it.

        None: wait however long it takes. Neither is called after `refuse_offer`. An offer that was withdrawn again
        counts as here: see KVReceiver.offered_tokens.
        """
        transfer_id = ticket.transfer_id
        if self._receiver.has_offer(ticket):
            on_offered()
            return

        def give_up() -> None:
            del self._awaited[transfer_id]
            on_missing()

        timer = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s, give_up)
        self._awaited[transfer_id] = _Awaited(ticket, on_offered, timer)

    def refuse_offer(self, ticket: Ticket) -> None:
        """Stop waiting, and refuse the offer that is here or still to come: its worker would keep its blocks for us."""
        self._take(ticket.transfer_id)
        self._receiver.refuse_offer(ticket)

    def _on_offer(self, transfer_id: bytes) -> None:
        awaited = self._awaited.get(transfer_id)
        if awaited is None or not self._receiver.has_offer(awaited.ticket):  # another source has declined it
            return
        self._take(transfer_id)
        awaited.on_offered()

    def _take(self, transfer_id: bytes) -> None:
        awaited = self._awaited.pop(transfer_id, None)
        if awaited is not None and awaited.timer is not None:
            awaited.timer.cancel()
