"""One lane of an outgoing transfer: what goes from this rank to one rank of the target."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twostroke.kvtransfer.chunk_plan import ChunkPlan
from twostroke.kvtransfer.deadline import Deadline
from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.lifecycle import SENDER_ENDS, SenderEvent, SenderState, transition
from twostroke.kvtransfer.retry import MAX_ATTEMPTS, needs_other_link
from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import Chunk, Commit, Run
from twostroke.protocol.requests import SampledToken, Ticket


class LaneCarrier(Protocol):
    """Whoever carries a lane's messages and bytes. Calls never wait and come on the event loop."""

    def has_work(self, lane: "OutgoingLane") -> None:
        """A chunk or the commit may be sent now."""

    def gave_up(self, lane: "OutgoingLane", reason: str) -> None:
        """The lane was aborted on this side; the peer should be told."""

    def ended(self, lane: "OutgoingLane") -> None:
        """It is over: the blocks are not read for it any more."""


@dataclass(slots=True)
class _Sent:
    """A chunk as it was last announced."""

    runs: tuple[Run, ...]
    attempt: int
    link: int
    is_asked_for: bool = False  # again: it waits for its next attempt


class OutgoingLane:
    """A lane's state, and what it sends next. Does no I/O: its carrier asks, and acts."""

    def __init__(
        self,
        ticket: Ticket,
        num_tokens: int,
        block_ids: tuple[int, ...],
        plan: ChunkPlan,
        *,
        carrier: LaneCarrier,
        on_failure: Callable[[str], None],
        on_end: Callable[[], None],
        clock: Clock,
        progress_s: float,
    ):
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.state = SenderState.OFFERING
        self.num_chunks = 0
        self._block_ids = block_ids
        self._plan = plan
        self._carrier = carrier
        self._on_failure = on_failure
        self._on_end = on_end
        self._cut: Cut | None = None  # until granted
        self._sent: list[_Sent] = []  # by sequence
        self._asked_for: deque[int] = deque()  # sequences of chunks to be sent again
        self._num_under_way = 0
        self._is_committed = False  # by the worker
        self._first_token: SampledToken | None = None
        self._has_failed = False
        self.peer_gave_up = False
        # Runs while it is the peer's turn: to grant or to say that its request waits for room, and to verify. While the
        # prompt is computed, the peer's clock runs.
        self._deadline = Deadline(clock, progress_s, self._expire)
        self._deadline.restart()

    # --- the transfer's calls ---

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """KV of the first `num_tokens` tokens of `layer` is in the blocks. Raises ValueError beyond the end."""
        if not self.ended:
            self._plan.add_ready(layer, num_tokens)
            self._carrier.has_work(self)

    def commit(self, first_token: SampledToken | None) -> None:
        """All layers are ready, and this token follows, or none."""
        if not self.ended:
            self._is_committed = True
            self._first_token = first_token
            self._carrier.has_work(self)

    def abort(self, reason: str) -> None:
        """Give the lane up; the peer is told. Any time, any number of times."""
        self._end(SenderEvent.ABORT, reason, tell_peer=True)

    @property
    def ended(self) -> bool:
        """The blocks are not read for this lane any more, and won't be."""
        return self.state in SENDER_ENDS

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
        if self.state in (SenderState.GRANTED, SenderState.SENDING):
            return self._plan.has_runs or bool(self._asked_for)
        return self.state in (SenderState.COMMITTED, SenderState.FINISHING) and bool(self._asked_for)

    def begin_chunk(self, link: int, max_units: int) -> Chunk | None:
        """The chunk to announce and send next on this link: its blocks are read from now on until `end_chunk`.

        None where there is none now. Chunks that are sent again go first.
        """
        if not self.has_chunk or self._cut is None:
            return None
        if self._asked_for:
            sequence = self._asked_for.popleft()
            sent = self._sent[sequence]
            sent.attempt, sent.link, sent.is_asked_for = sent.attempt + 1, link, False
        else:
            sequence = self.num_chunks
            sent = _Sent(self._plan.next_runs(max_units), 0, link)
            self._sent.append(sent)
            self.num_chunks += 1
        if self._num_under_way == 0:
            self._apply(SenderEvent.CHUNK_BEGIN)
        self._num_under_way += 1
        num_bytes = sum(run.num_units for run in sent.runs) * self._cut.unit_bytes
        return Chunk(self.ticket.transfer_id, sequence, sent.attempt, link, sent.runs, num_bytes)

    def segments(self, chunk: Chunk) -> tuple[Segment, ...]:
        """Where the chunk's units lie."""
        return () if self._cut is None else self._cut.segments(chunk.runs, self._block_ids)

    def end_chunk(self) -> None:
        """A chunk's blocks are not read any more: it is out, or its link is closed."""
        self._num_under_way -= 1
        if self._num_under_way == 0 and not self.ended:
            self._apply(SenderEvent.CHUNK_END)

    def damaged(self, sequence: int, attempt: int) -> int | None:
        """The peer asks for a chunk again; returns the link that must not carry it, if there is one.

        Raises ValueError for a chunk that is not out, or can't be asked for again.
        """
        if self.state in (SenderState.OFFERING, SenderState.OFFERED, SenderState.ABORTING) or self.ended:
            return None
        sent = self._sent[sequence] if 0 <= sequence < len(self._sent) else None
        if sent is None or sent.attempt != attempt or sent.is_asked_for or attempt + 1 >= MAX_ATTEMPTS:
            raise ValueError(f"attempt {attempt} of chunk {sequence} is not out, and can't be damaged")
        sent.is_asked_for = True
        self._asked_for.append(sequence)
        return sent.link if needs_other_link(attempt + 1) else None

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
        """The connection is gone and its links closed."""
        self._end(SenderEvent.PEER_LOST, reason, tell_peer=False)

    # --- inside ---

    def _expire(self) -> None:
        waited_for = "verify" if self.state in (SenderState.COMMITTED, SenderState.FINISHING) else "grant"
        self._end(SenderEvent.LEASE_EXPIRED, f"the target did not {waited_for} in time", tell_peer=True)

    def _end(self, event: SenderEvent, reason: str, *, tell_peer: bool) -> None:
        if self.ended:
            return
        fails = not self._has_failed and self.state is not SenderState.RELEASING
        if fails:
            self._has_failed = True
            if tell_peer:
                self._carrier.gave_up(self, reason)
            self._on_failure(reason)  # which may abort this lane too
        if not self.ended:
            self._apply(event)

    def _apply(self, event: SenderEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended:
            self._deadline.stop()
            self._carrier.ended(self)
            self._on_end()
