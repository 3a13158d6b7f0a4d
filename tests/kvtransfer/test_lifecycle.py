"""Every cell of the table, spelled out a second time."""

import itertools
from enum import Enum
from typing import Any

import pytest

from twostroke.kvtransfer.rules.lifecycle import (
    RECEIVER_ENDS,
    SENDER_ENDS,
    IllegalTransition,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
    transition,
)

SENDER = """
            OFFER    GRANT    CHUNK_BEGIN  CHUNK_END  COMMIT     VERIFIED   ABORT      LEASE_EXPIRED  PEER_LOST
OFFERING    OFFERED  -        -            -          -          -          ABORTED    ABORTED        ABORTED
OFFERED     -        GRANTED  -            -          -          -          ABORTED    ABORTED        ABORTED
GRANTED     -        -        SENDING      -          COMMITTED  -          ABORTED    ABORTED        ABORTED
SENDING     -        -        -            GRANTED    FINISHING  -          ABORTING   ABORTING       ABORTED
COMMITTED   -        -        FINISHING    -          -          RELEASED   ABORTED    ABORTED        ABORTED
FINISHING   -        -        -            COMMITTED  -          RELEASING  ABORTING   ABORTING       ABORTED
RELEASING   -        -        -            RELEASED   -          -          RELEASING  RELEASING      RELEASED
ABORTING    -        -        -            ABORTED    -          -          ABORTING   ABORTING       ABORTED
RELEASED    -        -        -            -          -          -          RELEASED   RELEASED       RELEASED
ABORTED     -        -        -            -          -          -          ABORTED    ABORTED        ABORTED
"""

RECEIVER = """
                OFFER    CHUNK_BEGIN  CHUNK_END  COMMIT    ABORT     LEASE_EXPIRED  PEER_LOST
AWAITING_OFFER  GRANTED  -            -          -         ABORTED   ABORTED        ABORTED
GRANTED         -        RECEIVING    -          VERIFIED  ABORTED   ABORTED        ABORTED
RECEIVING       -        -            GRANTED    -         ABORTING  ABORTING       ABORTED
ABORTING        -        -            ABORTED    -         ABORTING  ABORTING       ABORTED
VERIFIED        -        -            -          -         VERIFIED  VERIFIED       VERIFIED
ABORTED         -        -            -          -         ABORTED   ABORTED        ABORTED
"""


def cells(table: str, states: type[Enum], events: type[Enum]) -> list[tuple[Any, Any, Any]]:
    head, *rows = table.strip().splitlines()
    columns = [events[name] for name in head.split()]
    assert set(columns) == set(events)
    assert {row.split()[0] for row in rows} == set(states.__members__)
    return [
        (states[row.split()[0]], event, None if cell == "-" else states[cell])
        for row in rows
        for event, cell in zip(columns, row.split()[1:], strict=True)
    ]


ALL = cells(SENDER, SenderState, SenderEvent) + cells(RECEIVER, ReceiverState, ReceiverEvent)


@pytest.mark.parametrize(("state", "event", "after"), ALL)
def test_each_state_and_event_give_the_state_in_the_table(state: Any, event: Any, after: Any) -> None:
    if after is None:
        with pytest.raises(IllegalTransition, match=str(event.name)):
            transition(state, event)
    else:
        assert transition(state, event) is after


def test_the_two_sides_do_not_mix() -> None:
    with pytest.raises(IllegalTransition):
        transition(SenderState.GRANTED, ReceiverEvent.ABORT)  # type: ignore[call-overload]
    with pytest.raises(IllegalTransition):
        transition(ReceiverState.GRANTED, SenderEvent.ABORT)  # type: ignore[call-overload]


def test_an_end_is_left_by_no_event() -> None:
    for state, event, after in ALL:
        if state in SENDER_ENDS | RECEIVER_ENDS:
            assert after in (None, state), (state, event)


def test_every_state_can_be_reached_and_every_other_one_left_by_an_abort_and_the_chunks_end() -> None:
    for start, ends in ((SenderState.OFFERING, SENDER_ENDS), (ReceiverState.AWAITING_OFFER, RECEIVER_ENDS)):
        reached = {start}
        for _ in range(len(type(start))):
            reached |= {after for state, _, after in ALL if state in reached and after is not None}
        assert reached == set(type(start))
        for state in reached - ends:
            given_up = [after for at, event, after in ALL if at is state and event.name == "ABORT"]
            assert given_up[0].name in ("ABORTED", "ABORTING", "RELEASING")


def test_blocks_under_a_chunk_are_never_let_go_before_it_ends_unless_the_link_is_closed() -> None:
    for state, event, after in itertools.filterfalse(lambda cell: cell[2] is None, ALL):
        is_touched = state.name in ("SENDING", "FINISHING", "RELEASING", "RECEIVING", "ABORTING")
        if is_touched and after in SENDER_ENDS | RECEIVER_ENDS:
            assert event.name in ("CHUNK_END", "PEER_LOST")
