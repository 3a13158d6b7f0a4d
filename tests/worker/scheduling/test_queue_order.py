"""Turns by each policy, the savings of lower classes, the choice of jobs to preempt, and predicted answer lengths."""

from dataclasses import dataclass, field

import pytest

from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.worker.config import QueuePolicy
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import SequenceState, Turn
from twostroke.worker.scheduling.scheduler import jobs_to_preempt
from twostroke.worker.scheduling.step_policy import (
    ANSWER_TOKENS_PER_S,
    FIRST_ANSWER_TOKENS,
    MAX_OVERTAKING_S,
    MIN_CLASS_CHUNK,
    MIN_SHARE,
    NO_LIMIT,
    PROMPT_TOKENS_PER_S,
    AnswerLengths,
    ClassShares,
    turn_of,
    turns,
)

NOTHING = Promise()


@dataclass(eq=False)
class Waiting:
    """The part of a job that the order sees."""

    arrival: int
    arrived_at: float = 0.0
    num_uncached: int = 100
    promise: Promise = NOTHING
    has_output: bool = False
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


def test_the_earliest_deadline_goes_first_and_requests_without_one_go_last() -> None:
    jobs = [Waiting(0, 0.0, promise=due(None)), Waiting(1, 0.0, promise=due(5.0)), Waiting(2, 3.0, promise=due(1.0))]
    assert ordered(jobs, "edf") == [2, 1, 0]


def test_nobody_waits_for_ever_behind_deadlines() -> None:
    late = Waiting(1, 100.0, promise=due(0.5))
    assert ordered([Waiting(0, 0.0, promise=due(None)), late], "edf") == [0, 1]


def test_the_shortest_goes_first_until_a_longer_one_has_waited_for_what_it_is_longer() -> None:
    long = Waiting(0, 0.0, num_uncached=100 + int(2 * PROMPT_TOKENS_PER_S))
    assert ordered([long, Waiting(1, 1.9)], "sjf") == [1, 0]
    assert ordered([long, Waiting(1, 2.1)], "sjf") == [0, 1]


def test_a_long_answer_counts_as_a_later_arrival_but_never_by_more_than_the_bound() -> None:
    def turn_s(answer_tokens: float, arrived_at: float = 0.0) -> float:
        return turn_of(Waiting(0, arrived_at, num_uncached=0), "sjf", answer_tokens)[2]

    assert turn_s(10) < turn_s(40) == 40 / ANSWER_TOKENS_PER_S
    assert turn_s(1e9) < turn_s(0, MAX_OVERTAKING_S + 0.1)


def test_the_first_to_arrive_goes_first() -> None:
    assert ordered([Waiting(1, 0.0, 1, due(0.1)), Waiting(0, 0.0, 99, due(9.0))], "fcfs") == [0, 1]


@pytest.mark.parametrize("policy", ["edf", "sjf", "fcfs"])
def test_a_higher_priority_goes_first_and_then_requests_with_tokens(policy: QueuePolicy) -> None:
    jobs = [
        Waiting(0, promise=due(0.0)),
        Waiting(1, promise=due(9.0), has_output=True, num_uncached=999),
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
    [
        (500, 0, MIN_CLASS_CHUNK, True),
        (500, 0, MIN_CLASS_CHUNK - 1, False),
        (9, 0, 9, True),
        (500, 500, 499, False),
    ],
)
def test_it_goes_ahead_with_chunks_worth_the_trouble_and_with_all_that_can_not_be_divided(
    num_uncached: int, num_indivisible: int, tokens: int, goes_ahead: bool
) -> None:
    low = Waiting(1, num_uncached=num_uncached, promise=LOW, num_indivisible=num_indivisible)
    high, low = in_turn(Waiting(0, promise=HIGH), low)
    first, _ = next(turns(([high, low],), saved(tokens)))
    assert first is (low if goes_ahead else high)


FIFTH = Promise("fifth", priority=0, share=0.2)


