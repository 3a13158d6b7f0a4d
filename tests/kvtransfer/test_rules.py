"""Every cell of the table, spelled out a second time.

Which units may be sent when.
"""

import itertools
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.kvtransfer.layout import ChunkPlan
from twostroke.kvtransfer.lifecycle import (
    ENDS,
    IllegalTransition,
    ReceiverState,
    SenderState,
    TransferEvent,
    transition,
)
from twostroke.protocol.kv_layout import group_layers
from twostroke.protocol.messages import Run

SENDER = """
            OFFER    GRANT    CHUNK_BEGIN  CHUNK_END  COMMIT     VERIFIED   ABORT      PEER_LOST
OFFERING    OFFERED  -        -            -          -          -          ABORTED    ABORTED
OFFERED     -        GRANTED  -            -          -          -          ABORTED    ABORTED
GRANTED     -        -        SENDING      -          COMMITTED  -          ABORTING   ABORTED
SENDING     -        -        -            GRANTED    FINISHING  -          ABORTING   ABORTED
COMMITTED   -        -        -            -          -          RELEASED   ABORTING   ABORTED
FINISHING   -        -        -            COMMITTED  -          RELEASING  ABORTING   ABORTED
RELEASING   -        -        -            RELEASED   -          -          RELEASING  RELEASED
ABORTING    -        -        -            ABORTED    -          -          ABORTING   ABORTED
RELEASED    -        -        -            -          -          -          RELEASED   RELEASED
ABORTED     -        -        -            -          -          -          ABORTED    ABORTED
"""

RECEIVER = """
                OFFER    CHUNK_BEGIN  CHUNK_END  COMMIT    ABORT     PEER_LOST
AWAITING_OFFER  GRANTED  -            -          -         ABORTED   ABORTED
GRANTED         -        RECEIVING    -          VERIFIED  ABORTED   ABORTED
RECEIVING       -        -            GRANTED    -         ABORTING  ABORTED
ABORTING        -        -            ABORTED    -         ABORTING  ABORTED
VERIFIED        -        -            -          -         VERIFIED  VERIFIED
ABORTED         -        -            -          -         ABORTED   ABORTED
"""


def cells(table: str, states: type[Enum]) -> list[tuple[Any, Any, Any]]:
    """Events that have no column can't happen to this side."""
    head, *rows = table.strip().splitlines()
    columns = [TransferEvent[name] for name in head.split()]
    assert {row.split()[0] for row in rows} == set(states.__members__)
    return [
        (states[row.split()[0]], event, None if cell == "-" else states[cell])
        for row in rows
        for event, cell in (
            *zip(columns, row.split()[1:], strict=True),
            *((event, "-") for event in TransferEvent if event not in columns),
        )
    ]


ALL = cells(SENDER, SenderState) + cells(RECEIVER, ReceiverState)


@pytest.mark.parametrize(("state", "event", "after"), ALL)
def test_each_state_and_event_give_the_state_in_the_table(state: Any, event: Any, after: Any) -> None:
    if after is None:
        with pytest.raises(IllegalTransition, match=str(event.name)):
            transition(state, event)
    else:
        assert transition(state, event) is after


def test_blocks_under_a_chunk_are_never_let_go_before_it_ends_unless_the_link_is_closed() -> None:
    for state, event, after in itertools.filterfalse(lambda cell: cell[2] is None, ALL):
        is_touched = state.name in ("SENDING", "FINISHING", "RELEASING", "RECEIVING", "ABORTING")
        if is_touched and after in ENDS:
            assert event.name in ("CHUNK_END", "PEER_LOST")


def make(num_tokens: int = 10, *, layers: int = 2, ready: int = 0, skip: int = 0) -> ChunkPlan:
    plan = ChunkPlan(
        groups=group_layers((0,) * layers), layers=range(layers), num_tokens=num_tokens, num_ready_tokens=ready
    )
    plan.begin(4, skip)
    return plan


def test_units_of_the_prefix_cache_are_ready_in_all_layers_at_once_and_go_in_one_chunk() -> None:
    plan = make(ready=8)
    assert plan.next_runs(99) == (Run(0, 0, 2), Run(1, 0, 2))
    assert plan.next_runs(99) == ()


def test_what_becomes_ready_while_nothing_is_sent_goes_in_one_run() -> None:
    plan = make(16)
    for num_tokens in (4, 8, 12, 16):
        plan.add_ready(0, num_tokens)
    assert plan.next_runs(99) == (Run(0, 0, 4),)


def test_a_chunk_is_cut_at_its_size_within_a_layer_or_between_two() -> None:
    plan = make(20, layers=2, ready=20)
    chunks = [plan.next_runs(3) for _ in range(5)]
    assert chunks == [
        (Run(0, 0, 3),),
        (Run(0, 3, 2), Run(1, 0, 1)),
        (Run(1, 1, 3),),
        (Run(1, 4, 1),),
        (),
    ]


def test_tokens_that_can_not_be_ready_or_skipped_raise() -> None:
    with pytest.raises(ValueError, match="11 tokens"):
        make().add_ready(0, 11)
    with pytest.raises(ValueError, match="11 tokens"):
        make(skip=11)
    with pytest.raises(ValueError, match="-4 tokens"):
        make(skip=-4)
    with pytest.raises(ValueError, match="5 skipped tokens end within a unit of 4"):
        make(skip=5)


@settings(deadline=None)
@given(st.data())
def test_every_unit_of_every_layer_is_taken_exactly_once_in_any_order_of_events(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 3))
    num_tokens = data.draw(st.integers(1, 40))
    unit_tokens = data.draw(st.integers(1, 8))
    max_units = data.draw(st.integers(1, 5))
    ready = [data.draw(st.integers(0, num_tokens))] * layers
    plan = ChunkPlan(
        groups=group_layers((0,) * layers), layers=range(layers), num_tokens=num_tokens, num_ready_tokens=ready[0]
    )
    num_units = -(-num_tokens // unit_tokens)
    skipped = data.draw(st.integers(0, num_units))
    begins_after = data.draw(st.integers(0, 5))
    taken: list[tuple[int, int]] = []

    def take() -> None:
        while plan.has_runs:
            runs = plan.next_runs(max_units)
            assert 0 < sum(run.num_units for run in runs) <= max_units
            for run in runs:
                units = range(run.first_unit, run.first_unit + run.num_units)
                full = ready[run.layer] if ready[run.layer] < num_tokens else num_units * unit_tokens
                assert units.stop * unit_tokens <= full, "none before it is full"
                taken.extend((run.layer, unit) for unit in units)
        assert plan.next_runs(max_units) == ()

    steps = data.draw(st.lists(st.tuples(st.integers(0, layers - 1), st.integers(0, 9))))
    has_begun = False
    for step, (layer, more) in enumerate([*steps, *((layer, num_tokens) for layer in range(layers))]):
        if not has_begun and (step >= begins_after or step >= len(steps)):
            plan.begin(unit_tokens, min(skipped * unit_tokens, num_tokens))
            has_begun = True
        ready[layer] = min(num_tokens, ready[layer] + more)
        plan.add_ready(layer, ready[layer])
        if has_begun and data.draw(st.booleans()):
            take()
    assert plan.all_ready
    take()
    assert plan.all_taken
    assert sorted(taken) == [(layer, unit) for layer in range(layers) for unit in range(skipped, num_units)]
