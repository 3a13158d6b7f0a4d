"""One transfer as the decode worker sees it."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.config import TransferConfig
from kvtransfer.deadline import Deadline
from kvtransfer.lifecycle import RECEIVER_ENDS, ReceiverEvent, ReceiverState, transition
from kvtransfer.store import KVStore
from protocol.clock import Clock
from protocol.errors import TransferFailed
from protocol.messages import Chunk, Commit
from protocol.requests import SampledToken
from protocol.tickets import Ticket


class IncomingObserver(Protocol):
    """Whoever keeps the transfers of a worker. Calls never wait and come on the event loop."""

    def gave_up(self, transfer: "IncomingTransfer", reason: str) -> None:
        """The transfer was aborted on this side; the peer should be told."""

    def ended(self, transfer: "IncomingTransfer") -> None:
        """It is over: nothing writes into its blocks any more."""


class IncomingTransfer:
    """KV of one request on its way into reserved blocks. The worker awaits `verified`; `cancel` and `abort` give up."""

    def __init__(
        self,
        ticket: Ticket,
        block_ids: Sequence[int],
        num_tokens: int,
        skip_blocks: int,
        store: KVStore,
        observer: IncomingObserver,
        config: TransferConfig,
        clock: Clock,
    ):
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.skip_blocks = skip_blocks
        self.state = ReceiverState.AWAITING_OFFER
        self.started_s = clock()
        self._block_ids = tuple(block_ids)
        self._store = store
        self._observer = observer
        self._num_chunks = 0
        self._present = [bytearray(len(block_ids)) for _ in range(store.num_layers)]  # 1: received or skipped
        for layer in self._present:
            layer[:skip_blocks] = b"\x01" * skip_blocks
        self._num_missing = store.num_layers * (len(block_ids) - skip_blocks)
        self._first_token: SampledToken | None = None
        self._failure = ""
        self._over = asyncio.Event()
        self._deadline = Deadline(clock, config.progress_s, self._expire)
        self._deadline.restart()

    # --- the decode worker's calls ---

    async def verified(self) -> SampledToken:
        """The first token, once every block holds its verified KV. Raises TransferFailed otherwise.

        After either nothing will write into the blocks any more. A cancelled waiter leaves the transfer as it is.
        """
        await self._over.wait()
        if self._first_token is None:
            raise TransferFailed(self._failure)
        return self._first_token

    async def cancel(self) -> None:
        """Give the transfer up; returns when nothing can write into the blocks any more. Any number of times."""
        self.abort("the decode worker cancelled the transfer")
        await self._over.wait()

    def abort(self, reason: str) -> None:
        """Give the transfer up without waiting; `verified` raises once nothing can write into the blocks any more."""
        self._end(ReceiverEvent.ABORT, reason, tell_peer=True)

    # --- the receiver's and the connection's calls ---

    @property
    def ended(self) -> bool:
        """Nothing writes into the blocks any more."""
        return self.state in RECEIVER_ENDS

    def granted(self) -> None:
        """The offer has come, and fits."""
        self._apply(ReceiverEvent.OFFER)
        self._deadline.restart()

    def begin_chunk(self, chunk: Chunk) -> Sequence[int] | None:
        """The blocks that the chunk's bytes go into, written from now on until `end_chunk`.

        None where the chunk must be discarded: the transfer was given up, or is now, for what is wrong with the chunk.
        """
        if self.state is not ReceiverState.GRANTED:
            return None
        fault = self._fault(chunk)
        if fault:
            self.abort(f"the prefill worker broke the protocol: {fault}")
            return None
        self._apply(ReceiverEvent.CHUNK_BEGIN)
        return self._block_ids[chunk.first_block : chunk.first_block + chunk.num_blocks]

    def end_chunk(self, chunk: Chunk, *, is_intact: bool) -> None:
        """The chunk's bytes are in the blocks, and its digest holds or does not."""
        self._apply(ReceiverEvent.CHUNK_END)
        if self.ended:
            return
        if not is_intact:
            self.abort(f"chunk {chunk.sequence} was damaged on its way: its digest is wrong")
            return
        self._num_chunks += 1
        self._num_missing -= chunk.num_blocks
        self._present[chunk.layer][chunk.first_block : chunk.first_block + chunk.num_blocks] = (
            b"\x01" * chunk.num_blocks
        )
        self._deadline.restart()

    def commit(self, message: Commit) -> bool:
        """Whether everything is there; otherwise the transfer is given up."""
        if self.state is not ReceiverState.GRANTED:
            return False
        if message.num_chunks != self._num_chunks or self._num_missing:
            self.abort(
                f"the prefill worker committed {message.num_chunks} chunks, {self._num_chunks} came, "
                f"{self._num_missing} blocks are missing"
            )
            return False
        self._first_token = message.first_token
        self._apply(ReceiverEvent.COMMIT)
        return True

    def peer_aborted(self, reason: str) -> None:
        """The peer has given the transfer up, or it never was the peer's."""
        self._end(ReceiverEvent.ABORT, reason, tell_peer=False)

    def peer_lost(self, reason: str) -> None:
        """The connection is gone and its link closed."""
        self._end(ReceiverEvent.PEER_LOST, reason, tell_peer=False)

    # --- inside ---

    def _fault(self, chunk: Chunk) -> str | None:
        """What is wrong with the chunk, if anything."""
        end = chunk.first_block + chunk.num_blocks
        if chunk.sequence != self._num_chunks:
            return f"chunk {chunk.sequence} came in place of {self._num_chunks}"
        if not 0 <= chunk.layer < self._store.num_layers:
            return f"there is no layer {chunk.layer}"
        if chunk.num_blocks < 1 or not 0 <= chunk.first_block < end <= len(self._block_ids):
            return f"there are no blocks {chunk.first_block} to {end}"
        if chunk.num_bytes != chunk.num_blocks * self._store.block_bytes:
            return f"{chunk.num_blocks} blocks are not {chunk.num_bytes} bytes"
        if chunk.first_block < self.skip_blocks:
            return f"block {chunk.first_block} was skipped in the grant"
        if any(self._present[chunk.layer][chunk.first_block : end]):
            return f"blocks {chunk.first_block} to {end} of layer {chunk.layer} came twice"
        return None

    def _expire(self) -> None:
        self._end(ReceiverEvent.LEASE_EXPIRED, "the prefill worker made no progress in time", tell_peer=True)

    def _end(self, event: ReceiverEvent, reason: str, *, tell_peer: bool) -> None:
        if self.ended:
            return
        if not self._failure:
            self._failure = reason
            if tell_peer:
                self._observer.gave_up(self, reason)
        self._apply(event)

    def _apply(self, event: ReceiverEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended and not self._over.is_set():
            self._deadline.stop()
            self._over.set()
            self._observer.ended(self)
