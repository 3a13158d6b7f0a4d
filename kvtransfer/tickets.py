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
