"""Which answers the comparison takes, the rows and how they are sent, turns, and the report that is made of them."""

import functools
import json
from typing import Any

import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.benchmarks.peers.compare_servers import (
    Length,
    Plan,
    Ratio,
    Row,
    Target,
    Turn,
    fault_of,
    has_errors,
    measure,
    medians,
    prompts,
    ratio,
    report_of,
    rotated,
    rows,
    send_row,
    summarise,
    table,
)
from twostroke.loadtests.run_folder import Record

TARGETS = [Target("ours", "http://a"), Target("one", "http://b"), Target("two", "http://c")]


def turn(out_tok_s: float | None = None, itl_p99_s: float | None = None, errors: int = 0) -> Turn:
    return Turn(out_tok_s, None, None, None, None, itl_p99_s, None, errors, 0)


def test_each_server_begins_a_round_in_its_turn() -> None:
    begins = [rotated(TARGETS, number)[0].name for number in range(4)]
    assert begins == ["ours", "one", "two", "ours"]
    assert sorted(each.name for each in rotated(TARGETS, 2)) == ["one", "ours", "two"]


def test_the_first_server_is_compared_with_each_other_and_with_the_best() -> None:
    turns = {"c1": {"ours": [turn(10.0), turn(30.0)], "one": [turn(5.0), turn(10.0)], "two": [turn(20.0), turn(60.0)]}}
    report = report_of(turns, ["ours", "one", "two"])
    over = report["rows"]["c1"]["over"]["out_tok_s"]
    assert over["one"] == {"median": 2.5, "low": 2.0, "high": 3.0, "rounds": 2}
    assert over["two"]["median"] == 0.5
    assert report["rows"]["c1"]["over_best"]["out_tok_s"] == 0.5
    assert report["rows"]["c1"]["servers"]["ours"]["out_tok_s"] == 20.0
    assert not has_errors(report)
    json.dumps(report)
    assert "one 2.50 (2.00-3.00)" in table(report)


def test_a_row_that_had_no_round_makes_a_report_all_the_same() -> None:
    report = report_of({"c1": {"ours": [], "one": []}}, ["ours", "one"])
    assert report["rows"]["c1"]["over"] == {}
    assert "c1" in table(report)


def answer(body: dict[str, Any]) -> list[bytes]:
    return [HEAD, *([token_event("a")] * body["max_tokens"]), end(len(body["prompt"]), body["max_tokens"])]


async def test_servers_take_turns_with_the_same_prompts_each_round() -> None:
    plan = Plan("m", 32000, 16, rounds=2, time_limit_s=60.0, request_limit_s=10.0, only_rows=("c1",), settle_s=0.0)
    order: list[str] = []

    def noting(name: str, body: dict[str, Any]) -> list[bytes]:
        if body["max_tokens"] == 16:
            order.append(name)
        return answer(body)

    async with (
        scripted_server(functools.partial(noting, "ours")) as ours,
        scripted_server(functools.partial(noting, "peer")) as peer,
    ):
        turns = await measure([Target("ours", ours.url), Target("peer", peer.url)], plan)
    assert order == ["ours", "ours", "peer", "peer", "peer", "peer", "ours", "ours"]
    assert [len(each) for each in turns["c1"].values()] == [2, 2]
    measured = [[body["prompt"] for body in each.bodies if body["max_tokens"] == 16] for each in (ours, peer)]
    assert measured[0] == measured[1]
    assert len({tuple(prompt) for prompt in measured[0]}) == 4


async def test_no_round_begins_after_the_time_limit() -> None:
    plan = Plan("m", 32000, 16, rounds=2, time_limit_s=0.0, request_limit_s=10.0, only_rows=("c1",), settle_s=0.0)
    async with scripted_server(answer) as server:
        turns = await measure([Target("ours", server.url)], plan)
    assert turns == {"c1": {"ours": []}}


def by_name(name: str) -> Row:
    return next(row for row in rows(output_tokens=64) if row.name == name)


def test_rows_are_what_the_comparison_promises() -> None:
    assert [(row.name, row.concurrency) for row in rows(64)] == [
        ("c1", 1),
        ("c8", 8),
        ("c32", 32),
        ("mixed", 32),
        ("prefill-1k", 1),
    ]
    mixed = by_name("mixed").lengths
    assert len(mixed) == 32
    assert all(64 <= length.prompt <= 1024 and 16 <= length.output <= 128 for length in mixed)
    assert len(set(mixed)) == 32
    assert by_name("mixed") == by_name("mixed")  # the same in every run


def test_no_prompt_shares_its_beginning_with_another_of_any_round() -> None:
    every = [tuple(prompt[:16]) for row in rows(64) for number in range(3) for prompt in prompts(row, number, 32000)]
    assert len(set(every)) == len(every)


