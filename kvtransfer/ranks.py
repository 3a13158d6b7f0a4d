"""KV transfer of a worker of several ranks: all ranks' parts of a transfer as one.

Every rank has a KVSender and a KVReceiver, and listens for itself. Rank 0's worker calls RankedSender and
RankedReceiver like its own two. Each call goes to rank 0's own part, and to all other ranks as one TransferCall over
the connections that the engine has, where RankTransfers repeats it. Each rank replies with TransferEnded when its part
has ended. A transfer has succeeded when all parts have, and failed when one has.

Rank 0 alone knows whether an offer has arrived: every rank of a target has a rank pair from each source, from whichever
of its stages has the rank's first layer, so one arrives here too.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender, LinkReport
from twostroke.kvtransfer.transfer import IncomingTransfer, OutgoingTransfer, TransferCompletion
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ProtocolError, TransferFailed
from twostroke.protocol.messages import TransferCall, TransferEnded, TransferMethod
from twostroke.protocol.requests import Address, SampledToken, Ticket
from twostroke.protocol.stats import TransferStats

SideT = TypeVar("SideT", KVSender, KVReceiver)
PartT = TypeVar("PartT", OutgoingTransfer, IncomingTransfer)


class RankedSide(Generic[SideT]):
    """The common part of both sides: the transfers under way, and the numbers of all ranks together."""

    def __init__(self, own: SideT, ranks: RankConnections, clock: Clock):
        self.ranks = ranks
        self.clock = clock
        self._own: SideT = own
        self._total = TransferStats()  # of whole transfers
        self._stats: dict[int, TransferStats] = {}  # of the other ranks
        self._transfers: dict[int, RankedTransfer[Any]] = {}  # by number
        ranks.watch(self._part_ended)
        ranks.lost.add_done_callback(lambda lost: self._ranks_lost(lost.result()))

    @property
    def stats(self) -> TransferStats:
        """Transfers count once; bytes, checksum failures and lost links count on every rank."""
        ranks = [self._own.stats, *self._stats.values()]
        return msgspec.structs.replace(
            self._total,
            digest_failures=sum(each.digest_failures for each in ranks),
            links_lost=sum(each.links_lost for each in ranks),
            bytes=sum(each.bytes for each in ranks),
        )

    async def close(self) -> None:
        """End every transfer and close rank 0's own side; the other ranks close theirs when they end."""
        transfers = tuple(self._transfers.values())
        for transfer in transfers:
            transfer.abort("the worker is closing")
        for transfer in transfers:
            await transfer.settled()
        await self._own.close()

    def add(self, transfer: "RankedTransfer[Any]") -> None:
        """Add a transfer that has begun on rank 0."""
        self._transfers[transfer.number] = transfer
        self._total.in_flight += 1
        if self.ranks.loss is not None:
            transfer.ranks_lost(self.ranks.loss)

    def remove(self, transfer: "RankedTransfer[Any]") -> None:
        """Remove a transfer that has ended on all ranks."""
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


class RankedSender(RankedSide[KVSender]):
    """The KVSender of all ranks. Its methods are documented there."""

    def begin_transfer(
        self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int
    ) -> "RankedTransfer[OutgoingTransfer]":
        transfer = RankedTransfer(self, self._own.begin_transfer(ticket, num_tokens, block_ids, num_ready_tokens))
        transfer.call(
            "begin_transfer",
            ticket=ticket,
            block_ids=tuple(block_ids),
            num_tokens=num_tokens,
            num_here=num_ready_tokens,
        )
        return transfer

    def decline_transfer(self, ticket: Ticket, reason: str) -> None:
        self._own.decline_transfer(ticket, reason)
        self.ranks.tell(TransferCall("decline_transfer", ticket=ticket, reason=reason))

    def links(self) -> tuple[LinkReport, ...]:
        """Return the links of rank 0: those of other ranks go to the same workers, by the same means."""
        return self._own.links()


