"""KV transfer of a worker of several ranks: all ranks' parts of a transfer as one.

Every rank has a KVSender and a KVReceiver, and listens for itself. Rank 0's worker calls RankedSender and
RankedReceiver as it would call its own two: each call goes to rank 0's own part, and to all other ranks as one frame
over the connections that the engine has, where RankTransfers carries it out. Each rank tells rank 0 when its part has
ended. A transfer is whole when all parts are, and failed when one is.

Whether an offer has come rank 0 alone tells: every rank of a target has a lane from each source, from whichever of its
stages has the rank's first layer, so one comes here too.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.sides import LinkReport
from twostroke.kvtransfer.transfer import IncomingTransfer, OutgoingTransfer, Transfer, TransferCompletion
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ProtocolError, TransferFailed
from twostroke.protocol.messages import (
    AbortTransfer,
    CommitTransfer,
    DeclineTransfer,
    ExpectTransfer,
    KeepTransfer,
    OpenTransfer,
    RefuseTransfer,
    TransferEnded,
    TransferReady,
    WindowsMoved,
)
from twostroke.protocol.requests import Address, SampledToken, Ticket
from twostroke.protocol.stats import TransferStats

S = TypeVar("S", KVSender, KVReceiver)


class _RankedSide(Generic[S]):
    """What both sides have in common: the transfers under way, and the numbers of all ranks together."""

    def __init__(self, own: S, ranks: RankConnections, clock: Clock):
        self.ranks = ranks
        self.clock = clock
        self._own: S = own
        self._total = TransferStats()  # of whole transfers
        self._stats: dict[int, TransferStats] = {}  # of the other ranks
        self._transfers: dict[int, _RankedTransfer] = {}  # by number
        ranks.watch(self._part_ended)
        ranks.lost.add_done_callback(lambda lost: self._ranks_lost(lost.result()))

    @property
    def stats(self) -> TransferStats:
        """Transfers count once, what moves and goes wrong on every rank."""
        ranks = [self._own.stats, *self._stats.values()]
        return msgspec.structs.replace(
            self._total,
            digest_failures=sum(each.digest_failures for each in ranks),
            links_lost=sum(each.links_lost for each in ranks),
            bytes=sum(each.bytes for each in ranks),
        )

    async def close(self) -> None:
        """As a rank's own side's; the other ranks close theirs when they end."""
        transfers = tuple(self._transfers.values())
        for transfer in transfers:
            transfer.abort("the worker is closing")
        for transfer in transfers:
            await transfer.settled()
        await self._own.close()

    def began(self, transfer: "_RankedTransfer") -> None:
        self._transfers[transfer.number] = transfer
        self._total.in_flight += 1
        if self.ranks.loss is not None:
            transfer.ranks_lost(self.ranks.loss)

    def over(self, transfer: "_RankedTransfer") -> None:
        del self._transfers[transfer.number]
        self._total.end(transfer.failure, self.clock() - transfer.started_s, is_given_up=transfer.is_given_up)

    def _part_ended(self, rank: int, message: TransferEnded) -> None:
        transfer = self._transfers.get(message.number)
        if transfer is not None:
            self._stats[rank] = message.stats
            transfer.part_ended(rank, message.failure, message.first_token)

    def _ranks_lost(self, reason: str) -> None:
        for transfer in tuple(self._transfers.values()):
            transfer.ranks_lost(reason)


class RankedSender(_RankedSide[KVSender]):
    """Implements sides.SendingSide."""

    def open(
        self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int
    ) -> "RankedOutgoing":
        """As KVSender.open."""
        transfer = RankedOutgoing(self, self._own.open(ticket, num_tokens, block_ids, num_ready_tokens))
        self.ranks.tell(OpenTransfer(transfer.number, ticket, num_tokens, tuple(block_ids), num_ready_tokens))
        return transfer

    def decline(self, ticket: Ticket, reason: str) -> None:
        """As KVSender.decline."""
        self._own.decline(ticket, reason)
        self.ranks.tell(DeclineTransfer(ticket, reason))

    def links(self) -> tuple[LinkReport, ...]:
        """Those of rank 0: the others' go to the same workers, by the same means."""
        return self._own.links()


