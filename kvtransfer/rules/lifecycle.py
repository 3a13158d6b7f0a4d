"""A transfer's life on either side, as one table.

Rules of this file: nothing here does I/O, waits, or knows a clock. A state and an event give the next state; a pair
that is not in the table raises. Whoever drives a transfer asks here first and acts afterwards.

This is the life of one lane (one pair of ranks); a transfer is done when all its lanes are.

SENDING, FINISHING, RELEASING, RECEIVING and ABORTING mean that somebody touches the blocks right now: at least one
chunk is under way. CHUNK_BEGIN is the first of them, CHUNK_END the last: the lane counts those
between. Blocks may be freed in RELEASED, VERIFIED
and ABORTED alone. PEER_LOST is reported only after the link is closed, so it ends these states at once; ABORT has to
wait for the chunks that are under way.

    sender     OFFERING -> OFFERED -> GRANTED <-> SENDING
               GRANTED -> COMMITTED -> RELEASED
               SENDING -> FINISHING -> COMMITTED       (chunks were out when the commit went)
               FINISHING -> RELEASING -> RELEASED      (the peer's answer was quicker than our own call's return)
    receiver   AWAITING_OFFER -> GRANTED <-> RECEIVING         GRANTED -> VERIFIED
    both       any -> ABORTED, through ABORTING where a chunk is under way

An offer that comes before the request it belongs to is no transfer yet: the receiver keeps it aside.
"""

from enum import Enum
from typing import Any, TypeVar

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


class ReceiverState(Enum):
    """The side of the worker that gets the KV."""

    AWAITING_OFFER = "awaiting offer"
    GRANTED = "granted"
    RECEIVING = "receiving"  # a chunk's bytes are being written into the blocks
    ABORTING = "aborting"  # given up, but a chunk's bytes are still being written
    VERIFIED = "verified"
    ABORTED = "aborted"


class TransferEvent(Enum):
    """What can happen to either."""

    OFFER = "offer"  # it is out; it has come, and fits
    GRANT = "grant"  # has come
    CHUNK_BEGIN = "chunk begin"  # the first one under way
    CHUNK_END = "chunk end"  # the last one under way
    COMMIT = "commit"  # it is out; it has come, and every chunk it names is there
    VERIFIED = "verified"  # by the peer
    ABORT = "abort"  # ours or the peer's, or a deadline has passed
    PEER_LOST = "peer lost"


S = TypeVar("S", SenderState, ReceiverState)

ENDS = frozenset({SenderState.RELEASED, SenderState.ABORTED, ReceiverState.VERIFIED, ReceiverState.ABORTED})
VERIFIED_BY_PEER = frozenset({SenderState.RELEASING, SenderState.RELEASED})


def _table() -> dict[tuple[Any, TransferEvent], Any]:
    sender, receiver, event = SenderState, ReceiverState, TransferEvent
    table: dict[tuple[Any, TransferEvent], Any] = {
        (sender.OFFERING, event.OFFER): sender.OFFERED,
        (sender.OFFERED, event.GRANT): sender.GRANTED,
        (sender.GRANTED, event.CHUNK_BEGIN): sender.SENDING,
        (sender.SENDING, event.CHUNK_END): sender.GRANTED,
        (sender.GRANTED, event.COMMIT): sender.COMMITTED,
        (sender.SENDING, event.COMMIT): sender.FINISHING,
        (sender.FINISHING, event.CHUNK_END): sender.COMMITTED,
        (sender.COMMITTED, event.VERIFIED): sender.RELEASED,
        (sender.FINISHING, event.VERIFIED): sender.RELEASING,
        (sender.RELEASING, event.CHUNK_END): sender.RELEASED,
        (sender.ABORTING, event.CHUNK_END): sender.ABORTED,
        (receiver.AWAITING_OFFER, event.OFFER): receiver.GRANTED,
        (receiver.GRANTED, event.CHUNK_BEGIN): receiver.RECEIVING,
        (receiver.RECEIVING, event.CHUNK_END): receiver.GRANTED,
        (receiver.GRANTED, event.COMMIT): receiver.VERIFIED,
        (receiver.ABORTING, event.CHUNK_END): receiver.ABORTED,
    }
    under_way = {sender.SENDING, sender.FINISHING, sender.ABORTING, receiver.RECEIVING, receiver.ABORTING}
    for at in (*sender, *receiver):
        of = type(at)
        table[at, event.ABORT] = of.ABORTING if at in under_way else of.ABORTED
        table[at, event.PEER_LOST] = of.ABORTED
    for at in (*VERIFIED_BY_PEER, receiver.VERIFIED):  # it is too late to give up
        table[at, event.ABORT] = at
        table[at, event.PEER_LOST] = sender.RELEASED if at in VERIFIED_BY_PEER else at
    return table


_TABLE = _table()


def transition(state: S, event: TransferEvent) -> S:
    """The state after `event`. Raises IllegalTransition where the table has no such cell."""
    after: S | None = _TABLE.get((state, event))
    if after is None:
        raise IllegalTransition(f"{event} can't happen in {state}")
    return after
