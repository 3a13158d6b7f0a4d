"""One transfer's parts on the ranks of a worker, as rank 0 follows them: whole when all are, failed when one is."""

import asyncio
from collections.abc import Callable

from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.rank_messages import AbortTransfer
from twostroke.protocol.requests import SampledToken


class TransferParts:
    """One transfer's. Its blocks are touched until every part has ended, or the ranks with it."""

    def __init__(
        self,
        *,
        ranks: RankConnections,
        abort_own: Callable[[str], None],
        on_over: Callable[["TransferParts"], None],
        started_s: float,
    ):
        """`abort_own` gives the part of rank 0 up."""
        self.number = ranks.new_number()
        self.started_s = started_s
        self.failure: str | None = None  # why it is given up
        self.is_given_up = False  # by who began it here, not for a part that failed
        self._ranks = ranks
        self._abort_own = abort_own
        self._on_over = on_over
        self._left = {0, *ranks.others}
        self._first_tokens: list[SampledToken | None] = []
        self._over = asyncio.Event()

    def abort(self, reason: str) -> None:
        """Give all parts up. Any time, any number of times."""
        self.is_given_up |= self.failure is None
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if self._over.is_set() or self.failure is not None:
            return
        self.failure = reason
        self._ranks.tell(AbortTransfer(self.number, reason))
        self._abort_own(reason)

    def part_ended(self, rank: int, failure: str | None, first_token: SampledToken | None) -> None:
        """A rank touches the blocks no more."""
        if rank not in self._left:
            return
        self._left.discard(rank)
        self._first_tokens.append(first_token)
        if failure is not None:
            self._fail(failure if rank == 0 else f"{failure} (on rank {rank})")
        self._look_for_end()

    def ranks_lost(self, reason: str) -> None:
        """The other ranks are ending, and do nothing with their blocks any more."""
        self._fail(reason)
        self._left &= {0}
        self._look_for_end()

    async def over(self) -> SampledToken | None:
        """Wait for the end of all parts; returns the first token that came. Raises TransferFailed."""
        await self._over.wait()
        if self.failure is not None:
            raise TransferFailed(self.failure)
        return self._first_tokens[0]

    def _look_for_end(self) -> None:
        if self._left or self._over.is_set():
            return
        if self.failure is None and any(token != self._first_tokens[0] for token in self._first_tokens):
            self.failure = f"the source's ranks name different first tokens: {self._first_tokens}"
        self._over.set()
        self._on_over(self)
