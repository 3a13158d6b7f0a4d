"""The regret of a plan is computed from measured goodputs, and from those of a simulation."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from twostroke.cluster.cli import main
from twostroke.loadtests.capacity import SWEEP_FILE, Capacity, SweepResult
from twostroke.loadtests.report.estimates import Estimate
from twostroke.planning.commands.regret import CANDIDATES, verdict_of
from twostroke.planning.costs.profiles import SMALL, among_busy, write_profile
from twostroke.planning.layouts import Layout
from twostroke.planning.measured import TARGET
from twostroke.planning.search import Budget, FleetSearch
from twostroke.planning.trials import decide, simulated_goodput
from twostroke.planning.workload import SLOTargets, Workload

WORKERS = 4
KIND = among_busy(SMALL)


def mixed_lengths(seed: int) -> Workload:
    """Prompts of 490 tokens and answers of 90, medians."""
    draw = random.Random(seed)
    return Workload(
        "mixed",
        tuple(
            (
                max(16, min(3000, int(draw.lognormvariate(6.2, 0.8)))),
                max(2, min(400, int(draw.lognormvariate(4.5, 0.7)))),
            )
            for _ in range(500)
        ),
    )


def layouts() -> list[Layout]:
    """Every way to spend the workers."""
    split = [(mode, readers) for mode in ("disaggregated", "hybrid") for readers in range(1, WORKERS)]
    return [
        Layout("aggregated", KIND, WORKERS),
        *(Layout(mode, KIND, WORKERS - readers, KIND, readers) for mode, readers in split),  # type: ignore[arg-type]
    ]


def test_the_plan_loses_little_of_what_the_best_of_all_layouts_serves_in_simulation() -> None:
    workload, promise = mixed_lengths(1), SLOTargets(0.5, 0.015)
    found = decide(
        FleetSearch([KIND], [KIND], workload, promise, Budget(gpus=WORKERS)), workload, promise, None, lambda line: None
    )
    served = {
        layout: simulated_goodput(
            layout, workload, promise, layout.goodput(workload, promise), lambda line: None, seed=5
        )
        for layout in layouts()
    }
    regret = 1 - served[found.answers[0].layout] / max(served.values())
    assert regret <= 0.05, served
    assert max(served.values()) > 1.1 * min(served.values()), "with layouts that are all alike there is nothing to lose"


def test_regret_is_what_the_choice_loses_of_the_best() -> None:
    measured: dict[str, Estimate | None] = {one.name: Estimate(2.0) for one in CANDIDATES} | {"two": Estimate(4.0)}
    right = verdict_of({"two": 4.1, "one": 2.0}, measured)
    assert (right["best"], right["chosen"], right["regret"]) == ("two", "two", 0.0)
    assert verdict_of({"one": 4.1, "two": 2.0}, measured)["regret"] == pytest.approx(0.5)
    assert verdict_of({"two": 4.1}, {"two": Estimate(4.0)})["regret"] is None, "not all are measured"
    assert verdict_of({"two": 4.1}, measured | {"one": None})["regret"] is None, "of one a bound alone is known"


def test_what_is_kept_in_the_folder_is_told_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "plan", "--workload", "fixed", "--input-tokens", "200", "--output-tokens", "20", "--layouts"]

    def tell() -> tuple[int, dict[str, Any]]:
        code = main([*asked, "--output", str(tmp_path)])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    assert tell()[1]["measured_rps"] == {}
    for candidate, rate in zip(CANDIDATES, (2.0, 2.5, 4.0, 3.0), strict=True):
        sweep = SweepResult("", "", (), (Capacity(TARGET, Estimate(rate)),))
        for role in ("prefill", "decode"):
            write_profile(SMALL, tmp_path / candidate.name / f"{role}.json")
        (tmp_path / candidate.name / SWEEP_FILE).write_bytes(msgspec.json.encode(sweep))
    code, told = tell()
    assert (code, told["best"]) == (0, "two")
    assert told["chosen"] == next(iter(told["planned_rps"]))
    assert told["regret"] == pytest.approx(1 - told["measured_rps"][told["chosen"]] / 4.0)
    (tmp_path / "one" / SWEEP_FILE).write_text("{}")
    assert "one" in tell()[1]["failed"], "a file that is none is named, and the others are told"