class RankedReceiver(RankedSide[KVReceiver]):
    """The KVReceiver of all ranks. Its methods are documented there."""

    def __init__(self, own: KVReceiver, others: tuple[Address, ...], ranks: RankConnections, clock: Clock):
        """`others` are where the other ranks listen for sources, in order."""
        super().__init__(own, ranks, clock)
        self._others = others

    @property
    def on_offer(self) -> Callable[[bytes], None]:
        return self._own.on_offer

    @on_offer.setter
    def on_offer(self, on_offer: Callable[[bytes], None]) -> None:
        self._own.on_offer = on_offer

    async def start(self, host: str) -> tuple[Address, ...]:
        """Listen for sources; the other ranks listen already. Return one address for each rank."""
        return (*await self._own.start(host), *self._others)

    def has_offer(self, ticket: Ticket) -> bool:
        return self._own.has_offer(ticket)

    def offered_tokens(self, transfer_id: bytes) -> int | None:
        return self._own.offered_tokens(transfer_id)

    def expect_transfer(
        self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int
    ) -> "RankedTransfer[IncomingTransfer]":
        transfer = RankedTransfer(self, self._own.expect_transfer(ticket, block_ids, num_tokens, skip_tokens))
        transfer.call(
            "expect_transfer", ticket=ticket, block_ids=tuple(block_ids), num_tokens=num_tokens, num_here=skip_tokens
        )
        return transfer

    def keep_offer(self, ticket: Ticket) -> None:
        self._own.keep_offer(ticket)
        self.ranks.tell(TransferCall("keep_offer", ticket=ticket))

    def refuse_offer(self, ticket: Ticket) -> None:
        self._own.refuse_offer(ticket)
        self.ranks.tell(TransferCall("refuse_offer", ticket=ticket))


class RankedTransfer(TransferCompletion, Generic[PartT]):
    """All ranks' parts of one transfer. Its blocks are touched until every part has ended, or the ranks with it.

    Only `abort` on rank 0 gives it up; a part that fails does not. Its other methods are documented in OutgoingTransfer
    and IncomingTransfer.
    """

    def __init__(self, side: RankedSide[Any], own: PartT):
        super().__init__()
        self.number = side.ranks.new_number()
        self.started_s = side.clock()
        self._side = side
        self._own: PartT = own
        self._left = {0, *side.ranks.others}
        self._first_tokens: list[SampledToken | None] = []
        self._following = asyncio.create_task(self._follow(), name=f"rank 0's part of transfer {self.number}")
        side.add(self)

    def call(self, method: TransferMethod, **arguments: Any) -> None:
        """Have every other rank do the same with its part."""
        self._side.ranks.tell(TransferCall(method, self.number, **arguments))

    def fail(self, reason: str) -> None:
        if self.ended or self.failure is not None:
            return
        self.failure = reason
        self.call("abort", reason=reason)
        self._own.abort(reason)

    async def settled(self) -> None:
        """Wait for the end of all parts, whether they succeed or fail."""
        await self._over.wait()
        await self._following

    # --- as OutgoingTransfer ---

    def windows_moved(self: "RankedTransfer[OutgoingTransfer]", block_ids: Sequence[int]) -> None:
        self._own.windows_moved(block_ids)
        self.call("windows_moved", block_ids=tuple(block_ids))

    def layer_ready(self: "RankedTransfer[OutgoingTransfer]", layer: int, num_tokens: int) -> None:
        """Call the other ranks once, with the first layer: only they know when they have a layer themselves."""
        self._own.layer_ready(layer, num_tokens)
        if layer == 0:
            self.call("layer_ready", num_tokens=num_tokens)

    def commit(self: "RankedTransfer[OutgoingTransfer]", first_token: SampledToken | None) -> None:
        self._own.commit(first_token)
        self.call("commit", first_token=first_token)

    async def done(self) -> None:
        await self.end()

    # --- as IncomingTransfer ---

    async def verified(self) -> SampledToken | None:
        return await self.end()

    # --- the side's calls ---

    def part_ended(self, rank: int, failure: str | None, first_token: SampledToken | None) -> None:
        """Account for a rank that touches the blocks no more."""
        if rank not in self._left:
            return
        self._left.discard(rank)
        self._first_tokens.append(first_token)
        if failure is not None:
            self.fail(failure if rank == 0 else f"{failure} (on rank {rank})")
        self._look_for_end()

    def ranks_lost(self, reason: str) -> None:
        """Account for other ranks that are ending, and touch no blocks any more."""
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
        self._side.remove(self)


