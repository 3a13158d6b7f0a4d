"""The answer, and that it comes of what is there: parts that fail are left out, and an interrupt ends no answer."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from twostroke.cluster.cli import main
from twostroke.loadtests.plan import SLO, Fixed, Plan, Poisson
from twostroke.loadtests.run_folder import Record
from twostroke.planning import capacities
from twostroke.planning.agreement import Cell, summary_of, table
from twostroke.planning.capacities import Flip, Point, flips_of, measured_capacity, simulated_capacity
from twostroke.planning.commands import should_i_disaggregate as verdict
from twostroke.planning.commands.should_i_disaggregate import Found, tell, words_of
from twostroke.planning.exact import record_of
from twostroke.planning.modes import Counts, Fleet, Mode
from twostroke.planning.profiles import SMALL
from twostroke.protocol.errors import ConfigError

ASKED = ("should-i-disaggregate", "--workload", "fixed", "--input-tokens", "64", "--output-tokens", "4", "--no-sweep")


def points(*shares: float, requests: int = 200) -> list[Point]:
    return [Point(float(rate), round(share * requests), requests) for rate, share in enumerate(shares, start=1)]


def test_capacity_lies_where_attainment_falls_below_the_target() -> None:
    found = measured_capacity(points(1.0, 0.95, 0.85))
    assert found is not None
    assert found.value == pytest.approx(2.5)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high
    assert measured_capacity(points(1.0, 1.0)) is measured_capacity(points(0.5, 0.2)) is None


def test_a_simulated_capacity_is_about_what_the_worker_can_do() -> None:
    plan = Plan("simulated", "m", 4096, Poisson(1.0), Fixed(512, 1), SLO(ttft_s=1.0), 10.0, vocabulary=32_000)
    seconds = SMALL.costs.prefill_s(512, 0, 512)
    heard: list[float] = []
    fleet = Fleet("aggregated", Counts(0, 1), SMALL)
    found = simulated_capacity(plan, fleet, 4.0, requests=40, heard=lambda rate, _: heard.append(rate))
    assert heard[0] == 4.0
    assert min(heard) < found < max(heard), "each rate that is tried is told: a search may take minutes"
    assert 0.6 / seconds < found < 1.1 / seconds  # 40 requests alone would be over before a queue is late


def test_the_answer_flips_where_another_mode_leads_and_not_by_a_hair() -> None:
    swept: list[tuple[float, dict[Mode, float]]] = [
        (64.0, {"aggregated": 5.0, "hybrid": 4.0}),
        (256.0, {"aggregated": 3.0, "hybrid": 3.01}),
        (1024.0, {"aggregated": 1.0, "hybrid": 1.5}),
        (4096.0, {"aggregated": 0.0, "hybrid": 0.0}),
    ]
    assert flips_of("prompt_tokens", swept) == [Flip("prompt_tokens", 1024.0, "aggregated", "hybrid")]


def found_of(**capacities: float) -> Found:
    found = Found()
    for name, rate in capacities.items():
        mode: Mode = name  # type: ignore[assignment]
        found.fleets[mode] = Fleet(mode, Counts(1, 1), SMALL)
        found.simulated[mode] = [rate * 0.98, rate * 1.02]
    return found


def test_a_lead_within_what_is_uncertain_is_a_draw() -> None:
    clear = tell(found_of(aggregated=2.0, hybrid=3.0), is_measured=False)
    assert (clear["best"], clear["is_clear"], clear["basis"]) == ("hybrid", True, "simulation alone")
    assert clear["by"] == pytest.approx(0.5)
    assert words_of(clear)[0].startswith("Yes: hybrid keeps the promise for 3 requests a second, 50% more")
    draw = tell(found_of(aggregated=2.0, hybrid=2.02), is_measured=False)
    assert not draw["is_clear"]
    assert "take it for a draw" in words_of(draw)[0]
    assert words_of(tell(found_of(aggregated=3.0, hybrid=2.0), is_measured=False))[0].startswith("No: aggregated")
    assert tell(found_of(aggregated=1.0), is_measured=False)["best"] is None


def test_capacities_that_no_rate_has_bracketed_are_said_to_be_simulated() -> None:
    found = found_of(aggregated=4.0, hybrid=5.0)
    found.points = {"aggregated": [Point(1.0, 50, 50)], "hybrid": [Point(1.0, 50, 50), Point(6.0, 0, 50)]}
    told = words_of(tell(found, is_measured=True))[2]
    assert told.startswith("The capacity of aggregated is simulated: of the rates measured there all held, or none; ")
    assert "--rates around 4 would measure it" in told


def test_prediction_errors_are_part_of_what_is_uncertain() -> None:
    found = found_of(aggregated=2.0, hybrid=5.0)
    found.points = {
        "aggregated": points(1.0, 0.9, 0.1, requests=4000),
        "hybrid": points(1, 1, 1, 0.91, 0.2, requests=4000),
    }
    told = tell(found, is_measured=True)
    measured = told["modes"]["hybrid"]["measured_rps"]["value"]
    assert told["capacity_error"] == pytest.approx(abs(5.0 / measured - 1), rel=0.5)
    assert told["uncertainty"] >= told["capacity_error"]


def test_unmeasured_hardware_is_answered_by_simulation_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "SEEDS", 1)
    monkeypatch.setattr(verdict, "SPLIT_WORKERS", 2)
    monkeypatch.setattr(capacities, "PRECISION", 0.5)
    costs = tmp_path / "costs.json"
    costs.write_bytes(msgspec.json.encode(SMALL))
    asked = ("--input-tokens", "512", "--costs", str(costs), "--slo", "ttft=0.5,tpot=0.05")
    modes = ("--modes", "aggregated", "disaggregated")
    assert main([*ASKED, *asked, *modes, "--output", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1])
    assert captured.err.count("requests a second: ") > 5, "what is tried is told while it is"
    assert told["basis"] == "simulation alone"
    assert told["best"] in ("aggregated", "disaggregated")
    assert told["modes"].keys() == {"aggregated", "disaggregated"}
    assert json.loads((tmp_path / "out/verdict.json").read_text())["best"] == told["best"]


def test_a_gpu_is_a_worker_as_the_planner_knows_it() -> None:
    plan = Plan("simulated", "Llama-3.1-8B", 4096, Poisson(1.0), Fixed(512, 64), SLO(ttft_s=1.0), 10.0)
    profile = verdict.gpu_kind("h100-80gb", plan)
    assert profile.kv_bytes == 128 * 1024
    assert 400_000 < profile.kv_tokens < 480_000  # docs/planning.md: 56 requests of 8,192
    with pytest.raises(ConfigError, match="--gpu l4: the model fits on none"):
        verdict.gpu_kind("l4", msgspec.structs.replace(plan, model="Llama-3.1-70B"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((), "--slo"),
        (("--slo", "ttft=1", "--costs", "160m-cpu", "--gpu", "h100-80gb"), "--costs and --gpu"),
        (("--slo", "ttft=1", "--costs", "160m-cpu", "--config", "x.yaml"), "--config"),
        (("--slo", "ttft=1", "--modes", "hybrid"), "--modes"),
        (("--slo", "ttft=1", "--seconds", "2"), "--warm-up"),
    ],
)
def test_what_can_not_be_asked_names_the_flag(
    asked: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *asked]) == 2
    assert said in capsys.readouterr().err


# --- with servers that are not there ---


class Servers:
    """In the place of servers, their costs, and loads upon them: the simulation's own answers, or a failure."""

    def __init__(self, failing: tuple[str, ...] = (), interrupted_at: str = "") -> None:
        self.failing = failing
        self.interrupted_at = interrupted_at
        self.started: list[str] = []
        self.running: set[str] = set()

    @contextlib.contextmanager
    def server_in(self, mode: Mode, counts: Counts, settings: dict[str, Any]) -> Iterator[str]:
        if mode in self.failing:
            raise ConfigError(f"the {mode} server ended while it started")
        self.started.append(mode)
        self.running.add(mode)
        try:
            yield mode
        finally:
            self.running.remove(mode)

    def plan_for(self, url: str, workload: Fixed, seconds: float, *_: object) -> Plan:
        return Plan(url, "m", 4096, Poisson(1.0), workload, SLO(), seconds, warm_up_s=1.0, vocabulary=32_000)

    def compare(self, plan: Plan, name: str, fleet: Fleet, folder: Path) -> tuple[Cell, list[Record]]:
        if fleet.mode == self.interrupted_at:
            raise KeyboardInterrupt
        rate = getattr(plan.arrivals, "rate", 0.0)
        most = {"aggregated": 3.0, "disaggregated": 2.0, "hybrid": 5.0}[fleet.mode]
        late = 0.1 if rate <= most else 9.0
        records = [record_of(n, 1.0 + n * 0.1, 64, 4, (1.1 + n * 0.1 + late, 1.2 + n * 0.1 + late)) for n in range(50)]
        figures = {"ttft_mean_s": 0.1, "ttft_p90_s": 0.1}
        return Cell(fleet.mode, name, rate, 50, 0, figures, figures), records


