"""A transfer's life on either side, as one table.

Rules of this file: nothing here does I/O, waits, or knows a clock. A state and an event give the next state; a pair
that is not in the table raises. Whoever drives a transfer asks here first and acts afterwards.

This is the life of one lane (one pair of ranks); a transfer is done when all its lanes are.

SENDING, FINISHING, RELEASING, RECEIVING and ABORTING mean that somebody touches the blocks right now: at least one
chunk is under way. CHUNK_BEGIN is the first of them, CHUNK_END the last: the lane counts those
between. Blocks may be freed in RELEASED, VERIFIED
and ABORTED alone. PEER_LOST is reported only after the link is closed, so it ends these states at once; ABORT and
LEASE_EXPIRED have to wait for the chunks that are under way.

    sender     OFFERING -> OFFERED -> GRANTED <-> SENDING
               GRANTED -> COMMITTED -> RELEASED
               SENDING -> FINISHING -> COMMITTED       (chunks were out when the commit went)
               FINISHING -> RELEASING -> RELEASED      (the peer's answer was quicker than our own call's return)
    receiver   AWAITING_OFFER -> GRANTED <-> RECEIVING         GRANTED -> VERIFIED
    both       any -> ABORTED, through ABORTING where a chunk is under way

An offer that comes before the request it belongs to is no transfer yet: the receiver keeps it aside.
"""

from enum import Enum
from typing import overload

from twostroke.protocol.errors import TwostrokeError


class IllegalTransition(TwostrokeError):
    """An event that can't happen in this state: a peer that breaks the protocol, or our own mistake."""


class SenderState(Enum):
    """The side of the worker that has the KV."""

    OFFERING = "offering"  # opened; the offer is not out yet
    OFFERED = "offered"
    GRANTED = "granted"
    SENDING = "sending"  # a chunk's bytes are being read from the blocks
    COMMITTED = "committed"
    FINISHING = "finishing"  # committed, and a chunk's bytes are being read
    RELEASING = "releasing"  # verified by the peer, but a call that reads the blocks has not returned
    ABORTING = "aborting"  # given up, but a chunk's bytes are still being read
    RELEASED = "released"  # verified by the peer
    ABORTED = "aborted"


class SenderEvent(Enum):
    """What can happen to a SenderState."""

    OFFER = "offer"
    GRANT = "grant"
    CHUNK_BEGIN = "chunk begin"  # the first one under way
    CHUNK_END = "chunk end"  # the last one under way
    COMMIT = "commit"
    VERIFIED = "verified"
    ABORT = "abort"  # ours or the peer's
    LEASE_EXPIRED = "lease expired"
    PEER_LOST = "peer lost"


class ReceiverState(Enum):
    """The side of the worker that gets the KV."""

    AWAITING_OFFER = "awaiting offer"
    GRANTED = "granted"
    RECEIVING = "receiving"  # a chunk's bytes are being written into the blocks
    ABORTING = "aborting"  # given up, but a chunk's bytes are still being written
    VERIFIED = "verified"
    ABORTED = "aborted"


class ReceiverEvent(Enum):
    """What can happen to a ReceiverState."""

    OFFER = "offer"
    CHUNK_BEGIN = "chunk begin"  # the first one under way
    CHUNK_END = "chunk end"  # the last one under way
    COMMIT = "commit"  # it has come, and every chunk it names is there
    ABORT = "abort"  # ours or the peer's
    LEASE_EXPIRED = "lease expired"
    PEER_LOST = "peer lost"


def _sender_table() -> dict[tuple[SenderState, SenderEvent], SenderState]:
    state, event = SenderState, SenderEvent
    table = {
        (state.OFFERING, event.OFFER): state.OFFERED,
        (state.OFFERED, event.GRANT): state.GRANTED,
        (state.GRANTED, event.CHUNK_BEGIN): state.SENDING,
        (state.SENDING, event.CHUNK_END): state.GRANTED,
        (state.GRANTED, event.COMMIT): state.COMMITTED,
        (state.SENDING, event.COMMIT): state.FINISHING,
        (state.FINISHING, event.CHUNK_END): state.COMMITTED,
        (state.COMMITTED, event.VERIFIED): state.RELEASED,
        (state.FINISHING, event.VERIFIED): state.RELEASING,
        (state.RELEASING, event.CHUNK_END): state.RELEASED,
        (state.ABORTING, event.CHUNK_END): state.ABORTED,
    }
    for at in state:
        is_verified = at in (state.RELEASING, state.RELEASED)
        table[at, event.PEER_LOST] = state.RELEASED if is_verified else state.ABORTED
        for ending in (event.ABORT, event.LEASE_EXPIRED):
            if is_verified:
                table[at, ending] = at
            else:
                under_way = at in (state.SENDING, state.FINISHING, state.ABORTING)
                table[at, ending] = state.ABORTING if under_way else state.ABORTED
    return table


def _receiver_table() -> dict[tuple[ReceiverState, ReceiverEvent], ReceiverState]:
    state, event = ReceiverState, ReceiverEvent
    table = {
        (state.AWAITING_OFFER, event.OFFER): state.GRANTED,
        (state.GRANTED, event.CHUNK_BEGIN): state.RECEIVING,
        (state.RECEIVING, event.CHUNK_END): state.GRANTED,
        (state.GRANTED, event.COMMIT): state.VERIFIED,
        (state.ABORTING, event.CHUNK_END): state.ABORTED,
    }
    for at in state:
        done = at if at is state.VERIFIED else state.ABORTED
        table[at, event.PEER_LOST] = done
        under_way = at in (state.RECEIVING, state.ABORTING)
        for ending in (event.ABORT, event.LEASE_EXPIRED):
            table[at, ending] = state.ABORTING if under_way else done
    return table


_SENDER = _sender_table()
_RECEIVER = _receiver_table()

SENDER_ENDS = frozenset({SenderState.RELEASED, SenderState.ABORTED})
RECEIVER_ENDS = frozenset({ReceiverState.VERIFIED, ReceiverState.ABORTED})


@overload
def transition(state: SenderState, event: SenderEvent) -> SenderState: ...


@overload
def transition(state: ReceiverState, event: ReceiverEvent) -> ReceiverState: ...


def transition(state: SenderState | ReceiverState, event: SenderEvent | ReceiverEvent) -> SenderState | ReceiverState:
    """The state after `event`. Raises IllegalTransition where the table has no such cell."""
    after: SenderState | ReceiverState | None = None
    if isinstance(state, SenderState) and isinstance(event, SenderEvent):
        after = _SENDER.get((state, event))
    elif isinstance(state, ReceiverState) and isinstance(event, ReceiverEvent):
        after = _RECEIVER.get((state, event))
    if after is None:
        raise IllegalTransition(f"{event} can't happen in {state}")
    return after
