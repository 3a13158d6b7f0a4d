"""One lane of an incoming transfer: what one rank of the source sends to this rank."""

from collections.abc import Callable
from typing import Protocol

from twostroke.kvtransfer.deadline import Deadline
from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.lifecycle import RECEIVER_ENDS, ReceiverEvent, ReceiverState, transition
from twostroke.kvtransfer.retry import MAX_ATTEMPTS
from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import Chunk, Commit, Damaged, Run, Verified
from twostroke.protocol.requests import SampledToken, Ticket


class LaneKeeper(Protocol):
    """Whoever keeps the lanes of a worker. Calls never wait and come on the event loop."""

    def gave_up(self, lane: "IncomingLane", reason: str) -> None:
        """The lane was aborted on this side; the peer should be told."""

    def lane_ended(self, lane: "IncomingLane") -> None:
        """It is over: nothing writes into the blocks for it any more."""


class IncomingLane:
    """A lane's state, and where its bytes go. Does no I/O: its connection asks, and posts the answers it gets.

    A unit's place is taken when its chunk is announced, for good: only the same chunk may fill it, in a later attempt.
    """

    def __init__(
        self,
        ticket: Ticket,
        source_rank: int,
        block_ids: tuple[int, ...],
        num_tokens: int,
        skip_tokens: int,
        *,
        keeper: LaneKeeper,
        on_failure: Callable[[str], None],
        on_end: Callable[[], None],
        clock: Clock,
        progress_s: float,
    ):
        self.ticket = ticket
        self.source_rank = source_rank
        self.num_tokens = num_tokens
        self.skip_tokens = skip_tokens
        self.state = ReceiverState.AWAITING_OFFER
        self.first_token: SampledToken | None = None
        self._block_ids = block_ids
        self._keeper = keeper
        self._on_failure = on_failure
        self._on_end = on_end
        self._cut: Cut | None = None  # until granted
        self._num_units = 0
        self._num_skipped = 0  # units
        self._taken: list[bytearray] = []  # for each layer and unit, 1: a chunk has announced it
        self._num_missing = 0  # units without verified bytes
        self._num_announced = 0  # chunks
        self._num_whole = 0  # chunks, verified
        self._asked_for: dict[int, tuple[int, tuple[Run, ...]]] = {}  # sequence -> the attempt to come, its runs
        self._num_under_way = 0
        self._commit: Commit | None = None
        self._has_failed = False
        self.peer_gave_up = False
        self._deadline = Deadline(clock, progress_s, self._expire)
        self._deadline.restart()

    # --- the transfer's calls ---

    def abort(self, reason: str) -> None:
        """Give the lane up; the peer is told. Any time, any number of times."""
        self._end(ReceiverEvent.ABORT, reason, tell_peer=True)

    @property
    def ended(self) -> bool:
        """Nothing writes into the blocks for this lane any more."""
        return self.state in RECEIVER_ENDS

    # --- the receiver's and the connection's calls ---

    def granted(self, cut: Cut) -> None:
        """The offer has come, and fits. Raises IllegalTransition for a second one."""
        self._apply(ReceiverEvent.OFFER)
        self._cut = cut
        self._num_units = -(-self.num_tokens // cut.unit_tokens)
        all_skipped = self.skip_tokens == self.num_tokens
        self._num_skipped = self._num_units if all_skipped else self.skip_tokens // cut.unit_tokens
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
        return self._cut.segments(chunk.runs, self._block_ids)

    def end_chunk(self, chunk: Chunk, *, is_intact: bool) -> Damaged | Verified | None:
        """The chunk's bytes are in the blocks, whole or not, or its link is closed. Returns what the peer is told."""
        self._num_under_way -= 1
        if self._num_under_way == 0 and not self.ended:
            self._apply(ReceiverEvent.CHUNK_END)
        if not is_intact:
            return self.lost_chunk(chunk)
        if self.state not in (ReceiverState.GRANTED, ReceiverState.RECEIVING):
            return None
        self._num_whole += 1
        self._num_missing -= sum(run.num_units for run in chunk.runs)
        self._deadline.restart()
        return self._verify()

    def lost_chunk(self, chunk: Chunk) -> Damaged | None:
        """An announced chunk did not arrive whole. Returns the request for its next attempt, if there is one left."""
        if self.state not in (ReceiverState.GRANTED, ReceiverState.RECEIVING):
            return None
        if chunk.attempt + 1 >= MAX_ATTEMPTS:
            self.abort(f"chunk {chunk.sequence} was damaged or lost on its way {MAX_ATTEMPTS} times")
            return None
        self._asked_for[chunk.sequence] = (chunk.attempt + 1, chunk.runs)
        return Damaged(chunk.transfer_id, chunk.sequence, chunk.attempt)

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
        """The connection is gone and its links closed."""
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
        if chunk.attempt:
            if self._asked_for.pop(chunk.sequence, None) != (chunk.attempt, chunk.runs):
                return f"nobody asked for attempt {chunk.attempt} of chunk {chunk.sequence}"
            return None
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
        fails = not self._has_failed
        if fails:
            self._has_failed = True
            if tell_peer:
                self._keeper.gave_up(self, reason)
            self._on_failure(reason)  # which may abort this lane too
        if not self.ended:
            self._apply(event)

    def _apply(self, event: ReceiverEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended:
            self._deadline.stop()
            self._keeper.lane_ended(self)
            self._on_end()
