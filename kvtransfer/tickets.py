"""Tickets as both sides of KV transfer check them, and the parts of which a rank's side is made.

A ticket permits one transfer from one worker to another; the router makes it out (protocol/requests.py). Both sides
refuse a ticket that names another worker or epoch, and one that was used before. Its signature is checked by the
target, since the target's blocks are written.
"""

from dataclasses import dataclass, field

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import KVStore
from twostroke.kvtransfer.transfer import Transfer
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.clock import Clock
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import TransferStats


class UsedTickets:
    """The tickets that were used: each permits one transfer, once on each of its lanes.

    Remembers transfer ids for `keep_s` seconds, at most `max_count` of them (the oldest are forgotten first). A ticket
    that is used again after that does no harm: no request expects its transfer any more.
    """

    def __init__(self, clock: Clock, keep_s: float, max_count: int):
        self._clock = clock
        self._keep_s = keep_s
        self._max_count = max_count
        self._used: dict[bytes, tuple[float, set[int]]] = {}  # transfer id -> first use, lanes; the oldest first

    def __contains__(self, transfer_id: bytes) -> bool:
        """Return True where it was used on any lane."""
        return transfer_id in self._used

    def was_used(self, transfer_id: bytes, lane: int) -> bool:
        """Return True where it was used on this lane."""
        return transfer_id in self._used and lane in self._used[transfer_id][1]

    def use(self, transfer_id: bytes, lane: int = 0) -> bool:
        """Mark it as used on this lane; return False where it was used there before."""
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
    """The parts of a KVSender and a KVReceiver. Store and transports belong to their maker, which closes them."""

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
        """Count a transfer that has ended."""
        self.stats.end(transfer.failure, self.clock() - transfer.started_s, is_given_up=transfer.is_given_up)
