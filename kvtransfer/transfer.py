"""A transfer on either side, and its parts on rank pairs: what goes from one rank of the source to one of the target.

No I/O here. On the sending side the rank pair's connection asks for the next chunk, and sends it. On the receiving side
it asks for the places of bytes, reports those that have arrived, and posts the rank pair's answers.

A transfer succeeds once every rank pair has; a rank pair that fails ends the others. Its states are in lifecycle.py.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import ChunkPlan, KVShard, Segment, first_units
from twostroke.kvtransfer.lifecycle import (
    ENDS,
    VERIFIED_BY_PEER,
    ReceiverState,
    SenderState,
    TransferEvent,
    transition,
)
from twostroke.kvtransfer.link import KVStore
from twostroke.kvtransfer.timeouts import Deadline
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.kv_layout import KVGroups
from twostroke.protocol.messages import Chunk, Commit, Verified
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer, SampledToken, Ticket
from twostroke.protocol.stats import TransferStats

S = TypeVar("S", SenderState, ReceiverState)


class PairKeeper(Protocol):
    """The owner of a rank pair's connection, as rank pairs see it. No call waits; all are on the event loop."""

    def gave_up(self, pair: Any, reason: str) -> None:
        """Tell the peer that the rank pair was aborted on this side."""

    def pair_ended(self, pair: Any) -> None:
        """Forget the rank pair: the blocks are not touched for it any more."""


class PairCarrier(PairKeeper, Protocol):
    """The connection of a sending rank pair, as the rank pair sees it."""

    def has_work(self, pair: "OutgoingPairTransfer") -> None:
        """Send a chunk or the commit of the rank pair, in its turn."""


class TransferCompletion:
    """The end of a transfer, once, by success or failure."""

    def __init__(self) -> None:
        self.first_token: SampledToken | None = None  # received with the KV
        self.failure: str | None = None
        self.is_given_up = False  # one of the sides did not need it any more
        self._over = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True once the blocks are not touched any more."""
        return self._over.is_set()

    def abort(self, reason: str) -> None:
        """Give the transfer up and tell the peer. Never waits. Any time, any number of times."""
        self.is_given_up |= self.failure is None and not self.ended
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """End all of it: a part has failed, or it is given up, or could never begin."""
        raise NotImplementedError

    async def cancel(self) -> None:
        """Give the transfer up; returns when nothing touches the blocks any more. Any number of times."""
        self.abort("the worker cancelled the transfer")
        await self._over.wait()

    async def end(self) -> SampledToken | None:
        """Wait for the end; return the first token that was received, if any. Raises TransferFailed."""
        await self._over.wait()
        if self.failure is not None:
            raise TransferFailed(self.failure)
        return self.first_token


class Transfer(TransferCompletion):
    """KV of one request on its way from or into these blocks."""

    pairs: Mapping[int, "PairTransfer[Any]"]  # by the peer's rank

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
        for pair in self.pairs.values():
            pair.abort(reason)
        self.look_for_end()

    def look_for_end(self) -> None:
        """End the transfer where its last rank pair has ended."""
        if not self.ended and all(pair.ended for pair in self.pairs.values()):
            self._over.set()
            self._on_ended(self)
            self.pairs = {}  # they know their transfer: a cycle would be left to the collection of garbage


class PairTransfer(Generic[S]):
    """The transfer on one rank pair: its state. Its deadline runs while it is the peer's turn to make a step."""

    def __init__(self, transfer: Transfer, state: S, keeper: PairKeeper, progress_s: float):
        self.transfer = transfer
        self.ticket = transfer.ticket
        self.state: S = state
        self._keeper = keeper
        self._shard: KVShard | None = None  # until granted
        self._num_under_way = 0  # chunks
        self._has_failed = False
        self._deadline = Deadline(progress_s)
        self._deadline.restart(self._expire)

    @property
    def ended(self) -> bool:
        """True once the blocks are not touched for this rank pair any more."""
        return self.state in ENDS

    def abort(self, reason: str) -> None:
        """Give the rank pair and its transfer up and tell the peer. Any time, any number of times."""
        self._end(TransferEvent.ABORT, reason, tell_peer=True)

    def peer_aborted(self, reason: str) -> None:
        """End the rank pair, which the peer has given up."""
        self.transfer.is_given_up |= not self._has_failed and not self.ended
        self._end(TransferEvent.ABORT, reason, tell_peer=False)

    def peer_lost(self, reason: str) -> None:
        """End the rank pair, whose connection is lost and whose link is closed."""
        self._end(TransferEvent.PEER_LOST, reason, tell_peer=False)

    def segments(self, chunk: Chunk) -> tuple[Segment, ...]:
        """Return the places of the chunk's units."""
        return () if self._shard is None else self._shard.segments(chunk.runs, self.transfer.block_ids)

    def _begin_one(self) -> None:
        """Note a chunk under way: its blocks are touched until `_end_one`."""
        if self._num_under_way == 0:
            self._apply(TransferEvent.CHUNK_BEGIN)
        self._num_under_way += 1

    def _end_one(self) -> None:
        self._num_under_way -= 1
        if self._num_under_way == 0 and not self.ended and not self._is_awaited:
            self._apply(TransferEvent.CHUNK_END)

    @property
    def _is_awaited(self) -> bool:
        """True while the rank pair is given up, and the peer may still touch the blocks."""
        return False

    def _late(self) -> str:
        """Return why a rank pair ends whose deadline has passed."""
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
            self.transfer.fail(reason)  # which may abort this rank pair too
        if not self.ended:
            self._apply(event)

    def _apply(self, event: TransferEvent) -> None:
        self.state = transition(self.state, event)
        if self.ended:
            self._deadline.stop()
            self._keeper.pair_ended(self)
            self.transfer.look_for_end()


