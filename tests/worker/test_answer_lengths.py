"""Predicted lengths of answers: what kind of request they depend on, and what is said before there is any history."""

import pytest

from twostroke.worker.answer_lengths import FIRST_GUESS, AnswerLengths


def test_an_answer_is_expected_to_be_as_long_as_those_of_its_class_to_prompts_as_long() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.ended("chat", 10, 500)
        lengths.ended("chat", 900, 20)
        lengths.ended("code", 10, 5)
    assert lengths.expected("chat", 11) == pytest.approx(500)
    assert lengths.expected("chat", 1000) == pytest.approx(20)
    assert lengths.expected("code", 10) == pytest.approx(5)


def test_without_such_prompts_its_class_counts_then_all_answers_then_a_guess() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("chat", 10) == FIRST_GUESS
    lengths.ended("code", 10, 40)
    assert lengths.expected("chat", 10) == 40
    lengths.ended("chat", 10, 20)
    assert lengths.expected("chat", 5000) == 20


def test_answers_of_late_count_most() -> None:
    lengths = AnswerLengths()
    for num_tokens in [10] * 1000 + [100] * 100:
        lengths.ended("chat", 10, num_tokens)
    assert lengths.expected("chat", 10) > 99
