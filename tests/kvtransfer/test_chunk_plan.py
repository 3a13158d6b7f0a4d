"""Which blocks may be sent when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.chunk_plan import BlockRun, ChunkPlan


def make(num_tokens: int = 10, *, layers: int = 2, ready: int = 0, cap: int = 99) -> ChunkPlan:
    return ChunkPlan(num_layers=layers, num_tokens=num_tokens, block_size=4, num_ready_tokens=ready, max_run_blocks=cap)


def test_a_block_goes_once_it_is_full_and_the_partial_one_at_the_end() -> None:
    plan = make()
    plan.add_ready(0, 7)
    assert plan.next_run() == BlockRun(0, 0, 1)
    assert plan.next_run() is None
    plan.add_ready(0, 10)
    assert plan.next_run() == BlockRun(0, 1, 2)
    assert not plan.all_taken
    plan.add_ready(1, 10)
    assert plan.all_ready
    assert plan.next_run() == BlockRun(1, 0, 3)
    assert plan.all_taken


def test_blocks_of_the_prefix_cache_are_ready_in_all_layers_at_once() -> None:
    plan = make(ready=8)
    assert [plan.next_run(), plan.next_run(), plan.next_run()] == [BlockRun(0, 0, 2), BlockRun(1, 0, 2), None]


def test_what_becomes_ready_while_nothing_is_sent_goes_in_one_run() -> None:
    plan = make(16)
    for num_tokens in (4, 8, 12, 16):
        plan.add_ready(0, num_tokens)
    assert plan.next_run() == BlockRun(0, 0, 4)


def test_a_long_run_is_cut_at_the_cap() -> None:
    plan = make(20, layers=1, ready=20, cap=2)
    assert [plan.next_run() for _ in range(4)] == [BlockRun(0, 0, 2), BlockRun(0, 2, 2), BlockRun(0, 4, 1), None]


def test_skipped_blocks_are_never_sent_even_those_not_ready_at_the_time() -> None:
    plan = make(20, layers=1)
    plan.add_ready(0, 8)
    plan.skip(3)
    assert plan.next_run() is None
    plan.add_ready(0, 12)
    assert plan.next_run() is None
    plan.add_ready(0, 20)
    assert plan.next_run() == BlockRun(0, 3, 2)


def test_more_tokens_or_skipped_blocks_than_there_are_raise() -> None:
    with pytest.raises(ValueError, match="11 tokens"):
        make().add_ready(0, 11)
    with pytest.raises(ValueError, match="4 blocks"):
        make().skip(4)


@given(st.data())
def test_every_block_of_every_layer_is_taken_exactly_once_in_any_order_of_events(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 3))
    num_tokens = data.draw(st.integers(1, 40))
    plan = make(
        num_tokens, layers=layers, ready=data.draw(st.integers(0, num_tokens)), cap=data.draw(st.integers(1, 5))
    )
    skipped = data.draw(st.integers(0, plan.num_blocks))
    taken: list[tuple[int, int]] = []

    def take() -> None:
        while (run := plan.next_run()) is not None:
            taken.extend((run.layer, block) for block in range(run.first_block, run.first_block + run.num_blocks))

    ready = [0] * layers
    plan.skip(skipped)
    for layer, more in data.draw(st.lists(st.tuples(st.integers(0, layers - 1), st.integers(0, 9)))):
        ready[layer] = min(num_tokens, ready[layer] + more)
        plan.add_ready(layer, ready[layer])
        if data.draw(st.booleans()):
            take()
    for layer in range(layers):
        plan.add_ready(layer, num_tokens)
    take()
    assert plan.all_ready
    assert plan.all_taken
    wanted = [(layer, block) for layer in range(layers) for block in range(skipped, plan.num_blocks)]
    assert sorted(taken) == wanted