@dataclass(kw_only=True, eq=False)
class RankTransfers:
    """Repeats rank 0's calls on both sides of another rank. `tell` reaches rank 0, and never waits."""

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
        # Transfers of what steps under way compute, each with the tokens that are ready at the end of a step, and its
        # number.
        self._fed: list[tuple[OutgoingTransfer, int, int]] = []

    # --- the rank's engine ---

    def step_began(self) -> None:
        """Note a step that has begun. Another may be under way, where neither announces layers."""
        self._num_begun += 1
        self._next_layer = self.layers.start

    def layer_done(self, layer: int) -> None:
        """Pass on that the step under way has written the KV of this layer, one of the rank's."""
        self._next_layer = layer + 1
        for transfer, num_tokens, _ in self._fed:
            transfer.layer_ready(layer, num_tokens)

    def step_ended(self) -> None:
        """Pass on that every layer of the first step under way is done, announced or not."""
        self._num_ended += 1
        for layer in range(self._next_layer, self.layers.stop):
            for transfer, num_tokens, step in self._fed:
                if step <= self._num_ended:
                    transfer.layer_ready(layer, num_tokens)
        self._fed = [fed for fed in self._fed if fed[2] > self._num_ended]
        if self._num_ended == self._num_begun:
            self._next_layer = self.layers.stop

    # --- rank 0's calls ---

    def handle(self, message: object) -> None:
        """Repeat a call; never waits. Raises ProtocolError for a message that does not concern transfers."""
        match message:
            case TransferCall(ticket=Ticket() as ticket) as call:
                self._call_side(call, ticket)
            case TransferCall(method="abort", number=number, reason=reason):
                transfer = self._outgoing.get(number) or self._incoming.get(number)
                if transfer is not None:
                    transfer.abort(reason)
            case TransferCall() as call:
                if (outgoing := self._outgoing.get(call.number)) is not None:
                    self._call_transfer(call, outgoing)
            case _:
                raise ProtocolError(f"rank 0 must not send {type(message).__name__}")

    async def close(self) -> None:
        """Close both sides, and return once nothing touches a block any more."""
        await self.sender.close()
        await self.receiver.close()
        await asyncio.gather(*self._tasks)

    # --- inside ---

    def _call_side(self, call: TransferCall, ticket: Ticket) -> None:
        match call.method:
            case "begin_transfer":
                outgoing = self.sender.begin_transfer(ticket, call.num_tokens, call.block_ids, call.num_here)
                self._outgoing[call.number] = outgoing
                self._follow(call.number, outgoing, self.sender.stats)
            case "decline_transfer":
                self.sender.decline_transfer(ticket, call.reason)
            case "expect_transfer":
                incoming = self.receiver.expect_transfer(ticket, call.block_ids, call.num_tokens, call.num_here)
                self._incoming[call.number] = incoming
                self._follow(call.number, incoming, self.receiver.stats)
            case "keep_offer":
                self.receiver.keep_offer(ticket)
            case "refuse_offer":
                self.receiver.refuse_offer(ticket)

    def _call_transfer(self, call: TransferCall, outgoing: OutgoingTransfer) -> None:
        match call.method:
            case "windows_moved":
                outgoing.windows_moved(call.block_ids)
            case "layer_ready":
                self._feed(outgoing, call.num_tokens)
            case "commit":
                outgoing.commit(call.first_token)

    def _feed(self, transfer: OutgoingTransfer, num_tokens: int) -> None:
        for layer in range(self.layers.start, self._next_layer):
            transfer.layer_ready(layer, num_tokens)
        if self._next_layer < self.layers.stop:
            self._fed.append((transfer, num_tokens, self._num_begun))  # the last one: too late does no harm

    def _follow(self, number: int, transfer: TransferCompletion, stats: TransferStats) -> None:
        task = asyncio.create_task(self._reply(number, transfer, stats), name=f"part of transfer {number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, number: int, transfer: TransferCompletion, stats: TransferStats) -> None:
        failure, first_token = None, None
        try:
            first_token = await transfer.end()
        except TransferFailed as error:
            failure = str(error)
        self._outgoing.pop(number, None)
        self._incoming.pop(number, None)
        self.tell(TransferEnded(number, failure, first_token, stats))


# A worker is given either a rank's own sides or those of all its ranks.
SendingSide = KVSender | RankedSender
ReceivingSide = KVReceiver | RankedReceiver
Outgoing = OutgoingTransfer | RankedTransfer[OutgoingTransfer]
Incoming = IncomingTransfer | RankedTransfer[IncomingTransfer]


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