class RankedReceiver(_RankedSide[KVReceiver]):
    """Implements sides.ReceivingSide."""

    def __init__(self, own: KVReceiver, others: tuple[Address, ...], ranks: RankConnections, clock: Clock):
        """`others` are where the other ranks listen for sources, in order."""
        super().__init__(own, ranks, clock)
        self._others = others

    @property
    def on_offer(self) -> Callable[[bytes], None]:
        """As KVReceiver.on_offer."""
        return self._own.on_offer

    @on_offer.setter
    def on_offer(self, on_offer: Callable[[bytes], None]) -> None:
        self._own.on_offer = on_offer

    async def start(self, host: str) -> tuple[Address, ...]:
        """As KVReceiver.start; the other ranks listen already."""
        return (*await self._own.start(host), *self._others)

    def has_offer(self, ticket: Ticket) -> bool:
        """As KVReceiver.has_offer."""
        return self._own.has_offer(ticket)

    def offered_tokens(self, transfer_id: bytes) -> int | None:
        """As KVReceiver.offered_tokens."""
        return self._own.offered_tokens(transfer_id)

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int) -> "RankedIncoming":
        """As KVReceiver.expect."""
        transfer = RankedIncoming(self, self._own.expect(ticket, block_ids, num_tokens, skip_tokens))
        self.ranks.tell(ExpectTransfer(transfer.number, ticket, tuple(block_ids), num_tokens, skip_tokens))
        return transfer

    def keep(self, ticket: Ticket) -> None:
        """As KVReceiver.keep."""
        self._own.keep(ticket)
        self.ranks.tell(KeepTransfer(ticket))

    def refuse(self, ticket: Ticket) -> None:
        """As KVReceiver.refuse."""
        self._own.refuse(ticket)
        self.ranks.tell(RefuseTransfer(ticket))


class _RankedTransfer(TransferCompletion):
    """All ranks' parts of one transfer. Its blocks are touched until every part has ended, or the ranks with it.

    It is given up by who began it here, not by a part that failed.
    """

    def __init__(self, side: _RankedSide[Any], own: Transfer):
        super().__init__()
        self.number = side.ranks.new_number()
        self.started_s = side.clock()
        self._side = side
        self._own = own
        self._left = {0, *side.ranks.others}
        self._first_tokens: list[SampledToken | None] = []
        self._following = asyncio.create_task(self._follow(), name=f"rank 0's part of transfer {self.number}")
        side.began(self)

    def fail(self, reason: str) -> None:
        if self.ended or self.failure is not None:
            return
        self.failure = reason
        self._side.ranks.tell(AbortTransfer(self.number, reason))
        self._own.abort(reason)

    async def settled(self) -> None:
        """Wait for the end of all parts, however that is."""
        await self._over.wait()
        await self._following

    # --- the side's calls ---

    def part_ended(self, rank: int, failure: str | None, first_token: SampledToken | None) -> None:
        """A rank touches the blocks no more."""
        if rank not in self._left:
            return
        self._left.discard(rank)
        self._first_tokens.append(first_token)
        if failure is not None:
            self.fail(failure if rank == 0 else f"{failure} (on rank {rank})")
        self._look_for_end()

    def ranks_lost(self, reason: str) -> None:
        """The other ranks are ending, and do nothing with their blocks any more."""
        self.fail(reason)
        self._left &= {0}
        self._look_for_end()

    # --- inside ---

    async def _follow(self) -> None:
        try:
            first_token = await self._own.end()
        except TransferFailed as error:
            self.part_ended(0, str(error), None)
        else:
            self.part_ended(0, None, first_token)

    def _look_for_end(self) -> None:
        if self._left or self.ended:
            return
        self.first_token = self._first_tokens[0] if self._first_tokens else None
        if self.failure is None and any(token != self.first_token for token in self._first_tokens):
            self.failure = f"the source's ranks name different first tokens: {self._first_tokens}"
        self._over.set()
        self._side.over(self)


class RankedOutgoing(_RankedTransfer):
    """Implements sides.Outgoing."""

    def __init__(self, side: RankedSender, own: OutgoingTransfer):
        super().__init__(side, own)
        self._part = own

    def windows_moved(self, block_ids: Sequence[int]) -> None:
        """As OutgoingTransfer.windows_moved."""
        self._part.windows_moved(block_ids)
        self._side.ranks.tell(WindowsMoved(self.number, tuple(block_ids)))

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """As OutgoingTransfer.layer_ready.

        The other ranks are told once, with the first layer: when they have a layer themselves only they know.
        """
        self._part.layer_ready(layer, num_tokens)
        if layer == 0:
            self._side.ranks.tell(TransferReady(self.number, num_tokens))

    def commit(self, first_token: SampledToken | None) -> None:
        """As OutgoingTransfer.commit."""
        self._part.commit(first_token)
        self._side.ranks.tell(CommitTransfer(self.number, first_token))

    async def done(self) -> None:
        """As OutgoingTransfer.done, of every rank."""
        await self.end()


