"""The receiving side of a worker of several ranks. Each rank has its own KVReceiver, and listens for itself.

Whether an offer has come rank 0 alone tells: every rank of a target has a lane from each source, so one comes here too.
"""

from collections.abc import Callable, Sequence

from twostroke.kvtransfer.incoming import IncomingTransfer
from twostroke.kvtransfer.ranked_side import RankedSide
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.transfer_parts import TransferParts
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.rank_messages import ExpectTransfer, KeepTransfer, RefuseTransfer
from twostroke.protocol.requests import Address, SampledToken, Ticket


class RankedIncoming:
    """Implements sides.Incoming: all ranks' parts of a transfer as one."""

    def __init__(self, parts: TransferParts):
        self._parts = parts

    async def verified(self) -> SampledToken | None:
        """As IncomingTransfer.verified, of every rank."""
        return await self._parts.over()

    async def cancel(self) -> None:
        """As IncomingTransfer.cancel."""
        self.abort("the target cancelled the transfer")
        try:
            await self._parts.over()
        except TransferFailed:
            return

    def abort(self, reason: str) -> None:
        """As IncomingTransfer.abort."""
        self._parts.abort(reason)


class RankedReceiver:
    """Implements sides.ReceivingSide."""

    def __init__(self, own: KVReceiver, others: tuple[Address, ...], ranks: RankConnections, clock: Clock):
        """`others` are where the other ranks listen for sources, in order."""
        self._own = own
        self._others = others
        self._ranks = ranks
        self._side = RankedSide(own.stats, ranks, clock)

    @property
    def stats(self) -> TransferStats:
        """Of all ranks."""
        return self._side.stats

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

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int) -> RankedIncoming:
        """As KVReceiver.expect."""
        own = self._own.expect(ticket, block_ids, num_tokens, skip_tokens)
        parts = self._side.follow(_end(own), own.abort)
        self._ranks.tell(ExpectTransfer(parts.number, ticket, tuple(block_ids), num_tokens, skip_tokens))
        return RankedIncoming(parts)

    def keep(self, ticket: Ticket) -> None:
        """As KVReceiver.keep."""
        self._own.keep(ticket)
        self._ranks.tell(KeepTransfer(ticket))

    def refuse(self, ticket: Ticket) -> None:
        """As KVReceiver.refuse."""
        self._own.refuse(ticket)
        self._ranks.tell(RefuseTransfer(ticket))

    async def close(self) -> None:
        """As KVReceiver.close; the other ranks close their own sides when they end."""
        await self._side.end("the target is closing")
        await self._own.close()


async def _end(own: IncomingTransfer) -> SampledToken | None:
    return await own.verified()