# --- the sending side ---


class OutgoingTransfer(Transfer):
    """KV of one request on its way to another worker.

    The worker calls `layer_ready`, `commit` and `abort`, and awaits `done`. Once the transfer has ended, the first
    three do nothing: the worker learns of the end by `done` alone. A rank whose heads other ranks send has no rank
    pair, and is done by `commit`.
    """

    def __init__(
        self,
        ticket: Ticket,
        block_ids: tuple[int, ...],
        num_tokens: int,
        num_ready_tokens: int,
        *,
        min_skip_tokens: int = 0,
        groups: KVGroups,
        layers: range,
        on_ended: Callable[["OutgoingTransfer"], None],
        clock: Clock,
        progress_s: float,
    ):
        super().__init__(ticket, block_ids, num_tokens, on_ended=on_ended, clock=clock)
        self.pairs: dict[int, OutgoingPairTransfer] = {}
        self.min_skip_tokens = min_skip_tokens
        self._num_ready_tokens = num_ready_tokens
        self._groups = groups
        self._progress_s = progress_s
        self._plan = self._new_plan(layers)  # knows what is ready, whatever the rank pairs have sent
        self._is_committed = False

    def add_pair(self, target_rank: int, layers: range, carrier: PairCarrier) -> "OutgoingPairTransfer":
        """Add a rank pair with these layers. All rank pairs are added before any other call."""
        pair = OutgoingPairTransfer(self, self._new_plan(layers), carrier, self._progress_s)
        self.pairs[target_rank] = pair
        return pair

    def windows_moved(self, block_ids: Sequence[int]) -> None:
        """Update the block table of windows that have moved on. Never waits.

        Must be called before the KV in the new blocks is ready.
        """
        self.block_ids = tuple(block_ids[: len(self.block_ids)])

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """Send KV of the first `num_tokens` tokens of `layer`, one of this rank's, which is in the blocks. Never waits.

        Raises ValueError for more tokens than the transfer has, and for another rank's layer.
        """
        if self.ended:
            return
        self._plan.add_ready(layer, num_tokens)
        for pair in self.pairs.values():
            pair.layer_ready(layer, num_tokens)

    def commit(self, first_token: SampledToken | None) -> None:
        """Commit, with the first token (None: the KV is a prefix only), once all layers are ready. Never waits.

        Raises ValueError where a layer is not ready, or for a second commit.
        """
        if self.ended:
            return
        if not self._plan.all_ready:
            raise ValueError("a transfer can't be committed before every layer is ready")
        if self._is_committed:
            raise ValueError("a transfer can't be committed twice")
        self._is_committed = True
        for pair in self.pairs.values():
            pair.commit(first_token)
        self.look_for_end()

    async def done(self) -> None:
        """Wait until the peer has verified everything. Raises TransferFailed otherwise.

        After either, the blocks are not read any more. A cancelled waiter leaves the transfer as it is.
        """
        await self.end()

    def fail(self, reason: str) -> None:
        """Fail the transfer, unless the peer has everything already."""
        if not (self._is_committed and all(pair.state in VERIFIED_BY_PEER for pair in self.pairs.values())):
            super().fail(reason)

    def look_for_end(self) -> None:
        if self._is_committed or self.failure is not None:
            super().look_for_end()

    def _new_plan(self, layers: range) -> ChunkPlan:
        return ChunkPlan(
            groups=self._groups, layers=layers, num_tokens=self.num_tokens, num_ready_tokens=self._num_ready_tokens
        )


