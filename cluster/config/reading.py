"""Conversion of YAML to the sections of the configuration, and of pydantic's errors to one line that begins with the
setting.

A section is a `Section` model beside the part that it configures. Errors in it are ConfigErrors from here on.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twostroke.cluster.config.other_servers import VALUES, setting_hint
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import UNKNOWN_SETTING, Section

S = TypeVar("S", bound=Section)

_OPENED = (Path("/dev/fd"), Path("/proc/self/fd"))
_ABOUT_A_FIELD = re.compile(r"\w+(?:\.\w+|\[\d+\])*: ")


def read_settings(kind: type[S], raw: object) -> S:
    """A section from YAML's mappings and scalars. Raises ConfigError that begins with the path of what is wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = next((one for one in errors if one["type"] == UNKNOWN_SETTING), errors[0])
        raise ConfigError(setting_fault(first, kind)) from error


def setting_fault(error: ErrorDetails, kind: type[Section]) -> str:
    """One of pydantic's errors in one line that begins with the setting's path in a `kind`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"] if part != "[key]"]
    path = "".join(parts).removeprefix(".")
    if error["type"] == UNKNOWN_SETTING:
        name, hint, is_near = (error["ctx"][key] for key in ("name", "hint", "is_near"))
        hint = _hint_of_whole_file(name, kind, is_near=is_near) or hint
        return f"{path}.{name}: there is no such setting; {hint}".removeprefix(".")
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        # A section's own words may begin with the name of the field that they are about.
        if not path or _ABOUT_A_FIELD.match(message):
            return f"{path}.{message}".removeprefix(".")
    elif error["type"] == "missing":
        message = "is required"
    elif error["type"] == "model_type":
        message = f"{_shown(error['input'])} stands where a section should: write `name: value` lines under it"
        ours = setting_hint(path)
        message += f" ({ours})" if ours is not None else ""
    else:
        message = error["msg"].replace("Input", _shown(error["input"]), 1)
        theirs = VALUES.get(path.rpartition(".")[2], {}).get(str(error["input"]))
        message += f"; {theirs}" if theirs is not None else ""
    return f"{path or 'the configuration'}: {message}"


def _hint_of_whole_file(name: str, kind: type[Section], *, is_near: bool) -> str | None:
    """Return what to write instead of a name that its section lacks. `is_near` tells that the section itself has a
    similar one."""
    places: dict[str, list[str]] = {}
    for path in setting_paths(kind):
        places.setdefault(path.rpartition(".")[2], []).append(path)
    if name in places:
        return f"it belongs elsewhere: {' or '.join(places[name])}"
    if (ours := setting_hint(name)) is not None or is_near:
        return ours
    close = difflib.get_close_matches(name, places, n=1)
    return f"did you mean {' or '.join(places[close[0]])}?" if close else None


def setting_paths(kind: type[Section], path: str = "") -> Iterator[str]:
    """Return the paths of all settings, such as `decode.max_batch`, or `auth.keys[].name` in a list."""
    for name, field in kind.model_fields.items():
        inner: Any = field.annotation
        if get_origin(inner) is tuple and isinstance(get_args(inner)[0], type):
            yield from setting_paths(get_args(inner)[0], f"{path}{name}[].")
        elif isinstance(inner, type) and issubclass(inner, Section):
            yield from setting_paths(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for a file that is missing or is none, or has a key twice."""
    return load_yaml_and_text(path)[0]


def load_yaml_and_text(path: Path) -> tuple[dict[str, Any], str]:
    """Return what `load_yaml` returns, and the file's text: a pipe can be read only once."""
    try:
        text = read_text(path)
        raw = yaml.load(text, _KeysOnce)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deep: settings lie in sections, at most five deep") from error
    except Exception as error:  # a text such as 2026-02-30 raises whatever its type's constructor does
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split()) or type(error).__name__}") from error
    if raw is None:
        return {}, text
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as model, prefill, decode, router, slo")
    return raw, text


def read_text(path: Path) -> str:
    """A file's text. Raises OSError or ValueError where it can't be read, and ConfigError for a named pipe or a device,
    whose reader may wait for ever.

    What the shell has opened for this process is read whatever it is: `<(command)` and /dev/stdin have a writer.
    """
    is_open = str(path) == "/dev/stdin" or path.parent in _OPENED
    if not is_open and path.exists() and not path.is_file():
        raise ConfigError("is no regular file")
    return path.read_text(encoding="utf-8")


class _KeysOnce(yaml.SafeLoader):
    """YAML's plain types; of a key that is given twice, YAML itself would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Check that no key is given twice. Raises ConfigError with both lines."""
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise ConfigError(f"{key.value} is given twice, in lines {lines[name]} and {line}")
                lines[name] = line
        return super().construct_mapping(node, deep)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
