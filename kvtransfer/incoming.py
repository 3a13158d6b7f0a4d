"""One transfer as the worker that receives it sees it: all its lanes as one."""

import asyncio
from collections.abc import Callable

from twostroke.kvtransfer.incoming_lane import IncomingLane, LaneKeeper
from twostroke.kvtransfer.lifecycle import ReceiverState
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import SampledToken, Ticket


class IncomingTransfer:
    """KV of one request on its way into reserved blocks. The worker awaits `verified`; `cancel` and `abort` give up.

    It is verified once every lane is; a lane that fails takes the others with it.
    """

    def __init__(
        self,
        ticket: Ticket,
        block_ids: tuple[int, ...],
        num_tokens: int,
        skip_tokens: int,
        *,
        source_ranks: tuple[int, ...],
        keeper: LaneKeeper,
        on_ended: Callable[["IncomingTransfer"], None],
        clock: Clock,
        progress_s: float,
    ):
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.started_s = clock()
        self._on_ended = on_ended
        self._first_token: SampledToken | None = None
        self._failure: str | None = None
        self._is_given_up = False
        self._over = asyncio.Event()
        self.lanes = {
            rank: IncomingLane(
                ticket,
                rank,
                block_ids,
                num_tokens,
                skip_tokens,
                keeper=keeper,
                on_failure=self._fail,
                on_end=self._look_for_end,
                clock=clock,
                progress_s=progress_s,
            )
            for rank in source_ranks
        }

    # --- the worker's calls ---

    async def verified(self) -> SampledToken | None:
        """The first token (None: a prefix only), once every block holds its verified KV.

        Raises TransferFailed otherwise. After either nothing will write into the blocks any more. A cancelled waiter
        leaves the transfer as it is.
        """
        await self._over.wait()
        if self._failure is not None:
            raise TransferFailed(self._failure)
        return self._first_token

    async def cancel(self) -> None:
        """Give the transfer up; returns when nothing can write into the blocks any more. Any number of times."""
        self.abort("the target cancelled the transfer")
        await self._over.wait()

    def abort(self, reason: str) -> None:
        """Give the transfer up without waiting; `verified` raises once nothing can write into the blocks any more."""
        self._is_given_up |= self._failure is None
        self._fail(reason)

    @property
    def ended(self) -> bool:
        """Nothing writes into the blocks any more."""
        return self._over.is_set()

    @property
    def is_verified(self) -> bool:
        """It has ended, and well."""
        return self.ended and self._failure is None

    @property
    def is_given_up(self) -> bool:
        """One of both sides did not want it any more."""
        return self._is_given_up or any(lane.peer_gave_up for lane in self.lanes.values())

    # --- the receiver's calls ---

    def peer_aborted(self, reason: str) -> None:
        """Nothing will come, and no peer has to be told, where no lane was granted."""
        if self.ended:
            return
        if self._failure is None:
            self._failure = reason
            self._is_given_up = True
        for lane in self.lanes.values():
            lane.peer_aborted(reason)
        self._look_for_end()

    def peer_lost(self, reason: str) -> None:
        """All connections are gone and their links closed."""
        for lane in self.lanes.values():
            lane.peer_lost(reason)

    # --- inside ---

    def _fail(self, reason: str) -> None:
        if self.ended or self._failure is not None:
            return
        self._failure = reason
        for lane in self.lanes.values():
            lane.abort(reason)
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self.ended or not all(lane.ended for lane in self.lanes.values()):
            return
        if self._failure is None and all(lane.state is ReceiverState.VERIFIED for lane in self.lanes.values()):
            tokens = [lane.first_token for lane in self.lanes.values()]
            self._first_token = tokens[0]
            if any(token != tokens[0] for token in tokens):
                self._failure = f"the source's ranks name different first tokens: {tokens}"
        self._over.set()
        self._on_ended(self)
