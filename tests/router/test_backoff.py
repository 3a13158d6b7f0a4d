"""Pauses between attempts."""

from twostroke.router.generate.retries import Backoff


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(first_s=0.05, most_s=1.0, draw=lambda: 0.0)
    assert [backoff.pause_s(count) for count in (0, 1, 2, 5, 1000)] == [0.05, 0.1, 0.2, 1.0, 1.0]


def test_a_pause_is_shortened_by_up_to_half():
    assert Backoff(first_s=0.1, most_s=1.0, draw=lambda: 1.0).pause_s(0) == 0.05
