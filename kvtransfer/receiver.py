"""The receiving side of KV transfer: a KVReceiver, and its connection from each rank of each worker that sends to it.

A connection has one data link, and both end together: where a chunk arrives damaged, or the link breaks or is not
joined in time, all transfers on it fail. The router then has the decode worker compute each prompt, or starts another
attempt.

A source that is stopped for longer than its lease, and then wakes, can write nothing into blocks that were given away:

- Its lease ends here, by this side's clock, without a message from it. Then this side's end of the link is closed, and
  only after that its rank pairs end (PEER_LOST) and their blocks are released. Nothing writes through a closed link.
- The source never decides where bytes go: it sends bytes, and this side writes them into the blocks of the current
  chunk (tcp, torch_distributed), or copies them out of the source's memory itself (shm, cuda_ipc). Bytes that a woken
  source still sends end in a closed socket or a process group that is gone.
- Its messages arrive over a connection that is closed. A new one begins with a new Hello, and its tickets are used.

A target that is stopped and wakes late may still take announced chunks off a link that the source has closed, or read
blocks of the source that have other contents by now. Digests were computed over the right bytes, so chunks that pass
are right; any other ends the transfer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.kvtransfer.layout import KVShard, check_table, pair_shards, rank_pairs
from twostroke.kvtransfer.lifecycle import ReceiverState
from twostroke.kvtransfer.link import PendingLink, ReceivingEnd, chunk_seed, link_pace
from twostroke.kvtransfer.timeouts import Deadline, LeasedConnection, Patience, finish, run_until_lost, within
from twostroke.kvtransfer.transfer import IncomingPairTransfer, IncomingTransfer, RankSide
from twostroke.kvtransfer.transports import TransportChoice, choose_transport
from twostroke.protocol.errors import ConfigError, ConnectionLost, EpochMismatch, ProtocolError, TicketRefused
from twostroke.protocol.kv_layout import incompatibility
from twostroke.protocol.messages import (
    Abort,
    Awaited,
    Chunk,
    Commit,
    Grant,
    Hello,
    KVHello,
    KVWelcome,
    Message,
    Offer,
    Ping,
    Refuse,
    Welcome,
)
from twostroke.protocol.network import Connection, Listener
from twostroke.protocol.requests import Address, Peer, Ticket, verify_ticket

logger = logging.getLogger(__name__)

_DAMAGED = "a chunk was damaged on its way"


@dataclass(frozen=True, slots=True)
class _PendingOffer:
    """One rank pair's offer that arrived before its request, or that waits for room with it."""

    offer: Offer
    connection: "ReceiverConnection"
    deadline: Deadline


