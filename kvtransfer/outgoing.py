"""One transfer as the prefill worker sees it."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.chunk_plan import BlockRun, ChunkPlan
from kvtransfer.config import TransferConfig
from kvtransfer.deadline import Deadline
from kvtransfer.lifecycle import SENDER_ENDS, SenderEvent, SenderState, transition
from protocol.clock import Clock
from protocol.errors import TransferFailed
from protocol.requests import SampledToken
from protocol.tickets import Ticket


class OutgoingObserver(Protocol):
    """Whoever carries a transfer's messages and bytes. Calls never wait and come on the event loop."""

    def has_work(self, transfer: "OutgoingTransfer") -> None:
        """A chunk or the commit may be sent now."""

    def gave_up(self, transfer: "OutgoingTransfer", reason: str) -> None:
        """The transfer was aborted on this side; the peer should be told."""

    def ended(self, transfer: "OutgoingTransfer") -> None:
        """It is over: its blocks are not read any more."""


class OutgoingTransfer:
    """KV of one request on its way to a decode worker.

    The worker calls `layer_ready`, `commit`, `abort` and awaits `done`. Once the transfer has ended, for whatever
    reason, the first three do nothing: the worker learns of the end by `done` alone.
    """

    def __init__(
        self,
        ticket: Ticket,
        num_tokens: int,
        block_ids: Sequence[int],
        plan: ChunkPlan,
        observer: OutgoingObserver,
        config: TransferConfig,
        clock: Clock,
    ):
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.block_ids = tuple(block_ids)
        self.state = SenderState.OFFERING
        self.started_s = clock()
        self.first_token: SampledToken | None = None
        self.num_chunks = 0
        self._plan = plan
        self._observer = observer
        self._failure: str | None = None
        self._over = asyncio.Event()
        # Runs while it is the peer's turn: to grant, to verify. While the prompt is computed, the peer's clock runs.
        self._deadline = Deadline(clock, config.progress_s, self._expire)
        self._deadline.restart()

    # --- the prefill worker's calls ---

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """KV of the first `num_tokens` tokens of `layer` is in the blocks. Never waits.

        Raises ValueError for more tokens than the transfer has.
        """
        if self.ended:
            return
        self._plan.add_ready(layer, num_tokens)
        self._observer.has_work(self)

    def commit(self, first_token: SampledToken) -> None:
        """All layers are ready, and this token follows. Never waits.

        Raises ValueError where a layer is not ready, or for a second commit.
        """
        if self.ended:
            return
        if not self._plan.all_ready:
            raise ValueError("a transfer can't be committed before every layer is ready")
        if self.first_token is not None:
            raise ValueError("a transfer can't be committed twice")
        self.first_token = first_token
        self._observer.has_work(self)

    def abort(self, reason: str) -> None:
        """Give the transfer up; the peer is told. Any time, any number of times."""
        self._end(SenderEvent.ABORT, reason, tell_peer=True)

    async def done(self) -> None:
        """Wait for the end. Returns once the peer has verified everything; raises TransferFailed otherwise.

        After either the blocks are not read any more. A cancelled waiter leaves the transfer as it is.
        """
        await self._over.wait()
        if self._failure is not None:
            raise TransferFailed(self._failure)

    # --- the connection's calls ---

    @property
    def ended(self) -> bool:
        """The blocks are not read any more, and won't be."""
        return self.state in SENDER_ENDS

    def offered(self) -> None:
        """The offer is out."""
        self._apply(SenderEvent.OFFER)

    def granted(self, skip_blocks: int) -> None:
        """The peer has reserved its blocks. Raises IllegalTransition, or ValueError for too many skipped blocks."""
        self._apply(SenderEvent.GRANT)
        self._plan.skip(skip_blocks)
        self._deadline.stop()
        self._observer.has_work(self)

    def begin_chunk(self) -> BlockRun | None:
        """The run of blocks to send next, which are read from now on until `end_chunk`; None where none is ready."""
        run = self._plan.next_run()
        if run is not None:
            self._apply(SenderEvent.CHUNK_BEGIN)
        return run

    def end_chunk(self) -> None:
        """The run's blocks are not read any more."""
        self._apply(SenderEvent.CHUNK_END)

    @property
    def can_commit(self) -> bool:
        """All chunks are out, and the first token is known."""
        return self.state is SenderState.GRANTED and self.first_token is not None and self._plan.all_taken

    def committed(self) -> None:
        """The commit is out."""
        self._apply(SenderEvent.COMMIT)
        self._deadline.restart()

    def verified(self) -> None:
        """The peer has everything. Raises IllegalTransition before the commit."""
        self._apply(SenderEvent.VERIFIED)

    def peer_aborted(self, reason: str) -> None:
        """The peer has given the transfer up."""
        self._end(SenderEvent.ABORT, reason, tell_peer=False)

    def peer_lost(self, reason: str) -> None:
        """The connection is gone and its link closed."""
        self._end(SenderEvent.PEER_LOST, reason, tell_peer=False)

    # --- inside ---

    def _expire(self) -> None:
        waited_for = "verify" if self.state is SenderState.COMMITTED else "grant"
        self._end(SenderEvent.LEASE_EXPIRED, f"the decode worker did not {waited_for} in time", tell_peer=True)

    def _end(self, event: SenderEvent, reason: str, *, tell_peer: bool) -> None:
        if self.ended:
            return
        if self._failure is None:
            self._failure = reason
            if tell_peer:
                self._observer.gave_up(self, reason)
        self._apply(event)

    def _apply(self, event: SenderEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended and not self._over.is_set():
            self._deadline.stop()
            self._over.set()
            self._observer.ended(self)