class RankedIncoming(_RankedTransfer):
    """Implements sides.Incoming."""

    async def verified(self) -> SampledToken | None:
        """As IncomingTransfer.verified, of every rank."""
        return await self.end()


@dataclass(kw_only=True, eq=False)
class RankTransfers:
    """Acts on both sides of one rank. `tell` reaches rank 0, and never waits."""

    sender: KVSender
    receiver: KVReceiver
    layers: range  # this rank's
    tell: Callable[[TransferEnded], None]

    def __post_init__(self) -> None:
        self._outgoing: dict[int, OutgoingTransfer] = {}  # by rank 0's number, until their end
        self._incoming: dict[int, IncomingTransfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # one for each of them
        self._next_layer = self.layers.stop  # that the step under way writes; none where there is none
        self._num_begun = self._num_ended = 0  # steps
        # What steps under way compute for whom: tokens that are ready with the end of one, by its number.
        self._fed: list[tuple[OutgoingTransfer, int, int]] = []

    # --- the rank's engine ---

    def step_began(self) -> None:
        """Another may be under way, where neither announces layers."""
        self._num_begun += 1
        self._next_layer = self.layers.start

    def layer_done(self, layer: int) -> None:
        """The step under way has written the KV of this layer, one of the rank's."""
        self._next_layer = layer + 1
        for transfer, num_tokens, _ in self._fed:
            transfer.layer_ready(layer, num_tokens)

    def step_ended(self) -> None:
        """Every layer of the first step under way is done, announced or not."""
        self._num_ended += 1
        for layer in range(self._next_layer, self.layers.stop):
            for transfer, num_tokens, step in self._fed:
                if step <= self._num_ended:
                    transfer.layer_ready(layer, num_tokens)
        self._fed = [fed for fed in self._fed if fed[2] > self._num_ended]
        if self._num_ended == self._num_begun:
            self._next_layer = self.layers.stop

    # --- rank 0's word ---

    def handle(self, message: object) -> None:
        """Do as it says; never waits. Raises ProtocolError for what does not concern transfers."""
        match message:
            case OpenTransfer(number, ticket, num_tokens, block_ids, num_ready_tokens):
                outgoing = self.sender.open(ticket, num_tokens, block_ids, num_ready_tokens)
                self._outgoing[number] = outgoing
                self._follow(number, outgoing, self.sender.stats)
            case WindowsMoved(number, block_ids):
                if (sending := self._outgoing.get(number)) is not None:
                    sending.windows_moved(block_ids)
            case TransferReady(number, num_tokens):
                if (sending := self._outgoing.get(number)) is not None:
                    self._feed(sending, num_tokens)
            case CommitTransfer(number, first_token):
                if (sending := self._outgoing.get(number)) is not None:
                    sending.commit(first_token)
            case DeclineTransfer(ticket, reason):
                self.sender.decline(ticket, reason)
            case ExpectTransfer(number, ticket, block_ids, num_tokens, skip_tokens):
                incoming = self.receiver.expect(ticket, block_ids, num_tokens, skip_tokens)
                self._incoming[number] = incoming
                self._follow(number, incoming, self.receiver.stats)
            case KeepTransfer(ticket):
                self.receiver.keep(ticket)
            case RefuseTransfer(ticket):
                self.receiver.refuse(ticket)
            case AbortTransfer(number, reason):
                transfer = self._outgoing.get(number) or self._incoming.get(number)
                if transfer is not None:
                    transfer.abort(reason)
            case _:
                raise ProtocolError(f"rank 0 must not send {type(message).__name__}")

    async def close(self) -> None:
        """Close both sides, and return once nothing touches a block any more."""
        await self.sender.close()
        await self.receiver.close()
        await asyncio.gather(*self._tasks)

    # --- inside ---

    def _feed(self, transfer: OutgoingTransfer, num_tokens: int) -> None:
        for layer in range(self.layers.start, self._next_layer):
            transfer.layer_ready(layer, num_tokens)
        if self._next_layer < self.layers.stop:
            self._fed.append((transfer, num_tokens, self._num_begun))  # the last one: too late does no harm

    def _follow(self, number: int, transfer: Transfer, stats: TransferStats) -> None:
        task = asyncio.create_task(self._see_off(number, transfer, stats), name=f"part of transfer {number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_off(self, number: int, transfer: Transfer, stats: TransferStats) -> None:
        failure, first_token = None, None
        try:
            first_token = await transfer.end()
        except TransferFailed as error:
            failure = str(error)
        self._outgoing.pop(number, None)
        self._incoming.pop(number, None)
        self.tell(TransferEnded(number, failure, first_token, stats))
