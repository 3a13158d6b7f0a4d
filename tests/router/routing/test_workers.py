"""Work under way at workers, rates of links, and costs of tiers."""

import msgspec
import pytest

from tests.router.routing.knowing import Clock
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import TierStats, WorkerStats
from twostroke.router.routing.workers import FIRST_GUESS, InFlight, LinkRates, Place, WorkerLoad, tier_read_costs

P, D = Peer("p", 1), Peer("d", 1)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def counts(clock):
    return InFlight(clock)


def places(tokens=100, class_name="standard"):
    return Place(D, 0, tokens, class_name), Place(P, tokens, tokens, class_name)


def test_requests_that_come_together_see_each_other(counts):
    counts.hold(places())
    counts.hold(places())
    assert counts.load(P).prompt_tokens("standard", 0) == 200
    assert (counts.load(D).requests(0), counts.load(D).decoding_tokens(0)) == (2, 200)
    assert counts.load(D).prompt_tokens("standard", 0) == 0
    assert counts.total() == 4


def test_a_place_is_given_up_once_and_the_others_with_the_last_release(counts):
    hold = counts.hold(places())
    hold.release(P)
    hold.release(P)
    assert (counts.load(P).requests(0), counts.load(D).requests(0)) == (0, 1)
    hold.release()
    hold.release()
    assert counts.total() == 0


def test_work_that_the_workers_numbers_count_in_is_not_counted_twice(counts, clock):
    counts.hold(places(100))
    clock.now = 1.0
    counts.on_stats(P)
    assert counts.load(P).prompt_tokens("standard", 100) == 100
    assert counts.load(P).prompt_tokens("standard", 450) == 450, "others' are in there too"
    counts.hold(places(30))
    assert counts.load(P).prompt_tokens("standard", 450) == 480


def test_a_request_that_was_under_way_when_the_worker_told_its_numbers_is_not_in_them(counts, clock):
    clock.now = 1.0
    counts.hold(places(100))
    clock.now = 1.01
    counts.on_stats(P)
    assert counts.load(P).prompt_tokens("standard", 0) == 100
    assert counts.load(P).prompt_tokens("standard", 300) == 400
    clock.now = 1.5
    counts.on_stats(P)
    assert counts.load(P).prompt_tokens("standard", 300) == 300


def test_what_has_ended_since_the_worker_told_its_numbers_is_taken_off(counts, clock):
    hold = counts.hold(places(100))
    clock.now = 1.0
    counts.on_stats(P)
    hold.release(P)
    assert counts.load(P).prompt_tokens("standard", 450) == 350
    assert counts.load(P).prompt_tokens("standard", 100) == 0
    counts.on_stats(P)
    assert counts.load(P).prompt_tokens("standard", 450) == 450


def test_a_long_prompt_that_is_nearly_read_counts_with_what_is_left(counts, clock):
    counts.hold(places(100_000))
    clock.now = 60.0
    counts.on_stats(P)
    assert counts.load(P).prompt_tokens("standard", 500) == 500


def test_classes_are_told_apart(counts):
    counts.hold(places(100, "high"))
    counts.hold(places(10, "low"))
    load = counts.load(P)
    assert (load.prompt_tokens("high", 0), load.prompt_tokens("low", 0), load.prompt_tokens("other", 7)) == (100, 10, 7)


def test_after_the_first_token_no_prompt_is_left_to_compute(counts, clock):
    hold = counts.hold([Place(D, 80, 100)])
    hold.prompt_computed()
    hold.prompt_computed()
    assert counts.load(D).prompt_tokens("standard", 0) == 0
    assert counts.load(D).requests(0) == 1
    clock.now = 1.0
    counts.on_stats(D)
    hold.release()
    assert counts.load(D).requests(1) == 0


def test_a_worker_that_is_gone_leaves_no_trace_once_its_requests_have_ended(counts):
    hold = counts.hold(places())
    counts.keep({D})
    hold.release()
    counts.keep({D})
    assert set(counts._loads) == {D}
    counts.on_stats(D)
    assert not counts._loads