def test_a_class_that_waits_saves_what_makes_its_share_of_all_tokens() -> None:
    shares = ClassShares()
    shares.settle({HIGH: 80}, [FIFTH])
    assert shares.saved("fifth") == 20, "20 of 100 in all"


def test_what_it_is_given_anyhow_is_paid_from_that() -> None:
    shares = ClassShares()
    shares.settle({HIGH: 80, FIFTH: 5}, [FIFTH])
    assert shares.saved("fifth") == 15
    shares.settle({FIFTH: 50}, [FIFTH])
    assert not shares, "and no debt is kept"


def test_nothing_is_kept_of_a_class_that_does_not_wait() -> None:
    shares = ClassShares()
    shares.settle({HIGH: 80}, [FIFTH])
    shares.settle({HIGH: 80}, [])
    assert not shares


def test_the_highest_class_saves_nothing_however_long_it_waits() -> None:
    shares = ClassShares()
    shares.settle({FIFTH: 80, HIGH: 1}, [HIGH])
    assert not shares


def test_a_class_without_a_share_progresses_too() -> None:
    shares = ClassShares()
    for _ in range(100):
        shares.settle({HIGH: 98}, [Promise("poor", priority=0)])
    assert shares.saved("poor") == pytest.approx(100 * 98 * MIN_SHARE / (1 - MIN_SHARE), abs=1)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_spending_what_is_saved_gives_a_class_its_share_in_the_long_run(share: float) -> None:
    shares = ClassShares()
    low = Promise("low", priority=0, share=share)
    total = 0
    for _ in range(1000):
        ahead = min(100, shares.saved("low"))
        total += ahead
        shares.settle({HIGH: 100 - ahead, low: ahead}, [low, HIGH])
    assert total / 100_000 == pytest.approx(share, rel=0.02)


@dataclass
class Holder:
    sequence: SequenceState


def holder(pool: BlockPool, num_blocks: int) -> Holder:
    sequence = SequenceState(GenerateRequest("", "", tuple(range(num_blocks)), 1, SamplingParams(), 1), 1)
    sequence.reserve(pool, num_blocks)
    return Holder(sequence)


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [(1, [0]), (2, [0]), (3, [1]), (5, [0, 1]), (6, [2]), (10, [1, 2]), (13, [0, 1, 2]), (14, [])],
)
def test_no_more_jobs_are_preempted_than_needed_and_none_in_vain(missing: int, chosen: list[int]) -> None:
    pool = BlockPool(20, 1)
    holders = [holder(pool, 2), holder(pool, 3), holder(pool, 8)]
    assert jobs_to_preempt(holders, missing, pool) == [holders[i] for i in chosen]


def test_blocks_that_others_hold_too_would_not_come_free() -> None:
    pool = BlockPool(20, 1)
    one = holder(pool, 3)
    for number, block_id in enumerate(one.sequence.block_ids[:2]):
        pool.publish(block_id, bytes([number]))
    pool.match([b"\0", b"\1"])
    assert jobs_to_preempt([one], 1, pool) == [one]
    assert jobs_to_preempt([one], 2, pool) == []


def test_an_answer_is_expected_to_be_as_long_as_those_of_its_class_to_prompts_as_long() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.ended("chat", 10, 500)
        lengths.ended("chat", 900, 20)
        lengths.ended("code", 10, 5)
    assert lengths.expected("chat", 11) == pytest.approx(500)
    assert lengths.expected("chat", 1000) == pytest.approx(20)
    assert lengths.expected("code", 10) == pytest.approx(5)


def test_without_similar_prompts_its_class_counts_then_all_answers_then_a_guess() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("chat", 10) == FIRST_ANSWER_TOKENS
    lengths.ended("code", 10, 40)
    assert lengths.expected("chat", 10) == 40
    lengths.ended("chat", 10, 20)
    assert lengths.expected("chat", 5000) == 20


def test_recent_answers_count_most() -> None:
    lengths = AnswerLengths()
    for num_tokens in [10] * 1000 + [100] * 100:
        lengths.ended("chat", 10, num_tokens)
    assert lengths.expected("chat", 10) > 99
