"""What lower classes save while higher ones are served."""

import pytest

from twostroke.protocol.requests import Promise
from twostroke.worker.queue_order import LEAST_SHARE, ClassShares

HIGH = Promise("high", priority=2, share=0.5)
LOW = Promise("low", priority=1, share=0.2)


def test_a_class_that_waits_saves_what_makes_its_share_of_all_tokens() -> None:
    shares = ClassShares()
    shares.settle({HIGH: 80}, [LOW])
    assert shares.saved("low") == 20, "20 of 100 in all"


def test_what_it_is_given_anyhow_is_paid_from_that() -> None:
    shares = ClassShares()
    shares.settle({HIGH: 80, LOW: 5}, [LOW])
    assert shares.saved("low") == 15
    shares.settle({LOW: 50}, [LOW])
    assert not shares, "and no debt is kept"


def test_nothing_is_kept_of_a_class_that_does_not_wait() -> None:
    shares = ClassShares()
    shares.settle({HIGH: 80}, [LOW])
    shares.settle({HIGH: 80}, [])
    assert not shares


def test_the_highest_class_saves_nothing_however_long_it_waits() -> None:
    shares = ClassShares()
    shares.settle({LOW: 80, HIGH: 1}, [HIGH])
    assert not shares


def test_a_class_without_a_share_gets_on_too() -> None:
    shares = ClassShares()
    for _ in range(100):
        shares.settle({HIGH: 98}, [Promise("poor", priority=0)])
    assert shares.saved("poor") == pytest.approx(100 * 98 * LEAST_SHARE / (1 - LEAST_SHARE), abs=1)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_spending_what_is_saved_gives_a_class_its_share_in_the_long_run(share: float) -> None:
    shares = ClassShares()
    low = Promise("low", priority=1, share=share)
    total = 0
    for _ in range(1000):
        ahead = min(100, shares.saved("low"))
        total += ahead
        shares.settle({HIGH: 100 - ahead, low: ahead}, [low, HIGH])
    assert total / 100_000 == pytest.approx(share, rel=0.02)
