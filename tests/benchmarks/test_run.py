"""`bench run`: plans that ship can be carried out, and a plan's servers take turns, are compared and judged."""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.loadtests.stub_server import stub_server
from twostroke.benchmarks.run import PLANS, BenchPlan, read_plan, resolved
from twostroke.cluster.cli import main
from twostroke.cluster.config.config import read_config
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report.checks import FIGURES
from twostroke.loadtests.run_folder import read_json
from twostroke.loadtests.workloads.sessions import sessions

SHIPPED = sorted(path.stem for path in PLANS.glob("*.yaml"))


def read(name: str) -> BenchPlan:
    return read_plan(SimpleNamespace(plan=name, servers=None, loads=None, model=None, rounds=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_plan_that_ships_has_configurations_that_a_server_takes_and_figures_of_its_own_loads(name: str) -> None:
    plan = read(name)
    for server in plan.servers.values():
        config = resolved(server.get("config", {}), lambda figure: max(1.0, figure.least))
        assert config or server["command"]
        read_config(json.loads(json.dumps(config).replace("{folder}", "/tmp")))
    parts = chain.from_iterable((one.of, one.over) for one in plan.figures.values())
    paths = [path for part in parts for path in ([part] if isinstance(part, str) else part)]
    assert paths
    for path in paths:
        load, server_name, figure = path.split(".")
        assert server_name in plan.loads[load].get("servers", plan.servers), path
        assert server_name in plan.servers, path
        assert figure in FIGURES or figure in MORE or figure == "capacity", path


MORE = {
    *(f"{group}_cpu_us_per_token" for group in ("router", "proxy", "prefill", "decode", "client")),
    *(f"{role}_workers_{what}" for role in ("prefill", "decode") for what in ("most", "at_end", "changes")),
    *("cores_busy", "wall_s", "prompt_tok_s", "cached_share", "itl_p99_s_short", "tokens_per_step"),
}


def test_requests_of_a_template_have_words_of_their_own_and_the_same_for_all_servers(tmp_path: Path) -> None:
    raw = yaml.safe_load((PLANS / "speculation.yaml").read_text())["loads"]["c1_schemas"]
    plan = {"url": "", "model": "m", "max_context": 100, "slo": {}, "seconds": 9, **raw}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    bodies = [session.turns[0].fields for session in sessions(read_json(tmp_path / "plan.json", Plan))][:3]
    again = [session.turns[0].fields for session in sessions(read_json(tmp_path / "plan.json", Plan))][:3]
    assert bodies == again
    assert len({json.dumps(body) for body in bodies}) == 3
    schema = bodies[0]["response_format"]["json_schema"]["schema"]  # type: ignore[index]
    assert schema["required"] == list(schema["properties"])
    assert "$" not in json.dumps(bodies)


CLOSED = {"type": "closed", "users": 2, "requests": 4}
FIXED = {"type": "fixed", "input_tokens": 8, "output_tokens": 4}
PLAN: dict[str, Any] = {
    "about": "two stubs",
    "rounds": 2,
    "loads": {
        "closed": {"arrivals": CLOSED, "workload": FIXED},
        "open": {
            "servers": ["two"],
            "arrivals": {"type": "constant", "rate": {"of": "closed.one.ok", "times": 5}},
            "workload": FIXED,
            "seconds": 1,
            "slo": {"ttft_s": 5},
        },
    },
    "figures": {
        "ratio": {"of": "closed.two.output_rate", "over": ["closed.one.output_rate"]},
        "requests": {"of": "open.two.scheduled", "at_least": 15},
    },
}


def carry_out(
    plan: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, dict[str, Any]]:
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    code = main(["bench", "run", str(folder / "plan.yaml"), "--output", str(folder / "runs"), *more])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_servers_take_turns_and_a_load_may_depend_on_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server("immediate") as (url, served), stub_server("steady") as (other, _):
        code, told = carry_out(PLAN | {"servers": {"one": {"url": url}, "two": {"url": other}}}, tmp_path, capsys)
    assert code == 0
    assert told["ratio"] < 0.5, "a steady server writes 50 tokens a second, the other a thousand"
    assert told["requests"] == 20
    assert (told["errors"], told["missed"]) == (0, [])
    assert told["loads"]["closed"]["names"] == ["one", "two"]
    assert len(served) == 8
    plans = {path: read_json(path, Plan) for path in (tmp_path / "runs").rglob("plan.json")}
    began = {
        path.parent.relative_to(tmp_path / "runs"): json.loads((path.parent / "run.json").read_text())["started_at"]
        for path in plans
    }
    closed = sorted((at, str(path)) for path, at in began.items() if path.parts[0] == "closed")
    assert [path for _, path in closed] == [
        "closed/one/round-1",
        "closed/two/round-1",
        "closed/two/round-2",
        "closed/one/round-2",
    ], "each round begins with another server"
    seeds = {plan.url: set[int]() for plan in plans.values()}
    for plan in plans.values():
        if plan.name == "closed":
            seeds[plan.url].add(plan.seed)
    assert seeds[url] == seeds[other], "servers get the same prompts, others in each round"
    assert len(seeds[url]) == 2


def test_a_figure_beyond_its_bound_and_a_request_that_failed_fail_the_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_load = {"loads": {"closed": PLAN["loads"]["closed"]}, "rounds": 1}
    with stub_server("immediate") as (url, _):
        bound = {"figures": {"wall_s": {"of": "closed.one.wall_s", "at_most": 1e-6}}}
        plan = PLAN | one_load | bound | {"servers": {"one": {"url": url}}}
        assert carry_out(plan, tmp_path, capsys)[1]["missed"] == ["wall_s"]
    with stub_server("mixed") as (url, _):
        plan = PLAN | one_load | {"figures": {}, "servers": {"one": {"url": url}}, "request_limit_s": 0.5}
        code, told = carry_out(plan, tmp_path, capsys, "--requests", "24")
    assert code == 1
    assert told["errors"] > 0


def test_a_search_finds_the_rate_that_a_share_of_the_requests_still_bears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = {
        "arrivals": {"type": "poisson", "rate": 20},
        "workload": FIXED,
        "seconds": 1,
        "search": 0.9,
        "slo": {"ttft_s": 1e-6},
    }
    figures = {"figures": {"found": {"of": "at.one.capacity"}}}
    with stub_server("immediate") as (url, _):
        plan = PLAN | {"rounds": 1, "loads": {"at": load}, "servers": {"one": {"url": url}}} | figures
        told = carry_out(plan, tmp_path, capsys)[1]
    assert told["found"] == pytest.approx(20 / 8), "none is in time: the lowest rate that was tried"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"loads": {"a": {"arrivals": CLOSED}}}, "workload"),
        ({"servers": {"one": {"uri": "http://127.0.0.1:1"}}}, "uri"),
        ({"figures": {"x": {"off": "a.b.c"}}}, "off"),
    ],
)
def test_a_plan_with_a_wrong_field_names_it(
    change: dict[str, Any], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(json.dumps(PLAN | {"servers": {}} | change))
    assert main(["bench", "run", str(tmp_path / "plan.yaml")]) == 2
    assert fault in capsys.readouterr().err


def test_a_plan_server_or_load_that_is_not_there_is_told_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, known in (
        (["none"], "autoscaling"),
        (["roles", "--loads", "c9"], "c8, c32"),
        (["roles", "--servers", "x"], "split"),
    ):
        assert main(["bench", "run", *words]) == 2
        assert known in capsys.readouterr().err
