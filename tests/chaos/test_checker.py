"""The checker finds what it is there to find: an answer is harmed in each way, and nothing else is complained of."""

import copy
from collections.abc import Callable

import pytest

from tests.chaos.checker import check, has_repeats
from tests.chaos.client import Answer, Choice
from tests.chaos.requests import ClientRequest

REQUEST = ClientRequest(7, {"n": 2})


def whole() -> Answer:
    return Answer(
        REQUEST,
        sent_at=0.0,
        ended_at=1.0,
        status=200,
        choices=[
            Choice([(0.1, [5, 6]), (0.2, [7])], "abc", ["length"], [-0.5, -1.0, -2.0], [0, 1, 2]),
            Choice([(0.1, [8])], "x", ["stop"]),
        ],
        usage={"completion_tokens": 4},
        has_end=True,
    )


def test_an_answer_equal_to_the_expected_one_is_sound_however_it_was_cut_into_pieces() -> None:
    answer = whole()
    answer.choices[0].pieces = [(0.1, [5]), (0.9, [6, 7])]
    assert check(answer, whole()) == []


def harmed(harm: Callable[[Answer], object]) -> list[str]:
    answer = copy.deepcopy(whole())
    harm(answer)
    return [finding.verdict for finding in check(answer, whole())]


def set_pieces(*tokens: int) -> Callable[[Answer], None]:
    def harm(answer: Answer) -> None:
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
def test_each_harm_is_found(harm: Callable[[Answer], object], verdict: str) -> None:
    assert verdict in harmed(harm)


def test_a_client_that_left_must_have_seen_a_beginning_of_the_answer() -> None:
    answer = whole()
    answer.left, answer.has_end, answer.usage = True, False, None
    answer.choices[0] = Choice([(0.1, [5, 6])], "ab", [], [-0.5, -1.0], [0, 1])
    answer.choices[1] = Choice()
    assert check(answer, whole()) == []
    answer.choices[0].pieces = [(0.1, [5, 7])]
    assert [finding.verdict for finding in check(answer, whole())] == ["mismatched"]


def test_a_refused_request_is_not_lost() -> None:
    answer = Answer(REQUEST, 0.0, status=429, choices=[Choice(), Choice()])
    assert check(answer, whole()) == []


def test_longer_answers_with_other_tokens_are_no_repeats() -> None:
    assert has_repeats([1, 2, 3, 3], [1, 2, 3])
    assert not has_repeats([1, 2, 3, 4], [1, 2, 4])
    assert not has_repeats([1, 2], [1, 2])


def test_tokens_beyond_the_end_are_a_mismatch() -> None:
    assert "mismatched" in harmed(set_pieces(5, 6, 7, 1))
