"""docs/configuration.md tells of every setting there is, and tells the truth."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import pytest
import yaml
from pydantic import HttpUrl

from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import Section

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
REQUIRED = "required"
MEMBERS = {"classes[]": {"name": "x"}, "keys[]": {"name": "x", "sha256": "ab" * 32}}
BESIDE = {"redundant_experts": {"tensor_parallel": 2, "expert_parallel": True}}
"""Without which a setting can't be."""
UNITS = {"_bytes_per_s": "bytes a second", "_s": "s", "_bytes": "bytes", "_mib": "MiB", "_gib": "GiB"}


class Setting(NamedTuple):
    kind: Any
    default: object


class Row(NamedTuple):
    default: object
    unit: str
    bounds: str
    text: str


def settings_of(section: type[Section], path: str = "") -> Iterator[tuple[str, Setting]]:
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if get_origin(kind) is tuple and isinstance(get_args(kind)[0], type):
            yield from settings_of(get_args(kind)[0], f"{path}{name}[].")
        elif isinstance(kind, type) and issubclass(kind, Section):
            yield from settings_of(kind, f"{path}{name}.")
        else:
            default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
            yield f"{path}{name}", Setting(kind, default)


def rows() -> Iterator[tuple[str, Row]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            for name in cells[0].split(","):
                yield name.strip(" `"), Row(yaml.safe_load(cells[1].strip("`")), *cells[2:])


SETTINGS, ROWS = dict(settings_of(ClusterConfig)), dict(rows())


def test_every_setting_is_on_the_page_and_no_other() -> None:
    assert sorted(ROWS) == sorted(SETTINGS)
    assert len(list(rows())) == len(ROWS)


def test_the_dozen_that_come_first_are_settings() -> None:
    part = PAGE.read_text(encoding="utf-8").split("## The dozen that matter")[1].split("\n## ")[0]
    names = [name for line in part.splitlines() if line.startswith("| `") for name in re.findall("`([^`]+)`", line)]
    assert set(names) - {"slo.classes"} <= set(SETTINGS)
    assert "slo.classes[].name" in SETTINGS
    assert 10 <= len(part.splitlines()) <= 20


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_told_with_its_default_and_unit(name: str) -> None:
    row, setting = ROWS[name], SETTINGS[name]
    assert row.default == (list(setting.default) if isinstance(setting.default, tuple) else setting.default)
    assert row.text
    unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), None)
    assert unit is None or row.unit == unit


@pytest.mark.parametrize("name", SETTINGS)
def test_a_settings_bounds_are_those_that_are_checked(name: str) -> None:
    row, kind = ROWS[name], SETTINGS[name].kind
    options = [get_args(one)[0] if get_origin(one) is Annotated else one for one in get_args(kind) or (kind,)]
    by_name = get_origin(kind) is Mapping
    assert row.bounds.endswith(" by name") == by_name
    bounds = row.bounds.removeprefix("`auto`, ")
    literals = [one for one in (kind, *options) if get_origin(one) is Literal]
    if literals and float not in options:
        assert row.bounds == ", ".join(f"`{option}`" for option in get_args(literals[0]))
    elif kind is bool:
        assert row.bounds == "`true`, `false`"
    elif get_origin(kind) is tuple:
        assert row.bounds == "texts"
    elif by_name and options[1] is str:
        assert row.bounds == "texts by name"
    elif (str in options or HttpUrl in options) and not by_name:
        assert row.bounds == "a text"
    else:
        assert bool(literals) == (bounds != row.bounds)
        step = 1 if int in options else 1e-6
        allowed, refused = edges(bounds.removesuffix(" by name"), step)
        for value in allowed:
            read_config(nested(name, {"x": value} if by_name else value))
        for value in refused:
            with pytest.raises(ConfigError, match=name.split(".")[-1]):
                read_config(nested(name, {"x": value} if by_name else value))


def edges(bounds: str, step: float) -> tuple[list[float], list[float]]:
    """(values just inside, values just outside) of what the page says."""
    number = r"(-?\d+(?:\.\d+)?)"
    if found := re.fullmatch(f"{number} to {number}", bounds):
        low, high = map(yaml.safe_load, found.groups())
        return [low, high], [low - step, high + step]
    if found := re.fullmatch(f"{number} to below {number}", bounds):
        low, high = map(yaml.safe_load, found.groups())
        return [low, high - step], [low - step, high]
    if found := re.fullmatch(rf"at least {number}(?: \(.*\))?", bounds):
        low = yaml.safe_load(found[1])
        return [low], [low - step]
    if found := re.fullmatch(f"above {number}", bounds):
        low = yaml.safe_load(found[1])
        return [low + step], [low]
    raise AssertionError(f"no bounds that this test can read: {bounds}")


def nested(name: str, value: object) -> dict[str, Any]:
    """The setting as YAML gives it, beside what it needs, in a list beside what its members need."""
    raw: Any = value
    for part in reversed(name.split(".")):
        raw = {part.removesuffix("[]"): [MEMBERS[part] | raw] if part.endswith("[]") else raw, **BESIDE.get(part, {})}
    assert isinstance(raw, dict)
    return raw