def test_whose_load_has_changed_is_told(clock):
    changed = []
    counts = InFlight(clock, changed.append)
    hold = counts.hold(places())
    hold.release(P)
    assert changed == [D, P, P]


def test_a_worker_without_any_work_of_ours_has_what_it_tells():
    assert WorkerLoad().requests(5) == 5


# --- rates of links ---


A, B = Peer("a", 1), Peer("b", 1)


def told(num_bytes, seconds):
    return WorkerStats(transfer_bytes=num_bytes, transfer_seconds=seconds)


def test_a_worker_of_which_nothing_is_known_has_a_common_rate():
    assert LinkRates().of(A) == FIRST_GUESS


def test_transfers_that_were_quicker_than_was_thought_raise_the_rate_and_slower_ones_say_nothing():
    rates = LinkRates()
    rates.on_stats(A, told(8_000_000_000, 2.0))
    assert rates.of(A) == pytest.approx(4e9)
    rates.on_stats(A, told(8_001_000_000, 12.0))
    assert rates.of(A) == pytest.approx(4e9, rel=0.01), "they waited for prefill, perhaps"
    assert rates.of(B) == FIRST_GUESS


def test_few_bytes_measure_round_trips():
    rates = LinkRates()
    rates.on_stats(A, told(1000, 1e-9))
    assert rates.of(A) == FIRST_GUESS


def test_pulls_teach_the_rate_by_and_by():
    rates = LinkRates()
    rates.pulled(A, expected_s=0.1, took_s=100.0)
    assert rates.of(A) == pytest.approx(0.85 * FIRST_GUESS), "one measurement says little"
    for _ in range(30):
        rates.pulled(A, expected_s=1e9 / rates.of(A), took_s=10.0)
    assert rates.of(A) == pytest.approx(1e8, rel=0.05)
    rates.pulled(B, expected_s=0.1, took_s=0.0)
    assert rates.of(B) == pytest.approx(1.3 * FIRST_GUESS)


def test_a_worker_that_was_judged_slow_is_tried_again_some_day():
    rates = LinkRates()
    for _ in range(50):
        rates.pulled(A, expected_s=0.1, took_s=100.0)
    for _ in range(2000):
        rates.on_stats(A, told(0, 0.0))
    assert rates.of(A) > 0.8 * FIRST_GUESS


def test_workers_that_are_gone_are_forgotten():
    rates = LinkRates()
    for worker in (A, B):
        rates.on_stats(worker, told(8_000_000_000, 2.0))
    rates.keep({B})
    assert (rates.of(A), rates.of(B)) == (FIRST_GUESS, pytest.approx(4e9))


def test_pulls_that_always_seem_quicker_or_slower_leave_a_rate_that_can_be_reckoned_with():
    rates = LinkRates()
    for _ in range(5000):
        rates.pulled(A, expected_s=0.1, took_s=0.0)  # its prompts are quicker than their estimate, which proves nothing
        rates.pulled(B, expected_s=0.1, took_s=100.0)
    for worker in (A, B):
        rates.on_stats(worker, told(0, 0.0))
        assert 1e5 < rates.of(worker) < 1e14


# --- what reading KV tiers takes ---


def test_reads_are_expected_to_take_what_the_slowest_tier_takes_that_holds_anything():
    host = TierStats("host", num_bytes=1, read_s=0.001, read_token_s=1e-6)
    disk = TierStats("disk", num_bytes=1, read_s=0.002, read_token_s=1e-5)
    empty, untried = (msgspec.structs.replace(disk, **change) for change in ({"num_bytes": 0}, {"read_token_s": 0.0}))
    shared = TierStats("shared", num_bytes=1, read_s=0.1, read_token_s=1e-4)
    assert tier_read_costs((host, disk, shared)) == (0.002, 1e-5)
    assert tier_read_costs((host, empty, untried)) == (0.001, 1e-6)
    assert tier_read_costs((shared,)) == tier_read_costs(()) == (0.0, 0.0)
