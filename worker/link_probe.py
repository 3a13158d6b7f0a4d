"""Link probes: trial transfers between two workers, of blocks that no request uses.

They are real transfers, so they take the way of a request's KV, and need no messages of their own. The router mints
their tickets (`router/http/doctor.py`), as it does for requests.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from twostroke.kvtransfer.ranks import ReceivingSide, SendingSide
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import Peer, Ticket
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.transfers import Transfers

T = TypeVar("T")


@dataclass(frozen=True)
class LinkProbe:
    """One worker's end of link probes. It takes at most half of the free blocks, and waits for none.

    Cached blocks count as free, so a probe may evict some of the prefix cache. A cancelled call returns at once; its
    blocks are released once nothing reads or writes them any more.
    """

    pool: BlockPool
    sender: SendingSide
    receiver: ReceivingSide
    transfers: Transfers
    clock: Clock

    async def source(self, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        """Send KV of `num_tokens` tokens once for each ticket, one after the other. All go to one target.

        The first transfer may also have to wait for the connection, the link and the target's own call. Raises
        RequestError (this worker has too few free blocks) and TransferFailed.
        """
        return await self._owned(self._send(tickets, num_tokens))

    async def target(self, tickets: Sequence[Ticket], num_tokens: int) -> None:
        """Receive what `source` sends with these tickets. Raises RequestError and TransferFailed as it does."""
        await self._owned(self._receive(tickets, num_tokens))

    async def _owned(self, trial: Coroutine[Any, Any, T]) -> T:
        """Run the probe in a tracked task, which waits for its transfer's end even where the caller is cancelled."""
        task = self.transfers.track(trial, "probe")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _send(self, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        seconds: list[float] = []
        with self._blocks(num_tokens) as block_ids:
            for ticket in tickets:
                began = self.clock()
                transfer = self.sender.begin_transfer(ticket, num_tokens, block_ids, num_tokens)
                transfer.commit(None)
                try:
                    await transfer.done()
                except asyncio.CancelledError:
                    await transfer.cancel()
                    raise
                seconds.append(self.clock() - began)
        transport, why, missing = _links(self.sender, tickets[0].target)
        return ProbeTimes(tuple(seconds), transport, why, missing)

    async def _receive(self, tickets: Sequence[Ticket], num_tokens: int) -> None:
        with self._blocks(num_tokens) as block_ids:
            for ticket in tickets:
                incoming = self.receiver.expect_transfer(ticket, block_ids, num_tokens, 0)
                try:
                    await incoming.verified()
                except asyncio.CancelledError:
                    await incoming.cancel()
                    raise

    @contextmanager
    def _blocks(self, num_tokens: int) -> Iterator[list[int]]:
        """Allocate unpublished blocks for the tokens. Raises RequestError for more than half of the free blocks."""
        count = -(-num_tokens // self.pool.block_size) * self.pool.groups.count  # a probe's tables have no gaps
        most = self.pool.free_blocks // 2
        if not 1 <= count <= most:
            raise RequestError(f"a probe of {count} blocks: it may take 1 to {most} here now", code="too_few_blocks")
        block_ids = self.pool.allocate(count)
        try:
            yield block_ids
        finally:
            self.pool.release(block_ids)


def _links(sender: SendingSide, target: Peer) -> tuple[str, str, tuple[str, ...]]:
    """Return (transport, why, missing) of the links to `target`, with each value of several ranks once."""
    reports = [report for report in sender.links() if report.target == target]
    return (
        ", ".join(dict.fromkeys(report.transport for report in reports)),
        "; ".join(dict.fromkeys(report.why for report in reports)),
        tuple(dict.fromkeys(reason for report in reports for reason in report.missing)),
    )
