"""`twostroke plan`: what it answers, that a server could be started with it, and what it refuses."""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from msgspec import structs

from twostroke.cluster.cli import main
from twostroke.planning.commands.plan import add_arguments, run
from twostroke.planning.layouts import Layout, Mode
from twostroke.planning.trials import layout_settings
from twostroke.planning.workload import parse_promise
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import StepCosts
from twostroke.worker.profile import WorkerProfile

FIXED = ["--workload", "fixed", "--input-tokens", "800", "--output-tokens", "100"]
SLO = ["--slo", "ttft_p90_s=0.5,tpot_p90_s=0.03"]
KEYS = {"prefill", "decode", "tp", "mode", "quantization", "goodput_rps", "binds", "usd_per_million_tokens"}


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON line."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([*arguments, "--json"])) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_says_the_fleet_its_cost_and_settings_that_can_be_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "serving.yaml"
    asked = ["Llama-3.1-70B", "--gpu", "h100-80gb,h200", "--rate", "10", "--formulas", *FIXED, *SLO]
    told = planned(capsys, *asked, "--output", str(file))
    best = told["best"]
    assert best.keys() >= KEYS
    assert best["goodput_rps"] >= 10
    assert best["gpus"] == sum(best[role] * best["tp"].get(role, 0) for role in ("prefill", "decode"))
    assert best["usd_per_million_tokens"] == pytest.approx(best["usd_per_hour"] / (3600 * 10 * 100) * 1e6, rel=1e-3)
    assert all(one.keys() >= KEYS for one in told["runners_up"])
    assert told["what_would_change_it"]
    assert main(["config", "check", str(file)]) == 0
    capsys.readouterr()
    assert planned(capsys, *asked, "--output", str(file)) == told, "the same arguments give the same plan"


def test_fewer_gpus_serve_less_and_dearer_ones_are_left_to_others(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (
        planned(capsys, "Llama-3.1-8B", "--gpu", "h100-80gb", "--gpus", count, "--formulas", *FIXED, *SLO)["best"]
        for count in ("2", "4")
    )
    assert few["gpus"] <= 2 < many["gpus"] <= 4
    assert few["goodput_rps"] < many["goodput_rps"]
    asked = ["Llama-3.1-8B", "--gpu", "h100-80gb,h200", "--rate", "12", "--formulas", *FIXED, *SLO]
    on_h200 = planned(capsys, *asked, "--price", "h100-80gb=50,h200=1")["best"]
    on_h100 = planned(capsys, *asked, "--price", "h100-80gb=1,h200=50")["best"]
    assert set(on_h200["hardware"].values()) == {"h200"}
    assert set(on_h100["hardware"].values()) == {"h100-80gb"}


def test_a_plan_answers_with_the_modes_that_are_named_and_compares_fixed_roles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["Llama-3.1-8B", "--gpu", "h100-80gb", "--gpus", "4", "--formulas", *FIXED, *SLO]
    told = planned(capsys, *asked, "--modes", "hybrid", "fixed")
    found: dict[str, float] = {}
    for one in (told["best"], *told["runners_up"]):
        found[one["mode"]] = max(one["goodput_rps"], found.get(one["mode"], 0.0))
    assert found.keys() == {"hybrid", "fixed"}
    assert found["hybrid"] >= found["fixed"]


def test_measured_workers_are_planned_and_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(
        capsys, "bundled", "--costs", "160m-cpu", "--gpus", "4", *FIXED, "--slo", "ttft_p90_s=1,tpot_p90_s=0.03"
    )
    best = told["best"]
    assert best["simulated"]
    assert best["prefill"] + best["decode"] == 4
    assert best["goodput_rps"] == max(best["goodput_rps"], *(one["goodput_rps"] for one in told["runners_up"]))


def test_a_promise_below_a_plain_steps_time_is_planned_for_answers_that_repeat_earlier_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("plan", "bundled", "--costs", "8b-h100-floor", "--gpus", "2", *FIXED, "--json")
    promise = ("--slo", "ttft_p90_s=1,tpot_p90_s=0.006")
    assert main([*asked, *promise]) == 2
    assert "below the floor of 0.0073" in capsys.readouterr().err
    best = planned(capsys, *asked[1:-1], *promise, "--repeated", "0.6")["best"]
    assert best["simulated"]
    assert best["goodput_rps"] > 1


@pytest.mark.parametrize("mode", get_args(Mode))
def test_settings_of_every_mode_pass_the_check(mode: Any, tmp_path: Path) -> None:
    profile = WorkerProfile(
        *("b", StepCosts(1, 1, 1, 1, 1), 1.0, 16, 1.0, 2048, 64, ""), hardware="h200", ranks=2, quantization="int8"
    )
    profile = structs.replace(profile, shares_contexts=True)
    prefill = (
        None
        if mode == "aggregated"
        else structs.replace(profile, name="a", hardware="h100-80gb", ranks=1, shares_contexts=False)
    )
    layout = Layout(mode, profile, 3, prefill, 0 if prefill is None else 2)
    settings = layout_settings(
        layout, "bundled", parse_promise("ttft_p90_s=1,tpot_p90_s=0.05"), kv_cache_dtype="fp8", on_cpu=False
    )
    file = tmp_path / "serving.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert main(["config", "check", str(file)]) == 0
    assert settings["decode"]["tensor_parallel"] == 2
    assert settings["decode"]["context_parallel"] is True
    assert "context_parallel" not in settings["prefill"]
    assert settings["prefill"]["replicas"] == layout.num_prefill
    assert ("router" in settings) == (mode != "aggregated")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Llama-3.1-8B", "--gpu", "h900"], "--gpu h900: no such GPU in the table; there are a100-40gb"),
        (
            ["Llama-3.1-405B", "--gpu", "l4", "--slo", "ttft_p90_s=60,tpot_p90_s=9"],
            "the model fits on none of them .* the least is .* GiB of each of 8 GPUs",
        ),
        (["Llama-3.1-8B", "--gpu", "l4", "--slo", "ttft_p90_s=0.01,tpot_p90_s=0.1"], "ttft of 0.01 s: below the floor"),
        (["Llama-3.1-8B", "--gpu", "h200", "--slo", "ttft_p90_s=1,tpot_p90_s=0.0001"], "tpot of 0.0001 s: below the"),
        (["Llama-3.1-8B"], "--gpu: name one or more of"),
        (["Llama-3.1-8B", "--gpu", "h200", "--price", "h100-80gb=2"], "--price: h100-80gb is none of --gpu h200"),
        (["Llama-3.1-8B", "--gpu", "h200", "--quantization", "int2"], "--quantization int2: none of"),
        (["Llama-3.1-8B", "--gpu", "h200", "--usd-per-hour", "2"], "--usd-per-hour: not one worker"),
        ([], "name a MODEL"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(arguments: list[str], told: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match=told) as failure:
        run(parser.parse_args([*arguments, "--formulas", *FIXED]))
    assert "\n" not in str(failure.value)
