"""A transfer's life on either side, as one table.

Rules of this file: nothing here does I/O, waits, or knows a clock. A state and an event give the next state; a pair
that is not in the table raises. Whoever drives a transfer asks here first and acts afterwards.

SENDING, RECEIVING and ABORTING mean that somebody touches the blocks right now. Blocks may be freed in RELEASED,
VERIFIED and ABORTED alone. PEER_LOST is reported only after the link is closed, so it ends these states at once;
ABORT and LEASE_EXPIRED have to wait for the chunk that is under way.

    sender     OFFERING -> OFFERED -> GRANTED <-> SENDING      GRANTED -> COMMITTED -> RELEASED
    receiver   AWAITING_OFFER -> GRANTED <-> RECEIVING         GRANTED -> VERIFIED
    both       any -> ABORTED, through ABORTING where a chunk is under way

An offer that comes before the request it belongs to is no transfer yet: the receiver keeps it aside.
"""

from enum import Enum
from typing import overload

from protocol.errors import TwostrokeError


class IllegalTransition(TwostrokeError):
    """An event that can't happen in this state: a peer that breaks the protocol, or our own mistake."""


class SenderState(Enum):
    """The prefill worker's side."""

    OFFERING = "offering"  # opened; the offer is not out yet
    OFFERED = "offered"
    GRANTED = "granted"
    SENDING = "sending"  # a chunk's bytes are being read from the blocks
    COMMITTED = "committed"
    ABORTING = "aborting"  # given up, but a chunk's bytes are still being read
    RELEASED = "released"  # verified by the peer
    ABORTED = "aborted"


class SenderEvent(Enum):
    """What can happen to a SenderState."""

    OFFER = "offer"
    GRANT = "grant"
    CHUNK_BEGIN = "chunk begin"
    CHUNK_END = "chunk end"
    COMMIT = "commit"
    VERIFIED = "verified"
    ABORT = "abort"  # ours or the peer's
    LEASE_EXPIRED = "lease expired"
    PEER_LOST = "peer lost"


class ReceiverState(Enum):
    """The decode worker's side."""

    AWAITING_OFFER = "awaiting offer"
    GRANTED = "granted"
    RECEIVING = "receiving"  # a chunk's bytes are being written into the blocks
    ABORTING = "aborting"  # given up, but a chunk's bytes are still being written
    VERIFIED = "verified"
    ABORTED = "aborted"


class ReceiverEvent(Enum):
    """What can happen to a ReceiverState."""

    OFFER = "offer"
    CHUNK_BEGIN = "chunk begin"
    CHUNK_END = "chunk end"
    COMMIT = "commit"  # it names every chunk, and all are there
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
        (state.COMMITTED, event.VERIFIED): state.RELEASED,
        (state.ABORTING, event.CHUNK_END): state.ABORTED,
    }
    for at in state:
        done = at if at is state.RELEASED else state.ABORTED
        table[at, event.PEER_LOST] = done
        under_way = at in (state.SENDING, state.ABORTING)
        for ending in (event.ABORT, event.LEASE_EXPIRED):
            table[at, ending] = state.ABORTING if under_way else done
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
