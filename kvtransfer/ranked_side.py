"""What the two sides of KV transfer have in common on a worker of several ranks."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.transfer_parts import TransferParts
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.rank_messages import TransferCounts, TransferEnded
from twostroke.protocol.requests import SampledToken


class RankedSide:
    """One side's transfers under way, and the numbers of all ranks together."""

    def __init__(self, own: TransferStats, ranks: RankConnections, clock: Clock):
        """`own` are rank 0's numbers, which its own side keeps up to date."""
        self._own = own
        self._ranks = ranks
        self._clock = clock
        self._total = TransferStats()  # of whole transfers
        self._counts: dict[int, TransferCounts] = {}  # of the other ranks
        self._parts: dict[int, TransferParts] = {}  # by number
        self._tasks: set[asyncio.Task[None]] = set()
        ranks.watch(self._part_ended)
        ranks.lost.add_done_callback(lambda lost: self._ranks_lost(lost.result()))

    @property
    def stats(self) -> TransferStats:
        """Transfers count once, what moves and goes wrong on every rank."""
        counts: list[TransferStats | TransferCounts] = [self._own, *self._counts.values()]
        return TransferStats(
            in_flight=self._total.in_flight,
            done=self._total.done,
            failed=self._total.failed,
            given_up=self._total.given_up,
            seconds=self._total.seconds,
            digest_failures=sum(each.digest_failures for each in counts),
            retries=sum(each.retries for each in counts),
            links_lost=sum(each.links_lost for each in counts),
            bytes=sum(each.bytes for each in counts),
        )

    def follow(
        self, own_end: Coroutine[Any, Any, SampledToken | None], abort_own: Callable[[str], None]
    ) -> TransferParts:
        """A transfer begins, whose own part ends with `own_end`: by TransferFailed, or with its first token."""
        parts = TransferParts(ranks=self._ranks, abort_own=abort_own, on_over=self._count, started_s=self._clock())
        self._parts[parts.number] = parts
        self._total.in_flight += 1
        task = asyncio.create_task(_see_own(parts, own_end), name=f"rank 0's part of transfer {parts.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._ranks.loss is not None:
            parts.ranks_lost(self._ranks.loss)
        return parts

    async def end(self, reason: str) -> None:
        """Give every transfer up, and return once nothing touches their blocks any more."""
        for parts in tuple(self._parts.values()):
            parts.abort(reason)
        for parts in tuple(self._parts.values()):
            try:
                await parts.over()
            except TransferFailed:
                continue
        await asyncio.gather(*self._tasks)

    def _part_ended(self, rank: int, message: TransferEnded) -> None:
        parts = self._parts.get(message.number)
        if parts is not None:
            self._counts[rank] = message.counts
            parts.part_ended(rank, message.failure, message.first_token)

    def _ranks_lost(self, reason: str) -> None:
        for parts in tuple(self._parts.values()):
            parts.ranks_lost(reason)

    def _count(self, parts: TransferParts) -> None:
        del self._parts[parts.number]
        self._total.in_flight -= 1
        if parts.failure is None:
            self._total.done += 1
            self._total.seconds += self._clock() - parts.started_s
        else:
            self._total.failed += 1
            self._total.given_up += parts.is_given_up


async def _see_own(parts: TransferParts, own_end: Coroutine[Any, Any, SampledToken | None]) -> None:
    try:
        first_token = await own_end
    except TransferFailed as error:
        parts.part_ended(0, str(error), None)
    else:
        parts.part_ended(0, None, first_token)
