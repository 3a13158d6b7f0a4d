import pytest

from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import WorkerStats
from twostroke.router.routing.workers import FIRST_GUESS, LinkRates

A, B = Peer("a", 1), Peer("b", 1)


def told(num_bytes, seconds):
    return WorkerStats(transfer_bytes=num_bytes, transfer_seconds=seconds)


def test_a_worker_of_which_nothing_is_known_has_a_common_rate():
    assert LinkRates().of(A) == FIRST_GUESS


def test_transfers_that_were_quicker_than_was_thought_raise_the_rate_and_slower_ones_say_nothing():
    rates = LinkRates()
    rates.told(A, told(8_000_000_000, 2.0))
    assert rates.of(A) == pytest.approx(4e9)
    rates.told(A, told(8_001_000_000, 12.0))
    assert rates.of(A) == pytest.approx(4e9, rel=0.01), "they waited for prefill, perhaps"
    assert rates.of(B) == FIRST_GUESS


def test_few_bytes_measure_round_trips():
    rates = LinkRates()
    rates.told(A, told(1000, 1e-9))
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
        rates.told(A, told(0, 0.0))
    assert rates.of(A) > 0.8 * FIRST_GUESS


def test_workers_that_are_gone_are_forgotten():
    rates = LinkRates()
    for worker in (A, B):
        rates.told(worker, told(8_000_000_000, 2.0))
    rates.keep({B})
    assert (rates.of(A), rates.of(B)) == (FIRST_GUESS, pytest.approx(4e9))


def test_pulls_that_always_seem_quicker_or_slower_leave_a_rate_that_can_be_reckoned_with():
    rates = LinkRates()
    for _ in range(5000):
        rates.pulled(A, expected_s=0.1, took_s=0.0)  # its prompts are quicker than their estimate, which proves nothing
        rates.pulled(B, expected_s=0.1, took_s=100.0)
    for worker in (A, B):
        rates.told(worker, told(0, 0.0))
        assert 1e5 < rates.of(worker) < 1e14
