"""`twostroke simulate` as people call it."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from tests.cluster.command_line import one_line
from twostroke.cluster.cli import main
from twostroke.planning.costs.profiles import SMALL, named_profile
from twostroke.protocol.errors import ConfigError

FIGURES = {
    "workers",
    "requests",
    "seconds",
    "peak_rss_bytes",
    "ttft_p50_s",
    "ttft_p90_s",
    "tpot_p50_s",
    "tpot_p90_s",
    "attainment",
}
ASKED = ("simulate", "--workload", "fixed", "--input-tokens", "200", "--output-tokens", "20", "--rate", "4", "--json")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*ASKED, *arguments]) == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return told


@pytest.mark.parametrize("events", ["exact", "coarse"])
def test_the_last_line_has_the_figures_and_a_seed_repeats_them(events: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--fleet", "prefill=1,decode=1", "--requests", "30", "--slo", "ttft=1,tpot=0.1", "--events", events)
    first, again, other = (simulated(capsys, *asked, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.keys() >= FIGURES
    assert (first["workers"], first["requests"], first["attainment"]) == (2, 30, 1.0)
    of_machine = {"seconds", "peak_rss_bytes"}
    same, once_more, another = ({k: v for k, v in one.items() if k not in of_machine} for one in (first, again, other))
    assert same == once_more != another


@pytest.mark.parametrize("events", ["exact", "coarse"])
def test_answers_that_repeat_earlier_text_come_sooner(events: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--fleet", "decode=1", "--requests", "20", "--output-tokens", "100", "--rate", "1", "--events", events)
    plain, drafted = (simulated(capsys, *asked, "--repeated", share)["tpot_p50_s"] for share in ("0", "0.7"))
    assert isinstance(plain, float)
    assert isinstance(drafted, float)
    assert drafted < 0.75 * plain


def test_a_worker_that_crashes_costs_no_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('[{"at_s": 1.0, "role": "decode"}]')
    asked = ("--fleet", "prefill=1,decode=2", "--requests", "20", "--slo", "ttft=9")
    struck, calm = simulated(capsys, *asked, "--faults", str(faults)), simulated(capsys, *asked, "--events", "exact")
    assert struck["requests"] == calm["requests"] == 20
    assert struck["attainment"] == 1.0
    assert struck["tpot_p99_s"] != calm["tpot_p99_s"]


def test_the_autoscaler_of_the_configuration_decides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "serving.yaml"
    limits = "{min: 1, max: 8}"
    scaled = f"autoscaling: {{enabled: true, prefill: {limits}, decode: {limits}}}"
    config.write_text(f"{scaled}\nslo: {{classes: [{{name: all, ttft_s: 1.0, tpot_s: 0.1}}], admission: false}}\n")
    asked = ("--requests", "3000", "--slo", "ttft=1,tpot=0.1", "--input-tokens", "1000", "--rate", "12")
    alone = simulated(capsys, *asked, "--fleet", "prefill=1,decode=1", "--events", "coarse")
    grown = simulated(capsys, *asked, "--config", str(config))
    assert alone["attainment"] < 0.2 < 0.6 < grown["attainment"]  # type: ignore[operator]


def test_costs_are_read_from_a_file_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(SMALL))
    assert named_profile(str(path)) == SMALL
    for wrong in (["--costs", str(tmp_path / "none.json")], ["--costs", str(Path(__file__))], ["--fleet", "decode=0"]):
        with pytest.raises(SystemExit) if wrong[0] == "--fleet" else _nothing():
            assert main([*ASKED, "--requests", "3", *wrong]) == 2


def test_a_report_is_a_load_tests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    simulated(capsys, "--fleet", "prefill=1,decode=1", "--requests", "40", "--slo", "ttft=1", "--report", str(tmp_path))
    assert {"plan.json", "report.json", "report.html"} <= {path.name for path in tmp_path.iterdir()}


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rate", "0.01", "--seconds", "10"), "no request comes in that time"),
        (
            ("--requests", "9", "--baselines", "--repeated", "0.5"),
            "--repeated: the ways of --baselines draft no tokens",
        ),
        (("--requests", "9", "--rates", "1,2"), "--rates: are of --against; give one --rate"),
        (("--requests", "9", "--kv-tokens", "1"), "--kv-tokens 1: less than a block of 16 tokens"),
        (
            ("--requests", "9", "--kv-tokens", "64"),
            "can't be served: This model's maximum context length is 65 tokens. However, you requested 220",
        ),
        (
            ("--requests", "9", "--kv-tokens", "64", "--events", "coarse"),
            "a request of 220 tokens has no room in a worker's 64",
        ),
        (("--requests", "9", "--warm-up", "1e9"), "--warm-up 1e+09: the last request comes after"),
        (("--requests", "9", "--warm-up", "1e9", "--events", "coarse"), "--warm-up 1e+09: the last request"),
    ],
)
def test_what_nothing_can_be_said_of_is_told_in_one_line(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, "--fleet", "prefill=1,decode=1", *arguments]) == 2
    assert told in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--warm-up", "nan"),
        ("--warm-up", "-5"),
        ("--max-context", "1"),
        ("--repeated", "1.5"),
        ("--fleet", "prefill=1,decode=99999999999"),
    ],
)
def test_numbers_that_no_run_has_are_refused_as_arguments(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*ASKED, *arguments])
    assert f"argument {arguments[0]}: {arguments[1]}: give" in capsys.readouterr().err


@pytest.mark.parametrize("roles", ["fixed", "flexible"])
def test_while_the_only_decode_worker_is_down_requests_are_refused_unless_a_prefill_worker_may_write(
    roles: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    faults, config = tmp_path / "faults.json", tmp_path / "config.yaml"
    config.write_text(f"router: {{roles: {roles}}}")
    faults.write_text(json.dumps([{"at_s": 0.5 + number / 10, "role": "decode"} for number in range(4)]))
    told = simulated(
        capsys, "--fleet", "prefill=1,decode=1", "--requests", "30", "--faults", str(faults), "--config", str(config)
    )
    assert told["requests"] == 30
    assert (0 < int(str(told["refused"])) < 30) == (roles == "fixed")


def test_a_trace_of_requests_without_tokens_is_served_as_of_one_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "zero.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}\n')
    asked = ["simulate", "--workload", str(trace), "--rate", "4", "--json", "--requests", "3"]
    assert main([*asked, "--fleet", "prefill=1,decode=1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["requests"] == 3
    trace.write_text('{"timestamp": 0, "input_length": 12345678901234567890, "output_length": 5, "hash_ids": []}\n')
    assert main([*asked, "--fleet", "prefill=1,decode=1"]) == 2
    assert "zero.jsonl, line 1: Expected `int` <= 1000000000" in one_line(capsys)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kv_bytes": 0}, "`float` > 0.0 - at `$.kv_bytes`"),
        ({"kv_tokens": -5}, "`int` >= 16 - at `$.kv_tokens`"),
        ({"link_bytes_per_s": -1}, "`float` > 0.0 - at `$.link_bytes_per_s`"),
        ({"step_tokens": 0}, "`int` >= 1 - at `$.step_tokens`"),
        ({"max_batch": 0}, "`int` >= 1 - at `$.max_batch`"),
        ({"num_layers": 0}, "`int` >= 1 - at `$.num_layers`"),
        ({"costs": [-1, 0, 0, 0, 0]}, "costs: seconds below 0"),
    ],
)
def test_costs_that_no_worker_has_are_refused_by_name(change: dict[str, object], told: str, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(msgspec.to_builtins(SMALL) | change))
    with pytest.raises(ConfigError, match=re.escape(told)):
        named_profile(str(costs))
