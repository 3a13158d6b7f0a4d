"""An API key's limits, on a clock that a test sets."""

import pytest

from twostroke.protocol.errors import RequestError
from twostroke.router.http.tenants import KeyLimits, NotYet, RateLimited, TokenBucket


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, **given: float) -> KeyLimits:
    all_given = {"requests_per_minute": None, "tokens_per_minute": None, "max_in_flight": None} | given
    return KeyLimits(clock=clock, **all_given)


def test_a_bucket_holds_a_minutes_worth_and_is_refilled_steadily() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    for _ in range(60):
        bucket.take(1)
    with pytest.raises(NotYet) as caught:
        bucket.take(1)
    assert caught.value.wait_s == pytest.approx(1)
    clock.now += 1
    bucket.take(1)
    clock.now += 600
    assert bucket.take(1000) == 60  # all there is, and no more


def test_what_was_set_aside_and_not_used_comes_back_and_what_was_used_beyond_is_owed() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.settle(bucket.take(60), used=20)
    assert bucket.take(40) == 40
    bucket.settle(40, used=100)
    with pytest.raises(NotYet) as caught:
        bucket.take(1)
    assert caught.value.wait_s == pytest.approx(61)


def test_requests_over_the_limit_are_told_when_the_next_may_come() -> None:
    clock = Clock()
    own = limits(clock, requests_per_minute=2)
    own.count_request()
    own.count_request()
    with pytest.raises(RateLimited, match="used up its requests; try again in 30 s") as caught:
        own.count_request()
    assert (caught.value.status, caught.value.retry_after_s) == (429, 30)
    clock.now += 30
    own.count_request()


def test_tokens_are_set_aside_while_a_request_runs() -> None:
    clock = Clock()
    own = limits(clock, tokens_per_minute=600)
    with own.tokens(500, lambda: 50), pytest.raises(RateLimited, match="tokens"), own.tokens(200, lambda: 0):
        raise AssertionError("has no tokens")
    with own.tokens(550, lambda: 550):
        pass
    with pytest.raises(RateLimited) as caught, own.tokens(100, lambda: 0):
        raise AssertionError("has no tokens")
    assert caught.value.retry_after_s == 10


def test_places_come_back_however_a_request_ends() -> None:
    own = limits(Clock(), max_in_flight=2)
    with own.in_flight(2), pytest.raises(RateLimited, match="2 choices"), own.in_flight(1):
        raise AssertionError("has no place")
    with pytest.raises(ZeroDivisionError), own.in_flight(2):
        raise ZeroDivisionError
    with own.in_flight(2):
        pass


def test_more_choices_than_a_key_may_ever_have_are_not_told_to_try_again() -> None:
    own = limits(Clock(), max_in_flight=2)
    with pytest.raises(RequestError, match="3 choices, and the API key may have 2") as caught, own.in_flight(3):
        raise AssertionError("has no place")
    assert (caught.value.status, caught.value.param, caught.value.retry_after_s) == (400, "n", None)


def test_without_limits_everything_goes() -> None:
    own = limits(Clock())
    for _ in range(1000):
        own.count_request()
    with own.in_flight(10**6), own.tokens(10**9, lambda: 10**9):
        pass
