"""The decode worker's side of KV transfer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.config import TransferConfig
from kvtransfer.deadline import Deadline
from kvtransfer.digest import Digester
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.lifecycle import ReceiverState
from kvtransfer.link import Transport
from kvtransfer.receiver_connection import ReceiverConnection
from kvtransfer.stats import TransferStats
from kvtransfer.store import KVStore
from kvtransfer.used_tickets import UsedTickets
from protocol.clock import Clock
from protocol.errors import EpochMismatch, TicketRefused
from protocol.messages import Abort, Grant, Offer
from protocol.network import Connection, Listener, Network
from protocol.tickets import Address, Peer, Ticket, verify_ticket

__all__ = ["IncomingTransfer", "KVReceiver"]


@dataclass(frozen=True, slots=True)
class _PendingOffer:
    """An offer that came before its request."""

    offer: Offer
    connection: ReceiverConnection
    deadline: Deadline


class KVReceiver:
    """Matches offers of prefill workers with the requests that expect them, and lets their KV into reserved blocks.

    The store and the transport stay their maker's: `close` lets go of them and closes neither.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        store: KVStore,
        network: Network,
        transport: Transport,
        config: TransferConfig,
        clock: Clock,
        secret: bytes,
    ):
        self._peer = peer
        self._store = store
        self._network = network
        self._transport = transport
        self._config = config
        self._clock = clock
        self._secret = secret
        self._digester = Digester()
        self._listener: Listener | None = None
        self._host = ""
        self._transfers: dict[bytes, IncomingTransfer] = {}
        self._carriers: dict[bytes, ReceiverConnection] = {}  # of the granted ones
        self._offers: dict[bytes, _PendingOffer] = {}
        self._expected_tickets = UsedTickets(clock, config.used_ticket_s, config.max_used_tickets)
        self._offered_tickets = UsedTickets(clock, config.used_ticket_s, config.max_used_tickets)
        self.stats = TransferStats()
        self.on_offer: Callable[[bytes], None] = _ignore
        """Called with the transfer id of every offer that comes before its request is expected."""

    def has_offer(self, transfer_id: bytes) -> bool:
        """Whether an offer waits for its request to be expected, or came and was withdrawn: then waiting is no use."""
        return transfer_id in self._offers or transfer_id in self._offered_tickets

    async def start(self, host: str) -> Address:
        """Listen for prefill workers on a free port of `host`. Raises ConnectionLost where that can't be had."""
        self._host = host
        self._listener = await self._network.listen(host, self._serve)
        return self._listener.address

    async def close(self) -> None:
        """End every connection and transfer, and wait until nothing can write into a block any more."""
        if self._listener is not None:
            await self._listener.close()
        for transfer in tuple(self._transfers.values()):
            transfer.peer_lost("the decode worker is closing")
        self._digester.close()

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_blocks: int) -> IncomingTransfer:
        """Let the KV of `num_tokens` tokens come into `block_ids`; never waits, and needs a running event loop.

        The first `skip_blocks` blocks are whole already and are not sent. The offer may have come before. A ticket that
        is forged, used, or made out to others fails the transfer. Raises ValueError where tokens and blocks don't fit.
        """
        num_blocks = -(-num_tokens // self._store.block_size)
        if num_tokens < 1 or not 0 <= skip_blocks <= num_blocks <= len(block_ids):
            raise ValueError(f"{num_tokens} tokens and {skip_blocks} skipped blocks do not fit {len(block_ids)} blocks")
        blocks = block_ids[:num_blocks]
        if min(blocks) < 0 or max(blocks) >= self._store.num_blocks or len(set(blocks)) != num_blocks:
            raise ValueError(f"these are not distinct blocks of {self._store.num_blocks}: {list(blocks)}")
        transfer = IncomingTransfer(
            ticket, blocks, num_tokens, skip_blocks, self._store, self, self._config, self._clock
        )
        self.stats.in_flight += 1
        fault = self._ticket_fault(ticket, ticket.prefill)
        if fault is None and not self._expected_tickets.use(ticket.transfer_id):
            fault = "the ticket was used before"
        if fault is not None:
            transfer.peer_aborted(fault)
            return transfer
        pending = self._take_offer(ticket.transfer_id)
        if pending is None and ticket.transfer_id in self._offered_tickets:
            transfer.peer_aborted("the prefill worker has given the transfer up already")
            return transfer
        self._transfers[ticket.transfer_id] = transfer
        if pending is not None:
            self._match(transfer, pending.offer, pending.connection)
        return transfer

    def refuse(self, ticket: Ticket) -> None:
        """The ticket's request will never be expected: an offer that waits for it, or is still to come, is aborted."""
        self._expected_tickets.use(ticket.transfer_id)
        pending = self._take_offer(ticket.transfer_id)
        if pending is not None:
            pending.connection.post(Abort(ticket.transfer_id, "the decode worker has given the request up already"))

    # --- the transfers' calls (IncomingObserver) ---

    def gave_up(self, transfer: IncomingTransfer, reason: str) -> None:
        carrier = self._carriers.get(transfer.ticket.transfer_id)
        if carrier is not None:
            carrier.post(Abort(transfer.ticket.transfer_id, reason))

    def ended(self, transfer: IncomingTransfer) -> None:
        transfer_id = transfer.ticket.transfer_id
        if self._transfers.get(transfer_id) is transfer:
            del self._transfers[transfer_id]
            carrier = self._carriers.pop(transfer_id, None)
            if carrier is not None:
                carrier.transfers.pop(transfer_id, None)
        self.stats.in_flight -= 1
        if transfer.state is ReceiverState.VERIFIED:
            self.stats.done += 1
            self.stats.seconds += self._clock() - transfer.started_s
        else:
            self.stats.failed += 1

    # --- the connections' calls (OfferDesk) ---

    def offered(self, connection: ReceiverConnection, offer: Offer) -> None:
        transfer_id = offer.ticket.transfer_id
        fault = self._ticket_fault(offer.ticket, connection.sender)
        if fault is None and not self._offered_tickets.use(transfer_id):
            fault = "the ticket was used before"
        transfer = self._transfers.get(transfer_id)
        if fault is None and transfer is None:
            if transfer_id in self._expected_tickets:
                fault = "the decode worker has given the request up already"
            elif len(self._offers) >= self._config.max_pending_offers:
                fault = "too many offers wait for their requests"
        if fault is not None:
            connection.post(Abort(transfer_id, fault))
        elif transfer is not None:
            self._match(transfer, offer, connection)
        else:
            deadline = Deadline(self._clock, self._config.progress_s, lambda: self._expire_offer(transfer_id))
            deadline.restart()
            self._offers[transfer_id] = _PendingOffer(offer, connection, deadline)
            self.on_offer(transfer_id)

    def offer_withdrawn(self, connection: ReceiverConnection, transfer_id: bytes) -> None:
        pending = self._offers.get(transfer_id)
        if pending is not None and pending.connection is connection:
            self._take_offer(transfer_id)

    def connection_lost(self, connection: ReceiverConnection) -> None:
        for transfer_id, pending in tuple(self._offers.items()):
            if pending.connection is connection:
                self._take_offer(transfer_id)

    # --- inside ---

    async def _serve(self, connection: Connection) -> None:
        await ReceiverConnection(
            connection,
            peer=self._peer,
            host=self._host,
            store=self._store,
            transport=self._transport,
            config=self._config,
            clock=self._clock,
            digester=self._digester,
            stats=self.stats,
            desk=self,
        ).run()

    def _ticket_fault(self, ticket: Ticket, prefill: Peer) -> str | None:
        try:
            verify_ticket(self._secret, ticket, prefill=prefill, decode=self._peer)
        except (TicketRefused, EpochMismatch) as error:
            return str(error)
        return None

    def _match(self, transfer: IncomingTransfer, offer: Offer, connection: ReceiverConnection) -> None:
        """Grant the offer, where it is what the request expects."""
        transfer_id = transfer.ticket.transfer_id
        self._carriers[transfer_id] = connection
        connection.transfers[transfer_id] = transfer
        if offer.ticket != transfer.ticket:
            transfer.abort("the offer's ticket is not the request's")
        elif offer.num_tokens != transfer.num_tokens:
            transfer.abort(f"{offer.num_tokens} tokens are offered, {transfer.num_tokens} expected")
        else:
            transfer.granted()
            connection.post(Grant(transfer_id, transfer.skip_blocks))

    def _take_offer(self, transfer_id: bytes) -> _PendingOffer | None:
        pending = self._offers.pop(transfer_id, None)
        if pending is not None:
            pending.deadline.stop()
        return pending

    def _expire_offer(self, transfer_id: bytes) -> None:
        pending = self._take_offer(transfer_id)
        if pending is not None:
            pending.connection.post(Abort(transfer_id, "no request came for the offer in time"))


def _ignore(_: bytes) -> None:
    """Nobody wants to hear of offers."""
