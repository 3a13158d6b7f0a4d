"""One transfer as either worker sees it, and its lanes: what goes from a rank of the source to a rank of the target.

No I/O here. On the sending side the lane's connection asks what to send next, and sends it. On the receiving side it
asks where bytes go, tells what has come, and posts the answers it gets.

A transfer ends well once every lane has; a lane that fails takes the others with it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from twostroke.kvtransfer.rules.layout import ChunkPlan, Cut, Segment, first_units
from twostroke.kvtransfer.rules.lifecycle import (
    ENDS,
    VERIFIED_BY_PEER,
    ReceiverState,
    SenderState,
    TransferEvent,
    transition,
)
from twostroke.kvtransfer.timeouts import Deadline
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.kv_layout import KVGroups
from twostroke.protocol.messages import Chunk, Commit, Verified
from twostroke.protocol.requests import SampledToken, Ticket

S = TypeVar("S", SenderState, ReceiverState)


class LaneKeeper(Protocol):
    """What lanes ask of whoever has their connection. Calls never wait and come on the event loop."""

    def gave_up(self, lane: Any, reason: str) -> None:
        """The lane was aborted on this side; the peer should be told."""

    def lane_ended(self, lane: Any) -> None:
        """It is over: the blocks are not touched for it any more."""


class LaneCarrier(LaneKeeper, Protocol):
    """What a sending lane asks of its connection, too."""

    def has_work(self, lane: "OutgoingLane") -> None:
        """A chunk or the commit may be sent now."""


class TransferCompletion:
    """How a transfer ends, once."""

    def __init__(self) -> None:
        self.first_token: SampledToken | None = None  # that has come with the KV
        self.failure: str | None = None
        self.is_given_up = False  # one of both sides did not want it any more
        self._over = asyncio.Event()

    @property
    def ended(self) -> bool:
        """The blocks are not touched any more, and won't be."""
        return self._over.is_set()

    def abort(self, reason: str) -> None:
        """Give the transfer up; the peer is told. Never waits. Any time, any number of times."""
        self.is_given_up |= self.failure is None and not self.ended
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """Part of it has failed, or it is given up, or never could be: all of it ends."""
        raise NotImplementedError

    async def cancel(self) -> None:
        """Give the transfer up; returns when nothing touches the blocks any more. Any number of times."""
        self.abort("the worker cancelled the transfer")
        await self._over.wait()

    async def end(self) -> SampledToken | None:
        """Wait for the end, as `done` and `verified` do; returns the first token that has come, where one has."""
        await self._over.wait()
        if self.failure is not None:
            raise TransferFailed(self.failure)
        return self.first_token


class Transfer(TransferCompletion):
    """KV of one request, on its way from or into these blocks."""

    lanes: Mapping[int, "LaneTransfer[Any]"]  # by the peer's rank

    def __init__(
        self,
        ticket: Ticket,
        block_ids: tuple[int, ...],
        num_tokens: int,
        *,
        on_ended: Callable[[Any], None],
        clock: Clock,
    ):
        super().__init__()
        self.ticket = ticket
        self.block_ids = block_ids
        self.num_tokens = num_tokens
        self.started_s = clock()
        self._on_ended = on_ended

    def fail(self, reason: str) -> None:
        if self.ended or self.failure is not None:
            return
        self.failure = reason
        for lane in self.lanes.values():
            lane.abort(reason)
        self.look_for_end()

    def look_for_end(self) -> None:
        """A lane has ended: perhaps it was the last."""
        if not self.ended and all(lane.ended for lane in self.lanes.values()):
            self._over.set()
            self._on_ended(self)
            self.lanes = {}  # they know their transfer: a cycle would be left to the collection of garbage


