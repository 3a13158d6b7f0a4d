import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, Peer
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.router.routing.policy import Candidate, NoPath, choose_source, least_loaded, round_robin

LAYOUT = KVLayout("a model", "bfloat16", 2, 4, 8, 16)


def worker(role, name, *, requests=0, tokens=0, stats=None, **changes):
    info = WorkerInfo(role, Peer(name, 1), Address("h", 1), (Address("h", 2),), LAYOUT, 100, 1000)
    return Candidate(msgspec.structs.replace(info, **changes), stats, requests, tokens)


def names(path):
    return path.prefill and path.prefill.peer.worker_id, path.decode.peer.worker_id


def test_the_least_loaded_of_each_role_is_taken():
    path = least_loaded(
        [worker("prefill", "p0", tokens=50), worker("prefill", "p1", tokens=10)],
        [worker("decode", "d0", requests=3), worker("decode", "d1", requests=2)],
        num_tokens=20,
    )
    assert names(path) == ("p1", "d1")


def test_other_routers_requests_count_by_the_workers_own_numbers():
    busy = WorkerStats(num_running=5, num_waiting=4, num_waiting_tokens=900, free_blocks=100)
    path = least_loaded(
        [worker("prefill", "p0", stats=busy), worker("prefill", "p1", tokens=10)],
        [worker("decode", "d0", stats=busy), worker("decode", "d1", requests=8)],
        num_tokens=20,
    )
    assert names(path) == ("p1", "d1")


def test_a_decode_worker_with_room_comes_before_an_idle_one_without():
    full = WorkerStats(free_blocks=1)
    path = least_loaded([], [worker("decode", "d0", stats=full), worker("decode", "d1", requests=9)], num_tokens=20)
    assert names(path) == (None, "d1")


def test_free_blocks_break_ties_before_names_do():
    some, more = WorkerStats(free_blocks=50), WorkerStats(free_blocks=60)
    path = least_loaded([], [worker("decode", "d0", stats=some), worker("decode", "d1", stats=more)], num_tokens=20)
    assert names(path) == (None, "d1")


def test_a_failed_prefill_worker_is_never_taken_again_and_a_decode_worker_only_for_want_of_another():
    prefills, decodes = [worker("prefill", "p0")], [worker("decode", "d0"), worker("decode", "d1", requests=9)]
    avoid = {Peer("p0", 1), Peer("d0", 1)}
    assert names(least_loaded(prefills, decodes, num_tokens=2, avoid=avoid)) == (None, "d1")
    assert names(least_loaded(prefills, decodes[:1], num_tokens=2, avoid=avoid)) == (None, "d0")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": msgspec.structs.replace(LAYOUT, model="other")},
        {"layout": msgspec.structs.replace(LAYOUT, dtype="float32")},
        {"max_context": 10},
    ],
)
def test_a_prefill_worker_that_cannot_serve_the_pair_is_passed_over(change):
    path = least_loaded([worker("prefill", "p0", **change)], [worker("decode", "d0")], num_tokens=20)
    assert names(path) == (None, "d0")


def test_block_and_tensor_parallel_sizes_may_differ_within_a_pair():
    other = msgspec.structs.replace(LAYOUT, block_size=64, tp_size=2)
    path = least_loaded([worker("prefill", "p0", layout=other)], [worker("decode", "d0")], num_tokens=20)
    assert names(path) == ("p0", "d0")


def test_a_decode_worker_that_takes_no_kv_computes_the_prompt():
    path = least_loaded([worker("prefill", "p0")], [worker("decode", "d0", transfer_addresses=())], num_tokens=20)
    assert names(path) == (None, "d0")


@pytest.mark.parametrize("decodes", [[], [worker("decode", "d0", max_context=10)]])
def test_nobody_there_is_503(decodes):
    with pytest.raises(NoPath) as caught:
        least_loaded([worker("prefill", "p0")], decodes, num_tokens=20)
    assert caught.value.status == 503


@given(st.permutations([worker("decode", f"d{i}", requests=i % 2) for i in range(5)]))
def test_the_order_of_candidates_does_not_matter(decodes):
    assert names(least_loaded([], decodes, num_tokens=5)) == (None, "d0")


