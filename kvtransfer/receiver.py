"""The receiving side of KV transfer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.deadline import Deadline
from twostroke.kvtransfer.endings import finish
from twostroke.kvtransfer.incoming import IncomingTransfer
from twostroke.kvtransfer.incoming_lane import IncomingLane
from twostroke.kvtransfer.layout import plan_lanes
from twostroke.kvtransfer.lifecycle import ReceiverState
from twostroke.kvtransfer.receiver_connection import ReceiverConnection
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.store import KVStore
from twostroke.kvtransfer.transports import Transports
from twostroke.kvtransfer.used_tickets import UsedTickets
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import EpochMismatch, TicketRefused
from twostroke.protocol.messages import Abort, Awaited, Grant, Offer
from twostroke.protocol.network import Connection, Listener, Network
from twostroke.protocol.requests import Address, Peer, Ticket, verify_ticket

__all__ = ["IncomingTransfer", "KVReceiver"]


@dataclass(frozen=True, slots=True)
class _PendingOffer:
    """One lane's offer that came before its request, or that waits for room with it."""

    offer: Offer
    connection: ReceiverConnection
    deadline: Deadline


class KVReceiver:
    """Matches offers with the requests that expect them, lane by lane, and lets their KV into reserved blocks.

    The store and the transports stay their maker's: `close` lets go of them and closes neither.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        store: KVStore,
        network: Network,
        transports: Transports,
        config: TransferConfig,
        clock: Clock,
        secret: bytes,
    ):
        self._peer = peer
        self._store = store
        self._network = network
        self._transports = transports
        self._config = config
        self._clock = clock
        self._secret = secret
        self._listener: Listener | None = None
        self._host = ""
        self._transfers: dict[bytes, IncomingTransfer] = {}
        self._connections: dict[IncomingLane, ReceiverConnection] = {}  # of the lanes that were offered
        self._offers: dict[bytes, dict[int, _PendingOffer]] = {}  # by transfer id, then source rank
        self._kept: set[bytes] = set()  # transfer ids of requests that wait for room
        self._expected_tickets = UsedTickets(clock, config.used_ticket_s, config.max_used_tickets)
        self._offered_tickets = UsedTickets(clock, config.used_ticket_s, config.max_used_tickets)
        self._declined = UsedTickets(clock, config.used_ticket_s, config.max_used_tickets)  # by `_declined_by`
        self.stats = TransferStats()
        self.on_offer: Callable[[bytes], None] = _ignore
        """Called with the transfer id of every offer that comes before its request is expected, and where anybody
        declines such a request: see `has_offer`."""

    def has_offer(self, ticket: Ticket) -> bool:
        """Whether its offer waits to be expected, or was withdrawn, or its source declined: then waiting is no use."""
        transfer_id = ticket.transfer_id
        is_declined = _declined_by(ticket.source, transfer_id) in self._declined
        return is_declined or transfer_id in self._offers or transfer_id in self._offered_tickets

    def offered_tokens(self, transfer_id: bytes) -> int | None:
        """Of how many tokens the KV is offered; None where no offer waits: none came, or it was withdrawn."""
        offers = self._offers.get(transfer_id)
        return next(iter(offers.values())).offer.num_tokens if offers else None

    async def start(self, host: str) -> tuple[Address]:
        """Listen for sources on a free port of `host`. Raises ConnectionLost where that can't be had."""
        self._host = host
        self._listener = await self._network.listen(host, self._serve)
        return (self._listener.address,)

    async def close(self) -> None:
        """End every connection and transfer, and wait until nothing can write into a block any more."""
        await finish(self._close())

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int) -> IncomingTransfer:
        """Let the KV of `num_tokens` tokens come into `block_ids`; never waits, and needs a running event loop.

        The first `skip_tokens` tokens are there already, whole blocks or all, and are not sent. The offer may have come
        before. A ticket that is forged, used, or made out to others fails the transfer. Raises ValueError where tokens
        and blocks don't fit.
        """
        block_size = self._store.layout.block_size
        num_blocks = -(-num_tokens // block_size)
        if num_tokens < 1 or not 0 <= skip_tokens <= num_tokens or num_blocks > len(block_ids):
            raise ValueError(f"{num_tokens} tokens and {skip_tokens} skipped ones do not fit {len(block_ids)} blocks")
        if skip_tokens % block_size and skip_tokens != num_tokens:
            raise ValueError(f"{skip_tokens} skipped tokens end within a block of {block_size}")
        blocks = tuple(block_ids[:num_blocks])
        if min(blocks) < 0 or max(blocks) >= self._store.num_blocks or len(set(blocks)) != num_blocks:
            raise ValueError(f"these are not distinct blocks of {self._store.num_blocks}: {list(blocks)}")
        fault = self._ticket_fault(ticket, ticket.source)
        transfer = IncomingTransfer(
            ticket,
            blocks,
            num_tokens,
            skip_tokens,
            source_ranks=self._source_ranks(ticket) if fault is None else (),
            keeper=self,
            on_ended=self._count,
            clock=self._clock,
            progress_s=self._config.progress_s,
        )
        self.stats.in_flight += 1
        if fault is None and not transfer.lanes:
            fault = f"{ticket.source_ranks} ranks can't send to {self._store.layout.tp_size}"
        if fault is None and not self._expected_tickets.use(ticket.transfer_id):
            fault = "the ticket was used before"
        self._kept.discard(ticket.transfer_id)
        if fault is not None:
            for unwanted in self._offers.get(ticket.transfer_id, {}).values():
                unwanted.deadline.restart()  # no request waits with it any more
            transfer.peer_aborted(fault)
            return transfer
        self._transfers[ticket.transfer_id] = transfer
        offers = {rank: self._take_offer(ticket.transfer_id, rank) for rank in transfer.lanes}
        self._abort_offers(ticket.transfer_id, "nothing is expected of this rank")  # kept, they would wait for ever
        declined = _declined_by(ticket.source, ticket.transfer_id)
        for rank, pending in offers.items():
            if pending is not None:
                self._match(transfer.lanes[rank], pending.offer, pending.connection)
            elif self._offered_tickets.was_used(ticket.transfer_id, rank) or self._declined.was_used(declined, rank):
                transfer.abort("the source has given the transfer up already")
        return transfer

    def keep(self, ticket: Ticket) -> None:
        """The ticket's request is here and waits for room: so do its offers, those still to come included.

        `expect` or `refuse` must follow. Without this an offer, and its source, wait for `progress_s` at most.
        """
        self._kept.add(ticket.transfer_id)
        for pending in self._offers.get(ticket.transfer_id, {}).values():
            self._keep(pending)

    def refuse(self, ticket: Ticket) -> None:
        """The ticket's request will never be expected: an offer that waits for it, or is still to come, is aborted."""
        self._kept.discard(ticket.transfer_id)
        self._expected_tickets.use(ticket.transfer_id)
        self._abort_offers(ticket.transfer_id, "the target has given the request up already")

    # --- the lanes' calls (LaneKeeper) ---

    def gave_up(self, lane: IncomingLane, reason: str) -> None:
        connection = self._connections.get(lane)
        if connection is not None:
            connection.post(Abort(lane.ticket.transfer_id, reason))

    def lane_ended(self, lane: IncomingLane) -> None:
        connection = self._connections.pop(lane, None)
        if connection is not None:
            connection.lanes.pop(lane.ticket.transfer_id, None)

    # --- the connections' calls (OfferDesk) ---

    def offered(self, connection: ReceiverConnection, offer: Offer) -> None:
        transfer_id, rank = offer.ticket.transfer_id, connection.source_rank
        fault = self._ticket_fault(offer.ticket, connection.source)
        if fault is None and not self._offered_tickets.use(transfer_id, rank):
            fault = "the ticket was used before"
        transfer = self._transfers.get(transfer_id)
        lane = transfer.lanes.get(rank) if transfer is not None else None
        if fault is None and lane is None:
            if transfer is not None:
                fault = f"nothing is expected of rank {rank}"
            elif transfer_id in self._expected_tickets:
                fault = "the target has given the request up already"
            elif transfer_id not in self._offers and len(self._offers) >= self._config.max_pending_offers:
                fault = "too many offers wait for their requests"
        if fault is not None:
            connection.post(Abort(transfer_id, fault))
        elif lane is not None:
            self._match(lane, offer, connection)
        else:
            deadline = Deadline(self._clock, self._config.progress_s, lambda: self._expire_offer(transfer_id, rank))
            deadline.restart()
            pending = _PendingOffer(offer, connection, deadline)
            self._offers.setdefault(transfer_id, {})[rank] = pending
            if transfer_id in self._kept:
                self._keep(pending)
            self.on_offer(transfer_id)

    def declined(self, connection: ReceiverConnection, transfer_id: bytes, reason: str) -> None:
        rank = connection.source_rank
        pending = self._offers.get(transfer_id, {}).get(rank)
        if pending is not None:
            if pending.connection is connection:
                self._take_offer(transfer_id, rank)
            return
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            lane = transfer.lanes.get(rank)
            is_its_own = transfer.ticket.source == connection.source
            if is_its_own and lane is not None and lane.state is ReceiverState.AWAITING_OFFER:
                self._offered_tickets.use(transfer_id, rank)
                lane.peer_aborted(reason)
        elif transfer_id not in self._expected_tickets:  # whose ticket names another source has declined nothing
            self._declined.use(_declined_by(connection.source, transfer_id), rank)
            self.on_offer(transfer_id)

    def connection_lost(self, connection: ReceiverConnection) -> None:
        for transfer_id, offers in tuple(self._offers.items()):
            for rank, pending in tuple(offers.items()):
                if pending.connection is connection:
                    self._take_offer(transfer_id, rank)

    # --- inside ---

    async def _serve(self, connection: Connection) -> None:
        await ReceiverConnection(
            connection,
            peer=self._peer,
            host=self._host,
            store=self._store,
            transports=self._transports,
            config=self._config,
            clock=self._clock,
            stats=self.stats,
            desk=self,
        ).run()

    async def _close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for transfer in tuple(self._transfers.values()):
            transfer.peer_lost("the target is closing")

    def _source_ranks(self, ticket: Ticket) -> tuple[int, ...]:
        """The source's ranks that have something for this one; none where its number can't be."""
        layout = self._store.layout
        try:
            lanes = plan_lanes(ticket.source_ranks, layout.tp_size, layout.num_kv_heads)
        except ValueError:
            return ()
        return tuple(lane.source_rank for lane in lanes if lane.target_rank == self._store.rank)

    def _ticket_fault(self, ticket: Ticket, source: Peer) -> str | None:
        try:
            verify_ticket(self._secret, ticket, source=source, target=self._peer)
        except (TicketRefused, EpochMismatch) as error:
            return str(error)
        return None

    def _match(self, lane: IncomingLane, offer: Offer, connection: ReceiverConnection) -> None:
        """Grant the offer, where it is what the request expects."""
        if lane.ended or connection.cut is None:  # another lane of its transfer has failed meanwhile
            connection.post(Abort(offer.ticket.transfer_id, "the target has given the request up already"))
            return
        self._connections[lane] = connection
        connection.lanes[lane.ticket.transfer_id] = lane
        if offer.ticket != lane.ticket:
            lane.abort("the offer's ticket is not the request's")
        elif offer.num_tokens != lane.num_tokens:
            lane.abort(f"{offer.num_tokens} tokens are offered, {lane.num_tokens} expected")
        else:
            lane.granted(connection.cut)
            connection.post(Grant(lane.ticket.transfer_id, lane.skip_tokens))

    def _count(self, transfer: IncomingTransfer) -> None:
        if self._transfers.get(transfer.ticket.transfer_id) is transfer:
            del self._transfers[transfer.ticket.transfer_id]
        self.stats.in_flight -= 1
        if transfer.is_verified:
            self.stats.done += 1
            self.stats.seconds += self._clock() - transfer.started_s
        else:
            self.stats.failed += 1
            self.stats.given_up += transfer.is_given_up

    def _keep(self, pending: _PendingOffer) -> None:
        pending.deadline.stop()
        pending.connection.post(Awaited(pending.offer.ticket.transfer_id))

    def _take_offer(self, transfer_id: bytes, rank: int) -> _PendingOffer | None:
        offers = self._offers.get(transfer_id, {})
        pending = offers.pop(rank, None)
        if pending is not None:
            pending.deadline.stop()
            if not offers:
                del self._offers[transfer_id]
        return pending

    def _abort_offers(self, transfer_id: bytes, reason: str) -> None:
        for rank in tuple(self._offers.get(transfer_id, ())):
            pending = self._take_offer(transfer_id, rank)
            if pending is not None:
                pending.connection.post(Abort(transfer_id, reason))

    def _expire_offer(self, transfer_id: bytes, rank: int) -> None:
        pending = self._take_offer(transfer_id, rank)
        if pending is not None:
            pending.connection.post(Abort(transfer_id, "no request came for the offer in time"))


def _declined_by(source: Peer, transfer_id: bytes) -> bytes:
    """An Abort before any offer shows no ticket: it counts only for who sent it."""
    return transfer_id + f"{source.epoch} {source.worker_id}".encode()


def _ignore(_: bytes) -> None:
    """Nobody wants to hear of offers."""
