"""One transfer as the worker that sends it sees it: all its lanes as one."""

import asyncio
from collections.abc import Callable

from twostroke.kvtransfer.chunk_plan import ChunkPlan
from twostroke.kvtransfer.lifecycle import SenderState
from twostroke.kvtransfer.outgoing_lane import LaneCarrier, OutgoingLane
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import SampledToken, Ticket


class OutgoingTransfer:
    """KV of one request on its way to another worker.

    The worker calls `layer_ready`, `commit`, `abort` and awaits `done`. Once the transfer has ended, for whatever
    reason, the first three do nothing: the worker learns of the end by `done` alone. It is done once every lane is; a
    lane that fails takes the others with it. A rank whose heads other ranks send has no lane, and is done by `commit`.
    """

    def __init__(
        self,
        ticket: Ticket,
        num_tokens: int,
        block_ids: tuple[int, ...],
        num_ready_tokens: int,
        *,
        num_layers: int,
        on_ended: Callable[["OutgoingTransfer"], None],
        clock: Clock,
        progress_s: float,
    ):
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.started_s = clock()
        self.lanes: list[OutgoingLane] = []
        self._is_given_up = False
        self._block_ids = block_ids
        self._num_ready_tokens = num_ready_tokens
        self._num_layers = num_layers
        self._on_ended = on_ended
        self._clock = clock
        self._progress_s = progress_s
        self._plan = self._new_plan()  # knows what is ready, whatever the lanes have sent
        self._is_committed = False
        self._failure: str | None = None
        self._over = asyncio.Event()

    # --- the worker's calls ---

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """KV of the first `num_tokens` tokens of `layer` is in the blocks. Never waits.

        Raises ValueError for more tokens than the transfer has.
        """
        if self.ended:
            return
        self._plan.add_ready(layer, num_tokens)
        for lane in self.lanes:
            lane.layer_ready(layer, num_tokens)

    def commit(self, first_token: SampledToken | None) -> None:
        """All layers are ready, and this token follows; None where the KV is a prefix only. Never waits.

        Raises ValueError where a layer is not ready, or for a second commit.
        """
        if self.ended:
            return
        if not self._plan.all_ready:
            raise ValueError("a transfer can't be committed before every layer is ready")
        if self._is_committed:
            raise ValueError("a transfer can't be committed twice")
        self._is_committed = True
        for lane in self.lanes:
            lane.commit(first_token)
        self._look_for_end()

    def abort(self, reason: str) -> None:
        """Give the transfer up; the peer is told. Any time, any number of times."""
        self._is_given_up |= self._failure is None
        self._fail(reason)

    async def done(self) -> None:
        """Wait for the end. Returns once the peer has verified everything; raises TransferFailed otherwise.

        After either the blocks are not read any more. A cancelled waiter leaves the transfer as it is.
        """
        await self._over.wait()
        if self._failure is not None:
            raise TransferFailed(self._failure)

    @property
    def ended(self) -> bool:
        """The blocks are not read any more, and won't be."""
        return self._over.is_set()

    @property
    def is_released(self) -> bool:
        """It has ended, and well."""
        return self.ended and self._failure is None

    @property
    def is_given_up(self) -> bool:
        """One of both sides did not want it any more."""
        return self._is_given_up or any(lane.peer_gave_up for lane in self.lanes)

    # --- the sender's calls ---

    def add_lane(self, carrier: LaneCarrier) -> OutgoingLane:
        """One more lane. All are added before anything else happens."""
        lane = OutgoingLane(
            self.ticket,
            self.num_tokens,
            self._block_ids,
            self._new_plan(),
            carrier=carrier,
            on_failure=self._fail,
            on_end=self._look_for_end,
            clock=self._clock,
            progress_s=self._progress_s,
        )
        self.lanes.append(lane)
        return lane

    def refuse(self, reason: str) -> None:
        """It can't be: it has no lanes, and ends at once."""
        self._fail(reason)

    # --- inside ---

    def _new_plan(self) -> ChunkPlan:
        return ChunkPlan(
            num_layers=self._num_layers, num_tokens=self.num_tokens, num_ready_tokens=self._num_ready_tokens
        )

    def _fail(self, reason: str) -> None:
        if self.ended or self._failure is not None:
            return
        if self._is_committed and all(lane.state in _VERIFIED for lane in self.lanes):
            return  # the peer has everything already
        self._failure = reason
        for lane in self.lanes:
            lane.abort(reason)
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self.ended or not (self._is_committed or self._failure is not None):
            return
        if all(lane.ended for lane in self.lanes):
            self._over.set()
            self._on_ended(self)


_VERIFIED = frozenset({SenderState.RELEASING, SenderState.RELEASED})
