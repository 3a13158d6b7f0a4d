"""Turns, and the report that is made of them."""

import argparse
import functools
import json
from typing import Any

import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.benchmarks.peers.compare_servers import (
    Plan,
    Target,
    Turn,
    has_errors,
    measure,
    report_of,
    rotated,
    table,
    target,
)

TARGETS = [Target("ours", "http://a/v1"), Target("one", "http://b/v1"), Target("two", "http://c/v1")]


def turn(out_tok_s: float, itl_p99_s: float = 0.1) -> Turn:
    return Turn(out_tok_s, 1.0, 1.0, 1.0, 1.0, itl_p99_s, 1.0, 0, 0)


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
        turns = await measure([Target("ours", ours.base_url), Target("peer", peer.base_url)], plan)
    assert order == ["ours", "ours", "peer", "peer", "peer", "peer", "ours", "ours"]
    assert [len(each) for each in turns["c1"].values()] == [2, 2]
    measured = [[body["prompt"] for body in each.bodies if body["max_tokens"] == 16] for each in (ours, peer)]
    assert measured[0] == measured[1]
    assert len({tuple(prompt) for prompt in measured[0]}) == 4


async def test_no_round_begins_after_the_time_limit() -> None:
    plan = Plan("m", 32000, 16, rounds=2, time_limit_s=0.0, request_limit_s=10.0, only_rows=("c1",), settle_s=0.0)
    async with scripted_server(answer) as server:
        turns = await measure([Target("ours", server.base_url)], plan)
    assert turns == {"c1": {"ours": []}}


@pytest.mark.parametrize("text", ["http://127.0.0.1:1/v1", "=http://127.0.0.1:1/v1", "a=127.0.0.1:1", "a"])
def test_a_server_without_name_or_url_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=http"):
        target(text)


def test_a_url_may_end_in_a_slash() -> None:
    assert target("a=http://127.0.0.1:1/v1/") == Target("a", "http://127.0.0.1:1/v1")