class OutgoingPairTransfer(PairTransfer[SenderState]):
    """The sending end of a rank pair: the next chunk, and the commit.

    Its deadline runs until the peer has granted, or answered that its request waits for room, and again until the peer
    has verified, or has heard that the rank pair is given up. While the prompt is computed, the peer's deadline runs.
    """

    transfer: OutgoingTransfer

    def __init__(self, transfer: OutgoingTransfer, plan: ChunkPlan, carrier: PairCarrier, progress_s: float):
        super().__init__(transfer, SenderState.OFFERING, carrier, progress_s)
        self.num_chunks = 0
        self._plan = plan
        self._carrier = carrier
        self._is_committed = False  # by the worker
        self._first_token: SampledToken | None = None
        self._peer_may_read = False  # chunks that were sent

    # --- the transfer's calls ---

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        """Note that KV of a layer is ready, like OutgoingTransfer.layer_ready."""
        if not self.ended and layer in self._plan.layers:
            self._plan.add_ready(layer, num_tokens)
            self._carrier.has_work(self)

    def commit(self, first_token: SampledToken | None) -> None:
        """Commit once all chunks are out, like OutgoingTransfer.commit."""
        if not self.ended:
            self._is_committed = True
            self._first_token = first_token
            self._carrier.has_work(self)

    # --- the carrier's calls ---

    def offered(self) -> None:
        """Note that the offer is sent."""
        self._apply(TransferEvent.OFFER)

    def awaited(self) -> None:
        """Stop the deadline: the peer's request waits for room. Ignored once granted."""
        if self.state is SenderState.OFFERED:
            self._deadline.stop()

    def granted(self, shard: KVShard, skip_tokens: int) -> None:
        """Begin to send: the peer has reserved its blocks. Raises IllegalTransition, or ValueError for an odd skip."""
        self._apply(TransferEvent.GRANT)
        if skip_tokens < self.transfer.min_skip_tokens:
            self.abort(f"the target has {skip_tokens} tokens of {self.transfer.min_skip_tokens} that are not here")
            return
        self._shard = shard
        self._plan.begin(shard.unit_tokens, skip_tokens, shard.share)
        self._deadline.stop()
        self._carrier.has_work(self)

    @property
    def has_chunk(self) -> bool:
        """True where `begin_chunk` would return a chunk."""
        return self.state in (SenderState.GRANTED, SenderState.SENDING) and self._plan.has_runs

    def begin_chunk(self, max_units: int) -> Chunk | None:
        """Return the chunk to announce and send next; None: there is none now.

        Its blocks are read from now on until `end_chunk`.
        """
        if not self.has_chunk or self._shard is None:
            return None
        runs = self._plan.next_runs(max_units)
        self._begin_one()
        self._peer_may_read = True
        self.num_chunks += 1
        num_bytes = sum(run.num_units for run in runs) * self._shard.unit_bytes
        return Chunk(self.ticket.transfer_id, self.num_chunks - 1, runs, num_bytes)

    def end_chunk(self) -> None:
        """Note that a chunk is sent: its blocks are not read any more."""
        self._end_one()

    def take_commit(self) -> Commit | None:
        """Return the commit, once every chunk was announced and the worker has committed; None before, and after."""
        if self.state not in (SenderState.GRANTED, SenderState.SENDING):
            return None
        if not self._is_committed or not self._plan.all_taken:
            return None
        self._apply(TransferEvent.COMMIT)
        self._deadline.restart(self._expire)
        return Commit(self.ticket.transfer_id, self.num_chunks, self._first_token)

    def verified(self) -> None:
        """End the rank pair: the peer has everything. Raises IllegalTransition before the commit."""
        self._apply(TransferEvent.VERIFIED)

    def peer_aborted(self, reason: str) -> None:
        """End the rank pair, which the peer has given up, or whose end it has heard of: it does not mind the blocks
        now."""
        self._peer_may_read = False
        super().peer_aborted(reason)

    @property
    def _is_awaited(self) -> bool:
        return self.state is SenderState.ABORTING and self._peer_may_read

    def _expire(self) -> None:
        if self.state is SenderState.ABORTING:  # the peer has had its time to answer
            self._peer_may_read = False
        super()._expire()

    def _end(self, event: TransferEvent, reason: str, *, tell_peer: bool) -> None:
        super()._end(event, reason, tell_peer=tell_peer)
        if self.state is SenderState.ABORTING:
            if not self._deadline.runs:
                self._deadline.restart(self._expire)
            if not (self._num_under_way or self._is_awaited):
                self._apply(TransferEvent.CHUNK_END)

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
        keeper: PairKeeper,
        on_ended: Callable[["IncomingTransfer"], None],
        clock: Clock,
        progress_s: float,
    ):
        super().__init__(ticket, block_ids, num_tokens, on_ended=on_ended, clock=clock)
        self.skip_tokens = skip_tokens
        self.pairs: dict[int, IncomingPairTransfer] = {
            rank: IncomingPairTransfer(self, keeper, progress_s) for rank in source_ranks
        }

    async def verified(self) -> SampledToken | None:
        """Wait until every block has its verified KV; return the first token (None: a prefix only).

        Raises TransferFailed otherwise. After either, nothing writes into the blocks any more. A cancelled waiter
        leaves the transfer as it is.
        """
        return await self.end()

    def look_for_end(self) -> None:
        if not self.ended and self.failure is None and all(pair.ended for pair in self.pairs.values()):  # all verified
            tokens = [pair.first_token for pair in self.pairs.values()]
            self.first_token = tokens[0]
            if any(token != tokens[0] for token in tokens):
                self.failure = f"the source's ranks name different first tokens: {tokens}"
        super().look_for_end()


