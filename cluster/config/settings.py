"""A dataclass from YAML's mappings and scalars: every key known, every type right, every error named by its path.

A field whose default is a dataclass is a section of its own, a tuple of dataclasses a list of sections, a mapping from
texts a section with names of the user's own; one marked `SAME_LEVEL` has its keys beside its owner's, so that a
consumer's own config can sit in a section together with settings that only the cluster cares for.

All numbers are times, sizes or counts: where a field has no bounds of its own, it can't be negative. A section that
its consumer owns is given bounds by whoever has it as a field, with `bounds_within`.

Settings in YAML files.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from twostroke.protocol.errors import ConfigError

T = TypeVar("T")

# What numbers must at least be, by their names; those of a section within, by the section's name.
Least = Mapping[str, "float | Least"]

_NO_BOUNDS: Least = {}

_SAME_LEVEL = "same_level"
_BOUNDS = "bounds"
_BOUNDS_WITHIN = "bounds_within"
_INSTEAD = "instead"
SAME_LEVEL = {_SAME_LEVEL: True}

_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"}


def bounds(low: float, high: float = math.inf) -> dict[str, tuple[float, float]]:
    """Field metadata: the value, if there is one, must be at least `low` and at most `high`; of a mapping, each."""
    return {_BOUNDS: (low, high)}


def bounds_within(**least: "float | Least") -> dict[str, Least]:
    """Metadata of a field that is a section."""
    return {_BOUNDS_WITHIN: least}


def instead(**names: str) -> dict[str, dict[str, str]]:
    """Metadata of a field with options: other names that people try, and which option they mean."""
    return {_INSTEAD: names}


def read_settings(cls: type[T], raw: object, path: str = "", least: Least = _NO_BOUNDS) -> T:
    """An instance of the dataclass `cls`. Raises ConfigError that begins with the path of what is wrong.

    `least` has lower bounds for numbers of the section that have none of their own.
    """
    if raw is None:  # a section with all of its lines commented out
        raw = {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path or 'the configuration'}: expected keys and values, found {_shown(raw)}")
    known = _known_keys(cls)
    for key in raw:
        if key not in known:
            raise ConfigError(_unknown(key, known, path))
    return _build(cls, raw, path, least)


def _build(cls: type[T], raw: Mapping[Any, object], path: str, least: Least) -> T:
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]  # T is always a dataclass here
        kind = hints[field.name]
        where = f"{path}.{field.name}" if path else field.name
        inherited = least.get(field.name, _NO_BOUNDS)
        within = field.metadata.get(_BOUNDS_WITHIN, inherited)
        if field.metadata.get(_SAME_LEVEL):
            values[field.name] = _build(kind, raw, path, within)
        elif field.name in raw:
            value = raw[field.name]
            member = member_of(kind)
            if member is not None:
                values[field.name] = _members(member, value, where, within)
            elif get_origin(kind) is Mapping:
                values[field.name] = _named_values(value, get_args(kind)[1], field, where)
            elif is_dataclass(kind):
                values[field.name] = read_settings(kind, value, where, within)  # type: ignore[arg-type]
            else:
                values[field.name] = _checked(
                    value, kind, field, where, 0.0 if isinstance(inherited, Mapping) else inherited
                )
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{where}: is required")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_located(str(error), hints, path)) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def member_of(kind: Any) -> type[Any] | None:
    """The dataclass of which a field of this type has a list; None for other fields."""
    arguments = get_args(kind)
    if get_origin(kind) is tuple and len(arguments) == 2 and is_dataclass(arguments[0]):
        return arguments[0]  # type: ignore[return-value]  # a class, since it is in an annotation
    return None


def _members(cls: type[T], raw: object, path: str, least: Least) -> tuple[T, ...]:
    if not isinstance(raw, list):
        raise ConfigError(f"{path}: expected a list, found {_shown(raw)}")
    for i, one in enumerate(raw):
        if not isinstance(one, Mapping):
            raise ConfigError(f"{path}[{i}]: expected keys and values, found {_shown(one)}")
    return tuple(read_settings(cls, one, f"{path}[{i}]", least) for i, one in enumerate(raw))


def _named_values(raw: object, kind: Any, field: Field[Any], path: str) -> dict[str, object]:
    """A mapping whose names are the user's. All values are of one kind, within the field's bounds."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: expected names and values, found {_shown(raw)}")
    for name in raw:
        if not isinstance(name, str):
            raise ConfigError(f"{path}: expected texts as names, found {_shown(name)}")
    return {name: _checked(value, kind, field, f"{path}.{name}", 0.0) for name, value in raw.items()}


def _located(message: str, hints: Mapping[str, Any], path: str) -> str:
    """What a section says of itself, with the path of the field that it begins with, if it does."""
    if not path or message.startswith(path):
        return message
    return f"{path}.{message}" if message.partition(":")[0] in hints else f"{path}: {message}"


def _known_keys(cls: type[Any]) -> list[str]:
    hints = get_type_hints(cls)
    names: list[str] = []
    for field in fields(cls):
        names += _known_keys(hints[field.name]) if field.metadata.get(_SAME_LEVEL) else [field.name]
    return names


def _unknown(key: object, known: list[str], path: str) -> str:
    where = f"{path}.{key}" if path else str(key)
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return f"{where}: there is no such setting; {hint}"


def _checked(value: object, kind: Any, field: Field[Any], where: str, least: float) -> object:
    meant = field.metadata.get(_INSTEAD, {}).get(value.lower()) if isinstance(value, str) else None
    if meant is not None:
        raise ConfigError(f"{where}: {value} is not a name here: set {meant}, which uses it")
    value = _typed(value, kind, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = field.metadata.get(_BOUNDS, (least, math.inf))
        if not low <= value <= high:
            wanted = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ConfigError(f"{where}: {value} must be {wanted}")
    return value


def _typed(value: object, kind: Any, where: str) -> object:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        if get_origin(option) is Literal:
            if isinstance(value, str) and value in get_args(option):
                return value
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
        elif type(value) is option:
            return value
    wanted = " or ".join(_named(option) for option in options)
    raise ConfigError(f"{where}: expected {wanted}, found {_shown(value)}")


def _named(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(get_args(option))
    return _TYPE_NAMES.get(option, str(option))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for a file that is missing or is none, or has a key twice."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _KeysOnce)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as model, prefill, decode, router, slo")
    return raw


class _KeysOnce(yaml.SafeLoader):
    """YAML's plain types; of a key that is given twice, YAML itself would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises ConfigError for a key that is given twice, with both lines."""
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise ConfigError(f"{key.value} is given twice, in lines {lines[name]} and {line}")
                lines[name] = line
        return super().construct_mapping(node, deep)