def answer_with(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(verdict, "SEEDS", 1)
    monkeypatch.setattr(verdict, "server_in", servers.server_in)
    monkeypatch.setattr(verdict, "plan_for", servers.plan_for)
    monkeypatch.setattr(verdict, "compare", servers.compare)
    monkeypatch.setattr(verdict, "learn_kind", lambda url, mode, seed: SMALL)
    monkeypatch.setattr(verdict, "simulated_capacity", lambda *_, **__: 3.0)
    monkeypatch.setattr(verdict, "interrupt_once", lambda: None)
    asked = ("--slo", "ttft=1", "--rates", "1,2.5,4,6", "--json", "--output", str(tmp_path))
    code = main([*ASKED, *asked])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_each_mode_is_measured_and_the_best_one_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = Servers()
    code, told = answer_with(servers, monkeypatch, tmp_path, capsys)
    assert (code, told["best"], told["basis"]) == (0, "hybrid", "measurement and simulation")
    assert servers.started == ["disaggregated", "aggregated", "hybrid"]
    assert told["modes"]["hybrid"]["attainment"] == [[1.0, 1.0], [2.5, 1.0], [4.0, 1.0], [6.0, 0.0]]
    assert 4.0 < told["modes"]["hybrid"]["measured_rps"]["value"] < 6.0


def test_a_mode_that_fails_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = answer_with(Servers(failing=("hybrid",)), monkeypatch, tmp_path, capsys)
    assert (code, told["best"]) == (0, "aggregated")
    assert "ended while it started" in told["failed"]["hybrid"]


def test_an_interrupt_keeps_what_there_is_and_leaves_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = Servers(interrupted_at="aggregated")
    code, told = answer_with(servers, monkeypatch, tmp_path, capsys)
    assert code == 130
    assert servers.running == set()
    assert told["modes"]["disaggregated"]["attainment"]
    assert "interrupted" in told["failed"]["the rest"]


# --- cells ---


def test_a_cell_is_near_within_a_tenth_and_judged_only_on_a_steady_machine() -> None:
    measured, simulated = {"ttft_mean_s": 1.0, "tpot_mean_s": 0.10}, {"ttft_mean_s": 1.09, "tpot_mean_s": 0.12}
    cell = Cell("hybrid", "fixed", 2.0, 40, 0, measured, simulated, (1.0, 1.1), 2)
    assert cell.far == ["tpot_mean_s"]
    shaken = msgspec.structs.replace(cell, others=(1.0, 6.0))
    assert (cell.is_steady, shaken.is_steady) == (True, False)
    assert summary_of([cell, shaken])["tpot_mean_s"] == {"median": pytest.approx(0.2), "most": pytest.approx(0.2)}
    row = table([cell])[2]
    assert "1000 / 1090" in row
    assert "**100 / 120**" in row
    assert "not judged" in table([shaken])[2]
