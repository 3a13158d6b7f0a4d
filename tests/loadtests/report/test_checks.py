"""CI systems get exit codes, a Markdown summary and JUnit's XML."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.loadtests.report.runs import answer, drawn, facts, miss, plan, write_run
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands import compare, measure
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.checks import (
    FIGURES,
    Check,
    append_markdown,
    checks_of_run,
    figure_value,
    parse_requirement,
    write_junit,
)
from twostroke.loadtests.report.figures import Summary, summarise


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """Eight answers in the window, six of them in time, two refused."""
    times = [0.5] * 6
    records = [answer(2.0 + i, time, time + 0.05, time + 0.1) for i, time in enumerate(times)]
    records += [miss(8.0, "refused", "full", http_status=429), miss(8.5, "refused", "full", http_status=429)]
    return summarise(write_run(tmp_path / "run", records))


@pytest.mark.parametrize(
    ("required", "holds", "found"),
    [
        ("attainment>=0.75", True, "0.75"),
        ("attainment > 0.75", False, "0.75"),
        ("ttft_p99_s<=0.5", True, "0.5"),
        ("ttft_p99_s<5e-1", False, "0.5"),
        ("refused<=1", False, "2"),
        ("failed<=0", True, "0"),
        ("goodput_per_worker>=1", False, "not known"),
    ],
)
def test_a_requirement_is_judged_by_the_runs_figure(summary: Summary, required: str, holds: bool, found: str) -> None:
    valid, check = checks_of_run(summary, [parse_requirement(required)])
    assert valid == Check("the run is valid", "yes", True)
    assert (check.name, check.holds, check.found) == (str(parse_requirement(required)), holds, found)


def test_every_figure_can_be_required(summary: Summary) -> None:
    unknown = [figure for figure in FIGURES if figure_value(summary, figure) is None]
    assert unknown == ["goodput_per_worker"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attainment=0.9", "write, for example"),
        ("attainment>=high", "write, for example"),
        ("ttft_p98_s<=1", "there is no ttft_p98_s; there are attainment, "),
    ],
)
def test_what_is_no_requirement_is_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse_requirement(text)


def parsed(add_arguments: Callable[[argparse.ArgumentParser], None], *arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(each) for each in arguments])


@pytest.mark.parametrize(("required", "code"), [("attainment>=0.1", 0), ("attainment>=2", 1)])
def test_a_run_that_is_not_what_was_required_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: str, code: int
) -> None:
    def run_plan(made: Plan, folder: Path, **_: Any) -> None:
        write_run(folder, drawn(50, 10.0), made)

    monkeypatch.setattr(measure, "make_plan", lambda arguments: plan(slo=SLO(60.0, 60.0)))
    monkeypatch.setattr(measure, "run_plan", run_plan)
    summary, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    asked = ("--output", tmp_path / "run", "--require", required, "--summary", summary, "--junit", junit)
    assert measure.run_run(parsed(measure.add_run_arguments, *asked)) == code
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["required"] == {required: code == 0}
    assert f"| {'❌' if code else '✅'} | {required.replace('>', chr(92) + '>')} | 1 |" in summary.read_text()
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", str(code))
    failures = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failures == ([required] if code else [])


@pytest.mark.parametrize(("given", "slowness", "code"), [((), 9.0, 0), (("worse",), 9.0, 1), (("worse",), 1.0, 0)])
def test_a_comparison_fails_on_what_is_worse_where_that_is_asked_for(
    tmp_path: Path, given: tuple[str, ...], slowness: float, code: int
) -> None:
    asked = plan(seconds=60.0, slo=SLO(1.0, 0.2))
    write_run(tmp_path / "a", drawn(600, 60.0), asked)
    write_run(tmp_path / "b", drawn(600, 60.0, slowness=slowness), asked)
    junit = tmp_path / "junit.xml"
    folders = (f"ours={tmp_path / 'a'}", f"theirs={tmp_path / 'b'}")
    options = ("--output", tmp_path / "out", "--junit", junit, *(("--fail-on", *given) if given else ()))
    assert compare.run(parsed(compare.add_arguments, *folders, *options)) == code
    suite = ElementTree.parse(junit).getroot()
    assert (int(suite.get("failures", "")) > 0) == bool(code)
    assert "theirs: TTFT P99" in {case.get("name") for case in suite}


def test_an_invalid_run_fails_whatever_is_required(tmp_path: Path) -> None:
    run = summarise(write_run(tmp_path, drawn(20, 10.0), run_facts=facts(ended_early=True)))
    valid, attained = checks_of_run(run, [parse_requirement("attainment>=0")])
    assert (valid.holds, attained.holds) == (False, True)
    assert "ended early" in valid.found


def test_names_and_errors_break_neither_markdown_nor_xml_and_summaries_are_added_to(tmp_path: Path) -> None:
    checks = [Check("a|b <i>", "x\x00\n## y", False)]
    for _ in range(2):
        append_markdown(tmp_path / "s.md", "run", ["*told*"], checks)
    text = (tmp_path / "s.md").read_text()
    assert text.count(r"| ❌ | a\|b \<i\> |") == 2
    assert r"\*told\*" in text
    assert "\n## y" not in text
    write_junit(tmp_path / "j.xml", "run", checks)
    (case,) = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert case.get("name") == "a|b <i>"


def test_a_file_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    for told in (append_markdown, write_junit):
        arguments = ("run", ["x"], []) if told is append_markdown else ("run", [])
        with pytest.raises(LoadTestError, match="name another folder"):
            told(tmp_path, *arguments)  # type: ignore[operator]