@dataclass(kw_only=True, eq=False)
class KVReceiver(RankSide):
    """Matches offers with the requests that expect them, rank pair by rank pair, and lets their KV into reserved
    blocks."""

    secret: bytes

    def __post_init__(self) -> None:
        self._listener: Listener | None = None
        self._transfers: dict[bytes, IncomingTransfer] = {}
        self._connections: dict[IncomingPairTransfer, ReceiverConnection] = {}  # of the rank pairs that were offered
        self._offers: dict[bytes, dict[int, _PendingOffer]] = {}  # by transfer id, then source rank
        self._kept: set[bytes] = set()  # transfer ids of requests that wait for room
        self._expected_tickets = self.new_tickets()
        self._offered_tickets = self.new_tickets()
        self._declined = self.new_tickets()  # by `_declined_by`
        self.on_offer: Callable[[bytes], None] = _ignore
        """Called with the transfer id of every offer that arrives before its request is expected, and of every request
        that a source declines: see `has_offer`."""

    def has_offer(self, ticket: Ticket) -> bool:
        """Return True where waiting is no use: its offer is here or was withdrawn, or its source declined."""
        transfer_id = ticket.transfer_id
        is_declined = _declined_by(ticket.source, transfer_id) in self._declined
        return is_declined or transfer_id in self._offers or transfer_id in self._offered_tickets

    def offered_tokens(self, transfer_id: bytes) -> int | None:
        """Return the tokens whose KV is offered; None where no offer waits: none arrived, or it was withdrawn."""
        offers = self._offers.get(transfer_id)
        return next(iter(offers.values())).offer.num_tokens if offers else None

    async def start(self, host: str) -> tuple[Address]:
        """Listen for sources on a free port of `host`. Raises ConnectionLost where that can't be had."""
        self._listener = await self.network.listen(
            host, lambda connection: ReceiverConnection(self, connection, host).run()
        )
        return (self._listener.address,)

    async def close(self) -> None:
        """End every connection and transfer, and wait until nothing can write into a block any more."""
        await finish(self._close())

    def expect_transfer(
        self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int
    ) -> IncomingTransfer:
        """Receive the KV of `num_tokens` tokens into `block_ids`; never waits, and needs a running event loop.

        The first `skip_tokens` tokens, whole blocks or all, are there already and are not sent. The offer may have
        arrived before. A ticket that is forged, used, or made out to others fails the transfer. Raises
        ValueError where tokens and blocks don't fit.
        """
        block_size = self.store.layout.block_size
        if num_tokens < 1 or not 0 <= skip_tokens <= num_tokens:
            raise ValueError(f"{num_tokens} tokens can't come with {skip_tokens} of them skipped")
        if skip_tokens % block_size and skip_tokens != num_tokens:
            raise ValueError(f"{skip_tokens} skipped tokens end within a block of {block_size}")
        blocks = check_table(block_ids, num_tokens, skip_tokens, self.store.layout, self.store.num_blocks)
        fault = self._ticket_fault(ticket, ticket.source)
        transfer = IncomingTransfer(
            ticket,
            blocks,
            num_tokens,
            skip_tokens,
            source_ranks=self._source_ranks(ticket) if fault is None else (),
            keeper=self,
            on_ended=self._transfer_ended,
            clock=self.clock,
            progress_s=self.config.progress_s,
        )
        self.stats.in_flight += 1
        if fault is None and not transfer.pairs:
            fault = f"{ticket.source_cut} can't send to {self.store.layout.cut}"
        if fault is None and not self._expected_tickets.use(ticket.transfer_id):
            fault = "the ticket was used before"
        self._kept.discard(ticket.transfer_id)
        if fault is not None:
            for unwanted in self._offers.get(ticket.transfer_id, {}).values():
                self._limit(unwanted)  # no request waits with it any more
            transfer.abort(fault)
            return transfer
        self._transfers[ticket.transfer_id] = transfer
        pairs = transfer.pairs  # a rank pair that ends at once may end the transfer, which then forgets them
        offers = {rank: self._take_offer(ticket.transfer_id, rank) for rank in pairs}
        self._abort_offers(ticket.transfer_id, "nothing is expected of this rank")  # kept, they would wait for ever
        declined = _declined_by(ticket.source, ticket.transfer_id)
        for rank, pending in offers.items():
            if pending is not None:
                self._match(pairs[rank], pending.offer, pending.connection)
            elif self._offered_tickets.was_used(ticket.transfer_id, rank) or self._declined.was_used(declined, rank):
                transfer.abort("the source has given the transfer up already")
        return transfer

    def keep_offer(self, ticket: Ticket) -> None:
        """Keep the offers of a request that is here and waits for room, those still to come included.

        `expect_transfer` or `refuse_offer` must follow. Otherwise an offer, and its source, wait at most `progress_s`.
        """
        self._kept.add(ticket.transfer_id)
        for pending in self._offers.get(ticket.transfer_id, {}).values():
            self._keep(pending)

    def refuse_offer(self, ticket: Ticket) -> None:
        """Abort the ticket's offer, which may still be to come: its request will never be expected."""
        self._kept.discard(ticket.transfer_id)
        self._expected_tickets.use(ticket.transfer_id)
        self._abort_offers(ticket.transfer_id, "the target has given the request up already")

    # --- the rank pairs' calls (PairKeeper) ---

    def gave_up(self, pair: IncomingPairTransfer, reason: str) -> None:
        connection = self._connections.get(pair)
        if connection is not None:
            connection.post(Abort(pair.ticket.transfer_id, reason))

    def pair_ended(self, pair: IncomingPairTransfer) -> None:
        connection = self._connections.pop(pair, None)
        if connection is not None:
            connection.pairs.pop(pair.ticket.transfer_id, None)

    # --- the connections' calls, which never wait ---

    def offered(self, connection: "ReceiverConnection", offer: Offer) -> None:
        """Grant, keep or refuse the offer."""
        transfer_id, rank = offer.ticket.transfer_id, connection.source_rank
        fault = self._ticket_fault(offer.ticket, connection.source)
        if fault is None and not self._offered_tickets.use(transfer_id, rank):
            fault = "the ticket was used before"
        transfer = self._transfers.get(transfer_id)
        pair = transfer.pairs.get(rank) if transfer is not None else None
        if fault is None and pair is None:
            if transfer is not None:
                fault = f"nothing is expected of rank {rank}"
            elif transfer_id in self._expected_tickets:
                fault = "the target has given the request up already"
            elif transfer_id not in self._offers and len(self._offers) >= self.config.max_pending_offers:
                fault = "too many offers wait for their requests"
        if fault is not None:
            connection.post(Abort(transfer_id, fault))
        elif pair is not None:
            self._match(pair, offer, connection)
        else:
            pending = _PendingOffer(offer, connection, Deadline(self.config.progress_s))
            self._limit(pending)
            self._offers.setdefault(transfer_id, {})[rank] = pending
            if transfer_id in self._kept:
                self._keep(pending)
            self.on_offer(transfer_id)

    def declined(self, connection: "ReceiverConnection", transfer_id: bytes, reason: str) -> None:
        """Handle the peer's abort of a transfer that this connection does not carry: only offered, or never offered."""
        rank = connection.source_rank
        pending = self._offers.get(transfer_id, {}).get(rank)
        if pending is not None:
            if pending.connection is connection:
                self._take_offer(transfer_id, rank)
            return
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            pair = transfer.pairs.get(rank)
            is_its_own = transfer.ticket.source == connection.source
            if is_its_own and pair is not None and pair.state is ReceiverState.AWAITING_OFFER:
                self._offered_tickets.use(transfer_id, rank)
                pair.peer_aborted(reason)
        elif transfer_id not in self._expected_tickets:  # whose ticket names another source has declined nothing
            self._declined.use(_declined_by(connection.source, transfer_id), rank)
            self.on_offer(transfer_id)

    def connection_lost(self, connection: "ReceiverConnection") -> None:
        """Drop the offers of a lost connection."""
        for transfer_id, offers in tuple(self._offers.items()):
            for rank, pending in tuple(offers.items()):
                if pending.connection is connection:
                    self._take_offer(transfer_id, rank)

    # --- inside ---

    async def _close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for transfer in tuple(self._transfers.values()):  # those that no connection carries any more
            transfer.fail("the target is closing")

    def _source_ranks(self, ticket: Ticket) -> tuple[int, ...]:
        """Return the source's ranks that have KV for this one; none where the number of its ranks does not fit."""
        layout = self.store.layout
        try:
            pairs = rank_pairs(layout.over(ticket.source_cut), layout)
        except ValueError:
            return ()
        return tuple(pair.source_rank for pair in pairs if pair.target_rank == self.store.rank)

    def _ticket_fault(self, ticket: Ticket, source: Peer) -> str | None:
        try:
            verify_ticket(self.secret, ticket, source=source, target=self.peer)
        except (TicketRefused, EpochMismatch) as error:
            return str(error)
        return None

    def _match(self, pair: IncomingPairTransfer, offer: Offer, connection: "ReceiverConnection") -> None:
        """Grant the offer, where it is what the request expects."""
        if pair.ended or connection.shard is None:  # another rank pair of its transfer has failed meanwhile
            connection.post(Abort(offer.ticket.transfer_id, "the target has given the request up already"))
            return
        self._connections[pair] = connection
        connection.pairs[pair.ticket.transfer_id] = pair
        if offer.ticket != pair.ticket:
            pair.abort("the offer's ticket is not the request's")
        elif offer.num_tokens != pair.transfer.num_tokens:
            pair.abort(f"{offer.num_tokens} tokens are offered, {pair.transfer.num_tokens} expected")
        else:
            pair.granted(connection.shard)
            connection.post(Grant(pair.ticket.transfer_id, pair.transfer.skip_tokens))

    def _transfer_ended(self, transfer: IncomingTransfer) -> None:
        if self._transfers.get(transfer.ticket.transfer_id) is transfer:
            del self._transfers[transfer.ticket.transfer_id]
        self.count(transfer)

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

    def _limit(self, pending: _PendingOffer) -> None:
        """Let the offer wait for its request at most `progress_s` from now on."""

        def expire() -> None:
            transfer_id = pending.offer.ticket.transfer_id
            if self._take_offer(transfer_id, pending.connection.source_rank) is not None:
                pending.connection.post(Abort(transfer_id, "no request for the offer arrived in time"))

        pending.deadline.restart(expire)


