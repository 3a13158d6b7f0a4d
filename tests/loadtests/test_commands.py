"""The commands of `twostroke loadtest`: their arguments, what they say, and a run that is lost on its way."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.command_line import answering
from tests.loadtests.report.runs import drawn, facts, plan, read_sweep, write_run
from tests.loadtests.test_capacity import PLAN, summarise_observations
from twostroke.loadtests import LoadTestError, RunLost
from twostroke.loadtests.commands import arguments as plan_arguments
from twostroke.loadtests.commands import compare, measure
from twostroke.loadtests.commands.arguments import make_plan, with_slo_multiple
from twostroke.loadtests.plan import SLO, Closed, Plan, Poisson
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Counts, Spread, Summary, Validity, summarise
from twostroke.loadtests.run_folder import RunFolder, make_folder, write_json


def parsed(add_arguments: Callable[[argparse.ArgumentParser], None], *arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(each) for each in arguments])


def test_report_says_the_verdict_and_ends_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, drawn(20, 10.0), run_facts=facts(ended_early=True))
    assert measure.run_report(parsed(measure.add_report_arguments, tmp_path)) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("INVALID: the run was ended early")
    (figures,) = json.loads(last)["reports"]
    assert (figures["folder"], figures["valid"]) == (str(tmp_path), False)
    assert figures["attainment"] is not None


def test_plan_writes_what_run_and_locust_carry_out_and_nothing_else_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering({"/v1/models": b'{"data": [{"id": "m", "max_model_len": 4096, "vocab_size": 4096}]}'}) as url:
        assert measure.run_write(parsed(measure.add_write_arguments, "--url", url, "--rate", 2, "--seconds", 30)) == 0
    written = capsys.readouterr()
    made = msgspec.json.decode(written.out, type=Plan)
    assert (made.url, made.model, made.arrivals, made.seconds) == (url, "m", Poisson(2.0), 30.0)
    assert "locust -f" in written.err
    file = tmp_path / "plan.json"
    file.write_text(written.out)
    assert make_plan(parsed(plan_arguments.add_plan_arguments, "--plan", file)) == made


def test_plan_writes_none_that_can_t_be_carried_out(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"/v1/models": b'{"data": [{"id": "m", "max_model_len": 4096}]}'}) as url:
        too_long = parsed(
            measure.add_write_arguments, "--url", url, "--rate", 2, "--workload", "fixed", "--input-tokens", 5000
        )
        with pytest.raises(LoadTestError, match="don't fit"):
            measure.run_write(too_long)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either two NAME=FOLDER or more, or --urls"),
        (["a=x"], "two servers or more"),
        (["a=x", "a=y"], "two servers or more"),
        (["--urls", "a=http://x", "a=http://y"], "a name of its own"),
    ],
)
def test_compare_names_the_argument_that_is_wrong(arguments: list[str], words: str) -> None:
    with pytest.raises(LoadTestError, match=words):
        compare.run(parsed(compare.add_arguments, *arguments))


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
        parsed(compare.add_arguments, "--urls", *urls, "--rounds", 2, "--output", out, "--plan", tmp_path / "plan.json")
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


NO_SLO = Plan("http://127.0.0.1:1", "m", 4096, PLAN.arrivals, PLAN.workload, SLO(), seconds=20.0, seed=100)


def parsed_sweep(*given: str) -> argparse.Namespace:
    return parsed(measure.add_sweep_arguments, "--url", "http://127.0.0.1:1", *given)


@pytest.mark.parametrize(
    ("add_arguments", "given", "message"),
    [
        (measure.add_sweep_arguments, "--rates 1,many", "argument --rates"),
        (measure.add_sweep_arguments, "--rates 1,0", "argument --rates: 0: give more than 0"),
        (measure.add_sweep_arguments, "--start 0", "argument --start: 0: give more than 0"),
        (measure.add_sweep_arguments, "--repeats 12", "argument --repeats: invalid choice"),
        (measure.add_sweep_arguments, "--budget nan", "argument --budget: nan: give more than 0"),
        (measure.add_sweep_arguments, "--slo-multiple ttft=0", "argument --slo-multiple: 0: give more than 0"),
        (compare.add_arguments, "a=x b", "b is not a name, = and what it names"),
        (compare.add_arguments, "--urls ../a=http://x b=http://y", "argument --urls: ../a=http://x is not a name"),
        (compare.add_arguments, "--rounds 0", "argument --rounds: 0: give at least 1"),
    ],
)
def test_an_argument_that_is_wrong_by_itself_is_refused_by_its_name(
    add_arguments: Callable[[argparse.ArgumentParser], None],
    given: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parsed(add_arguments, *given.split())
    assert message in capsys.readouterr().err


def test_the_folder_of_another_sweep_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(LoadTestError, match="has a sweep already; name another folder"):
        measure.run_sweep(parsed_sweep("--output", str(tmp_path)))


def test_a_sweep_without_an_slo_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "make_plan", lambda arguments, arrivals: NO_SLO)
    with pytest.raises(LoadTestError, match="give --slo or --slo-multiple"):
        measure.run_sweep(parsed_sweep("--output", str(tmp_path)))


def test_a_server_that_goes_away_ends_the_sweep_with_a_report_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([summarise_observations(1.0, Validity(True))])

    def run_at(plan: Plan, folder: Path) -> Summary:
        if (summary := next(found, None)) is None:
            raise LoadTestError("no server answers")
        return summary

    monkeypatch.setattr(measure, "make_plan", lambda arguments, arrivals: PLAN)
    monkeypatch.setattr(measure, "_run_at", run_at)
    monkeypatch.setattr(measure, "write_sweep_report", read_sweep)
    assert measure.run_sweep(parsed_sweep("--output", str(tmp_path))) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["valid"], said["ended_early"]) == (True, "no server answers")
    assert said["capacity"]["0.9"] == {"value": 1.0, "low": None, "high": None, "is_lower_bound": True}
    with pytest.raises(LoadTestError, match="nothing was measured: no server answers"):
        measure.run_sweep(parsed_sweep("--output", str(tmp_path / "other")))


def spread(p50: float) -> Spread:
    return Spread(9, p50, Estimate(p50), p50, p50, Estimate(p50), p50)


def measured(monkeypatch: pytest.MonkeyPatch, summary: Summary) -> list[Plan]:
    """The plans of uncontended runs; each has this result."""
    plans: list[Plan] = []

    def run_plan(plan: Plan, folder: Path) -> RunFolder:
        plans.append(plan)
        return RunFolder(folder)

    monkeypatch.setattr(plan_arguments, "run_plan", run_plan)
    monkeypatch.setattr(plan_arguments, "summarise", lambda folder: summary)
    return plans


def result(ok: int) -> Summary:
    fields = {"counts": Counts(ok, ok, 0, 0, 0, ok, ok, ok), "ttft": spread(0.2), "tpot": spread(0.01)}
    whole = summarise_observations(1.0, Validity(True))
    return Summary(**({name: getattr(whole, name) for name in Summary.__struct_fields__} | fields))


def test_an_slo_is_multiples_of_one_users_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = measured(monkeypatch, result(9))
    plan = with_slo_multiple(NO_SLO, parsed_sweep("--slo-multiple", "ttft=5,tpot=2"), tmp_path)
    assert plan.slo == SLO(ttft_s=1.0, tpot_s=0.02)
    assert (plans[0].arrivals, plans[0].seconds, plans[0].workload) == (Closed(1), 20.0, NO_SLO.workload)
    assert plans[0].seed != NO_SLO.seed
    only = with_slo_multiple(NO_SLO, parsed_sweep("--slo-multiple", "tpot=3"), tmp_path)
    assert only.slo == SLO(tpot_s=0.03)


def test_too_few_answers_make_no_slo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, result(4))
    with pytest.raises(LoadTestError, match="had 4 whole answers in 20 s, too few for an SLO: give more --seconds"):
        with_slo_multiple(NO_SLO, parsed_sweep("--slo-multiple", "ttft=5"), tmp_path)


def test_an_slo_and_a_multiple_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="there is an SLO already"):
        with_slo_multiple(PLAN, parsed_sweep("--slo-multiple", "ttft=5"), tmp_path)
    assert with_slo_multiple(PLAN, parsed_sweep(), tmp_path) == PLAN


def test_ctrl_c_before_a_run_begins_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_plan(plan: Plan, folder: Path, **_: Any) -> None:
        make_folder(folder)
        write_json(RunFolder(folder).plan_path, plan)
        raise KeyboardInterrupt

    arguments = lose_after(monkeypatch, 0, tmp_path / "run")
    monkeypatch.setattr(measure, "run_plan", run_plan)
    assert measure.run_run(arguments) == measure.INTERRUPTED_EXIT
    assert capsys.readouterr().err == "interrupted before the run began: nothing was measured\n"


def lose_after(monkeypatch: pytest.MonkeyPatch, num_requests: int, folder: Path) -> argparse.Namespace:
    """Have a run end after so many requests. Returns the command's arguments."""

    def run_plan(run_plan: Plan, folder: Path, **_: Any) -> None:
        write_run(folder, drawn(num_requests, 10.0), run_facts=facts(ended_early=True))
        raise RunLost("sending process 0 was killed by SIGKILL")

    monkeypatch.setattr(measure, "make_plan", lambda arguments: plan())
    monkeypatch.setattr(measure, "run_plan", run_plan)
    return parsed(measure.add_run_arguments, "--output", folder)


def test_a_lost_run_has_a_report_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure.run_run(lose_after(monkeypatch, 50, tmp_path / "run")) == 1
    told = capsys.readouterr()
    assert "killed by SIGKILL" in told.err
    said = json.loads(told.out.splitlines()[-1])
    assert (said["valid"], said["lost"]) == (False, "sending process 0 was killed by SIGKILL")
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_that_is_lost_before_its_first_answer_has_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunLost):
        measure.run_run(lose_after(monkeypatch, 0, tmp_path / "run"))
