"""GPUs that are there are used, and those that stay idle are told of; on a machine whose number of GPUs is given."""

import io
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import ray
from rich.console import Console

from twostroke.cluster.cli import main
from twostroke.cluster.commands import serve
from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.gpus import one_for_each_rank, share_gpus
from twostroke.cluster.deployments.serve_app import build_app
from twostroke.cluster.local import server
from twostroke.cluster.local.server import ServeOrder, ServerReport
from twostroke.protocol.errors import ConfigError

TP4 = {role: {"tensor_parallel": 4} for role in ("prefill", "decode")}


def workers(settings: dict[str, Any]) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return the number of workers and the GPUs of each rank, of both roles."""
    config = read_config(settings)
    return tuple((config.counts[role].most, config.roles[role].gpus) for role in ("prefill", "decode"))  # type: ignore


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, 0, ((1, 0), (1, 0))),
        ({}, 1, ((0, 0), (1, 1))),
        ({}, 2, ((1, 1), (1, 1))),
        ({}, 8, ((3, 1), (5, 1))),
        ({"prefill": None, "decode": {"num_gpus": "auto"}}, 8, ((3, 1), (5, 1))),
        (TP4, 8, ((1, 1), (1, 1))),
        (TP4, 4, ((0, 0), (1, 1))),
        ({"decode": {"tensor_parallel": 2}}, 5, ((1, 1), (2, 1))),
        ({"prefill": {"replicas": 1}, "decode": {"replicas": 1}}, 1, ((1, 0.5), (1, 0.5))),
        ({"prefill": {"replicas": 0}, "decode": {"replicas": 4}}, 4, ((0, 0), (4, 1))),
        ({"decode": {"replicas": 4}}, 2, ((1, 0.3333), (4, 0.3333))),
        ({"prefill": {"num_gpus": 0}}, 8, ((1, 0), (1, 0))),
        ({"prefill": {"num_gpus": 0.25}, "decode": {"num_gpus": 0.5}}, 1, ((1, 0.25), (1, 0.5))),
        ({"model": {"device": "cpu"}}, 8, ((1, 0), (1, 0))),
    ],
)
def test_gpus_are_shared_out(settings: dict[str, Any], gpus: int, expected: object) -> None:
    assert workers(share_gpus(settings, gpus).settings) == expected


@pytest.mark.parametrize(
    ("settings", "gpus", "idle"),
    [
        ({}, 8, None),
        ({}, 0, None),
        ({"prefill": {"replicas": 1}}, 8, "6 GPUs stay idle: more prefill.replicas"),
        ({"prefill": {"num_gpus": 0}}, 8, "8 GPUs stay idle: the workers are told to take 0 of 8"),
        ({"model": {"device": "cpu"}}, 1, "1 GPU stays idle: model.device is cpu"),
        (TP4, 7, "3 GPUs stay idle: workers' ranks"),
    ],
)
def test_gpus_that_stay_idle_are_told_of(settings: dict[str, Any], gpus: int, idle: str | None) -> None:
    shared = share_gpus(settings, gpus)
    assert shared.is_idle == (idle is not None)
    assert idle is None or idle in (shared.line or "")


def test_the_autoscaler_has_the_gpus_for_budget() -> None:
    autoscaling = {"enabled": True, "prefill": {"max": 8}, "decode": {"max": 8}}
    shared = share_gpus({"autoscaling": autoscaling}, 4)
    assert read_config(shared.settings).autoscaling.budget == 4
    assert workers(shared.settings) == ((8, 1), (8, 1))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"decode": {"tensor_parallel": 4}}, "decode.tensor_parallel: 4 ranks need as many GPUs, and there are 2"),
        (
            {role: {"tensor_parallel": 2, "replicas": 1} for role in ("prefill", "decode")},
            "4 ranks together, for 2 GPUs",
        ),
    ],
)
def test_too_few_gpus_for_what_is_asked_is_said_before_anything_starts(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        share_gpus(settings, 2)


@pytest.mark.parametrize(
    ("settings", "has_gpus", "expected", "idle"),
    [
        ({}, True, ((1, 1), (1, 1)), None),
        ({}, False, ((1, 0), (1, 0)), None),
        ({"decode": {"num_gpus": 0.5}}, True, ((1, 1), (1, 0.5)), None),
        ({"decode": {"num_gpus": 0}}, True, ((1, 0), (1, 0)), "num_gpus is 0"),
        ({"model": {"device": "cpu"}}, True, ((1, 0), (1, 0)), "model.device is cpu"),
    ],
)
def test_on_a_cluster_with_gpus_each_rank_has_one_unless_somebody_says_otherwise_which_is_told(
    settings: dict[str, Any], has_gpus: bool, expected: object, idle: str | None
) -> None:
    shared = one_for_each_rank(settings, has_gpus=has_gpus)
    assert workers(shared.settings) == expected
    assert shared.line == (idle and f"The cluster's GPUs stay idle: {idle}")


def test_who_deploys_on_a_cluster_hears_of_its_idle_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    build_app({"model": {"device": "cpu"}})
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "The cluster's GPUs stay idle: model.device is cpu")
    ]


class _Stopped(Exception):
    """Raised in place of starting anything."""


def told_by_a_server_on_two_gpus(order: ServeOrder, monkeypatch: pytest.MonkeyPatch) -> list[ServerReport]:
    """Return the reports before anything starts."""
    monkeypatch.setattr(server, "_gpus_in_sight", lambda: 2)
    monkeypatch.setattr(server, "check_is_anywhere", lambda _: (_ for _ in ()).throw(_Stopped))
    said = io.StringIO()
    with pytest.raises(_Stopped):
        server._serve(order, MagicMock(), said)
    return [msgspec.json.decode(line, type=ServerReport) for line in said.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("settings", "event", "text"),
    [
        ({"prefill": {"num_gpus": 0}}, "loud", "2 GPUs stay idle: the workers are told to take 0 of 2"),
        ({}, "step", "GPUs: 1 prefill and 1 decode workers share 2"),
    ],
)
def test_a_server_on_a_host_whose_gpus_stay_idle_says_so_in_red(
    settings: dict[str, Any], event: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ServeOrder(settings, "127.0.0.1", 0, False, False)
    (report,) = told_by_a_server_on_two_gpus(order, monkeypatch)
    assert (report.event, report.text[: len(text)]) == (event, text)
    shown = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    assert serve._show(iter([report]), order, shown)
    assert ("\x1b[1;31m" in shown.file.getvalue()) == (event == "loud")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (None, ["GPUs: 1 prefill and 1 decode workers share 2"]),
        ("9", ["GPUs: 1 prefill and 1 decode workers share 2"]),
        ("1", ["GPUs: too few for a worker of each role"]),
        ("0", []),
    ],
)
def test_no_more_gpus_are_shared_out_than_the_command_line_allows(
    typed: str | None, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[ServeOrder] = []
    monkeypatch.setattr(serve, "_look_after", lambda order, *_: orders.append(order))
    assert main(["serve", "bundled", *(["--gpus", typed] if typed else [])]) == 0
    reports = told_by_a_server_on_two_gpus(orders[0], monkeypatch)
    assert [report.text[: len(line)] for report, line in zip(reports, told, strict=True)] == told


def test_fewer_gpus_than_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "bundled", "--gpus", "-1"]) == 2
    assert "--gpus -1: how many may be used, 0 for none" in capsys.readouterr().err