class IncomingPairTransfer(PairTransfer[ReceiverState]):
    """The receiving end of a rank pair: the places of its bytes. Announcing a chunk takes its units' places for
    good."""

    transfer: IncomingTransfer

    def __init__(self, transfer: IncomingTransfer, keeper: PairKeeper, progress_s: float):
        super().__init__(transfer, ReceiverState.AWAITING_OFFER, keeper, progress_s)
        self.first_token: SampledToken | None = None
        self.is_damaged = False  # a chunk was damaged: its link is not to be trusted
        self._num_units = 0
        self._first_units: dict[int, int] = {}  # of each of the rank pair's layers: those before are skipped
        self._taken: dict[int, bytearray] = {}  # for each layer and unit, 1: a chunk has announced it
        self._num_missing = 0  # units without verified bytes
        self._num_announced = 0  # chunks
        self._num_whole = 0  # chunks, verified
        self._commit: Commit | None = None

    def granted(self, shard: KVShard) -> None:
        """Grant the rank pair: its offer was received, and fits. Raises IllegalTransition for a second offer."""
        self._apply(TransferEvent.OFFER)
        num_tokens, skip_tokens = self.transfer.num_tokens, self.transfer.skip_tokens
        self._shard = shard
        self._num_units = shard.share.below(-(-num_tokens // shard.unit_tokens))
        self._first_units = first_units(
            shard.layout.groups, shard.layers, num_tokens, shard.unit_tokens, skip_tokens, shard.share
        )
        self._taken = {layer: bytearray(self._num_units) for layer in shard.layers}
        self._num_missing = sum(self._num_units - first for first in self._first_units.values())
        self._deadline.restart(self._expire)

    @property
    def takes_chunks(self) -> bool:
        """True where it was granted, and has not been given up."""
        return self.state in (ReceiverState.GRANTED, ReceiverState.RECEIVING)

    def announce(self, chunk: Chunk) -> None:
        """Take the places of a chunk that will arrive. An invalid chunk ends its rank pair, and is discarded later."""
        if self.takes_chunks:
            fault = self._fault(chunk)
            if fault is not None:
                self.abort(f"the source broke the protocol: {fault}")

    def begin_chunk(self, chunk: Chunk) -> tuple[Segment, ...] | None:
        """Return the places of the chunk's bytes, written until `end_chunk`; None: the bytes are discarded."""
        if not self.takes_chunks:
            return None
        self._begin_one()
        return self.segments(chunk)

    def end_chunk(self, chunk: Chunk, *, has_right_checksum: bool) -> Verified | None:
        """Account for a chunk whose bytes are in the blocks, right or not; return the answer to the peer, if any.

        A damaged chunk ends the rank pair, unless it has been given up meanwhile.
        """
        self._end_one()
        if not self.takes_chunks:
            return None
        if not has_right_checksum:
            self.is_damaged = True
            self.abort(f"chunk {chunk.sequence} was damaged on its way")
            return None
        self._num_whole += 1
        self._num_missing -= sum(run.num_units for run in chunk.runs)
        self._deadline.restart(self._expire)
        return self._verify()

    def commit(self, message: Commit) -> Verified | None:
        """Account for the commit; return the answer to the peer, where everything has arrived already."""
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
        """Return the answer to the commit, once all chunks are whole. Gives up where units are missing then."""
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
        """Take the chunk's places; return what is wrong with the chunk, if anything."""
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


class UsedTickets:
    """The tickets that were used: each permits one transfer, once on each of its rank pairs.

    Remembers transfer ids for `keep_s` seconds, at most `max_count` of them (the oldest are forgotten first). A ticket
    that is used again after that does no harm: no request expects its transfer any more.
    """

    def __init__(self, clock: Clock, keep_s: float, max_count: int):
        self._clock = clock
        self._keep_s = keep_s
        self._max_count = max_count
        self._used: dict[bytes, tuple[float, set[int]]] = {}  # transfer id -> first use, rank pairs; the oldest first

    def __contains__(self, transfer_id: bytes) -> bool:
        """Return True where it was used on any rank pair."""
        return transfer_id in self._used

    def was_used(self, transfer_id: bytes, pair: int) -> bool:
        """Return True where it was used on this rank pair."""
        return transfer_id in self._used and pair in self._used[transfer_id][1]

    def use(self, transfer_id: bytes, pair: int = 0) -> bool:
        """Mark it as used on this rank pair; return False where it was used there before."""
        now = self._clock()
        while self._used:
            oldest = next(iter(self._used))
            if len(self._used) < self._max_count and now - self._used[oldest][0] < self._keep_s:
                break
            del self._used[oldest]
        _, pairs = self._used.setdefault(transfer_id, (now, set()))
        if pair in pairs:
            return False
        pairs.add(pair)
        return True


@dataclass(kw_only=True, eq=False)
class RankSide:
    """The parts of a KVSender and a KVReceiver. Store and transports belong to their maker, which closes them."""

    peer: Peer
    store: KVStore
    network: Network
    transports: Transports
    config: TransferConfig
    clock: Clock
    stats: TransferStats = field(default_factory=TransferStats, init=False)

    def new_tickets(self) -> UsedTickets:
        return UsedTickets(self.clock, self.config.used_ticket_s, self.config.max_used_tickets)

    def count(self, transfer: Transfer) -> None:
        """Count a transfer that has ended."""
        self.stats.end(transfer.failure, self.clock() - transfer.started_s, is_given_up=transfer.is_given_up)
