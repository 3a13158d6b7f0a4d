"""A command's arguments become a plan."""

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from tests.cluster.command_line import answering
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands.arguments import SLO_PRESETS, add_plan_arguments, make_plan, parse_slo, server_url
from twostroke.loadtests.plan import (
    SLO,
    Arrivals,
    Chat,
    Closed,
    Constant,
    Fixed,
    Gamma,
    LongPrompts,
    Plan,
    Poisson,
    Ramp,
    RateSteps,
    Replay,
    SharedPrompt,
    Synthetic,
    TraceFile,
    Workload,
)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return parser.parse_args(words)


def plan_from(*words: str, **card: object) -> Plan:
    models = {"data": [{"id": "m", "owned_by": "somebody", "max_model_len": 2048} | card, {"id": "other"}]}
    with answering({"/v1/models": json.dumps(models).encode()}) as url:
        return make_plan(arguments("--url", url, *words))


@pytest.mark.parametrize(
    ("words", "arrivals"),
    [
        ("--rate 2", Poisson(2.0)),
        ("--arrivals gamma --rate 2 --cv 4", Gamma(2.0, 4.0)),
        ("--arrivals constant --rate 2", Constant(2.0)),
        ("--arrivals ramp --rate 1 --to-rate 5", Ramp(1.0, 5.0)),
        ("--arrivals step --steps 0:1,30:4", RateSteps(((0.0, 1.0), (30.0, 4.0)))),
        ("--arrivals replay --speed 2", Replay(2.0)),
        ("--arrivals closed --users 3 --think 0.5", Closed(3, 0.5)),
    ],
)
def test_each_kind_of_arrivals(words: str, arrivals: Arrivals) -> None:
    assert plan_from(*words.split()).arrivals == arrivals


@pytest.mark.parametrize(
    ("words", "workload"),
    [
        ("", Synthetic("azure-conv")),
        ("--workload servegen", Synthetic("servegen")),
        ("--workload fixed --input-tokens 7", Fixed(7, 128)),
        ("--workload chat --turns 2 --think-time 1", Chat(turns=2.0, think_s=1.0)),
        ("--workload shared-prompt --shared-prompts 9", SharedPrompt(1024, 9, 128, 128)),
        ("--workload long-prompts --long-share 0.2", LongPrompts(64, 256, 4096, 16, 0.2)),
    ],
)
def test_each_kind_of_workload(words: str, workload: Workload) -> None:
    assert plan_from("--rate", "1", *words.split()).workload == workload


def test_a_trace_is_found_again_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "day.csv").write_text("")
    monkeypatch.chdir(tmp_path)
    plan = plan_from("--rate", "1", "--workload", "day.csv", "--format", "azure")
    assert plan.workload == TraceFile(str(tmp_path / "day.csv"), "azure")
    assert plan.name == "day"


def test_what_the_server_tells_need_not_be_given() -> None:
    plan = plan_from("--rate", "1")
    assert (plan.model, plan.max_context, plan.prompts, plan.vocabulary) == ("m", 2048, "text", 0)
    given = plan_from("--rate", "1", "--max-context", "512", "--vocabulary", "1000")
    assert (given.max_context, given.prompts, given.vocabulary) == (512, "ids", 1000)
    assert plan_from("--rate", "1", "--stop-at-eos").ignore_eos is False


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=0.5", SLO(ttft_s=0.5)),
        ("ttft=0.5,tpot=0.05", SLO(0.5, 0.05)),
        ("ttft=500ms,tpot=50ms", SLO(0.5, 0.05)),
        ("ttft=2s", SLO(2.0)),
        ("distserve-13b-chat", SLO_PRESETS["distserve-13b-chat"]),
    ],
)
def test_an_slo_is_times_or_a_preset(text: str, slo: SLO) -> None:
    assert parse_slo(text) == slo


def test_an_slo_of_minutes_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_slo("ttft=1000,tpot=50") == SLO(1000.0, 50.0)
    assert capsys.readouterr().err.splitlines() == [
        "--slo ttft=1000,tpot=50: ttft is 1000 seconds; milliseconds are written 1000ms",
        "--slo ttft=1000,tpot=50: tpot is 50 seconds; milliseconds are written 50ms",
    ]
    parse_slo("ttft=60,tpot=5")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("", "--arrivals poisson needs --rate"),
        ("--arrivals gamma --rate 1", "needs --cv"),
        ("--arrivals ramp --rate 1", "needs --to-rate"),
        ("--arrivals step", "needs --steps"),
        ("--rate 1 --users 4", "--arrivals poisson has no --users; it has --rate"),
        ("--arrivals closed --users 1 --rate 4", "closed has no --rate; it has --users, --think"),
        ("--rate 1 --workload nothing.csv", "no such file"),
        ("--rate 1 --workload chat --format azure", "--format azure: --workload chat is no trace"),
        ("--rate 1 --workload fixed --turns 2", "has no --turns; it has --input-tokens, --output-tokens"),
        ("--arrivals replay --rate 1", "replay has no --rate; it has --speed"),
        ("--plan nope.json", "--plan nope.json: no such file; name the plan.json"),
        ("--rate 1 --warm-up 60", "--warm-up 60"),
        ("--rate 1 --model third", "serves m, other, not third"),
        ("--rate 1 --model other", "give --max-context"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(words: str, fault: str) -> None:
    with pytest.raises(LoadTestError, match=fault):
        plan_from(*words.split())


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--steps 0,1", "argument --steps: 0,1: write FROM:RATE pairs"),
        (
            "--slo fast",
            "argument --slo: fast: write, for example, ttft=0.5,tpot=0.05, or one of them, or one of mlperf",
        ),
        ("--slo ttft=500us", "ttft=500us: write, for example"),
        ("--slo e2e=1", "e2e=1: write, for example"),
        ("--slo ttft=-1", "-1: give more than 0"),
        ("--seconds nan", "argument --seconds: nan: give more than 0"),
        ("--workers 0", "argument --workers: 0: give at least 1"),
        ("--vocabulary 0", "argument --vocabulary: 0: give at least 1"),
    ],
)
def test_a_wrong_value_is_refused_as_it_is_read(words: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(*words.split())
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize("given", ["http://h:1/v1", "http://h:1/v1/", "h:1", "h:1/v1", "http://h:1/"])
def test_the_address_that_openai_s_clients_are_given_will_do(given: str) -> None:
    assert server_url(given) == "http://h:1"


def test_an_address_keeps_its_scheme_and_its_path() -> None:
    assert server_url("https://h/models/v1") == "https://h/models"


def test_a_plan_of_a_file_is_repeated_as_it_is_on_any_server(tmp_path: Path) -> None:
    plan = plan_from("--rate", "1", "--seed", "7")
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    words = ["--plan", str(tmp_path / "plan.json")]
    assert make_plan(arguments(*words)) == plan
    elsewhere = make_plan(arguments(*words, "--url", "http://there", "--name", "again"))
    assert elsewhere == msgspec.structs.replace(plan, url="http://there", name="again")
    with pytest.raises(LoadTestError, match="--seed can't stand beside --plan"):
        make_plan(arguments(*words, "--seed", "8"))
