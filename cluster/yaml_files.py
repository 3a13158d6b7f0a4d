"""Settings in YAML files."""

from pathlib import Path
from typing import Any

import yaml

from twostroke.protocol.errors import ConfigError


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
