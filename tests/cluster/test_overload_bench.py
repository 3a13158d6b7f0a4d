"""`twostroke bench overload`: what it reads from the wire, and what it counts."""

from itertools import pairwise

import pytest

from twostroke.benchmarks.overload import BATCH, INTERACTIVE, PARTS, Arrival, Mix, Outcome, classes_for, outcome_of
from twostroke.loadtests.generator.http_stream import Exchange

CLASSES = classes_for(0.5, 0.05)
MIX = Mix("m", PARTS, prompt_tokens=8, max_tokens=4)
ARRIVAL = Arrival(1.0, INTERACTIVE, {"max_tokens": 3})


def test_arrivals_are_poisson_of_both_classes_and_the_same_for_a_seed() -> None:
    arrivals = MIX.arrivals(50, 100, seed=1)
    assert len(arrivals) == pytest.approx(5000, rel=0.05)
    assert sum(one.class_name == INTERACTIVE for one in arrivals) == pytest.approx(1500, rel=0.1)
    assert all(before.at <= after.at < 100 for before, after in pairwise(arrivals))
    assert arrivals == MIX.arrivals(50, 100, seed=1)
    assert arrivals[0].body["service_tier"] == arrivals[0].class_name


def test_times_count_from_the_schedule() -> None:
    chunk = b'data: {"choices":[{"text":"x"}]}\n\n'
    end = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    arrivals = [(10.2, b"HTTP/1.1 200 OK\r\n\r\n" + chunk), (10.3, chunk), (10.4, chunk + end)]
    outcome = outcome_of(ARRIVAL, 10.0, Exchange(10.1, arrivals))
    assert outcome.status == "ok"
    assert outcome.lag_s == pytest.approx(0.1)
    assert outcome.ttft_s == pytest.approx(0.2)
    assert outcome.tpot_s == pytest.approx(0.1)
    assert not outcome.met(CLASSES)
    assert Outcome(BATCH, 1.0, 0.1, "ok", 0.2, 0.1).met(CLASSES)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", "refused"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "failed"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", "failed"),
        (b"", "failed"),
    ],
)
def test_whatever_is_neither_a_whole_answer_nor_a_429_is_a_failure(head: bytes, status: str) -> None:
    outcome = outcome_of(ARRIVAL, 10.0, Exchange(10.0, [(10.1, head)] if head else []))
    assert outcome.status == status
    assert not outcome.met(CLASSES)


def test_a_batch_class_has_more_time_and_goes_last() -> None:
    interactive, batch = CLASSES[INTERACTIVE], CLASSES[BATCH]
    assert interactive.priority > batch.priority
    assert (batch.ttft_s, batch.tpot_s) == (2.0, 0.2)


def test_an_answer_that_lacks_tokens_has_failed() -> None:
    chunk = b'data: {"choices":[{"text":"x"}]}\n\n'
    end = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    result = Exchange(10.1, [(10.2, b"HTTP/1.1 200 OK\r\n\r\n" + chunk + end)])
    short = Arrival(1.0, INTERACTIVE, {"max_tokens": 4})
    assert outcome_of(short, 10.0, result).why == "3 tokens instead of 4"
    assert outcome_of(ARRIVAL, 10.0, result).status == "ok"
