"""One transfer as the worker that sends it sees it, and its lanes: what goes from this rank to each rank of the target.

No I/O here: the lane's connection asks what to send next, and sends it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from twostroke.kvtransfer.rules.chunk_plan import ChunkPlan
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.rules.lifecycle import SENDER_ENDS, SenderEvent, SenderState, transition
from twostroke.kvtransfer.timeouts import Deadline
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.messages import Chunk, Commit
from twostroke.protocol.requests import SampledToken, Ticket


class LaneCarrier(Protocol):
    """What a lane asks of its connection. Calls never wait and come on the event loop."""

    def has_work(self, lane: "OutgoingLane") -> None:
        """A chunk or the commit may be sent now."""

    def gave_up(self, lane: "OutgoingLane", reason: str) -> None:
        """The lane was aborted on this side; the peer should be told."""

    def ended(self, lane: "OutgoingLane") -> None:
        """It is over: the blocks are not read for it any more."""


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
        self.block_ids = block_ids
        self.started_s = clock()
        self.lanes: list[OutgoingLane] = []
        self._is_given_up = False
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
        self.look_for_end()

    def abort(self, reason: str) -> None:
        """Give the transfer up; the peer is told. Any time, any number of times."""
        self._is_given_up |= self._failure is None
        self.fail(reason)

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

    # --- the sender's call ---

    def add_lane(self, carrier: LaneCarrier) -> "OutgoingLane":
        """One more lane. All are added before anything else happens."""
        lane = OutgoingLane(self, self._new_plan(), carrier, self._clock, self._progress_s)
        self.lanes.append(lane)
        return lane

    # --- the lanes' calls ---

    def fail(self, reason: str) -> None:
        """A lane has failed, or the transfer is given up, or never could be: all lanes end."""
        if self.ended or self._failure is not None:
            return
        if self._is_committed and all(lane.state in _VERIFIED for lane in self.lanes):
            return  # the peer has everything already
        self._failure = reason
        for lane in self.lanes:
            lane.abort(reason)
        self.look_for_end()

    def look_for_end(self) -> None:
        """A lane has ended: perhaps it was the last."""
        if self.ended or not (self._is_committed or self._failure is not None):
            return
        if all(lane.ended for lane in self.lanes):
            self._over.set()
            self._on_ended(self)

    # --- inside ---

    def _new_plan(self) -> ChunkPlan:
        return ChunkPlan(
            num_layers=self._num_layers, num_tokens=self.num_tokens, num_ready_tokens=self._num_ready_tokens
        )


_VERIFIED = frozenset({SenderState.RELEASING, SenderState.RELEASED})


class OutgoingLane:
    """A lane's state, and what it sends next."""

    def __init__(
        self, transfer: OutgoingTransfer, plan: ChunkPlan, carrier: LaneCarrier, clock: Clock, progress_s: float
    ):
        self.transfer = transfer
        self.ticket = transfer.ticket
        self.state = SenderState.OFFERING
        self.num_chunks = 0
        self.peer_gave_up = False
        self._plan = plan
        self._carrier = carrier
        self._cut: Cut | None = None  # until granted
        self._num_under_way = 0
        self._is_committed = False  # by the worker
        self._first_token: SampledToken | None = None
        self._has_failed = False
        # Runs while it is the peer's turn: to grant or to say that its request waits for room, and to verify. While the
        # prompt is computed, the peer's clock runs.
        self._deadline = Deadline(clock, progress_s, self._expire)
        self._deadline.restart()

    @property
    def ended(self) -> bool:
        """The blocks are not read for this lane any more, and won't be."""
        return self.state in SENDER_ENDS

    # --- the transfer's calls ---

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """As OutgoingTransfer.layer_ready."""
        if not self.ended:
            self._plan.add_ready(layer, num_tokens)
            self._carrier.has_work(self)

    def commit(self, first_token: SampledToken | None) -> None:
        """As OutgoingTransfer.commit."""
        if not self.ended:
            self._is_committed = True
            self._first_token = first_token
            self._carrier.has_work(self)

    def abort(self, reason: str) -> None:
        """Give the lane up, and its transfer; the peer is told. Any time, any number of times."""
        self._end(SenderEvent.ABORT, reason, tell_peer=True)

    # --- the carrier's calls ---

    def offered(self) -> None:
        """The offer is out."""
        self._apply(SenderEvent.OFFER)

    def awaited(self) -> None:
        """The peer's request waits for room: the offer stands as long as the connection does. Means nothing later."""
        if self.state is SenderState.OFFERED:
            self._deadline.stop()

    def granted(self, cut: Cut, skip_tokens: int) -> None:
        """The peer has reserved its blocks. Raises IllegalTransition, or ValueError for an odd skip."""
        self._apply(SenderEvent.GRANT)
        self._cut = cut
        self._plan.begin(cut.unit_tokens, skip_tokens)
        self._deadline.stop()
        self._carrier.has_work(self)

    @property
    def has_chunk(self) -> bool:
        """`begin_chunk` would give one."""
        return self.state in (SenderState.GRANTED, SenderState.SENDING) and self._plan.has_runs

    def begin_chunk(self, max_units: int) -> Chunk | None:
        """The chunk to announce and send next: its blocks are read from now on until `end_chunk`.

        None where there is none now.
        """
        if not self.has_chunk or self._cut is None:
            return None
        runs = self._plan.next_runs(max_units)
        if self._num_under_way == 0:
            self._apply(SenderEvent.CHUNK_BEGIN)
        self._num_under_way += 1
        self.num_chunks += 1
        num_bytes = sum(run.num_units for run in runs) * self._cut.unit_bytes
        return Chunk(self.ticket.transfer_id, self.num_chunks - 1, runs, num_bytes)

    def segments(self, chunk: Chunk) -> tuple[Segment, ...]:
        """Where the chunk's units lie."""
        return () if self._cut is None else self._cut.segments(chunk.runs, self.transfer.block_ids)

    def end_chunk(self) -> None:
        """A chunk is out: its blocks are not read any more."""
        self._num_under_way -= 1
        if self._num_under_way == 0 and not self.ended:
            self._apply(SenderEvent.CHUNK_END)

    def take_commit(self) -> Commit | None:
        """The commit, once every chunk was announced and the worker has committed; None before, and after."""
        if self.state not in (SenderState.GRANTED, SenderState.SENDING):
            return None
        if not self._is_committed or not self._plan.all_taken:
            return None
        self._apply(SenderEvent.COMMIT)
        self._deadline.restart()
        return Commit(self.ticket.transfer_id, self.num_chunks, self._first_token)

    def verified(self) -> None:
        """The peer has everything. Raises IllegalTransition before the commit."""
        self._apply(SenderEvent.VERIFIED)

    def peer_aborted(self, reason: str) -> None:
        """The peer has given the lane up."""
        self.peer_gave_up |= not self._has_failed
        self._end(SenderEvent.ABORT, reason, tell_peer=False)

    def peer_lost(self, reason: str) -> None:
        """The connection is gone and its link closed."""
        self._end(SenderEvent.PEER_LOST, reason, tell_peer=False)

    # --- inside ---

    def _expire(self) -> None:
        waited_for = "verify" if self.state in (SenderState.COMMITTED, SenderState.FINISHING) else "grant"
        self._end(SenderEvent.LEASE_EXPIRED, f"the target did not {waited_for} in time", tell_peer=True)

    def _end(self, event: SenderEvent, reason: str, *, tell_peer: bool) -> None:
        if self.ended:
            return
        if not self._has_failed and self.state is not SenderState.RELEASING:
            self._has_failed = True
            if tell_peer:
                self._carrier.gave_up(self, reason)
            self.transfer.fail(reason)  # which may abort this lane too
        if not self.ended:
            self._apply(event)

    def _apply(self, event: SenderEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended:
            self._deadline.stop()
            self._carrier.ended(self)
            self.transfer.look_for_end()
