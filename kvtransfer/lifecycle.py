"""The lifecycle of a transfer on either side, as one table.

Rules of this file: nothing here does I/O, waits, or knows a clock. A state and an event give the next state; a pair
that is not in the table raises. The drivers of a transfer call `transition` first and act afterwards.

The states are those of one rank pair; a transfer has ended once all its rank pairs have. An offer that arrives
before the request it belongs to is no transfer yet: the receiver keeps it aside.
"""

from enum import Enum
from typing import Any, TypeVar

from twostroke.protocol.errors import TwostrokeError


class IllegalTransition(TwostrokeError):
    """An event that can't happen in this state: a peer that breaks the protocol, or a mistake here."""


class SenderState(Enum):
    """The states of a rank pair at the source, which has the KV.

               OFFER            GRANT               COMMIT              VERIFIED
      OFFERING -----> OFFERED -----> GRANTED --------------> COMMITTED ----------> RELEASED
                                      |   ^                      ^                     ^
                          CHUNK_BEGIN |   | CHUNK_END            | CHUNK_END           | CHUNK_END
                                      v   |      COMMIT          |      VERIFIED       |
                                     SENDING ------------> FINISHING ----------> RELEASING

      ABORT      any state but RELEASING and RELEASED -> ABORTED; from GRANTED on by way of ABORTING
      PEER_LOST  any state but RELEASING and RELEASED -> ABORTED; RELEASING -> RELEASED

    In the lower row and in ABORTING a chunk's bytes are being read from the blocks. CHUNK_BEGIN is the first chunk
    under way, CHUNK_END the last; the rank pair counts those between. An ABORT waits for the chunks under way, and for
    the peer's answer where chunks were sent: it may be reading the blocks itself, and would take other bytes for
    damage. PEER_LOST is reported only after the link is closed, so nothing is under way then. Blocks may be freed in
    RELEASED and ABORTED alone. RELEASING means that the peer's answer arrived before the call that sends a chunk
    returned.
    """

    OFFERING = "offering"  # opened; the offer is not out yet
    OFFERED = "offered"
    GRANTED = "granted"
    SENDING = "sending"  # a chunk's bytes are being read from the blocks
    COMMITTED = "committed"
    FINISHING = "finishing"  # committed, and a chunk's bytes are being read
    RELEASING = "releasing"  # verified by the peer, but a call that reads the blocks has not returned
    ABORTING = "aborting"  # given up, but a chunk's bytes are still being read, or the peer has not answered
    RELEASED = "released"  # verified by the peer
    ABORTED = "aborted"


class ReceiverState(Enum):
    """The states of a rank pair at the target, which receives the KV.

                      OFFER            COMMIT
      AWAITING_OFFER -----> GRANTED ------------> VERIFIED
                             |   ^
                 CHUNK_BEGIN |   | CHUNK_END
                             v   |
                           RECEIVING

      ABORT      any state but VERIFIED -> ABORTED; from RECEIVING by way of ABORTING
      PEER_LOST  any state but VERIFIED -> ABORTED

    In RECEIVING and ABORTING a chunk's bytes are being written into the blocks, which may be freed in VERIFIED and
    ABORTED alone. COMMIT is the source's commit once every chunk that it names has arrived.
    """

    AWAITING_OFFER = "awaiting offer"
    GRANTED = "granted"
    RECEIVING = "receiving"  # a chunk's bytes are being written into the blocks
    ABORTING = "aborting"  # given up, but a chunk's bytes are still being written
    VERIFIED = "verified"
    ABORTED = "aborted"


class TransferEvent(Enum):
    """The events of either side."""

    OFFER = "offer"  # sent; or received, and fits
    GRANT = "grant"  # received
    CHUNK_BEGIN = "chunk begin"  # the first one under way
    CHUNK_END = "chunk end"  # the last one under way
    COMMIT = "commit"  # sent; or received, and every chunk that it names is there
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
    under_way = {
        *(sender.GRANTED, sender.SENDING, sender.COMMITTED, sender.FINISHING, sender.ABORTING),
        *(receiver.RECEIVING, receiver.ABORTING),
    }
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
    """Return the state after `event`. Raises IllegalTransition where the table has no cell for it."""
    after: S | None = _TABLE.get((state, event))
    if after is None:
        raise IllegalTransition(f"{event} can't happen in {state}")
    return after
