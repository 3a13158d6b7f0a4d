"""The sending side of KV transfer: a KVSender, and its connection to each rank of each worker that it sends to.

A connection has one data link, and both end together: where a link can't be joined, breaks, or is given up by the
target because it damages chunks, all transfers on it fail, and the prompt is computed at the target. The
next transfer to the same worker makes a fresh connection with a fresh link.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from twostroke.kvtransfer.layout import KVShard, RankPair, pair_shards, rank_pairs
from twostroke.kvtransfer.lifecycle import IllegalTransition, SenderState
from twostroke.kvtransfer.link import SendingEnd, chunk_seed, link_pace
from twostroke.kvtransfer.timeouts import LeasedConnection, Patience, all_ended, finish, run_until_lost, within
from twostroke.kvtransfer.transfer import OutgoingPairTransfer, OutgoingTransfer, RankSide
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.kv_layout import incompatibility
from twostroke.protocol.messages import (
    Abort,
    Awaited,
    Grant,
    Hello,
    KVHello,
    KVWelcome,
    Message,
    Offer,
    Ping,
    Refuse,
    Verified,
    Welcome,
)
from twostroke.protocol.network import Connection
from twostroke.protocol.requests import Address, Peer, Ticket

logger = logging.getLogger(__name__)

SECOND_BEST_S = 300.0
"""Seconds that a connection keeps a transport in place of a better one whose link failed.

Should the better one fail again, one transfer's prompt is computed at the target."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The link by which this rank sends to one rank of another worker."""

    target: Peer
    transport: str
    why: str  # this transport, in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need


@dataclass(kw_only=True, eq=False)
class KVSender(RankSide):
    """Opens transfers, and keeps one connection for each rank of each worker that this rank sends to."""

    def __post_init__(self) -> None:
        self._connections: dict[tuple[Peer, Address], SenderConnection] = {}
        self._unfit: dict[tuple[Peer, Address], str] = {}  # the transport that the last connection's link failed by
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation replays exactly
        self._transfers: dict[OutgoingTransfer, None] = {}
        self._opened_tickets = self.new_tickets()

    def begin_transfer(
        self,
        ticket: Ticket,
        num_tokens: int,
        block_ids: Sequence[int],
        num_ready_tokens: int,
        *,
        min_skip_tokens: int = 0,
    ) -> OutgoingTransfer:
        """Begin a transfer of the KV of `num_tokens` tokens; never waits, and needs a running event loop.

        `block_ids` is the request's block table, which must cover the tokens, except for windows that have not reached
        them (see OutgoingTransfer.windows_moved). KV of the first `num_ready_tokens` tokens is in these blocks already,
        in all layers, except for the first `least_skip_tokens`: where the target lacks some of those, the transfer
        fails. A ticket that names another source, or was used, fails it too. Raises ValueError where tokens and blocks
        don't fit.
        """
        if not 0 <= num_ready_tokens <= num_tokens or num_tokens < 1:
            raise ValueError(f"{num_ready_tokens} tokens are ready of {num_tokens}")
        layout = self.store.layout
        groups = layout.groups
        num_blocks = -(-num_tokens // layout.block_size) * groups.count
        if num_blocks > len(block_ids):
            raise ValueError(f"{num_tokens} tokens need {num_blocks} blocks, not {len(block_ids)}")
        transfer = OutgoingTransfer(
            ticket,
            tuple(block_ids[:num_blocks]),
            num_tokens,
            num_ready_tokens,
            min_skip_tokens=min_skip_tokens,
            groups=groups,
            layers=layout.layers_of(self.store.rank),
            on_ended=self._transfer_ended,
            clock=self.clock,
            progress_s=self.config.progress_s,
        )
        self._transfers[transfer] = None
        self.stats.in_flight += 1
        try:
            pairs = self._rank_pairs(ticket)
            if not self._opened_tickets.use(ticket.transfer_id):
                raise ValueError("the ticket was used before")
        except ValueError as error:  # a ticket of another worker opens no connection
            transfer.fail(str(error))
            return transfer
        for pair in pairs:
            connection = self._connection(ticket, pair)
            connection.add(transfer.add_pair(pair.target_rank, pair.layers, connection))
        return transfer

    def decline_transfer(self, ticket: Ticket, reason: str) -> None:
        """Tell the ticket's target, where it can be reached, that no KV will be sent. Never waits.

        Raises ValueError for a ticket that names another source.
        """
        for pair in self._rank_pairs(ticket):
            self._connection(ticket, pair).decline(ticket.transfer_id, reason)

    def links(self) -> tuple[LinkReport, ...]:
        """Return the links that are open, in the order in which their connections were made."""
        return tuple(link.report for link in self._connections.values() if link.report is not None)

    async def close(self) -> None:
        """End every transfer and connection, and wait until no block is read any more."""
        await finish(self._close())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await all_ended(tuple(self._tasks))
        for connection in tuple(self._connections.values()):  # those whose task was cancelled before its first step
            connection.abandon("the source is closing")
        self._connections.clear()
        for transfer in tuple(self._transfers):  # those that no connection carries
            transfer.abort("the source is closing")

    def _rank_pairs(self, ticket: Ticket) -> tuple[RankPair, ...]:
        """Return the transfer's rank pairs with this rank. Raises ValueError for a ticket of another source."""
        layout = self.store.layout
        if ticket.source != self.peer:
            raise ValueError(f"the ticket is made out to {ticket.source}, and this is {self.peer}")
        if ticket.source_cut != layout.cut:
            raise ValueError(f"the ticket counts {ticket.source_cut}, and this worker has {layout.cut}")
        if ticket.target_cut.ranks != len(ticket.target_addresses):
            raise ValueError(f"the ticket counts {ticket.target_cut}, and names {len(ticket.target_addresses)} ranks")
        pairs = rank_pairs(layout, layout.over(ticket.target_cut))
        return tuple(pair for pair in pairs if pair.source_rank == self.store.rank)

    def _connection(self, ticket: Ticket, pair: RankPair) -> "SenderConnection":
        """Return the connection to the pair's rank at the ticket's target; begin one where there is none."""
        key = ticket.target, ticket.target_addresses[pair.target_rank]
        connection = self._connections.get(key)
        if connection is None:
            unfit = self._unfit.pop(key, None)
            without = () if unfit is None else (unfit,)
            connection = self._connections[key] = SenderConnection(self, *key, pair, without)
            task = asyncio.get_running_loop().create_task(connection.run(), name=f"kv to {ticket.target.worker_id}")
            self._tasks[task] = None
            task.add_done_callback(self._ended)
        return connection

    def _transfer_ended(self, transfer: OutgoingTransfer) -> None:
        del self._transfers[transfer]
        self.count(transfer)

    def forget(self, connection: "SenderConnection") -> None:
        """Put no more transfers on a lost connection; the next transfer makes another."""
        key = connection.target, connection.address
        if self._connections.get(key) is connection:
            del self._connections[key]
            if connection.unfit_transport is not None:
                self._unfit[key] = connection.unfit_transport

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)


