"""What the plan's choice loses: of goodputs that were measured, and of those that every layout has in simulation."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from twostroke.cluster.cli import main
from twostroke.loadtests.report.estimates import Estimate
from twostroke.planning.layouts import Layout
from twostroke.planning.modes import Counts, slowed
from twostroke.planning.profiles import SMALL
from twostroke.planning.regret import (
    CANDIDATES,
    POINTS_FILE,
    Turn,
    goodputs,
    next_rate,
    planned_goodputs,
    reading_rate,
    verdict_of,
)
from twostroke.planning.search import Budget, Search
from twostroke.planning.trials import among_busy, decide, simulated_goodput
from twostroke.planning.workload import Promise, Workload

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


def test_costs_are_learnt_at_rates_that_workers_can_read() -> None:
    profile = msgspec.structs.replace(SMALL, prompt_s=0.01, beside=None)
    both, one = (reading_rate(profile, counts) for counts in (Counts(0, 2), Counts(0, 1)))
    assert both == 2 * one == reading_rate(profile, Counts(2, 1))
    seconds = sum(
        share * (0.01 + profile.costs.prefill_s(tokens, 0, profile.step_tokens))
        for tokens, share in ((80, 0.75), (300, 0.25))
    )
    assert one == pytest.approx(1 / seconds)
    assert reading_rate(msgspec.structs.replace(profile, beside=slowed(profile.costs, 2.0, 2.0)), Counts(0, 1)) < one


def test_the_plan_loses_little_of_what_the_best_of_all_layouts_serves_in_simulation() -> None:
    workload, promise = mixed_lengths(1), Promise(0.5, 0.015)
    found = decide(
        Search([KIND], [KIND], workload, promise, Budget(gpus=WORKERS)), workload, promise, None, lambda line: None
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


def test_the_planner_is_asked_about_the_four_that_are_measured() -> None:
    whole = msgspec.structs.replace(
        SMALL, costs=msgspec.structs.replace(SMALL.costs, token_s=SMALL.costs.token_s / 2, row_s=SMALL.costs.row_s / 2)
    )
    profiles = {"half": among_busy(SMALL, "half"), "whole": among_busy(whole, "whole", gpus=2)}
    planned = planned_goodputs(profiles, mixed_lengths(1), Promise(2.0, 0.05))
    assert planned.keys() == CANDIDATES.keys()
    assert list(planned.values()) == sorted(planned.values(), reverse=True)


def turn(rate: float, met: int, layout: str = "one", requests: int = 200) -> Turn:
    return Turn(layout, rate, requests, met, requests, 1.0)


def test_rates_close_in_on_where_the_promise_breaks() -> None:
    def follow(most: float) -> list[float]:
        turns: list[Turn] = []
        while len(turns) < 10:
            rate = next_rate(turns, 4.0)
            turns.append(turn(rate, 200 if rate <= most else 100))
        return [one.rate for one in turns]

    for most in (1.0, 3.9, 4.1, 11.0):
        low, high = sorted(follow(most)[-2:])
        assert low <= most * 1.1
        assert high >= most / 1.1
        assert high / low < 1.2, "the two ends of the bracket"


def test_regret_is_of_the_best_and_as_uncertain_as_the_goodputs() -> None:
    measured = dict.fromkeys(CANDIDATES, Estimate(2.0, 1.9, 2.1)) | {"two": Estimate(4.0, 3.8, 4.2)}
    right = verdict_of({"two": 4.1, "one": 2.0}, measured)
    assert (right["best"], right["regret"], right["regret_high"]) == ("two", 0.0, 0.0)
    wrong = verdict_of({"one": 4.1, "two": 2.0}, measured)
    assert wrong["regret"] == pytest.approx(0.5)
    assert wrong["regret_low"] < 0.5 < wrong["regret_high"]
    assert verdict_of({"two": 4.1}, {"two": Estimate(4.0)})["regret"] is None


def test_what_is_kept_in_the_folder_is_told_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "plan", "--workload", "fixed", "--input-tokens", "200", "--output-tokens", "20", "--layouts"]
    assert main([*asked, "--output", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing"] == ["disaggregated", "one"]
    turns = [turn(rate, met, name) for name in CANDIDATES for rate, met in ((2.0, 200), (4.0, 140))]
    (tmp_path / POINTS_FILE).write_bytes(msgspec.json.encode([*turns, turn(2.0, 190, "two"), turn(4.0, 190, "two")]))
    for name in ("half", "whole"):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(SMALL))
    assert main([*asked, "--output", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["best"] == "two"
    assert told["measured_rps"]["one"]["value"] == pytest.approx(goodputs(turns)["one"].value)
    assert told["chosen"] in CANDIDATES
    assert 0 <= told["regret_low"] <= told["regret"] <= told["regret_high"]
