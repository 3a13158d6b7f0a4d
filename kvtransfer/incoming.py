"""One transfer as the worker that receives it sees it, and its lanes: what each rank of the source sends to this rank.

No I/O here: the lane's connection asks where bytes go, tells what has come, and posts the answers it gets.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.rules.lifecycle import RECEIVER_ENDS, ReceiverEvent, ReceiverState, transition
from twostroke.kvtransfer.timeouts import Deadline
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.messages import Chunk, Commit, Verified
from twostroke.protocol.requests import SampledToken, Ticket


class LaneKeeper(Protocol):
    """What lanes ask of the receiver. Calls never wait and come on the event loop."""

    def gave_up(self, lane: "IncomingLane", reason: str) -> None:
        """The lane was aborted on this side; the peer should be told."""

    def lane_ended(self, lane: "IncomingLane") -> None:
        """It is over: nothing writes into the blocks for it any more."""


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
        self.block_ids = block_ids
        self.num_tokens = num_tokens
        self.skip_tokens = skip_tokens
        self.started_s = clock()
        self.keeper = keeper
        self._on_ended = on_ended
        self._first_token: SampledToken | None = None
        self._failure: str | None = None
        self._is_given_up = False
        self._over = asyncio.Event()
        self.lanes = {rank: IncomingLane(self, rank, clock, progress_s) for rank in source_ranks}

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
        self.fail(reason)

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
        self.look_for_end()

    def peer_lost(self, reason: str) -> None:
        """All connections are gone and their links closed."""
        for lane in self.lanes.values():
            lane.peer_lost(reason)

    # --- the lanes' calls ---

    def fail(self, reason: str) -> None:
        """A lane has failed, or the transfer is given up: all others are, too."""
        if self.ended or self._failure is not None:
            return
        self._failure = reason
        for lane in self.lanes.values():
            lane.abort(reason)
        self.look_for_end()

    def look_for_end(self) -> None:
        """A lane has ended: perhaps it was the last."""
        if self.ended or not all(lane.ended for lane in self.lanes.values()):
            return
        if self._failure is None and all(lane.state is ReceiverState.VERIFIED for lane in self.lanes.values()):
            tokens = [lane.first_token for lane in self.lanes.values()]
            self._first_token = tokens[0]
            if any(token != tokens[0] for token in tokens):
                self._failure = f"the source's ranks name different first tokens: {tokens}"
        self._over.set()
        self._on_ended(self)


class IncomingLane:
    """A lane's state, and where its bytes go. A unit's place is taken for good when its chunk is announced."""

    def __init__(self, transfer: IncomingTransfer, source_rank: int, clock: Clock, progress_s: float):
        self.transfer = transfer
        self.ticket = transfer.ticket
        self.source_rank = source_rank
        self.state = ReceiverState.AWAITING_OFFER
        self.first_token: SampledToken | None = None
        self.peer_gave_up = False
        self.is_damaged = False  # a chunk of it came so: its link is not to be trusted
        self._cut: Cut | None = None  # until granted
        self._num_units = 0
        self._num_skipped = 0  # units
        self._taken: list[bytearray] = []  # for each layer and unit, 1: a chunk has announced it
        self._num_missing = 0  # units without verified bytes
        self._num_announced = 0  # chunks
        self._num_whole = 0  # chunks, verified
        self._num_under_way = 0
        self._commit: Commit | None = None
        self._has_failed = False
        self._deadline = Deadline(clock, progress_s, self._expire)
        self._deadline.restart()

    @property
    def ended(self) -> bool:
        """Nothing writes into the blocks for this lane any more."""
        return self.state in RECEIVER_ENDS

    def abort(self, reason: str) -> None:
        """Give the lane up, and its transfer; the peer is told. Any time, any number of times."""
        self._end(ReceiverEvent.ABORT, reason, tell_peer=True)

    def granted(self, cut: Cut) -> None:
        """The offer has come, and fits. Raises IllegalTransition for a second one."""
        self._apply(ReceiverEvent.OFFER)
        num_tokens, skip_tokens = self.transfer.num_tokens, self.transfer.skip_tokens
        self._cut = cut
        self._num_units = -(-num_tokens // cut.unit_tokens)
        self._num_skipped = self._num_units if skip_tokens == num_tokens else skip_tokens // cut.unit_tokens
        self._taken = [bytearray(self._num_units) for _ in range(cut.layout.num_layers)]
        self._num_missing = cut.layout.num_layers * (self._num_units - self._num_skipped)
        self._deadline.restart()

    def announce(self, chunk: Chunk) -> None:
        """A chunk will come. One that can't be is given up with its lane; its bytes have to be discarded later."""
        if self.state in (ReceiverState.GRANTED, ReceiverState.RECEIVING):
            fault = self._fault(chunk)
            if fault is not None:
                self.abort(f"the source broke the protocol: {fault}")

    def begin_chunk(self, chunk: Chunk) -> tuple[Segment, ...] | None:
        """Where the chunk's bytes go, which are written from now on until `end_chunk`; None: they are discarded."""
        if self.state not in (ReceiverState.GRANTED, ReceiverState.RECEIVING) or self._cut is None:
            return None
        if self._num_under_way == 0:
            self._apply(ReceiverEvent.CHUNK_BEGIN)
        self._num_under_way += 1
        return self._cut.segments(chunk.runs, self.transfer.block_ids)

    def end_chunk(self, chunk: Chunk, *, is_intact: bool) -> Verified | None:
        """The chunk's bytes are in the blocks, whole or not. Returns what the peer is told.

        A damaged chunk ends the lane, unless it has been given up meanwhile.
        """
        self._num_under_way -= 1
        if self._num_under_way == 0 and not self.ended:
            self._apply(ReceiverEvent.CHUNK_END)
        if self.state not in (ReceiverState.GRANTED, ReceiverState.RECEIVING):
            return None
        if not is_intact:
            self.is_damaged = True
            self.abort(f"chunk {chunk.sequence} was damaged on its way")
            return None
        self._num_whole += 1
        self._num_missing -= sum(run.num_units for run in chunk.runs)
        self._deadline.restart()
        return self._verify()

    def commit(self, message: Commit) -> Verified | None:
        """Every chunk was announced. Returns what the peer is told, where everything is there already."""
        if self.state not in (ReceiverState.GRANTED, ReceiverState.RECEIVING):
            return None
        if self._commit is not None or message.num_chunks != self._num_announced:
            self.abort(
                f"the source broke the protocol: it committed {message.num_chunks} chunks, and announced "
                f"{self._num_announced}"
            )
            return None
        self._commit = message
        return self._verify()

    def peer_aborted(self, reason: str) -> None:
        """The peer has given the lane up, or it never was the peer's."""
        self.peer_gave_up |= not self._has_failed
        self._end(ReceiverEvent.ABORT, reason, tell_peer=False)

    def peer_lost(self, reason: str) -> None:
        """The connection is gone and its link closed."""
        self._end(ReceiverEvent.PEER_LOST, reason, tell_peer=False)

    # --- inside ---

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
        self._apply(ReceiverEvent.COMMIT)
        return Verified(self.ticket.transfer_id)

    def _fault(self, chunk: Chunk) -> str | None:
        """Takes the chunk's places. Returns what is wrong with the chunk, if anything."""
        if chunk.sequence != self._num_announced:
            return f"chunk {chunk.sequence} came in place of {self._num_announced}"
        if self._commit is not None:
            return f"chunk {chunk.sequence} came after the commit"
        for run in chunk.runs:
            end = run.first_unit + run.num_units
            if not 0 <= run.layer < len(self._taken):
                return f"there is no layer {run.layer}"
            if run.num_units < 1 or not 0 <= run.first_unit < end <= self._num_units:
                return f"there are no units {run.first_unit} to {end}"
            if run.first_unit < self._num_skipped:
                return f"unit {run.first_unit} was skipped in the grant"
            taken = self._taken[run.layer]
            if taken.find(1, run.first_unit, end) >= 0:
                return f"units {run.first_unit} to {end} of layer {run.layer} came twice"
            taken[run.first_unit : end] = b"\x01" * run.num_units
        self._num_announced += 1
        return None

    def _expire(self) -> None:
        self._end(ReceiverEvent.LEASE_EXPIRED, "the source made no progress in time", tell_peer=True)

    def _end(self, event: ReceiverEvent, reason: str, *, tell_peer: bool) -> None:
        if self.ended:
            return
        if not self._has_failed:
            self._has_failed = True
            if tell_peer:
                self.transfer.keeper.gave_up(self, reason)
            self.transfer.fail(reason)  # which may abort this lane too
        if not self.ended:
            self._apply(event)

    def _apply(self, event: ReceiverEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended:
            self._deadline.stop()
            self.transfer.keeper.lane_ended(self)
            self.transfer.look_for_end()
