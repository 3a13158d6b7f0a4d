"""The bench of roles divides figures within one turn, judges requests by both bounds, and keeps what it has."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.benchmarks.turns import roles
from twostroke.benchmarks.turns.roles import (
    AGGREGATED,
    FLEXIBLE,
    SERVERS,
    SPLIT,
    Turn,
    judged,
    ratio,
    settings_of,
    summarise,
)
from twostroke.benchmarks.turns.worker_orders import longest_gap_s
from twostroke.cluster.config.config import ClusterConfig
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.alone import Sent
from twostroke.loadtests.generator.http_stream import ClientExchange
from twostroke.loadtests.plan import SLO, Gamma, Plan
from twostroke.loadtests.run_folder import Record


def answer(*token_s: float, scheduled_s: float = 0.0) -> Record:
    tokens = len(token_s)
    return Record(
        0,
        0,
        scheduled_s,
        scheduled_s,
        token_s[-1],
        "ok",
        planned_output_tokens=tokens,
        input_tokens=9,
        output_tokens=tokens,
        token_s=token_s,
    )


def turn(load: str, figure: str, **values: float | None) -> Turn:
    return {load: {name: {figure: value} for name, value in values.items()}}


def test_ratios_are_taken_within_a_turn() -> None:
    turns = [
        turn("c8", "out_tok_s", aggregated=100, flexible=90),
        turn("c8", "out_tok_s", aggregated=50, flexible=50),
        turn("c8", "out_tok_s", aggregated=400, flexible=440),
    ]
    assert ratio(turns, "c8", "out_tok_s", FLEXIBLE, (AGGREGATED,)) == 1.0


def test_a_turn_without_one_of_the_figures_has_no_ratio() -> None:
    turns = [
        turn("c8", "out_tok_s", flexible=90),
        turn("c8", "out_tok_s", aggregated=None, flexible=90),
        turn("c32", "out_tok_s", aggregated=100, flexible=90),
    ]
    assert ratio(turns, "c8", "out_tok_s", FLEXIBLE, (AGGREGATED,)) is None
    turns.append(turn("c8", "out_tok_s", aggregated=100, flexible=80))
    assert ratio(turns, "c8", "out_tok_s", FLEXIBLE, (AGGREGATED,)) == 0.8


def test_goodput_is_divided_by_the_better_of_the_two_that_keep_their_roles() -> None:
    turns = [turn("open", "goodput_s", aggregated=2.0, split=4.0, flexible=5.0)]
    assert summarise(turns, SERVERS[:3])["goodput_over_best_fixed"] == 1.25


def test_a_request_is_good_where_it_keeps_both_bounds() -> None:
    records = [
        answer(1.0, 1.1, 1.2),
        answer(1.0, 1.1, 1.9),  # a gap is too long
        answer(2.0, 2.1, 2.2),  # the first token is late
        answer(2.0, 2.1, 2.2, scheduled_s=1.0),
        Record(0, 0, 0.0, 0.0, 1.0, "refused", error="503 no"),
    ]
    figures = judged(records, ttft_s=1.5, itl_s=0.2, seconds=4.0)
    assert (figures["attained"], figures["goodput_s"], figures["errors"]) == (0.4, 0.5, 1)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("layout", ["1+1", "1+2", "2+1"])
def test_each_server_has_a_valid_configuration(name: str, layout: str, tmp_path: Path) -> None:
    config = ClusterConfig.model_validate(settings_of(name, layout, str(tmp_path)))
    counts = config.prefill.replicas, config.decode.replicas
    assert counts == ((0, 1) if name == AGGREGATED else tuple(map(int, layout.split("+"))))
    lends, roles_are = config.prefill.lend_cores and config.decode.lend_cores, config.router.roles
    assert (roles_are == "fixed") == (name in (SPLIT, "split-lent"))
    assert lends == (name not in (SPLIT, "flexible-apart"))


@pytest.fixture
def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    roles.add_arguments(parser)
    return parser.parse_args(["--turns", "2"])


def no_pause(seconds: float) -> None:
    del seconds


def plan(url: str, *arguments: object, seed: int, **more: object) -> Plan:
    del more
    arrivals, workload, *_ = arguments
    return Plan(url, "model", 2048, arrivals, workload, SLO(), 9.0, seed=seed)  # type: ignore[arg-type]


def test_a_load_that_is_lost_leaves_the_others(arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _sender(monkeypatch, lambda plan: plan.url == SPLIT and plan.seed == 0)
    turns = roles.measure({AGGREGATED: AGGREGATED, SPLIT: SPLIT, FLEXIBLE: FLEXIBLE}, arguments)
    assert [sorted(turn["c8"]) for turn in turns] == [[AGGREGATED, FLEXIBLE], [AGGREGATED, FLEXIBLE, SPLIT]]
    rates = {plan.arrivals.rate for plan in sent if isinstance(plan.arrivals, Gamma)}
    assert len(rates) == 1, "all turns of the open load have the rate of the first"


def test_an_interrupt_ends_the_turns_and_keeps_them(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(plan: Plan) -> bool:
        if plan.seed == 1:
            raise KeyboardInterrupt
        return False

    _sender(monkeypatch, interrupt)
    turns = roles.measure({AGGREGATED: AGGREGATED, FLEXIBLE: FLEXIBLE}, arguments)
    figures = summarise(turns, (AGGREGATED, FLEXIBLE))
    assert figures["flexible_over_aggregated_c32"] == 1.0


def _sender(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Plan], bool]) -> list[Plan]:
    """Send nothing: each plan has one answer, or is lost where it `fails`."""
    sent: list[Plan] = []

    def send(plan: Plan) -> Sent:
        if fails(plan):
            raise LoadTestError("no server answers")
        sent.append(plan)
        return Sent([answer(1.0, 1.1 + plan.seed)], 0.0, 2.0, 0.0)

    monkeypatch.setattr(roles, "send", send)
    monkeypatch.setattr(roles, "plan_at", plan)
    monkeypatch.setattr(roles.time, "sleep", no_pause)
    return sent


def test_a_gap_counts_where_it_ends_after_the_order_and_before_the_last_look() -> None:
    pieces = [(at, b"") for at in (0.0, 5.0, 5.5, 6.0, 9.0)]
    assert longest_gap_s(ClientExchange(0.0, pieces), since=5.2, until=8.0) == 0.5
    assert longest_gap_s(ClientExchange(0.0, pieces), since=4.0, until=9.0) == 5.0
    assert longest_gap_s(ClientExchange(0.0, pieces), since=9.5, until=10.0) == 0.0
