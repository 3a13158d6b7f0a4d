"""Rates, percentiles and ratios."""

import pytest

from twostroke.benchmarks.peers.compare_servers import Answer, Ratio, Turn, medians, ratio, summarise, worst


def turn(out_tok_s: float | None = None, itl_p99_s: float | None = None, errors: int = 0) -> Turn:
    return Turn(out_tok_s, None, None, None, None, itl_p99_s, None, errors, 0)


def test_a_turn_lasts_from_the_first_request_to_the_last_token() -> None:
    first = Answer(10.0, (10.5, 11.0, 11.5), prompt_tokens=100, completion_tokens=3)
    second = Answer(11.0, (13.0, 14.0, 15.0), prompt_tokens=100, completion_tokens=3)
    figures = summarise([second, first], [3, 3], errors=1)
    assert figures.out_tok_s == 6 / 5
    assert figures.prompt_tok_s == (100 / 0.5 + 100 / 2.0) / 2
    assert (figures.ttft_p50_s, figures.ttft_p99_s) == (0.5, 2.0)
    assert (figures.itl_p50_s, figures.itl_p99_s) == (0.5, 1.0)
    assert (figures.tokens_per_event, figures.errors, figures.wrong_length) == (1.0, 1, 0)


def test_a_server_that_puts_several_tokens_into_an_event_is_seen() -> None:
    figures = summarise([Answer(0.0, (1.0, 2.0), 10, completion_tokens=8)], [8], errors=0)
    assert figures.tokens_per_event == 4.0
    assert figures.out_tok_s == 4.0


def test_an_answer_of_another_length_counts_with_the_tokens_that_it_had() -> None:
    figures = summarise([Answer(0.0, (1.0, 2.0), 10, completion_tokens=2)], [64], errors=0)
    assert figures.wrong_length == 1
    assert figures.out_tok_s == 1.0


def test_a_turn_without_answers_has_no_rates() -> None:
    figures = summarise([], [], errors=4)
    assert figures.errors == 4
    assert {figures.out_tok_s, figures.prompt_tok_s, figures.itl_p99_s, figures.tokens_per_event} == {None}


def test_rounds_are_compared_each_by_itself() -> None:
    ours = [turn(10.0), turn(100.0), turn(30.0)]
    theirs = [turn(5.0), turn(100.0), turn(10.0)]
    assert ratio("out_tok_s", ours, theirs) == Ratio(median=2.0, low=1.0, high=3.0, rounds=3)


def test_above_one_is_better_for_times_too() -> None:
    assert ratio("itl_p99_s", [turn(itl_p99_s=0.1)], [turn(itl_p99_s=0.4)]) == Ratio(4.0, 4.0, 4.0, 1)


def test_a_round_without_answers_of_either_is_left_out() -> None:
    found = ratio("out_tok_s", [turn(10.0), turn(None), turn(9.0)], [turn(None), turn(1.0), turn(3.0)])
    assert found == Ratio(3.0, 3.0, 3.0, 1)
    assert ratio("out_tok_s", [turn(None)], [turn(1.0)]) is None


def test_turns_of_different_rounds_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio("out_tok_s", [turn(1.0), turn(2.0)], [turn(1.0)])


def test_the_best_peer_is_the_one_with_the_smallest_ratio() -> None:
    assert worst([Ratio(1.5, 1.0, 2.0, 3), None, Ratio(0.9, 0.8, 3.0, 3)]) == 0.9
    assert worst([None]) is None


def test_medians_leave_out_what_is_missing_and_sum_errors() -> None:
    figures = medians([turn(1.0, errors=1), turn(None, errors=2), turn(5.0)])
    assert figures["out_tok_s"] == 3.0
    assert figures["itl_p99_s"] is None
    assert figures["errors"] == 3