class LaneTransfer(Generic[S]):
    """A lane's state, and its ends. Its deadline runs while it is the peer's turn to make a step."""

    def __init__(self, transfer: Transfer, state: S, keeper: LaneKeeper, progress_s: float):
        self.transfer = transfer
        self.ticket = transfer.ticket
        self.state: S = state
        self._keeper = keeper
        self._cut: Cut | None = None  # until granted
        self._num_under_way = 0  # chunks
        self._has_failed = False
        self._deadline = Deadline(progress_s)
        self._deadline.restart(self._expire)

    @property
    def ended(self) -> bool:
        """The blocks are not touched for this lane any more, and won't be."""
        return self.state in ENDS

    def abort(self, reason: str) -> None:
        """Give the lane up, and its transfer; the peer is told. Any time, any number of times."""
        self._end(TransferEvent.ABORT, reason, tell_peer=True)

    def peer_aborted(self, reason: str) -> None:
        """The peer has given the lane up."""
        self.transfer.is_given_up |= not self._has_failed and not self.ended
        self._end(TransferEvent.ABORT, reason, tell_peer=False)

    def peer_lost(self, reason: str) -> None:
        """The connection is gone and its link closed."""
        self._end(TransferEvent.PEER_LOST, reason, tell_peer=False)

    def segments(self, chunk: Chunk) -> tuple[Segment, ...]:
        """Where the chunk's units lie."""
        return () if self._cut is None else self._cut.segments(chunk.runs, self.transfer.block_ids)

    def _begin_one(self) -> None:
        """A chunk is under way: its blocks are touched until `_end_one`."""
        if self._num_under_way == 0:
            self._apply(TransferEvent.CHUNK_BEGIN)
        self._num_under_way += 1

    def _end_one(self) -> None:
        self._num_under_way -= 1
        if self._num_under_way == 0 and not self.ended:
            self._apply(TransferEvent.CHUNK_END)

    def _late(self) -> str:
        """Why a lane ends whose deadline has passed."""
        raise NotImplementedError

    def _expire(self) -> None:
        self._end(TransferEvent.ABORT, self._late(), tell_peer=True)

    def _end(self, event: TransferEvent, reason: str, *, tell_peer: bool) -> None:
        if self.ended:
            return
        if not self._has_failed and self.state is not SenderState.RELEASING:
            self._has_failed = True
            if tell_peer:
                self._keeper.gave_up(self, reason)
            self.transfer.fail(reason)  # which may abort this lane too
        if not self.ended:
            self._apply(event)

    def _apply(self, event: TransferEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended:
            self._deadline.stop()
            self._keeper.lane_ended(self)
            self.transfer.look_for_end()


# --- the sending side ---


class OutgoingTransfer(Transfer):
    """KV of one request on its way to another worker.

    The worker calls `layer_ready`, `commit`, `abort` and awaits `done`. Once the transfer has ended, for whatever
    reason, the first three do nothing: the worker learns of the end by `done` alone. A rank whose heads other ranks
    send has no lane, and is done by `commit`.
    """

    def __init__(
        self,
        ticket: Ticket,
        block_ids: tuple[int, ...],
        num_tokens: int,
        num_ready_tokens: int,
        *,
        groups: KVGroups,
        layers: range,
        on_ended: Callable[["OutgoingTransfer"], None],
        clock: Clock,
        progress_s: float,
    ):
        super().__init__(ticket, block_ids, num_tokens, on_ended=on_ended, clock=clock)
        self.lanes: dict[int, OutgoingLane] = {}
        self._num_ready_tokens = num_ready_tokens
        self._groups = groups
        self._progress_s = progress_s
        self._plan = self._new_plan(layers)  # knows what is ready, whatever the lanes have sent
        self._is_committed = False

    def add_lane(self, target_rank: int, layers: range, carrier: LaneCarrier) -> "OutgoingLane":
        """One more lane, of these layers. All are added before anything else happens."""
        lane = OutgoingLane(self, self._new_plan(layers), carrier, self._progress_s)
        self.lanes[target_rank] = lane
        return lane

    def windows_moved(self, block_ids: Sequence[int]) -> None:
        """The table has blocks now that it had not, of windows that have come to their rows. Never waits.

        To be called before what these blocks hold is ready.
        """
        self.block_ids = tuple(block_ids[: len(self.block_ids)])

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """KV of the first `num_tokens` tokens of `layer`, one of this rank's, is in the blocks. Never waits.

        Raises ValueError for more tokens than the transfer has, and for another rank's layer.
        """
        if self.ended:
            return
        self._plan.add_ready(layer, num_tokens)
        for lane in self.lanes.values():
            lane.layer_ready(layer, num_tokens)

    def commit(self, first_token: SampledToken | None) -> None:
        """All of this rank's layers are ready, and this token follows; None where the KV is a prefix only. Never waits.

        Raises ValueError where a layer is not ready, or for a second commit.
        """
        if self.ended:
            return
        if not self._plan.all_ready:
            raise ValueError("a transfer can't be committed before every layer is ready")
        if self._is_committed:
            raise ValueError("a transfer can't be committed twice")
        self._is_committed = True
        for lane in self.lanes.values():
            lane.commit(first_token)
        self.look_for_end()

    async def done(self) -> None:
        """Wait for the end. Returns once the peer has verified everything; raises TransferFailed otherwise.

        After either the blocks are not read any more. A cancelled waiter leaves the transfer as it is.
        """
        await self.end()

    def fail(self, reason: str) -> None:
        """As Transfer.fail; means nothing once the peer has everything."""
        if not (self._is_committed and all(lane.state in VERIFIED_BY_PEER for lane in self.lanes.values())):
            super().fail(reason)

    def look_for_end(self) -> None:
        if self._is_committed or self.failure is not None:
            super().look_for_end()

    def _new_plan(self, layers: range) -> ChunkPlan:
        return ChunkPlan(
            groups=self._groups, layers=layers, num_tokens=self.num_tokens, num_ready_tokens=self._num_ready_tokens
        )


class OutgoingLane(LaneTransfer[SenderState]):
    """What a lane sends next.

    Its deadline runs until the peer has granted, or said that its request waits for room, and until it has verified.
    While the prompt is computed, the peer's clock runs.
    """

    def __init__(self, transfer: OutgoingTransfer, plan: ChunkPlan, carrier: LaneCarrier, progress_s: float):
        super().__init__(transfer, SenderState.OFFERING, carrier, progress_s)
        self.num_chunks = 0
        self._plan = plan
        self._carrier = carrier
        self._is_committed = False  # by the worker
        self._first_token: SampledToken | None = None

    # --- the transfer's calls ---

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """As OutgoingTransfer.layer_ready."""
        if not self.ended and layer in self._plan.layers:
            self._plan.add_ready(layer, num_tokens)
            self._carrier.has_work(self)

    def commit(self, first_token: SampledToken | None) -> None:
        """As OutgoingTransfer.commit."""
        if not self.ended:
            self._is_committed = True
            self._first_token = first_token
            self._carrier.has_work(self)

    # --- the carrier's calls ---

    def offered(self) -> None:
        """The offer is out."""
        self._apply(TransferEvent.OFFER)

    def awaited(self) -> None:
        """The peer's request waits for room: the offer stands as long as the connection does. Means nothing later."""
        if self.state is SenderState.OFFERED:
            self._deadline.stop()

    def granted(self, cut: Cut, skip_tokens: int) -> None:
        """The peer has reserved its blocks. Raises IllegalTransition, or ValueError for an odd skip."""
        self._apply(TransferEvent.GRANT)
        self._cut = cut
        self._plan.begin(cut.unit_tokens, skip_tokens, cut.share)
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
        self._begin_one()
        self.num_chunks += 1
        num_bytes = sum(run.num_units for run in runs) * self._cut.unit_bytes
        return Chunk(self.ticket.transfer_id, self.num_chunks - 1, runs, num_bytes)

    def end_chunk(self) -> None:
        """A chunk is out: its blocks are not read any more."""
        self._end_one()

    def take_commit(self) -> Commit | None:
        """The commit, once every chunk was announced and the worker has committed; None before, and after."""
        if self.state not in (SenderState.GRANTED, SenderState.SENDING):
            return None
        if not self._is_committed or not self._plan.all_taken:
            return None
        self._apply(TransferEvent.COMMIT)
        self._deadline.restart(self._expire)
        return Commit(self.ticket.transfer_id, self.num_chunks, self._first_token)

    def verified(self) -> None:
        """The peer has everything. Raises IllegalTransition before the commit."""
        self._apply(TransferEvent.VERIFIED)

    def _late(self) -> str:
        waited_for = "verify" if self.state in (SenderState.COMMITTED, SenderState.FINISHING) else "grant"
        return f"the target did not {waited_for} in time"


# --- the receiving side ---


class IncomingTransfer(Transfer):
    """KV of one request on its way into reserved blocks. The worker awaits `verified`; `cancel` and `abort` give up."""

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
        super().__init__(ticket, block_ids, num_tokens, on_ended=on_ended, clock=clock)
        self.skip_tokens = skip_tokens
        self.lanes: dict[int, IncomingLane] = {rank: IncomingLane(self, keeper, progress_s) for rank in source_ranks}

    async def verified(self) -> SampledToken | None:
        """The first token (None: a prefix only), once every block holds its verified KV.

        Raises TransferFailed otherwise. After either nothing will write into the blocks any more. A cancelled waiter
        leaves the transfer as it is.
        """
        return await self.end()

    def look_for_end(self) -> None:
        if not self.ended and self.failure is None and all(lane.ended for lane in self.lanes.values()):  # all verified
            tokens = [lane.first_token for lane in self.lanes.values()]
            self.first_token = tokens[0]
            if any(token != tokens[0] for token in tokens):
                self.failure = f"the source's ranks name different first tokens: {tokens}"
        super().look_for_end()


class IncomingLane(LaneTransfer[ReceiverState]):
    """Where a lane's bytes go. A unit's place is taken for good when its chunk is announced."""

    transfer: IncomingTransfer

    def __init__(self, transfer: IncomingTransfer, keeper: LaneKeeper, progress_s: float):
        super().__init__(transfer, ReceiverState.AWAITING_OFFER, keeper, progress_s)
        self.first_token: SampledToken | None = None
        self.is_damaged = False  # a chunk of it came so: its link is not to be trusted
        self._num_units = 0
        self._first_units: dict[int, int] = {}  # of each of the lane's layers: those before are skipped
        self._taken: dict[int, bytearray] = {}  # for each layer and unit, 1: a chunk has announced it
        self._num_missing = 0  # units without verified bytes
        self._num_announced = 0  # chunks
        self._num_whole = 0  # chunks, verified
        self._commit: Commit | None = None

    def granted(self, cut: Cut) -> None:
        """The offer has come, and fits. Raises IllegalTransition for a second one."""
        self._apply(TransferEvent.OFFER)
        num_tokens, skip_tokens = self.transfer.num_tokens, self.transfer.skip_tokens
        self._cut = cut
        self._num_units = cut.share.below(-(-num_tokens // cut.unit_tokens))
        self._first_units = first_units(
            cut.layout.groups, cut.layers, num_tokens, cut.unit_tokens, skip_tokens, cut.share
        )
        self._taken = {layer: bytearray(self._num_units) for layer in cut.layers}
        self._num_missing = sum(self._num_units - first for first in self._first_units.values())
        self._deadline.restart(self._expire)

    @property
    def takes_chunks(self) -> bool:
        """It was granted, and has not been given up."""
        return self.state in (ReceiverState.GRANTED, ReceiverState.RECEIVING)

    def announce(self, chunk: Chunk) -> None:
        """A chunk will come. One that can't be is given up with its lane; its bytes have to be discarded later."""
        if self.takes_chunks:
            fault = self._fault(chunk)
            if fault is not None:
                self.abort(f"the source broke the protocol: {fault}")

    def begin_chunk(self, chunk: Chunk) -> tuple[Segment, ...] | None:
        """Where the chunk's bytes go, which are written from now on until `end_chunk`; None: they are discarded."""
        if not self.takes_chunks:
            return None
        self._begin_one()
        return self.segments(chunk)

    def end_chunk(self, chunk: Chunk, *, is_intact: bool) -> Verified | None:
        """The chunk's bytes are in the blocks, whole or not. Returns what the peer is told.

        A damaged chunk ends the lane, unless it has been given up meanwhile.
        """
        self._end_one()
        if not self.takes_chunks:
            return None
        if not is_intact:
            self.is_damaged = True
            self.abort(f"chunk {chunk.sequence} was damaged on its way")
            return None
        self._num_whole += 1
        self._num_missing -= sum(run.num_units for run in chunk.runs)
        self._deadline.restart(self._expire)
        return self._verify()

    def commit(self, message: Commit) -> Verified | None:
        """Every chunk was announced. Returns what the peer is told, where everything is there already."""
        if not self.takes_chunks:
            return None
        if self._commit is not None or message.num_chunks != self._num_announced:
            self.abort(
                f"the source broke the protocol: it committed {message.num_chunks} chunks, and announced "
                f"{self._num_announced}"
            )
            return None
        self._commit = message
        return self._verify()

    def _verify(self) -> Verified | None:
        """The answer to the commit, once all chunks are whole. Gives up where they are, and units are missing."""
        if self._commit is None or self._num_whole < self._num_announced:
            return None
        if self._num_missing:
            self.abort(
                f"the source broke the protocol: it committed {self._num_whole} chunks, and {self._num_missing} "
                "units are missing"
            )
            return None
        self.first_token = self._commit.first_token
        self._apply(TransferEvent.COMMIT)
        return Verified(self.ticket.transfer_id)

    def _fault(self, chunk: Chunk) -> str | None:
        """Takes the chunk's places. Returns what is wrong with the chunk, if anything."""
        if chunk.sequence != self._num_announced:
            return f"chunk {chunk.sequence} came in place of {self._num_announced}"
        if self._commit is not None:
            return f"chunk {chunk.sequence} came after the commit"
        for run in chunk.runs:
            end = run.first_unit + run.num_units
            if run.layer not in self._taken:
                return f"there is no layer {run.layer}"
            if run.num_units < 1 or not 0 <= run.first_unit < end <= self._num_units:
                return f"there are no units {run.first_unit} to {end}"
            if run.first_unit < self._first_units[run.layer]:
                return f"unit {run.first_unit} of layer {run.layer} was skipped in the grant, or is before its window"
            taken = self._taken[run.layer]
            if taken.find(1, run.first_unit, end) >= 0:
                return f"units {run.first_unit} to {end} of layer {run.layer} came twice"
            taken[run.first_unit : end] = b"\x01" * run.num_units
        self._num_announced += 1
        return None

    def _late(self) -> str:
        return "the source made no progress in time"
