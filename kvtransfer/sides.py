"""Both sides of KV transfer as workers use them, what they are made of, and what they count and report.

Tickets that were used, and requests that wait for another worker's offer to send their KV.

One rank's are in sender.py and receiver.py, which document the calls; those of a worker of several ranks in ranks.py.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import KVStore
from twostroke.kvtransfer.transfer import Transfer
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.clock import Clock
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket
from twostroke.protocol.stats import TransferStats


class UsedTickets:
    """Which tickets were used: each is good for one transfer, once on each of its lanes.

    Remembers transfer ids for `keep_s` seconds, `max_count` of them at most (the oldest go first).

    A ticket that comes back after that is not harmful, only late: no request expects its transfer any more.
    """

    def __init__(self, clock: Clock, keep_s: float, max_count: int):
        self._clock = clock
        self._keep_s = keep_s
        self._max_count = max_count
        self._used: dict[bytes, tuple[float, set[int]]] = {}  # transfer id -> first use, lanes; the oldest first

    def __contains__(self, transfer_id: bytes) -> bool:
        """Whether it was used on any lane."""
        return transfer_id in self._used

    def was_used(self, transfer_id: bytes, lane: int) -> bool:
        """Whether it was used on this lane."""
        return transfer_id in self._used and lane in self._used[transfer_id][1]

    def use(self, transfer_id: bytes, lane: int = 0) -> bool:
        """Mark as used on this lane; False where it was used there before."""
        now = self._clock()
        while self._used:
            oldest = next(iter(self._used))
            if len(self._used) < self._max_count and now - self._used[oldest][0] < self._keep_s:
                break
            del self._used[oldest]
        _, lanes = self._used.setdefault(transfer_id, (now, set()))
        if lane in lanes:
            return False
        lanes.add(lane)
        return True


@dataclass(kw_only=True, eq=False)
class RankSide:
    """What a KVSender and a KVReceiver are made of. Store and transports stay their maker's, and are closed by it."""

    peer: Peer
    store: KVStore
    network: Network
    transports: Transports
    config: TransferConfig
    clock: Clock
    stats: TransferStats = field(default_factory=TransferStats, init=False)

    def new_tickets(self) -> UsedTickets:
        return UsedTickets(self.clock, self.config.used_ticket_s, self.config.max_used_tickets)

    def count(self, transfer: Transfer) -> None:
        """It has ended."""
        self.stats.end(transfer.failure, self.clock() - transfer.started_s, is_given_up=transfer.is_given_up)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """How this rank sends to one rank of another worker."""

    target: Peer
    transport: str
    why: str  # this transport, in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need


class Outgoing(Protocol):
    """As OutgoingTransfer, which documents these."""

    def windows_moved(self, block_ids: Sequence[int]) -> None: ...

    def layer_ready(self, layer: int, num_tokens: int) -> None: ...

    def commit(self, first_token: SampledToken | None) -> None: ...

    def abort(self, reason: str) -> None: ...

    async def cancel(self) -> None: ...

    async def done(self) -> None: ...


class SendingSide(Protocol):
    """As KVSender, which documents these."""

    @property
    def stats(self) -> TransferStats: ...

    def open(self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int) -> Outgoing: ...

    def decline(self, ticket: Ticket, reason: str) -> None: ...

    def links(self) -> tuple[LinkReport, ...]: ...

    async def close(self) -> None: ...


class Incoming(Protocol):
    """As IncomingTransfer, which documents these."""

    async def verified(self) -> SampledToken | None: ...

    async def cancel(self) -> None: ...

    def abort(self, reason: str) -> None: ...


class ReceivingSide(Protocol):
    """As KVReceiver, which documents these."""

    on_offer: Callable[[bytes], None]

    @property
    def stats(self) -> TransferStats: ...

    async def start(self, host: str) -> tuple[Address, ...]:
        """Listen for sources on `host`; one address for each rank of the worker. Raises ConnectionLost."""

    def has_offer(self, ticket: Ticket) -> bool: ...

    def offered_tokens(self, transfer_id: bytes) -> int | None: ...

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int) -> Incoming: ...

    def keep(self, ticket: Ticket) -> None: ...

    def refuse(self, ticket: Ticket) -> None: ...

    async def close(self) -> None: ...


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
