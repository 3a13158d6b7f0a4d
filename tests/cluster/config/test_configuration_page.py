"""docs/configuration.md: its tables are the models', which say of every setting what it is and what it may be."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from twostroke.cluster.cli import main
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.config.reading import setting_paths
from twostroke.cluster.config.reference import BEGIN, DOZEN, END, Setting, section_settings
from twostroke.protocol.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
SETTINGS = {one.path: one for one in section_settings(ClusterConfig)}
MEMBERS = {"classes[]": {"name": "x"}, "keys[]": {"name": "x", "sha256": "ab" * 32}}
BESIDE = {"redundant_experts": {"tensor_parallel": 2, "expert_parallel": True}}
"""Settings that a setting needs beside it."""
NUMBER = r"-?\d+(?:\.\d+)?"
RANGE = re.compile(
    rf"(?:(?:at least|(?P<above>above)) )?(?P<low>{NUMBER})(?:,? to (?P<below>below )?(?P<high>{NUMBER}))?"
)


def test_the_tables_of_the_page_are_made_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    found = PAGE[PAGE.index(BEGIN) : PAGE.index(END) + len(END)] + "\n"
    assert found == capsys.readouterr().out, "put in their place what this prints: twostroke config reference"


def test_every_setting_is_told_of_with_what_it_is() -> None:
    assert [path for path in SETTINGS if path not in ("slo.classes", "auth.keys")] == sorted(
        setting_paths(ClusterConfig), key=list(SETTINGS).index
    )
    assert [one.path for one in SETTINGS.values() if not re.fullmatch(r"\S.{10,}\.", one.text)] == []


def test_those_that_come_first_are_about_a_dozen_and_are_there() -> None:
    assert {path for paths in DOZEN for path in paths} <= SETTINGS.keys()
    assert 10 <= len(DOZEN) <= 13


@pytest.mark.parametrize(
    ("path", "default", "values"),
    [
        ("model.path", "bundled", "a text"),
        ("model.dtype", "auto", "`auto`, `bfloat16`, `float32`"),
        ("prefill.dtype", "null", "`auto`, `bfloat16`, `float32`"),
        ("decode.run_ahead", "true", "`true`, `false`"),
        ("decode.num_gpus", "auto", "`auto`, 0 to 64"),
        ("decode.watermark", "0.01", "0 to below 1"),
        ("decode.token_channel.max_unsent_bytes", "4194304", "at least 1"),
        ("prefill.node_labels", "{}", "texts by name"),
        ("prefill.node_resources", "{}", "0.0001 to 100000 by name"),
        ("router.cors_origins", "[]", "texts"),
        ("router.request_timeout_s", "600", "above 0"),
        ("router.tracing.endpoint", "null", "a text"),
        ("kv_transfer.lease_s", "3", "a number"),
        ("slo.classes", "[{name: standard}]", "sections"),
        ("slo.classes[].name", "required", "a text"),
        ("slo.classes[].priority", "0", "-1000 to 1000"),
        ("autoscaling.slack", "0.5", "above 0, to 1"),
    ],
)
def test_defaults_and_values_of_each_kind_are_told_for_people(path: str, default: str, values: str) -> None:
    assert SETTINGS[path][1:3] == (default, values)


@pytest.mark.parametrize(
    "setting", [one for one in SETTINGS.values() if RANGE.match(one.values)], ids=lambda one: one[0]
)
def test_a_bound_is_the_one_that_is_checked_or_the_text_names_what_gives_it(setting: Setting) -> None:
    found = RANGE.fullmatch(setting.values.removesuffix(" by name"))
    assert found is not None
    for number, is_out in ((found["low"], found["above"]), (found["high"], found["below"])):
        if number is None or is_out:
            continue
        value = yaml.safe_load(number)
        refusal = refusal_of(nested(setting.path, {"x": value} if setting.values.endswith(" by name") else value))
        told = {*re.findall(r"`(?:\w+\.)*(\w+)`", setting.text), *re.findall(NUMBER, setting.text)}
        named = {*re.findall(r"[a-z_]+|[\d.]*\d", refusal)} - {number, setting.path.rpartition(".")[2]}
        assert not refusal or told & named, refusal


def refusal_of(raw: object) -> str:
    """Empty where it is taken."""
    try:
        read_config(raw)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_files_that_the_page_shows_are_right() -> None:
    block = PAGE.split("\n    model: ")[1].split("\n\n")[0]
    config = read_config(yaml.safe_load("    model: " + block))
    assert config.autoscaling.enabled
    assert config.slo.default_class.name == "batch"


def nested(path: str, value: object) -> dict[str, Any]:
    """The setting as YAML gives it, beside what it needs, in a list beside what its members need."""
    raw: Any = value
    for part in reversed(path.split(".")):
        raw = {part.removesuffix("[]"): [MEMBERS[part] | raw] if part.endswith("[]") else raw, **BESIDE.get(part, {})}
    assert isinstance(raw, dict)
    return raw
