"""Whose turn it is, by each policy."""

from dataclasses import dataclass, field

import pytest

from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.worker.queue_order import (
    AGEING_TOKENS_PER_S,
    LEAST_AHEAD,
    NO_LIMIT,
    ClassShares,
    QueuePolicy,
    Turn,
    turn_of,
    turns,
)

NOTHING = Promise()


@dataclass(eq=False)
class Waiting:
    """As much of a job as the order sees."""

    arrival: int
    arrived_at: float = 0.0
    num_uncached: int = 100
    promise: Promise = NOTHING
    has_begun: bool = False
    num_indivisible: int = 0
    turn: Turn = field(default=())

    @property
    def num_to_compute(self) -> int:
        return self.num_uncached

    @property
    def request(self) -> GenerateRequest:
        return GenerateRequest("", "", (1,), 1, SamplingParams(), 1, promise=self.promise)


def ordered(jobs: list[Waiting], policy: QueuePolicy) -> list[int]:
    return [job.arrival for job in sorted(jobs, key=lambda job: turn_of(job, policy))]


def due(in_s: float | None, priority: int = 0) -> Promise:
    return Promise(priority=priority, ttft_left_s=in_s)


def test_the_earliest_deadline_goes_first_and_who_was_promised_none_goes_last() -> None:
    jobs = [Waiting(0, 0.0, promise=due(None)), Waiting(1, 0.0, promise=due(5.0)), Waiting(2, 3.0, promise=due(1.0))]
    assert ordered(jobs, "edf") == [2, 1, 0]


def test_nobody_waits_for_ever_behind_deadlines() -> None:
    late = Waiting(1, 100.0, promise=due(0.5))
    assert ordered([Waiting(0, 0.0, promise=due(None)), late], "edf") == [0, 1]


def test_the_shortest_goes_first_until_a_longer_one_has_waited_for_what_it_is_longer() -> None:
    long = Waiting(0, 0.0, num_uncached=100 + int(2 * AGEING_TOKENS_PER_S))
    assert ordered([long, Waiting(1, 1.9)], "sjf") == [1, 0]
    assert ordered([long, Waiting(1, 2.1)], "sjf") == [0, 1]


def test_the_first_that_came_goes_first() -> None:
    assert ordered([Waiting(1, 0.0, 1, due(0.1)), Waiting(0, 0.0, 99, due(9.0))], "fcfs") == [0, 1]


@pytest.mark.parametrize("policy", ["edf", "sjf", "fcfs"])
def test_a_higher_priority_goes_before_everything_else_and_then_who_has_tokens_already(policy: QueuePolicy) -> None:
    jobs = [
        Waiting(0, promise=due(0.0)),
        Waiting(1, promise=due(9.0), has_begun=True, num_uncached=999),
        Waiting(2, promise=due(None, priority=1), num_uncached=9999),
    ]
    assert ordered(jobs, policy) == [2, 1, 0]


HIGH = Promise("high", priority=1)
LOW = Promise("low", priority=0, share=0.5)


def in_turn(*jobs: Waiting) -> list[Waiting]:
    for job in jobs:
        job.turn = turn_of(job, "edf")
    return sorted(jobs, key=lambda job: job.turn)


def saved(tokens: int) -> ClassShares:
    shares = ClassShares()
    shares.settle({HIGH: tokens}, [LOW])
    return shares


def test_a_class_has_what_it_saved_before_higher_ones_and_the_rest_in_its_turn() -> None:
    high, low, later = in_turn(Waiting(0, promise=HIGH), Waiting(1, promise=LOW), Waiting(2, promise=LOW))
    assert list(turns(([high, later], [low]), saved(70))) == [
        (low, 70),
        (high, NO_LIMIT),
        (low, NO_LIMIT),
        (later, NO_LIMIT),
    ]


@pytest.mark.parametrize(
    ("num_uncached", "num_indivisible", "tokens", "goes_ahead"),
    [(500, 0, LEAST_AHEAD, True), (500, 0, LEAST_AHEAD - 1, False), (9, 0, 9, True), (500, 500, 499, False)],
)
def test_it_goes_ahead_with_chunks_worth_the_trouble_and_with_all_that_can_not_be_divided(
    num_uncached: int, num_indivisible: int, tokens: int, goes_ahead: bool
) -> None:
    low = Waiting(1, num_uncached=num_uncached, promise=LOW, num_indivisible=num_indivisible)
    high, low = in_turn(Waiting(0, promise=HIGH), low)
    first, _ = next(turns(([high, low],), saved(tokens)))
    assert first is (low if goes_ahead else high)
