"""A run's verdict, on answers and faults made up for it: what is harmed is found, and nothing else is complained of."""

import copy
import dataclasses
from collections.abc import Callable

import pytest

from tests.chaos.answers import Family, Injected, check, has_repeats
from tests.chaos.load import ClientAnswer, ClientChoice, KeyedRequest
from tests.chaos.verdict import Normal, check_schema, judge, normal_of, stalls_by_fault

TWO_CHOICES = KeyedRequest(7, {"n": 2})


def whole() -> ClientAnswer:
    return ClientAnswer(
        TWO_CHOICES,
        sent_at=0.0,
        ended_at=1.0,
        status=200,
        choices=[
            ClientChoice([(0.1, [5, 6]), (0.2, [7])], "abc", ["length"], [-0.5, -1.0, -2.0], [0, 1, 2]),
            ClientChoice([(0.1, [8])], "x", ["stop"]),
        ],
        usage={"completion_tokens": 4},
        has_end=True,
    )


def test_an_answer_equal_to_the_expected_one_is_sound_however_it_was_cut_into_pieces() -> None:
    answer = whole()
    answer.choices[0].pieces = [(0.1, [5]), (0.9, [6, 7])]
    assert check(answer, whole()) == []


def harmed(harm: Callable[[ClientAnswer], object]) -> list[str]:
    answer = copy.deepcopy(whole())
    harm(answer)
    return [finding.flaw for finding in check(answer, whole())]


def set_pieces(*tokens: int) -> Callable[[ClientAnswer], None]:
    def harm(answer: ClientAnswer) -> None:
        answer.choices[0].pieces = [(0.1, list(tokens))]

    return harm


@pytest.mark.parametrize(
    ("harm", "verdict"),
    [
        (lambda answer: setattr(answer, "has_end", False), "lost"),
        (lambda answer: setattr(answer, "error", "worker lost"), "lost"),
        (set_pieces(5, 6, 9), "mismatched"),
        (set_pieces(5, 6), "mismatched"),
        (set_pieces(5, 7), "mismatched"),
        (set_pieces(5, 6, 6, 7), "duplicates"),
        (set_pieces(5, 6, 5, 6, 7), "duplicates"),
        (lambda answer: answer.choices[0].offsets.sort(reverse=True), "duplicates"),
        (lambda answer: setattr(answer.choices[1], "text", "y"), "mismatched"),
        (lambda answer: answer.choices[1].finish_reasons.append("stop"), "mismatched"),
        (lambda answer: answer.choices[1].finish_reasons.clear(), "mismatched"),
        (lambda answer: answer.choices[0].logprobs.pop(), "mismatched"),
        (lambda answer: answer.choices[0].logprobs.__setitem__(1, -1.1), "mismatched"),
        (lambda answer: answer.usage.__setitem__("completion_tokens", 5), "mismatched"),
    ],
)
def test_each_harm_is_found(harm: Callable[[ClientAnswer], object], verdict: str) -> None:
    assert verdict in harmed(harm)


def test_a_client_that_left_must_have_seen_a_beginning_of_the_answer() -> None:
    answer = whole()
    answer.left, answer.has_end, answer.usage = True, False, None
    answer.choices[0] = ClientChoice([(0.1, [5, 6])], "ab", [], [-0.5, -1.0], [0, 1])
    answer.choices[1] = ClientChoice()
    assert check(answer, whole()) == []
    answer.choices[0].pieces = [(0.1, [5, 7])]
    assert [finding.flaw for finding in check(answer, whole())] == ["mismatched"]


def test_a_refused_request_is_not_lost() -> None:
    answer = ClientAnswer(TWO_CHOICES, 0.0, status=429, choices=[ClientChoice(), ClientChoice()])
    assert check(answer, whole()) == []


def test_longer_answers_with_other_tokens_are_no_repeats() -> None:
    assert has_repeats([1, 2, 3, 3], [1, 2, 3])
    assert not has_repeats([1, 2, 3, 4], [1, 2, 4])
    assert not has_repeats([1, 2], [1, 2])


def test_tokens_beyond_the_end_are_a_mismatch() -> None:
    assert "mismatched" in harmed(set_pieces(5, 6, 7, 1))


def test_an_answer_that_ends_must_be_of_its_schema() -> None:
    request = KeyedRequest(3, {"n": 1, "guided_json": {"type": "integer"}})
    for text, reason, flaws in [("12", "stop", []), ('"1', "length", []), ('"1"', "stop", ["invalid"])]:
        answer = ClientAnswer(
            request, 0.0, 1.0, 200, None, [ClientChoice([(0.5, [1])], text, [reason])], {"completion_tokens": 1}, True
        )
        assert [finding.flaw for finding in check_schema(answer)] == flaws


def test_what_is_constrained_and_was_cut_by_a_kill_is_counted() -> None:
    schema = {"guided_json": {"type": "integer"}}
    for times, body, count in [((99.5, 100.5), schema, 1), ((100.5, 101.0), schema, 0), ((99.5, 100.5), {}, 0)]:
        answer = run_answer(99.0, *times)
        answer = dataclasses.replace(answer, request=KeyedRequest(0, {"n": 1, **body}))
        answer.choices[0].text = "12"
        verdict = judge([answer], {0: answer}, [KILL], minutes=0.04, leaked_blocks=0, deaths=0)
        assert verdict.summary["constrained_through_kills"] == count