class SenderConnection:
    """The control connection from this rank to one rank of a target, its data link, and the rank pairs on both.

    Rank pairs take turns by chunk: a short prompt waits for at most one chunk of each other. A chunk's message goes out
    just before its bytes, so control connection and link stay in step whatever is aborted in between. The commit goes
    out right behind the last chunk's message.
    """

    def __init__(self, sender: KVSender, target: Peer, address: Address, pair: RankPair, without: tuple[str, ...]):
        """`without` names transports to avoid where there are others."""
        self.target = target
        self.address = address
        self.report: LinkReport | None = None  # while the link is open
        self.unfit_transport: str | None = None  # could not be joined, or carried nothing
        self._sender = sender
        self._pair = pair
        self._without = without
        self._pairs: dict[bytes, OutgoingPairTransfer] = {}
        self._declined: list[Abort] = []  # sent once the connection is welcomed
        self._control: LeasedConnection | None = None  # set once the peer has welcomed us, as is the cut
        self._shard: KVShard | None = None
        self._has_carried = False  # a chunk
        self._line: dict[OutgoingPairTransfer, None] = {}  # those with a chunk to send, in turn
        self._work = asyncio.Event()
        self._idle = asyncio.Event()

    def add(self, pair: OutgoingPairTransfer) -> None:
        """Offer `pair`, now or once the connection is welcomed."""
        self._pairs[pair.ticket.transfer_id] = pair
        if self._control is not None:
            self._offer(self._control, pair)

    def decline(self, transfer_id: bytes, reason: str) -> None:
        """Tell the target that no KV will be sent, now or once the connection is welcomed."""
        if self._control is not None:
            self._control.post(Abort(transfer_id, reason))
        else:
            self._declined.append(Abort(transfer_id, reason))

    async def run(self) -> None:
        """Connect and serve until the connection or its link is lost or this is cancelled; then end every rank pair
        left."""
        connection: Connection | None = None
        reason = "the source is closing"
        try:
            connection = await within(
                self._sender.config.lease_s, self._sender.network.connect(self.address), "connecting to the target"
            )
            welcome = await within(self._sender.config.lease_s, self._greet(connection), "the target's welcome")
            control = self._control = LeasedConnection(connection, self._sender.clock, self._sender.config.lease_s)
            shard = self._begin(control, welcome)
            parts = [self._listen(control), self._carry(control, welcome, shard), control.watch()]
            if self._without and welcome.transport not in self._without:
                parts.append(self._stand_in())
            reason = await run_until_lost(*(self._forgotten_with(part) for part in parts))
        except ConnectionLost as lost:
            reason = str(lost)
        finally:  # the link is closed here
            self._sender.forget(self)
            self._control = None
            self.abandon(reason)
            if connection is not None:
                await connection.close()

    async def _forgotten_with(self, part: Coroutine[None, None, None]) -> None:
        """Run a part of the connection. Once it is lost, no transfer begins on it while the link closes."""
        try:
            await part
        except ConnectionLost:
            self._sender.forget(self)
            raise

    def abandon(self, reason: str) -> None:
        """End every rank pair left. Only where `run` has ended, or never began: nothing is under way."""
        for pair in tuple(self._pairs.values()):
            pair.peer_lost(reason)

    # --- the rank pairs' calls (PairCarrier) ---

    def has_work(self, pair: OutgoingPairTransfer) -> None:
        """Let `pair` send its commit now, and a chunk in its turn."""
        if self._control is None:
            return
        commit = pair.take_commit()
        if commit is not None:
            self._control.post(commit)
        if pair.has_chunk:
            self._line[pair] = None
            self._work.set()

    def gave_up(self, pair: OutgoingPairTransfer, reason: str) -> None:
        self.decline(pair.ticket.transfer_id, reason)

    def pair_ended(self, pair: OutgoingPairTransfer) -> None:
        self._pairs.pop(pair.ticket.transfer_id, None)
        self._line.pop(pair, None)
        if not self._pairs:
            self._idle.set()

    # --- the control connection ---

    async def _greet(self, connection: Connection) -> KVWelcome:
        """Send our hello and return the peer's welcome. Raises ConnectionLost where it refuses."""
        ours, encoding = self._sender, self._sender.config.encoding
        kv = KVHello(ours.store.layout, ours.store.rank, encoding, ours.transports.reach, self._without)
        connection.send(Hello(ours.peer, self.target, kv))
        while isinstance(answer := await connection.receive(), Ping):
            pass  # it is still preparing the link
        if isinstance(answer, Refuse):
            raise ConnectionLost(f"the target refuses the connection: {answer.reason}")
        if not isinstance(answer, Welcome) or answer.receiver != self.target or answer.kv is None:
            raise ProtocolError(f"{self.address} answers as another worker: {answer}")
        if answer.kv.rank != self._pair.target_rank:
            raise ProtocolError(f"{self.address} is rank {answer.kv.rank}, not {self._pair.target_rank}")
        fault = incompatibility(ours.store.layout, answer.kv.layout, encoding)
        if fault is not None:
            raise ProtocolError(f"the target welcomes what does not fit: {fault}")
        return answer.kv

    def _begin(self, control: LeasedConnection, welcome: KVWelcome) -> KVShard:
        """Send the offers and declines that were waiting for the welcome. Return our end of the rank pair."""
        shard = self._shard = pair_shards(
            self._pair, self._sender.store.layout, welcome.layout, self._sender.config.encoding
        )[0]
        for pair in tuple(self._pairs.values()):
            self._offer(control, pair)
        for abort in self._declined:
            control.post(abort)
        self._declined.clear()
        return shard

    def _offer(self, control: LeasedConnection, pair: OutgoingPairTransfer) -> None:
        control.post(Offer(pair.ticket, pair.transfer.num_tokens))
        pair.offered()

    async def _listen(self, control: LeasedConnection) -> None:
        while True:
            self._handle(await control.receive())

    def _handle(self, message: Message) -> None:
        match message:
            case Ping():
                return
            case Refuse(reason=reason):
                raise ConnectionLost(f"the target ended the connection: {reason}")
            case Awaited(transfer_id=transfer_id):
                if (pair := self._pairs.get(transfer_id)) is not None:
                    pair.awaited()
            case Grant() | Verified():
                pair = self._pairs.get(message.transfer_id)
                if pair is None:
                    return
                if pair.state is not SenderState.ABORTING:
                    self._answer(pair, message)
                elif isinstance(message, Verified):  # which crosses our abort of the rank pair, and is no fault
                    pair.peer_aborted("the target has everything already")
            case Abort(transfer_id=transfer_id, reason=reason):
                if (pair := self._pairs.get(transfer_id)) is not None:
                    pair.peer_aborted(f"the target gave up: {reason}")
            case _:
                raise ProtocolError(f"a target does not send {type(message).__name__}")

    def _answer(self, pair: OutgoingPairTransfer, message: Grant | Verified) -> None:
        """Pass the peer's answer to its rank pair; an invalid answer ends this transfer alone."""
        try:
            if isinstance(message, Verified):
                pair.verified()
            elif self._shard is not None:
                pair.granted(self._shard, message.skip_tokens)
        except (IllegalTransition, ValueError) as error:
            pair.abort(f"the target broke the protocol: {error}")

    async def _stand_in(self) -> None:
        """Raise ConnectionLost after SECOND_BEST_S, once idle: the next transfer tries the better transport again."""
        await asyncio.sleep(SECOND_BEST_S)
        while self._pairs:
            self._idle.clear()
            await self._idle.wait()
        raise ConnectionLost("a better transport is tried again")

    # --- the data link ---

    async def _carry(self, control: LeasedConnection, welcome: KVWelcome, shard: KVShard) -> None:
        """Join the link and send over it until it is lost, which raises ConnectionLost; it is closed then."""
        transport = self._sender.transports.by_name.get(welcome.transport)
        if transport is None:
            raise ProtocolError(f"the target chose the transport {welcome.transport}, which this worker has not")
        self.unfit_transport = welcome.transport  # until joined: the connection may be lost before we hear of the link
        try:
            link = await transport.join(welcome.link, shard)
        except ConnectionLost as lost:
            raise self._lost(f"the {welcome.transport} link can't be joined: {lost}", welcome) from lost
        self.unfit_transport = None
        missing = welcome.missing if link.shortfall is None else (*welcome.missing, link.shortfall)
        self.report = LinkReport(self.target, welcome.transport, welcome.why, missing)
        pace = link_pace(self._sender.store)
        chunk_bytes = self._sender.config.max_chunk_bytes or pace.chunk_bytes
        max_units = max(1, min(chunk_bytes, link.max_chunk_bytes or chunk_bytes) // shard.unit_bytes)
        patience = Patience(self._sender.config.lease_s)
        movers = [self._send_chunks(control, link, patience, max_units) for _ in range(pace.chunks_under_way)]
        try:
            reason = await run_until_lost(*movers)
            broken = self._lost(f"the {welcome.transport} link was lost: {reason}", welcome)
            self._sender.forget(self)  # before the link is closed, which may take a while
        finally:
            self.report = None
            await finish(link.close())
        raise broken

    async def _send_chunks(
        self, control: LeasedConnection, link: SendingEnd, patience: Patience, max_units: int
    ) -> None:
        """Send the rank pairs' chunks in turn, one at a time. Raises ConnectionLost when the link breaks."""
        while True:
            await control.drain()
            if not self._line:
                self._work.clear()
                await self._work.wait()
                continue
            pair = next(iter(self._line))
            del self._line[pair]
            chunk = pair.begin_chunk(max_units)
            if chunk is None:
                continue
            control.post(chunk)
            self.has_work(pair)  # at the end of the line
            seed = chunk_seed(chunk, self._sender.peer, self.target)
            await patience.wait(link.send(pair.segments(chunk), seed), "sending a chunk")
            self._has_carried = True
            self._sender.stats.bytes += chunk.num_bytes
            pair.end_chunk()

    def _lost(self, reason: str, welcome: KVWelcome) -> ConnectionLost:
        self._sender.stats.links_lost += 1
        if not self._has_carried:
            self.unfit_transport = welcome.transport
        logger.warning("kv to %s: %s", self.target, reason)
        return ConnectionLost(reason)
