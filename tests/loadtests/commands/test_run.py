"""A run that is lost on its way."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.loadtests.report.runs import drawn, facts, plan, write_run
from twostroke.loadtests.commands import run
from twostroke.loadtests.errors import RunLost
from twostroke.loadtests.plan import Plan


def lose_after(monkeypatch: pytest.MonkeyPatch, num_requests: int, folder: Path) -> argparse.Namespace:
    """Have a run end after so many requests. Returns the command's arguments."""

    def run_plan(run_plan: Plan, folder: Path, **_: Any) -> None:
        write_run(folder, drawn(num_requests, 10.0), run_facts=facts(ended_early=True))
        raise RunLost("sending process 0 was killed by SIGKILL")

    monkeypatch.setattr(run, "plan_of", lambda arguments: plan())
    monkeypatch.setattr(run, "run_plan", run_plan)
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(["--output", str(folder)])


def test_a_lost_run_has_a_report_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run(lose_after(monkeypatch, 50, tmp_path / "run")) == 1
    told = capsys.readouterr()
    assert "killed by SIGKILL" in told.err
    said = json.loads(told.out.splitlines()[-1])
    assert (said["valid"], said["lost"]) == (False, "sending process 0 was killed by SIGKILL")
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_that_is_lost_before_its_first_answer_has_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunLost):
        run.run(lose_after(monkeypatch, 0, tmp_path / "run"))
