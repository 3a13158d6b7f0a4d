"""The comparison takes whole answers alone, and its rows, turns and report are as documented."""

import json
from typing import Any

import pytest

from twostroke.benchmarks.peers import compare_servers
from twostroke.benchmarks.peers.compare_servers import (
    Figures,
    PeerLoad,
    PeerServer,
    fault_of,
    figures_of,
    has_errors,
    measure,
    plans,
    report_of,
    table,
)
from twostroke.loadtests.generator.alone import Sent
from twostroke.loadtests.plan import Closed, Plan, Uniform
from twostroke.loadtests.run_folder import Record
from twostroke.loadtests.workloads.sessions import sessions

SMALL = PeerLoad("m", 32000, 16, rounds=2, time_limit_s=60.0, request_limit_s=10.0, only_rows=("c1",))


def turn(**known: float) -> Figures:
    return {**figures_of([]), **known}


def test_the_first_server_is_compared_with_each_other_and_with_the_best() -> None:
    told = {"ours": (10.0, 30.0), "one": (5.0, 10.0), "two": (20.0, 60.0)}
    turns = {
        "c1": {name: [turn(out_tok_s=value, itl_p99_s=value) for value in values] for name, values in told.items()}
    }
    report = report_of(turns, ["ours", "one", "two"])
    part = report["rows"]["c1"]
    assert part["over"]["out_tok_s"]["one"] == {"median": 2.5, "low": 2.0, "high": 3.0, "rounds": 2}
    assert part["over"]["itl_p99_s"]["two"]["median"] == 2.0, "above 1 is better, of times too"
    assert (part["over_best"]["out_tok_s"], part["servers"]["ours"]["out_tok_s"]) == (0.5, 20.0)
    assert not has_errors(report)
    json.dumps(report)
    assert "one 2.50 (2.00-3.00)" in table(report)


def test_a_row_that_had_no_round_makes_a_report_all_the_same() -> None:
    report = report_of({"c1": {"ours": [], "one": []}}, ["ours", "one"])
    assert report["rows"]["c1"]["over"] == {}
    assert "c1" in table(report)


def test_servers_take_turns_with_the_same_requests_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Plan] = []

    def send(plan: Plan) -> Sent:
        sent.append(plan)
        return Sent([], 0.0, 1.0, 0.0)

    monkeypatch.setattr(compare_servers, "send", send)
    monkeypatch.setattr(compare_servers, "SETTLE_S", 0.0)
    targets = [PeerServer("ours", "a"), PeerServer("peer", "b")]
    turns = measure(targets, SMALL)
    measured = [plan for plan in sent if plan.seed >= 0]
    assert [(plan.url, plan.seed) for plan in measured] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert {plan.arrivals for plan in measured} == {Closed(1, requests=2)}
    assert [len(each) for each in turns["c1"].values()] == [2, 2]
    late = PeerLoad("m", 32000, 16, rounds=2, time_limit_s=0.0, request_limit_s=10.0, only_rows=("c1",))
    assert measure(targets, late) == {"c1": {"ours": [], "peer": []}}, "no round begins after the time limit"


def test_rows_are_what_the_comparison_promises() -> None:
    rows = plans(SMALL, 64)
    users = {name: plan.arrivals.users for name, plan in rows.items() if isinstance(plan.arrivals, Closed)}
    assert users == {"c1": 1, "c8": 8, "c32": 32, "mixed": 32, "prefill-1k": 1}
    assert rows["mixed"].workload == Uniform((64, 1024), (16, 128))
    assert {name: len(list(sessions(plan))) for name, plan in rows.items()} == {
        **{"c1": 2, "c8": 8, "c32": 32, "mixed": 32, "prefill-1k": 3},
    }


def answered(sent_s: float, *token_s: float, tokens: int | None, **more: Any) -> Record:
    """A whole answer to a prompt of 100 tokens, by the clock's times."""
    asked = {"planned_output_tokens": 3, "input_tokens": 100, "output_tokens": tokens, "token_s": token_s}
    return Record(*(0, 0, sent_s, sent_s, token_s[-1], "ok"), **{**asked, **more})


def test_a_turn_lasts_from_the_first_request_to_the_last_token() -> None:
    first = answered(10.0, 10.5, 11.0, 11.5, tokens=3)
    second = answered(11.0, 13.0, 14.0, 15.0, tokens=2)
    untold = answered(9.0, 10.0, tokens=None)
    figures = figures_of([second, first, untold, Record(0, 0, 9.0, 9.0, 20.0, "failed", error="broke")])
    assert figures["out_tok_s"] == 5 / 5
    assert figures["prompt_tok_s"] == (100 / 0.5 + 100 / 2.0) / 2
    assert (figures["errors"], figures["wrong_length"], figures["tokens_per_event"]) == (2, 1, 5 / 6)
    assert fault_of(untold) == "the stream tells no usage, which says how many tokens it had"