def test_workers_that_are_ejected_are_taken_for_want_of_others_and_before_one_that_failed_the_request():
    prefills, decodes = [worker("prefill", "p0")], [worker("decode", "d0"), worker("decode", "d1", requests=9)]
    p0, d0, d1 = Peer("p0", 1), Peer("d0", 1), Peer("d1", 1)
    assert names(least_loaded(prefills, decodes, num_tokens=2, ejected={p0, d0})) == (None, "d1")
    assert names(least_loaded(prefills, decodes, num_tokens=2, ejected={d0, d1})) == ("p0", "d0")
    assert names(least_loaded(prefills, decodes, num_tokens=2, avoid={d0}, ejected={d1})) == ("p0", "d1")
    assert names(least_loaded(prefills, decodes, num_tokens=2, avoid={d0, d1}, ejected={d1})) == ("p0", "d0")


def test_workers_that_drain_take_nothing_new():
    leaving = WorkerStats(free_blocks=100, is_draining=True)
    prefills = [worker("prefill", "p0", stats=leaving), worker("prefill", "p1", tokens=10)]
    decodes = [worker("decode", "d0", stats=leaving), worker("decode", "d1", requests=1)]
    assert names(least_loaded(prefills, decodes, num_tokens=2)) == ("p1", "d1")
    assert names(least_loaded(prefills[:1], decodes, num_tokens=2)) == (None, "d1")
    with pytest.raises(NoPath):
        least_loaded(prefills, decodes[:1], num_tokens=2)


def test_in_turn_each_worker_of_a_role_is_taken_whatever_its_load():
    prefills = [worker("prefill", "p1", tokens=900), worker("prefill", "p0")]
    decodes = [worker("decode", f"d{number}", requests=number) for number in range(3)]
    taken = [names(round_robin(prefills, decodes, num_tokens=2, turn=turn)) for turn in range(4)]
    assert taken == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0")]
    assert names(round_robin(prefills, decodes, num_tokens=2, turn=0, avoid={Peer("d0", 1)})) == ("p0", "d1")


def source_of(held, *, target=None, min_tokens=100, num_tokens=1001, avoid=(), **changes):
    """Who is pulled from, of p0 (who pulls), p1, d0 and d1, where they hold as many tokens as `held` says."""
    workers = [
        worker("prefill" if name[0] == "p" else "decode", name, requests=name == "d0", **changes.get(name, {}))
        for name in ("p0", "p1", "d0", "d1")
    ]
    found = choose_source(
        target or workers[0].info,
        workers,
        held_tokens={Peer(name, 1): tokens for name, tokens in held.items()},
        num_tokens=num_tokens,
        min_tokens=min_tokens,
        avoid=avoid,
    )
    return found and found.peer.worker_id


def test_a_prefix_is_pulled_from_whoever_holds_most_of_it():
    assert source_of({"p0": 100, "p1": 300, "d0": 600, "d1": 500}) == "d0"
    assert source_of({"p1": 300}) == "p1"
    assert source_of({"d0": 300, "d1": 300}) == "d1", "the one with fewer requests"


def test_a_prefix_is_pulled_only_where_it_spares_enough():
    assert source_of({"p0": 200, "d0": 299}) is None
    assert source_of({"p0": 200, "d0": 300}) == "d0"
    assert source_of({}) is None


def test_the_last_token_of_a_prompt_is_never_worth_a_pull():
    assert source_of({"p0": 864, "d0": 992}, num_tokens=992) == "d0"
    assert source_of({"p0": 864, "d0": 992}, num_tokens=992, min_tokens=128) is None


def test_a_prefix_is_never_pulled_from_a_worker_that_failed_or_whose_kv_does_not_fit():
    assert source_of({"d0": 600, "d1": 500}, avoid={Peer("d0", 1)}) == "d1"
    other = {"layout": msgspec.structs.replace(LAYOUT, model="other")}
    assert source_of({"d0": 600, "d1": 500}, d0=other) == "d1"


def test_a_worker_that_takes_no_kv_pulls_nothing():
    assert source_of({"d0": 600}, target=worker("prefill", "p0", transfer_addresses=()).info) is None