class ReceiverConnection:
    """The control connection from one rank of a source to this rank, its data link, and the rank pairs on both.

    Control messages are read at once, and chunks are left to the link: a slow transfer delays no pings, offers or
    aborts behind it.
    """

    def __init__(self, receiver: KVReceiver, connection: Connection, host: str):
        """`host` is where the source can reach a link of this rank."""
        self.source = Peer("", 0)  # until its Hello, as are the next two
        self.source_rank = -1
        self.shard: KVShard | None = None
        self.pairs: dict[bytes, IncomingPairTransfer] = {}  # by transfer id
        self._receiver = receiver
        self._connection = connection
        self._host = host
        self._control = LeasedConnection(connection, receiver.clock, receiver.config.lease_s)
        self._chunks: deque[Chunk] = deque()  # announced, to be taken off the link in this order
        self._announced = asyncio.Event()

    async def run(self) -> None:
        """Serve until the connection or its link is lost or this is cancelled; then end every rank pair left."""
        reason = "the target is closing"
        try:
            hello = await within(self._receiver.config.lease_s, self._connection.receive(), "the source's hello")
            if not isinstance(hello, Hello):
                raise ProtocolError(f"a connection does not begin with {type(hello).__name__}")
            try:
                kv, shard = self._fit(hello)
                self._choose(kv, kv.without)
            except ConfigError as refusal:
                self._connection.send(Refuse(str(refusal)))
                await self._connection.drain()
                return
            self.source, self.source_rank, self.shard = hello.sender, kv.rank, shard
            reason = await run_until_lost(self._listen(shard), self._carry(kv, shard), self._control.watch())
        except ConnectionLost as lost:
            reason = str(lost)
        finally:  # the link is closed here
            self._receiver.connection_lost(self)
            for pair in tuple(self.pairs.values()):
                pair.peer_lost(reason)

    def post(self, message: Message) -> None:
        """Send `message`, if the connection still stands; never waits."""
        self._control.post(message)

    # --- the control connection ---

    def _fit(self, hello: Hello) -> tuple[KVHello, KVShard]:
        """Return the hello's KV part and our end of the rank pair. Raises ConfigError with both sides' values."""
        ours = self._receiver.store.layout
        if hello.receiver != self._receiver.peer:
            raise ConfigError(f"you look for {_name(hello.receiver)}, and this is {_name(self._receiver.peer)}")
        kv = hello.kv
        if kv is None:
            raise ConfigError("this is no token channel")
        fault = incompatibility(kv.layout, ours, kv.encoding)
        if fault is not None:
            raise ConfigError(fault)
        for pair in rank_pairs(kv.layout, ours):
            if (pair.source_rank, pair.target_rank) == (kv.rank, self._receiver.store.rank):
                return kv, pair_shards(pair, kv.layout, ours, kv.encoding)[1]
        raise ConfigError(
            f"rank {kv.rank} of {kv.layout.num_ranks} has nothing for rank {self._receiver.store.rank} of "
            f"{ours.num_ranks}"
        )

    def _choose(self, kv: KVHello, without: tuple[str, ...]) -> TransportChoice:
        """Choose a transport. Raises ConfigError where the pair has none in common."""
        return choose_transport(kv.reach, self._receiver.transports.reach, kv.encoding, without)

    async def _listen(self, shard: KVShard) -> None:
        while True:
            message = await self._control.receive()
            match message:
                case Ping():
                    pass
                case Offer():
                    self._receiver.offered(self, message)
                case Chunk():
                    self._announce(message, shard)
                case Commit(transfer_id=transfer_id):
                    pair = self.pairs.get(transfer_id)
                    if pair is not None and (verified := pair.commit(message)) is not None:
                        self.post(verified)
                case Abort(transfer_id=transfer_id, reason=reason):
                    if (pair := self.pairs.get(transfer_id)) is not None:
                        pair.peer_aborted(f"the source gave up: {reason}")
                        # The source keeps its blocks until then: bytes of others would pass for damage.
                        self.post(Abort(transfer_id, "the target has heard it"))
                    else:
                        self._receiver.declined(self, transfer_id, f"the source gave up: {reason}")
                case _:
                    raise ProtocolError(f"a source does not send {type(message).__name__}")
            await self._control.drain()  # a source that reads no answers gets no further messages read

    def _announce(self, chunk: Chunk, shard: KVShard) -> None:
        """Queue a chunk that arrives over the link next. Raises ProtocolError where its length can't be right."""
        num_units = sum(run.num_units for run in chunk.runs)
        if len(self._chunks) >= self._receiver.config.max_queued_messages:
            raise ProtocolError("the source runs ahead of its bytes")
        if len(chunk.runs) > len(shard.layers):  # a layer's next units are one run
            raise ProtocolError(f"a chunk of {len(chunk.runs)} runs can't be")
        most = len(shard.layers) * self._receiver.store.num_blocks * shard.units_per_block
        if not all(run.num_units > 0 for run in chunk.runs) or not 0 < num_units <= most:
            raise ProtocolError(f"a chunk of {num_units} units can't be")
        if chunk.num_bytes != num_units * shard.unit_bytes:
            raise ProtocolError(f"{num_units} units can't be {chunk.num_bytes} bytes")
        pair = self.pairs.get(chunk.transfer_id)
        if pair is not None:
            pair.announce(chunk)
        self._chunks.append(chunk)
        self._announced.set()

    # --- the data link ---

    async def _carry(self, kv: KVHello, shard: KVShard) -> None:
        """Prepare the link, welcome the source, and receive until the link is lost, which raises ConnectionLost.

        The link is closed then.
        """
        choice, pending = await self._prepare(kv, shard)
        try:
            kv_welcome = KVWelcome(
                self._receiver.store.layout,
                self._receiver.store.rank,
                choice.transport,
                choice.why,
                choice.missing,
                pending.params,
            )
            self.post(Welcome(self._receiver.peer, kv_welcome))
            link = await pending.established()
            patience = Patience(self._receiver.config.lease_s)
            movers = [
                self._receive_chunks(link, patience) for _ in range(link_pace(self._receiver.store).chunks_under_way)
            ]
            try:
                reason = await run_until_lost(*movers)
                if reason != _DAMAGED:  # which was sent already
                    self.post(Refuse(reason))  # at once: to close the link may take a while
            finally:
                await finish(link.close())
        except ConnectionLost as lost:
            reason = str(lost)
        finally:
            await finish(pending.close())
        logger.warning("lost the %s link from %s: %s", choice.transport, self.source, reason)
        raise ConnectionLost(reason)

    async def _prepare(self, kv: KVHello, shard: KVShard) -> tuple[TransportChoice, PendingLink]:
        """Prepare a link by the best transport that works here and is not to be avoided. Raises ConnectionLost."""
        without = kv.without
        while True:
            choice = self._choose(kv, without)
            try:
                return choice, await self._receiver.transports.by_name[choice.transport].prepare(self._host, shard)
            except ConnectionLost as lost:
                if choice.transport in without:
                    raise
                logger.warning("can't prepare a %s link: %s", choice.transport, lost)
                without = (*without, choice.transport)

    async def _receive_chunks(self, link: ReceivingEnd, patience: Patience) -> None:
        """Receive chunks from the link, one at a time. Raises ConnectionLost when it breaks, or damages one."""
        while True:
            if not self._chunks:
                self._announced.clear()
                await self._announced.wait()
                continue
            chunk = self._chunks.popleft()
            pair = self.pairs.get(chunk.transfer_id)
            segments = pair.begin_chunk(chunk) if pair is not None else None
            if pair is None or segments is None:
                num_units = sum(run.num_units for run in chunk.runs)
                await patience.wait(link.discard(num_units), "discarding a chunk")
                continue
            seed = chunk_seed(chunk, self.source, self._receiver.peer)
            has_right_checksum = await patience.wait(link.receive(segments, seed), "receiving a chunk")
            self._receiver.stats.bytes += chunk.num_bytes
            if pair.takes_chunks and not has_right_checksum:  # else the source may have given the blocks to others
                self._receiver.stats.digest_failures += 1
                self.post(Refuse(_DAMAGED))  # before the rank pair's Abort: or the source begins another transfer here
            verified = pair.end_chunk(chunk, has_right_checksum=has_right_checksum)
            if verified is not None:
                self.post(verified)
            if pair.is_damaged:
                raise ConnectionLost(_DAMAGED)


def _declined_by(source: Peer, transfer_id: bytes) -> bytes:
    """Return the key of a decline. An Abort before any offer has no ticket, so it counts only for its sender."""
    return transfer_id + f"{source.epoch} {source.worker_id}".encode()


def _ignore(_: bytes) -> None:
    """Do nothing: no listener for offers is set."""


def _name(peer: Peer) -> str:
    return f"{peer.worker_id} of epoch {peer.epoch:x}"
