"""The parsers take the flags, metrics and fields that docs/from-vllm.md names."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twostroke.cluster.commands.serve import add_arguments, merged_settings
from twostroke.cluster.config import other_servers
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.config.other_servers import COMMANDS, INSTEAD, SAME
from twostroke.cluster.config.reading import setting_paths
from twostroke.protocol.errors import ConfigError, RequestError
from twostroke.router.openai.schemas import ChatRequest, CompletionRequest, UnknownFields

DOCS = Path(__file__).parents[3] / "docs"
REQUESTS = (
    (CompletionRequest, {"prompt": "x"}),
    (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
)
SETTINGS = {*setting_paths(ClusterConfig), "auth.keys"}
SAMPLES = {
    "--dtype": "bfloat16",
    "--kv-cache-dtype": "fp8_e4m3",
    "--quantization": "int8",
    "--generation-config": "none",
    "--speculative-config": "ngram",
    "--otlp-traces-endpoint": "http://localhost:4318/v1/traces",
    "--gpu-memory-utilization": "0.7",
    "--max-num-batched-tokens": "768",
    "--tensor-parallel-size": "4",
    "--pipeline-parallel-size": "4",
}
"""Values for settings that do not take 257."""


def cells_of(part: str) -> Iterator[list[str]]:
    """The rows of the tables under a heading."""
    text = (DOCS / "from-vllm.md").read_text(encoding="utf-8").split(f"\n## {part}\n")[1].split("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def words(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def name_of(cell: str) -> str:
    return words(cell)[0].removeprefix("--").replace("-", "_")


def typed(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return merged_settings(parser.parse_args(arguments))


def value_at(config: object, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


FLAGS = [cells for cells in cells_of("Flags") if len(cells) == 4]


def test_every_setting_that_is_ours_under_another_name_is_on_the_page() -> None:
    assert {name_of(cells[0]): tuple(words(cells[1])) for cells in FLAGS} == SAME
    assert {setting for settings in SAME.values() for setting in settings} <= SETTINGS
    ours = {name for cells in cells_of("Commands") for name in words(cells[0])}
    assert ours == {f"vllm {name}" for name in COMMANDS} - {"vllm complete"}


@pytest.mark.parametrize("name", [*other_servers.SGLANG_AS_VLLM, *other_servers.SGLANG_INSTEAD])
def test_a_name_of_sglangs_is_answered_and_is_none_of_vllms(name: str) -> None:
    assert name not in SAME.keys() | INSTEAD.keys()
    hint = other_servers.setting_hint(name)
    assert hint.startswith(f"SGLang's {name}")
    theirs = other_servers.SGLANG_AS_VLLM.get(name)
    assert all(setting in hint for setting in SAME.get(theirs or "", ()))
    assert other_servers.SGLANG_INSTEAD.get(name, INSTEAD.get(theirs or "", "")) in hint


@pytest.mark.parametrize("cells", FLAGS, ids=lambda cells: words(cells[0])[0])
def test_a_flag_sets_what_the_page_says_or_is_none(cells: list[str]) -> None:
    (flag,), settings = words(cells[0]), words(cells[1])
    if flag == "--enable-expert-parallel":
        config = read_config(typed("bundled", flag))
        assert all(value_at(config, setting) for setting in settings)
        assert not any(value_at(read_config(typed("bundled")), setting) for setting in settings)
        return
    value = SAMPLES.get(flag, "257")
    if cells[2] == "no":
        with pytest.raises(SystemExit):
            typed("bundled", flag, value)
        return
    assert cells[2] == "yes"
    arguments = [flag, value] if flag == "--model" else ["bundled", flag, value]
    config = read_config(typed(*arguments))
    if flag == "--api-key":
        assert config.auth.keys[-1].admin
        return
    for setting in settings:
        found = value_at(config, setting)
        if setting.endswith("_bytes"):  # vLLM takes GiB
            found /= 2**30
        assert str(found).removesuffix(".0") == value


def test_metrics_are_those_that_there_are() -> None:
    told = set(words((DOCS / "observability.md").read_text(encoding="utf-8")))
    told |= {f"request_{stage}_time_seconds" for stage in ("queue", "prefill", "transfer", "decode")}
    ours = {name for cells in cells_of("Metrics") for name in words(cells[1])}
    assert len(ours) > 15
    assert ours <= told  # which a test of its own holds to what a scrape has


def judged(field: str) -> set[str]:
    """Return what happens to a field, by the models that check requests."""
    found = set()
    for kind, least in REQUESTS:
        if field in kind.model_fields:
            found.add("same")
        elif field in kind.lacking:
            with pytest.raises(ValueError, match="is not supported"):
                kind.model_validate({**least, field: {"anything": 1}})
            found.add("refused")
        else:
            with pytest.raises(RequestError, match="is not a known field"):
                UnknownFields(strict=True).check(kind.model_validate({**least, field: 1}))
            found.add("unknown")
    return found


def test_fields_of_requests_are_taken_refused_or_left_out_as_the_page_says() -> None:
    rows = [(words(cells[0]), cells[1]) for cells in cells_of("Fields of requests")]
    assert len(rows) == 7
    for fields, text in rows:
        for field in fields:
            if text == "the same":
                assert judged(field) == {"same"}, field
            elif text.startswith("the same"):
                where = CompletionRequest if "completions" in text else ChatRequest
                assert field in where.model_fields, field
            else:
                assert judged(field) == {"refused" if text.startswith("refused") else "unknown"}, field


@pytest.mark.parametrize("name", [*SAME, *INSTEAD])
def test_a_name_of_vllms_in_yaml_is_told_with_what_it_is_here(name: str) -> None:
    if name == "model":  # is a section here
        with pytest.raises(ConfigError, match=r"^model: 'm' stands where a section should"):
            read_config({name: "m"})
        return
    with pytest.raises(ConfigError, match="there is no such setting; ") as caught:
        read_config({name.replace("_", "-"): 1})
    hint = str(caught.value).partition("; ")[2]
    assert all(setting in hint for setting in SAME.get(name, ()))
    assert INSTEAD.get(name, "") in hint