def test_all_servers_get_the_same_prompts_in_a_round() -> None:
    assert prompts(by_name("c8"), 2, 32000) == prompts(by_name("c8"), 2, 32000)


def test_prompts_have_their_lengths_and_stay_within_the_vocabulary() -> None:
    row = by_name("mixed")
    drawn = prompts(row, 0, 1010)
    assert [len(prompt) for prompt in drawn] == [length.prompt for length in row.lengths]
    assert all(1000 <= token < 1010 for prompt in drawn for token in prompt)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_row_is_sent_by_as_many_clients_as_it_says(concurrency: int) -> None:
    row = Row("some", tuple(Length(2, 1 + index) for index in range(6)), concurrency)
    async with scripted_server(answer) as server:
        figures = summarise(await send_row(Target("scripted", server.url), "m", row, prompts(row, 0, 32000), 10.0))
    assert [body["max_tokens"] for body in server.bodies] == [1, 2, 3, 4, 5, 6] or concurrency > 1
    assert sorted(body["max_tokens"] for body in server.bodies) == [1, 2, 3, 4, 5, 6]
    assert server.most_open <= concurrency
    assert (figures.errors, figures.wrong_length, figures.tokens_per_event) == (0, 0, 1.0)


async def test_a_refused_and_a_short_answer_are_told_apart() -> None:
    def answer(body: dict[str, int]) -> list[bytes]:
        if body["max_tokens"] == 1:
            return [b"HTTP/1.1 429 Too Many Requests\r\n\r\nfull"]
        return [HEAD, token_event("a", "stop"), end(2, 1)]

    row = Row("some", (Length(2, 1), Length(2, 9)), 1)
    async with scripted_server(answer) as server:
        came = await send_row(Target("scripted", server.url), "m", row, prompts(row, 0, 32000), 10.0)
    assert [fault_of(each) for each in came] == ["429 Too Many Requests: full", None]
    assert (summarise(came).errors, summarise(came).wrong_length) == (1, 1)


def answered(sent_s: float, *token_s: float, tokens: int | None, asked: int = 3) -> Record:
    """A whole answer to a prompt of 100 tokens, by the clock's times."""
    return Record(
        *(0, 0, sent_s, sent_s, token_s[-1], "ok"),
        planned_output_tokens=asked,
        input_tokens=100,
        output_tokens=tokens,
        token_s=token_s,
    )


def test_a_turn_lasts_from_the_first_request_to_the_last_token() -> None:
    first = answered(10.0, 10.5, 11.0, 11.5, tokens=3)
    second = answered(11.0, 13.0, 14.0, 15.0, tokens=3)
    figures = summarise([second, first, Record(0, 0, 9.0, 9.0, 20.0, "failed", error="broke")])
    assert figures.out_tok_s == 6 / 5
    assert figures.prompt_tok_s == (100 / 0.5 + 100 / 2.0) / 2
    assert (figures.ttft_p50_s, figures.ttft_p99_s) == (0.5, 2.0)
    assert (figures.itl_p50_s, figures.itl_p99_s) == (0.5, 1.0)
    assert (figures.tokens_per_event, figures.errors, figures.wrong_length) == (1.0, 1, 0)


def test_an_answer_counts_with_the_tokens_of_its_usage_and_without_one_not_at_all() -> None:
    figures = summarise([answered(0.0, 1.0, 2.0, tokens=8, asked=64), answered(0.0, 1.0, 9.0, tokens=None)])
    assert (figures.tokens_per_event, figures.out_tok_s) == (4.0, 4.0)
    assert (figures.wrong_length, figures.errors) == (1, 1)


def test_a_turn_without_answers_has_no_rates() -> None:
    figures = summarise([])
    assert {figures.out_tok_s, figures.prompt_tok_s, figures.itl_p99_s, figures.tokens_per_event} == {None}


def test_above_one_is_better_for_times_too() -> None:
    assert ratio("itl_p99_s", [turn(itl_p99_s=0.1)], [turn(itl_p99_s=0.4)]) == Ratio(4.0, 4.0, 4.0, 1)


def test_a_round_without_answers_of_either_is_left_out() -> None:
    found = ratio(
        "out_tok_s",
        [turn(10.0), turn(None), turn(9.0)],
        [turn(None), turn(1.0), turn(3.0)],
    )
    assert found == Ratio(3.0, 3.0, 3.0, 1)
    assert ratio("out_tok_s", [turn(None)], [turn(1.0)]) is None


def test_turns_of_different_rounds_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio("out_tok_s", [turn(1.0), turn(2.0)], [turn(1.0)])


def test_medians_leave_out_what_is_missing_and_sum_errors() -> None:
    figures = medians([turn(1.0, errors=1), turn(None, errors=2), turn(5.0)])
    assert figures["out_tok_s"] == 3.0
    assert figures["itl_p99_s"] is None
    assert figures["errors"] == 3
