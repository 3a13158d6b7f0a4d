"""The answer, and that it comes of what is there: parts that fail are left out, and an interrupt ends no answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from twostroke.cluster.cli import main
from twostroke.loadtests.capacity import Capacity, SweepPoint, SweepResult
from twostroke.loadtests.report.estimates import Estimate
from twostroke.planning.against import TARGET, Candidate, Measured, capacity_by_simulation
from twostroke.planning.commands import should_i_disaggregate as verdict
from twostroke.planning.commands.should_i_disaggregate import Found, find_flips, tell, verdict_words
from twostroke.planning.costs.profiles import SMALL
from twostroke.planning.layouts import Layout, Mode
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.protocol.errors import ConfigError

ASKED = ("should-i-disaggregate", "--workload", "fixed", "--input-tokens", "64", "--output-tokens", "4", "--no-sweep")
SAMPLE = Workload("alike", ((512, 4),))
PROMISE = SLOTargets(1.0, 0.05)


def measured_at(rate: float | None) -> Measured:
    """Return a measurement whose capacity is `rate`, and whose rates all held where that is None."""
    points = tuple(SweepPoint(at, "", 1.0 if at < (rate or 9.0) else 0.0, 1.0, 1.0, at, True) for at in (1.0, 6.0))
    capacity = Capacity(TARGET, Estimate(rate or 6.0), is_lower_bound=rate is None)
    return Measured({"prefill": SMALL, "decode": SMALL}, SweepResult("", "", points, (capacity,)))


def test_a_simulated_capacity_is_about_what_the_worker_can_do() -> None:
    seconds = SMALL.costs.prefill_s(512, 0, 512)
    layout = Layout("aggregated", SMALL, 1)
    found = capacity_by_simulation(layout, Workload("prompts", ((512, 1),)), PROMISE, 4.0)
    assert 0.6 / seconds < found < 1.1 / seconds


def test_the_answer_flips_where_another_mode_leads_and_not_by_a_hair() -> None:
    swept: list[tuple[float, dict[Mode, float]]] = [
        (64.0, {"aggregated": 5.0, "hybrid": 4.0}),
        (256.0, {"aggregated": 3.0, "hybrid": 3.01}),
        (1024.0, {"aggregated": 1.0, "hybrid": 1.5}),
        (4096.0, {"aggregated": 0.0, "hybrid": 0.0}),
    ]
    assert find_flips("prompt_tokens", swept) == [
        {"what": "prompt_tokens", "at": 1024.0, "before": "aggregated", "after": "hybrid"}
    ]


def found_of(**capacities: float) -> Found:
    found = Found(SAMPLE, PROMISE)
    for name, rate in capacities.items():
        mode: Mode = name  # type: ignore[assignment]
        found.layouts[mode] = Layout(mode, SMALL, 1)
        found.simulated[mode] = [rate * 0.98, rate * 1.02]
    return found


def test_a_lead_within_what_is_uncertain_is_a_draw() -> None:
    clear = tell(found_of(aggregated=2.0, hybrid=3.0))
    assert (clear["best"], clear["is_clear"], clear["basis"]) == ("hybrid", True, "simulation alone")
    assert clear["by"] == pytest.approx(0.5)
    assert verdict_words(clear)[0].startswith("Yes: hybrid keeps the promise for 3 requests a second, 50% more")
    draw = tell(found_of(aggregated=2.0, hybrid=2.02))
    assert not draw["is_clear"]
    assert "take it for a draw" in verdict_words(draw)[0]
    assert verdict_words(tell(found_of(aggregated=3.0, hybrid=2.0)))[0].startswith("No: aggregated")
    assert tell(found_of(aggregated=1.0))["best"] is None


def test_capacities_that_no_rate_has_bracketed_are_said_to_be_simulated() -> None:
    found = found_of(aggregated=4.0, hybrid=5.0)
    found.measured = {"aggregated": measured_at(None), "hybrid": measured_at(5.5)}
    told = verdict_words(tell(found))[2]
    assert told.startswith("The capacity of aggregated is simulated: of the rates measured there all held, or none; ")
    assert "--rates around 4 would measure it" in told


def test_prediction_errors_are_part_of_what_is_uncertain() -> None:
    found = found_of(aggregated=2.0, hybrid=5.0)
    found.measured = {"hybrid": measured_at(4.0)}
    told = tell(found)
    assert told["capacity_error"] == pytest.approx(0.25)
    assert told["uncertainty"] >= told["capacity_error"]


def test_unmeasured_hardware_is_answered_by_simulation_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("SEEDS", 1), ("LENGTHS", (64, 1024)), ("SWEPT_SHARES", (0.5, 1.25))):
        monkeypatch.setattr(verdict, name, few)
    costs = tmp_path / "costs.json"
    costs.write_bytes(msgspec.json.encode(SMALL))
    asked = ("--input-tokens", "512", "--costs", str(costs), "--slo", "ttft=0.5,tpot=0.05", "--report")
    modes = ("--modes", "aggregated", "disaggregated")
    without_sweep = [one for one in ASKED if one != "--no-sweep"]
    assert main([*without_sweep, *asked, *modes, "--output", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1])
    assert "simulated capacity" in captured.err
    assert told["basis"] == "simulation alone"
    assert told["best"] in ("aggregated", "disaggregated")
    assert told["modes"].keys() == {"aggregated", "disaggregated"}
    assert [rate for rate, _ in told["attainment_by_rate"]] == sorted(rate for rate, _ in told["attainment_by_rate"])
    assert json.loads((tmp_path / "out/verdict.json").read_text())["best"] == told["best"]
    page = (tmp_path / "out/verdict.html").read_text()
    assert page.count("data:image/png;base64,") == 6


def test_a_gpu_is_a_worker_as_the_planner_knows_it() -> None:
    profile = verdict.gpu_profile("h100-80gb", "Llama-3.1-8B", SAMPLE)
    assert profile.kv_bytes == 128 * 1024
    assert 400_000 < profile.kv_tokens < 480_000  # docs/planning.md: 56 requests of 8,192
    with pytest.raises(ConfigError, match="--gpu l4: the model fits on none"):
        verdict.gpu_profile("l4", "Llama-3.1-70B", SAMPLE)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((), "--slo"),
        (("--slo", "ttft=1", "--costs", "160m-cpu", "--gpu", "h100-80gb"), "--costs and --gpu"),
        (("--slo", "ttft=1", "--costs", "160m-cpu", "--config", "x.yaml"), "--config"),
        (("--slo", "ttft=1", "--modes", "hybrid"), "--modes"),
        (("--slo", "ttft=1", "--repeated", "0.5"), "--repeated: is measured"),
        (("--slo", "ttft=1", "--seconds", "2"), "--warm-up"),
    ],
)
def test_what_can_not_be_asked_names_the_flag(
    asked: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *asked]) == 2
    assert said in capsys.readouterr().err


# --- with measurements that never were ---

Measure = Callable[..., Measured]


def answer_with(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(verdict, "SEEDS", 1)
    monkeypatch.setattr(verdict, "measure", measure)
    monkeypatch.setattr(verdict, "interrupt_once", lambda: None)
    code = main([*ASKED, "--slo", "ttft=1", "--json", "--output", str(tmp_path)])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def by_mode(candidate: Candidate, *_: object, **__: object) -> Measured:
    return measured_at({"aggregated": 3.0, "disaggregated": 2.0, "hybrid": 5.0}[candidate.mode])


def test_each_mode_is_measured_and_the_best_one_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = answer_with(by_mode, monkeypatch, tmp_path, capsys)
    assert (code, told["best"], told["basis"]) == (0, "hybrid", "measurement and simulation")
    assert told["modes"]["hybrid"]["attainment"] == [[1.0, 1.0], [6.0, 0.0]]
    assert told["modes"]["hybrid"]["measured_rps"]["value"] == 5.0


def test_a_mode_that_fails_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(candidate: Candidate, *_: object, **__: object) -> Measured:
        if candidate.mode == "hybrid":
            raise ConfigError("the server ended while it started")
        return by_mode(candidate)

    code, told = answer_with(measure, monkeypatch, tmp_path, capsys)
    assert (code, told["best"]) == (0, "aggregated")
    assert "ended while it started" in told["failed"]["hybrid"]


def test_an_interrupt_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(candidate: Candidate, *_: object, **__: object) -> Measured:
        if candidate.mode == "disaggregated":
            raise KeyboardInterrupt
        return by_mode(candidate)

    code, told = answer_with(measure, monkeypatch, tmp_path, capsys)
    assert code == 130
    assert told["modes"]["aggregated"]["attainment"]
    assert "interrupted" in told["failed"]["the rest"]
