"""From YAML to the sections of the configuration, and from pydantic's errors to one line that begins with the setting.

A section is a `Section` model beside whatever it configures. What is wrong in one is a ConfigError from here on.
"""

import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import UNKNOWN_SETTING, Section

S = TypeVar("S", bound=Section)

_ABOUT_A_FIELD = re.compile(r"\w+(?:\.\w+|\[\d+\])*: ")


def read_settings(kind: type[S], raw: object) -> S:
    """A section from YAML's mappings and scalars. Raises ConfigError that begins with the path of what is wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(told(error)) from error


def told(error: ValidationError) -> str:
    """The first error in one line; a key that does not exist goes before all others."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == UNKNOWN_SETTING), errors[0])
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part != "[key]"]
    path = "".join(parts).removeprefix(".")
    if first["type"] in ("value_error", UNKNOWN_SETTING):
        message = first["msg"].removeprefix("Value error, ")
        # A section's own words may begin with the name of the field that they are about.
        if not path or _ABOUT_A_FIELD.match(message):
            return f"{path}.{message}".removeprefix(".")
    elif first["type"] == "missing":
        message = "is required"
    else:
        message = first["msg"].replace("Input", _shown(first["input"]), 1)
    return f"{path or 'the configuration'}: {message}"


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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
