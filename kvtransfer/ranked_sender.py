"""The sending side of a worker of several ranks. Each has a KVSender; rank 0 tells the others what to send."""

from collections.abc import Sequence

from twostroke.kvtransfer.outgoing import OutgoingTransfer
from twostroke.kvtransfer.ranked_side import RankedSide
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.sender_connection import LinkReport
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.transfer_parts import TransferParts
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.clock import Clock
from twostroke.protocol.rank_messages import CommitTransfer, DeclineTransfer, OpenTransfer, TransferReady
from twostroke.protocol.requests import SampledToken, Ticket


class RankedOutgoing:
    """Implements sides.Outgoing: all ranks' parts of a transfer as one."""

    def __init__(self, own: OutgoingTransfer, parts: TransferParts, ranks: RankConnections):
        self._own = own
        self._parts = parts
        self._ranks = ranks

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """As OutgoingTransfer.layer_ready.

        The other ranks are told once, with the first layer: when they have a layer themselves only they know.
        """
        self._own.layer_ready(layer, num_tokens)
        if layer == 0:
            self._ranks.tell(TransferReady(self._parts.number, num_tokens))

    def commit(self, first_token: SampledToken | None) -> None:
        """As OutgoingTransfer.commit."""
        self._own.commit(first_token)
        self._ranks.tell(CommitTransfer(self._parts.number, first_token))

    def abort(self, reason: str) -> None:
        """As OutgoingTransfer.abort."""
        self._parts.abort(reason)

    async def done(self) -> None:
        """As OutgoingTransfer.done, of every rank."""
        await self._parts.over()


class RankedSender:
    """Implements sides.SendingSide."""

    def __init__(self, own: KVSender, ranks: RankConnections, clock: Clock):
        self._own = own
        self._ranks = ranks
        self._side = RankedSide(own.stats, ranks, clock)

    @property
    def stats(self) -> TransferStats:
        """Of all ranks."""
        return self._side.stats

    def open(self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int) -> RankedOutgoing:
        """As KVSender.open."""
        own = self._own.open(ticket, num_tokens, block_ids, num_ready_tokens)
        parts = self._side.follow(_end(own), own.abort)
        self._ranks.tell(OpenTransfer(parts.number, ticket, num_tokens, tuple(block_ids), num_ready_tokens))
        return RankedOutgoing(own, parts, self._ranks)

    def decline(self, ticket: Ticket, reason: str) -> None:
        """As KVSender.decline."""
        self._own.decline(ticket, reason)
        self._ranks.tell(DeclineTransfer(ticket, reason))

    def links(self) -> tuple[LinkReport, ...]:
        """Those of rank 0: the others' go to the same workers, by the same means."""
        return self._own.links()

    async def close(self) -> None:
        """As KVSender.close; the other ranks close their own sides when they end."""
        await self._side.end("the source is closing")
        await self._own.close()


async def _end(own: OutgoingTransfer) -> None:
    await own.done()
