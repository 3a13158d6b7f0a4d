"""All that is wrong in a configuration file at once, each with the line where it stands."""

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from twostroke.cluster.config.config import ClusterConfig
from twostroke.cluster.config.reading import fault_of, load_yaml_and_text
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import UNKNOWN_SETTING

_PATH = re.compile(r"[\w.-]+(?:\[\d+\][\w.-]*)*(?=: )")
_PART = re.compile(r"\[(\d+)\]|([\w-]+)")
_RAY_CLUSTER = {"cluster_name", "provider"}
"""Keys that a file for `ray up` must have."""


class ConfigFault(NamedTuple):
    """An error of a configuration file, with its line."""

    line: int  # the first is 1
    text: str  # begins with the setting's path


def faults_of(path: Path) -> list[ConfigFault]:
    """Return all errors of a file for `twostroke serve --config`, or for Ray Serve's tools, whose configurations stand
    under `args`. Settings are checked together only where each is right alone. Raises ConfigError for a file that
    cannot be read, is not YAML, or is Serve's and has no `args`."""
    raw, text_of_file = load_yaml_and_text(path)
    if "applications" not in raw:
        return faults_in(raw, text_of_file, path)
    root = yaml.compose(text_of_file, yaml.SafeLoader)
    applications = raw["applications"] if isinstance(raw["applications"], list) else []
    found = [(i, one["args"]) for i, one in enumerate(applications) if isinstance(one, dict) and one.get("args")]
    if not found:
        raise ConfigError(f"{path}: no application has `args`, under which the configuration stands")
    texts = [f"applications[{i}].args.{text}" for i, args in found for text in _faults(args)]
    return [ConfigFault(_line_of(root, text), text) for text in texts]


def faults_in(raw: dict[str, Any], text_of_file: str, path: Path) -> list[ConfigFault]:
    """Return all errors of settings as a file at `path` has them. Raises ConfigError for a file of another program."""
    if raw.keys() >= _RAY_CLUSTER:
        raise ConfigError(f"{path}: describes a cluster for `ray up`; settings are in the file for `serve deploy`")
    texts = list(_faults(raw))
    root = yaml.compose(text_of_file, yaml.SafeLoader) if texts else None  # read again for the lines of faults alone
    return sorted(ConfigFault(_line_of(root, text), text) for text in texts)


def _faults(raw: Any) -> Iterator[str]:
    """A section with an unknown name tells of nothing else: such names are told of, and taken out."""
    raw = copy.deepcopy(raw)
    while True:
        try:
            ClusterConfig.model_validate(raw)
            return
        except ValidationError as error:
            errors = error.errors(include_url=False)
        unknown = [one for one in errors if one["type"] == UNKNOWN_SETTING]
        yield from (fault_of(one, ClusterConfig) for one in unknown or errors)
        if not unknown:
            return
        for one in unknown:
            section = raw
            for part in one["loc"]:
                section = section[part]
            for name in [name for name in section if str(name) == one["ctx"]["name"]]:
                del section[name]


def _line_of(node: yaml.Node | None, text: str) -> int:
    """The line of the setting that `text` begins with, or of the section where it is missing."""
    path = _PATH.match(text)
    line = 1
    for part in _PART.finditer(path[0] if path is not None else ""):
        index, name = part.groups()
        if isinstance(node, yaml.MappingNode) and name is not None:
            found: Sequence[tuple[yaml.Node, yaml.Node]] = [pair for pair in node.value if pair[0].value == name]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and index is not None and int(index) < len(node.value):
            node = node.value[int(index)]
            line = node.start_mark.line + 1
        else:
            break
    return line