REQUEST = KeyedRequest(0, {"n": 1})
KILL = Injected("kill decode", "kill", 100.0, 104.0, "gone", back_s=4.0)
ROUTER_KILL = Injected("kill router", "load", 100.0, 104.0, "gone")


def run_answer(sent_at: float, *times: float, has_end: bool = True) -> ClientAnswer:
    choice = ClientChoice(
        [(at, [index]) for index, at in enumerate(times)], finish_reasons=["length"] if has_end else []
    )
    usage = {"completion_tokens": len(times)} if has_end else None
    error = None if has_end else "closed in the middle of the answer"
    return ClientAnswer(REQUEST, sent_at, times[-1], 200, None, [choice], usage, has_end, error)


EXPECTED = {0: run_answer(0.0, 0.25, 0.5)}
SOUND = run_answer(100.0, 100.25, 100.5)


def failures(
    *answers: ClientAnswer, faults: tuple[Injected, ...] = (KILL,), leaked_blocks: int = 0, deaths: int = 0
) -> list[str]:
    return judge(answers, EXPECTED, faults, minutes=0.04, leaked_blocks=leaked_blocks, deaths=deaths).failures


def fault(kind: Family, begin: float, end: float) -> Injected:
    return Injected(kind, kind, begin, end, "it fired")


@pytest.mark.parametrize(
    ("times", "faults", "stalls"),
    [
        pytest.param([10.0, 10.5, 10.6], [fault("kill", 10.0, 15.0)], {"kill": 0.0}, id="what is usual"),
        pytest.param([9.0, 9.4, 11.4, 11.9], [fault("kill", 10.0, 15.0)], {"kill": 1.4}, id="the longest wait counts"),
        pytest.param([9.0, 15.0, 20.25, 20.3], [fault("kill", 20.0, 21.0)], {"kill": 0.25}, id="from when it struck"),
        pytest.param([9.0, 15.0], [fault("kill", 20.0, 21.0)], {}, id="over before it struck"),
        pytest.param(
            [9.9, 10.0, 14.0, 14.5],
            [fault("kill", 10.0, 15.0), fault("stop", 12.0, 14.0)],
            {"stop": 2.0, "kill": 0.4},
            id="a wait through a kill and a stop is the stop's",
        ),
    ],
)
def test_stalls_are_the_waits_beyond_the_usual(
    times: list[float], faults: list[Injected], stalls: dict[str, float]
) -> None:
    found = stalls_by_fault([run_answer(*times)], {0: Normal(first_s=0.5, between_s=0.1)}, faults)
    assert {name: pytest.approx(stall) for name, (stall,) in found.items()} == stalls


def test_normal_is_the_longest_wait_of_each_sort() -> None:
    assert normal_of(run_answer(0.0, 1.0, 1.5, 2.25)) == Normal(1.0, 0.75)


def test_a_sound_run_passes_and_tells_its_figures() -> None:
    verdict = judge([SOUND], EXPECTED, [KILL], minutes=0.04, leaked_blocks=0, deaths=0)
    assert verdict.failures == []
    assert verdict.summary["passed"]
    wanted = {"faults": 1, "lost": 0, "mismatched": 0, "duplicates": 0, "stall_p99_s": 0.0}
    assert wanted.items() <= verdict.summary.items()
    (row,) = verdict.rows
    assert (row.name, row.fired, row.stalls, row.back_s) == ("kill decode", 1, 1, 4.0)


def test_each_thing_that_falls_short_fails_the_run() -> None:
    lost = run_answer(100.0, 100.25, has_end=False)
    assert failures(SOUND, lost) == ["1 lost"]
    assert failures(dataclasses.replace(lost, status=503)) == ["1 lost"]
    assert failures(run_answer(100.0, 100.25, 103.0)) == ["stall P99 of kill faults is 2.5 s, over 2"]
    assert failures(SOUND, faults=(dataclasses.replace(KILL, back_s=11.0),)) == [
        "a replica came back after 11.0 s, over 10"
    ]
    late = dataclasses.replace(KILL, back_s=11.0)
    assert judge([SOUND], EXPECTED, [late], minutes=0.04, leaked_blocks=0, deaths=0, slack=2.0).failures == []
    assert failures(SOUND, faults=()) == ["only 0 faults have fired, of 0.92 to come"]
    slow = judge([SOUND], EXPECTED, (), minutes=0.04, leaked_blocks=0, deaths=0, slack=2.0)
    assert slow.failures == ["only 0 faults have fired, of 0.46 to come"]
    assert failures(SOUND, leaked_blocks=3) == ["3 blocks are owned when idle"]
    assert failures(SOUND, deaths=1) == ["1 workers have ended without being killed"]
    assert failures(dataclasses.replace(SOUND, status=429, has_end=False)) == []


@pytest.mark.parametrize(("ended_at", "is_lost"), [(100.5, False), (99.5, True), (104.5, True)])
def test_what_breaks_with_a_killed_router_is_counted_apart_and_nothing_else(ended_at: float, is_lost: bool) -> None:
    broken = run_answer(99.0, ended_at, has_end=False)
    verdict = judge([broken], EXPECTED, (ROUTER_KILL,), minutes=0.04, leaked_blocks=0, deaths=0)
    assert (verdict.failures == ["1 lost"]) == is_lost
    assert verdict.summary["cut_by_router"] == int(not is_lost)
