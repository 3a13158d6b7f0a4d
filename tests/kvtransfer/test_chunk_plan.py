"""Which units may be sent when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kvtransfer.rules.chunk_plan import ChunkPlan
from twostroke.protocol.messages import Run


def make(num_tokens: int = 10, *, layers: int = 2, ready: int = 0, skip: int = 0) -> ChunkPlan:
    plan = ChunkPlan(num_layers=layers, num_tokens=num_tokens, num_ready_tokens=ready)
    plan.begin(4, skip)
    return plan


def test_a_unit_goes_once_it_is_full_and_the_partial_one_at_the_end() -> None:
    plan = make()
    plan.add_ready(0, 7)
    assert plan.next_runs(99) == (Run(0, 0, 1),)
    assert plan.next_runs(99) == ()
    assert not plan.has_runs
    plan.add_ready(0, 10)
    assert plan.has_runs
    assert plan.next_runs(99) == (Run(0, 1, 2),)
    assert not plan.all_taken
    plan.add_ready(1, 10)
    assert plan.all_ready
    assert plan.next_runs(99) == (Run(1, 0, 3),)
    assert plan.all_taken


def test_units_of_the_prefix_cache_are_ready_in_all_layers_at_once_and_go_in_one_chunk() -> None:
    plan = make(ready=8)
    assert plan.next_runs(99) == (Run(0, 0, 2), Run(1, 0, 2))
    assert plan.next_runs(99) == ()


def test_what_becomes_ready_while_nothing_is_sent_goes_in_one_run() -> None:
    plan = make(16)
    for num_tokens in (4, 8, 12, 16):
        plan.add_ready(0, num_tokens)
    assert plan.next_runs(99) == (Run(0, 0, 4),)


def test_what_becomes_ready_before_the_grant_is_not_forgotten() -> None:
    plan = ChunkPlan(num_layers=2, num_tokens=16, num_ready_tokens=0)
    plan.add_ready(1, 9)
    assert plan.next_runs(99) == ()
    plan.begin(4, 0)
    assert plan.next_runs(99) == (Run(1, 0, 2),)


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


def test_skipped_units_are_never_sent_even_those_not_ready_at_the_time() -> None:
    plan = ChunkPlan(num_layers=1, num_tokens=20, num_ready_tokens=0)
    plan.add_ready(0, 8)
    plan.begin(4, 12)
    assert plan.next_runs(99) == ()
    plan.add_ready(0, 12)
    assert plan.next_runs(99) == ()
    plan.add_ready(0, 20)
    assert plan.next_runs(99) == (Run(0, 3, 2),)


def test_a_prompt_that_is_all_there_is_taken_from_the_start() -> None:
    plan = make(10, skip=10)
    assert plan.all_taken
    plan.add_ready(0, 10)
    assert plan.next_runs(99) == ()


def test_tokens_that_can_not_be_ready_or_skipped_raise() -> None:
    with pytest.raises(ValueError, match="11 tokens"):
        make().add_ready(0, 11)
    with pytest.raises(ValueError, match="11 tokens"):
        make(skip=11)
    with pytest.raises(ValueError, match="-4 tokens"):
        make(skip=-4)
    with pytest.raises(ValueError, match="5 skipped tokens end within a unit of 4"):
        make(skip=5)


@given(st.data())
def test_every_unit_of_every_layer_is_taken_exactly_once_in_any_order_of_events(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 3))
    num_tokens = data.draw(st.integers(1, 40))
    unit_tokens = data.draw(st.integers(1, 8))
    max_units = data.draw(st.integers(1, 5))
    ready = [data.draw(st.integers(0, num_tokens))] * layers
    plan = ChunkPlan(num_layers=layers, num_tokens=num_tokens, num_ready_tokens=ready[0])
    num_units = -(-num_tokens // unit_tokens)
    skipped = data.draw(st.integers(0, num_units))
    begins_after = data.draw(st.integers(0, 5))
    taken: list[tuple[int, int]] = []

    def take() -> None:
        while runs := plan.next_runs(max_units):
            assert sum(run.num_units for run in runs) <= max_units
            for run in runs:
                units = range(run.first_unit, run.first_unit + run.num_units)
                full = ready[run.layer] if ready[run.layer] < num_tokens else num_units * unit_tokens
                assert units.stop * unit_tokens <= full, "none before it is full"
                taken.extend((run.layer, unit) for unit in units)

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
