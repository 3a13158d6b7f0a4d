"""From YAML to the sections of the configuration, and from pydantic's errors to one line that begins with the setting.

A section is a `Section` model beside whatever it configures. What is wrong in one is a ConfigError from here on.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import Section

S = TypeVar("S", bound=Section)

_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"}
_SECTION, _LIST = "keys and values", "a list"


def read_settings(kind: type[S], raw: object) -> S:
    """A section from YAML's mappings and scalars. Raises ConfigError that begins with the path of what is wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(told(error, kind)) from error


def told(error: ValidationError, kind: type[Section]) -> str:
    """The first error of the section `kind` in one line; a key that does not exist goes before all others."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] in ("extra_forbidden", "invalid_key")), errors[0])
    place = list(first["loc"])
    if first["type"] == "invalid_key":
        place[-1] = str(place[-1])
    elif place[-1:] == ["[key]"]:
        place = place[:-2]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    message = _message(first, kind, place)
    if first["type"] != "value_error":
        return f"{path or 'the configuration'}: {message}"
    # A section's own words begin with the name of the field that they are about, if it is one.
    section = _declared(kind, place)
    field, _, rest = message.partition(": ")
    if isinstance(section, type) and issubclass(section, Section) and re.split(r"[.\[]", field)[0] in _keys(section):
        return f"{path}.{field}: {rest}".removeprefix(".")
    return f"{path}: {message}" if path else message


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


def _message(error: ErrorDetails, kind: type[Section], place: list[int | str]) -> str:
    """What is wrong, in our words: pydantic's know neither all of a field's bounds nor YAML's names for types."""
    found = error["input"]
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "is required"
        case "extra_forbidden" | "invalid_key":
            known = _keys(_declared(kind, place[:-1]))
            close = difflib.get_close_matches(str(place[-1]), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
            return f"there is no such setting; {hint}"
        case "string_type" if error["loc"][-1] == "[key]":
            return f"expected texts as names, found {_shown(found)}"
        case "greater_than_equal" | "greater_than" | "less_than_equal" | "less_than":
            options = list(_options(_declared(kind, place)))
            number = float(found) if float in options else found
            return f"{number} must be {_bounds(_declared(kind, place))}"
        case "model_type":
            return f"expected {_SECTION}, found {_shown(found)}"
        case _:
            wanted = " or ".join(_named(option) for option in _options(_declared(kind, place)))
            return f"expected {wanted}, found {_shown(found)}"


def _keys(section: Any) -> list[str]:
    return list(section.model_fields)


def _declared(kind: Any, place: list[int | str]) -> Any:
    """The type of what stands at `place` in a section, its bounds included."""
    for part in place:
        kind = next((option for option in _options(kind) if option is not NoneType), kind)
        if isinstance(kind, type) and issubclass(kind, Section):
            field = kind.model_fields[str(part)]
            kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        elif get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        else:
            kind = get_args(kind)[1]  # a mapping's values
    return kind


def _options(kind: Any) -> Iterator[Any]:
    """The types of which a value may be one."""
    if get_origin(kind) is Annotated:
        yield from _options(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for option in get_args(kind):
            yield from _options(option)
    else:
        yield kind


def _bounds(kind: Any) -> str:
    """All that a number must be: `from 1 to 8`."""
    found = {type(bound): bound for bound in _constraints(kind)}
    low: Any = found.get(Ge) or found.get(Gt)
    high: Any = found.get(Le) or found.get(Lt)
    least = f"at least {low.ge:g}" if isinstance(low, Ge) else f"above {low.gt:g}" if low else ""
    if isinstance(low, Ge) and isinstance(high, Le):
        return f"from {low.ge:g} to {high.le:g}"
    most = f"at most {high.le:g}" if isinstance(high, Le) else f"below {high.lt:g}" if high else ""
    return " and ".join(bound for bound in (least, most) if bound)


def _constraints(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Annotated:
        yield from kind.__metadata__
        yield from _constraints(kind.__origin__)
    else:
        for option in get_args(kind):
            yield from _constraints(option)


def _named(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(get_args(option))
    if get_origin(option) is tuple:
        return _LIST
    return _TYPE_NAMES.get(option, "names and values")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
