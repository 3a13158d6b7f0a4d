"""`twostroke loadtest report` and `compare`: their arguments, and what they say."""

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from tests.loadtests.report.runs import drawn, facts, plan, write_run
from twostroke.loadtests.commands import compare, report
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.figures import summarise
from twostroke.loadtests.run_folder import RunFolder


def parsed(command: str, *arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    {"report": report, "compare": compare}[command].add_arguments(parser)
    return parser.parse_args([str(each) for each in arguments])


def test_report_says_the_verdict_and_ends_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, drawn(20, 10.0), run_facts=facts(ended_early=True))
    assert report.run(parsed("report", tmp_path)) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("INVALID: the run was ended early")
    (figures,) = json.loads(last)["reports"]
    assert (figures["folder"], figures["valid"]) == (str(tmp_path), False)
    assert figures["attainment"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either two NAME=FOLDER or more, or --urls"),
        (["a=x"], "two servers or more"),
        (["a=x", "a=y"], "two servers or more"),
        (["a=x", "b"], "'b' is not NAME=FOLDER"),
        (["--urls", "a=http://x", "b=http://y", "--rounds", "0"], "--rounds 0"),
        (["--urls", "a=http://x", "a=http://y"], "a name of its own"),
        (["--urls", "../a=http://x", "b=http://y"], "is not NAME=URL"),
    ],
)
def test_compare_names_the_argument_that_is_wrong(arguments: list[str], words: str) -> None:
    with pytest.raises(LoadTestError, match=words):
        compare.run(parsed("compare", *arguments))


def test_servers_are_asked_the_same_in_turns_and_then_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Plan] = []

    def pretend(made: Plan, folder: Path) -> RunFolder:
        asked.append(made)
        return write_run(folder, drawn(40, 10.0, made.seed), made)

    monkeypatch.setattr(compare, "run_plan", pretend)
    monkeypatch.setattr(compare, "write_report", summarise)
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan(seed=5)))
    urls = ["a=http://127.0.0.1:1", "b=http://127.0.0.1:2"]
    out = tmp_path / "out"
    code = compare.run(
        parsed("compare", "--urls", *urls, "--rounds", 2, "--output", out, "--plan", tmp_path / "plan.json")
    )
    assert code == 0
    assert [(each.name, each.url[-1], each.seed) for each in asked] == [
        ("a", "1", 5),
        ("b", "2", 5),
        ("b", "2", 6),
        ("a", "1", 6),
    ]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["names"], result["valid"]) == (["a", "b"], True)
    assert result["figures"]["attainment"]["ratios"] == [1.0]
    assert (out / "comparison.html").exists()


def test_all_servers_are_kept_within_what_each_of_them_can_take() -> None:
    ours = plan(max_context=8000, prompts="ids", vocabulary=4096)
    theirs = plan(max_context=2000, prompts="text", vocabulary=0)
    found = compare.alike([ours, theirs])
    assert {(each.max_context, each.prompts, each.vocabulary) for each in found} == {(2000, "text", 0)}
    assert {each.slo for each in found} == {SLO(1.0, 0.1)}
