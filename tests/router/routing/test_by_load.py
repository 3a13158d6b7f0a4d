"""Choices by load and in turn."""

import msgspec
import pytest

from tests.router.routing.knowing import IDLE, LAYOUT, OTHER_KIND, Workers, load, peers
from twostroke.router.fleet import NoPath, Path
from twostroke.router.routing.by_load import least_loaded, round_robin, with_source
from twostroke.router.routing.cheapest_path import leave_out


class Fleet(Workers):
    """Of which nobody has told costs."""

    def __init__(self, prefill, decode, **changes):
        super().__init__(prefill, decode, costs=None, **changes)

    def names(self, num_tokens=20, *, failed=(), ejected=(), turn=None):
        options = {"num_tokens": num_tokens, "left_out": leave_out(failed, ejected)}
        prefill, decode = self.of("prefill", {}), self.of("decode", {})
        if turn is None:
            path = least_loaded(prefill, decode, **options)
        else:
            path = round_robin(prefill, decode, turn=turn, **options)
        return path.prefill and path.prefill.peer.worker_id, path.decode.peer.worker_id


def test_the_least_loaded_of_each_role_is_taken():
    fleet = Fleet([load(waiting=50), load(waiting=10)], [load(running=3), load(running=2)])
    assert fleet.names() == ("p1", "d1")
    assert Fleet([], [IDLE] * 5).names() == (None, "d0"), "names break ties"


def test_a_decode_worker_with_room_comes_before_an_idle_one_without_and_of_equals_the_one_with_more():
    assert Fleet([], [load(free_blocks=1), load(running=9)]).names() == (None, "d1")
    assert Fleet([], [load(free_blocks=50), load(free_blocks=60)]).names() == (None, "d1")


def test_workers_that_failed_are_ejected_or_drain_are_taken_for_want_of_others_and_never_to_prefill():
    fleet = Fleet([IDLE], [IDLE, load(running=9)])
    assert fleet.names(failed=peers("p0", "d0")) == (None, "d1")
    assert fleet.names(failed=peers("d0", "d1")) == ("p0", "d0")
    assert fleet.names(ejected=peers("p0", "d0")) == (None, "d1")
    assert fleet.names(failed=peers("d0"), ejected=peers("d1")) == ("p0", "d1")
    leaving = load(is_draining=True)
    assert Fleet([leaving, load(waiting=10)], [leaving, load(running=1)]).names() == ("p1", "d1")
    assert Fleet([leaving], [leaving, load(running=1)]).names() == (None, "d1")
    for nobody in (Fleet([IDLE], [leaving]), Fleet([IDLE], []), Fleet([IDLE], [IDLE], d0={"max_context": 10})):
        with pytest.raises(NoPath) as caught:
            nobody.names()
        assert caught.value.status == 503


@pytest.mark.parametrize("change", [OTHER_KIND, {"max_context": 10}])
def test_a_prefill_worker_that_cannot_serve_the_pair_is_passed_over(change):
    assert Fleet([IDLE], [IDLE], p0=change).names() == (None, "d0")


def test_block_and_tensor_parallel_sizes_may_differ_within_a_pair():
    other = msgspec.structs.replace(LAYOUT, block_size=64, tp_size=2)
    assert Fleet([IDLE], [IDLE], p0={"layout": other}).names() == ("p0", "d0")


def test_a_decode_worker_that_takes_no_kv_computes_the_prompt():
    assert Fleet([IDLE], [IDLE], d0={"transfer_addresses": ()}).names() == (None, "d0")


def test_in_turn_each_worker_of_a_role_is_taken_whatever_its_load():
    fleet = Fleet([IDLE, load(waiting=900)], [load(running=number) for number in range(3)])
    assert [fleet.names(turn=turn) for turn in range(4)] == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0")]
    assert fleet.names(turn=0, failed=peers("d0")) == ("p0", "d1")


def source_of(held, *, min_tokens=100, num_tokens=1001, failed=(), **changes):
    """Who is pulled from, of p0 (who pulls), p1, d0 and d1, where they hold as many tokens as `held` says."""
    fleet = Fleet([IDLE, IDLE], [load(running=1), IDLE], **changes)
    path = with_source(
        Path(fleet["p0"].info, fleet["d1"].info),
        [*fleet.of("prefill", held), *fleet.of("decode", held)],
        num_tokens=num_tokens,
        min_tokens=min_tokens,
        left_out=leave_out(failed, ()),
    )
    return path.source and path.source.peer.worker_id


@pytest.mark.parametrize(
    ("held", "source"),
    [
        ({"p0": 100, "p1": 300, "d0": 600, "d1": 500}, "d0"),
        ({"p1": 300}, "p1"),
        ({"d0": 300, "d1": 300}, "d1"),  # the one with fewer requests
        ({"p0": 200, "d0": 299}, None),
        ({"p0": 200, "d0": 300}, "d0"),
        ({}, None),
    ],
)
def test_a_prefix_is_pulled_from_whoever_holds_most_of_it_where_that_spares_enough(held, source):
    assert source_of(held) == source


def test_the_last_token_of_a_prompt_is_never_worth_a_pull():
    assert source_of({"p0": 864, "d0": 992}, num_tokens=992) == "d0"
    assert source_of({"p0": 864, "d0": 992}, num_tokens=992, min_tokens=128) is None


def test_a_prefix_is_never_pulled_from_a_worker_that_failed_or_whose_kv_does_not_fit():
    assert source_of({"d0": 600, "d1": 500}, failed=peers("d0")) == "d1"
    assert source_of({"d0": 600, "d1": 500}, d0=OTHER_KIND) == "d1"
    assert source_of({"d0": 600}, p0={"transfer_addresses": ()}) is None
