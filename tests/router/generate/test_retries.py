"""Failures that are followed by another attempt, and the pauses before it."""

import pytest

from twostroke.protocol.errors import RequestError, WorkerFailed, WorkerLeaving, WorkerLost
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import Retries, RetryBudget
from twostroke.router.worker_health import backoff_s


def retries(*, most: int = 3, floor: int = 0) -> Retries:
    config = PipelineConfig(retries=most, retry_budget=0.0, retry_floor=floor, retry_first_s=0.1)
    return Retries(config, RetryBudget(config, lambda: 0.0), draw=lambda: 0.0)


def pauses(of: Retries, error: Exception, count: int, *, has_decoded: bool = False) -> list[float | None]:
    return [
        of.pause_s(error, has_decoded=has_decoded, decode_failed_before=False, has_begun=False) for _ in range(count)
    ]


@pytest.mark.parametrize("error", [WorkerLost("died"), WorkerLeaving("leaves")])
def test_a_lost_workers_request_goes_on_at_once_and_then_with_pauses_whatever_the_budget_says(error):
    assert pauses(retries(), error, 4) == [0.0, 0.1, 0.2, None]


def test_an_attempt_that_brought_tokens_starts_the_count_anew():
    assert pauses(retries(), WorkerLost("died"), 20, has_decoded=True) == [0.0] * 20


def test_refusals_pause_before_the_first_retry_and_take_from_the_budget():
    assert pauses(retries(floor=2), RequestError("full", status=429), 3) == [0.1, 0.2, None]


def test_failures_of_workers_that_live_take_from_the_budget():
    assert pauses(retries(floor=1), WorkerFailed("a gap"), 2) == [0.0, None]


@pytest.mark.parametrize("status", [400, 422, 500, 504])
def test_what_speaks_of_the_request_is_not_tried_elsewhere(status):
    assert pauses(retries(floor=9), RequestError("no", status=status), 1) == [None]


def test_a_worker_that_refuses_twice_is_believed():
    error = RequestError("full", status=429)
    assert retries(floor=9).pause_s(error, has_decoded=False, decode_failed_before=True, has_begun=False) is None


def test_who_has_tokens_already_waits_for_room_until_its_own_deadline():
    full, of = RequestError("full", status=429), retries()
    paused = [of.pause_s(full, has_decoded=False, decode_failed_before=True, has_begun=True) for _ in range(4)]
    assert paused == [0.1, 0.2, 0.4, 0.4]


def test_pauses_double_up_to_the_longest_and_are_shortened_by_up_to_half():
    pauses_s = [backoff_s(0.05, 1.0, count, lambda: 0.0) for count in (0, 1, 2, 5, 1000)]
    assert pauses_s == [0.05, 0.1, 0.2, 1.0, 1.0]
    assert backoff_s(0.1, 1.0, 0, lambda: 1.0) == 0.05


def budget_of(*, share, clock=lambda: 0.0):
    return RetryBudget(PipelineConfig(retry_budget=share, retry_floor=2), clock)


def test_retries_are_a_share_of_the_traffic_beyond_the_floor():
    budget = budget_of(share=0.25)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(8):
        budget.count_first_attempt()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_the_floor_comes_back_with_time_and_no_more():
    now = 0.0
    budget = budget_of(share=0.2, clock=lambda: now)
    assert budget.take()
    assert budget.take()
    now = 5.0
    assert [budget.take() for _ in range(2)] == [True, False]
    now = 1000.0
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_what_is_saved_up_is_bounded():
    budget = budget_of(share=1.0)
    for _ in range(1000):
        budget.count_first_attempt()
    assert sum(budget.take() for _ in range(1000)) == 20
