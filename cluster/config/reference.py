"""The tables of docs/configuration.md: `twostroke config reference` prints them, and a test compares.

All that they say is the models': names, defaults, what values may be, and docstrings.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import get_annotations
from typing import Any, NamedTuple, get_args, get_origin

from twostroke.cluster.config.config import ClusterConfig
from twostroke.protocol.settings import Section
from twostroke.protocol.stats import Role

BEGIN, END = "<!-- made by `twostroke config reference` -->", "<!-- end of what is made -->"

DOZEN: Mapping[tuple[str, ...], str] = {
    ("model.path",): "which model",
    ("model.name",): "what clients call it",
    ("model.max_context",): "shorter contexts leave room for more requests at once",
    ("model.quantization",): "half or a quarter of the weights' memory; faster answers on CPUs",
    ("prefill.replicas", "decode.replicas"): "how many workers compute prompts, and how many generate answers",
    ("prefill.tensor_parallel", "decode.tensor_parallel"): "a model that one GPU can't hold",
    ("decode.kv_cache_gib",): "how many requests and prefixes fit",
    ("decode.max_batch",): "fewer streams at once, each faster",
    ("slo.classes",): "what is promised: what would be late is refused, not served late",
    ("auth.keys_file",): "who may ask",
    ("router.replicas",): "more where one core can't tokenise and stream for all clients",
    ("autoscaling.enabled",): "workers follow the load",
}
"""The settings that come first on the page, and why one would set them."""

_REQUIRED = "required"
_ROLE = re.compile("|".join(get_args(Role)))
_PAGE = re.compile(r"docs/([\w/-]+\.md)(#[\w-]+)?")


class Setting(NamedTuple):
    """One row, for people."""

    path: str  # as `auth.keys[].name`
    default: str
    values: str
    text: str  # what it is, and when to change it


def section_settings(kind: type[Section], path: str = "") -> Iterator[Setting]:
    """Return the settings of a section and of those within. A section's own settings come before those that it
    inherits."""
    schema = kind.model_json_schema()
    fields = [name for cls in kind.__mro__ for name in get_annotations(cls) if name in kind.model_fields]
    for name in dict.fromkeys(fields):
        inner: Any = kind.model_fields[name].annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from section_settings(inner, f"{path}{name}.")
            continue
        field_schema = schema["properties"][name]
        default = _REQUIRED if name in schema.get("required", ()) else _plain(field_schema["default"])
        yield Setting(f"{path}{name}", default, _values(field_schema), _sentence(field_schema.get("description", "")))
        if get_origin(inner) is tuple and isinstance(get_args(inner)[0], type):
            yield from section_settings(get_args(inner)[0], f"{path}{name}[].")


def reference() -> str:
    """All tables, in Markdown: the dozen that matter, then the sections, both roles' in one."""
    known = list(section_settings(ClusterConfig))
    lines = [BEGIN, "", "## The dozen that matter", "", *_dozen({one.path: one for one in known}), ""]
    schema = ClusterConfig.model_json_schema()
    roles = get_args(Role)
    for first in (name for name in ClusterConfig.model_fields if name not in roles[1:]):
        names = roles if first == roles[0] else (first,)
        kinds = [schema["$defs"][schema["properties"][name]["$ref"].rpartition("/")[2]] for name in names]
        lines += [f"## {', '.join(names)}", "", _sentence(" ".join(kind["description"] for kind in kinds)), ""]
        lines += [*_table([one for one in known if one.path.partition(".")[0] in names]), ""]
    return "\n".join([*lines, END, ""])


def _dozen(known: Mapping[str, Setting]) -> Iterator[str]:
    yield "| setting | default | why you would set it |"
    yield "|---|---|---|"
    for paths, why in DOZEN.items():
        (default,) = {known[path].default for path in paths}
        yield f"| {_names(paths)} | `{default}` | {why} |"


def _table(settings: Sequence[Setting]) -> Iterator[str]:
    """Return a table. Settings that both roles describe in the same words share a row; the others are side by side."""
    yield "| setting | default | values | what it is, and when to change it |"
    yield "|---|---|---|---|"
    rows: dict[str, dict[Sequence[str], list[str]]] = {}
    for path, *cells in settings:
        rows.setdefault(_ROLE.sub("", path), {}).setdefault(tuple(cells), []).append(path)
    for (default, values, text), paths in (row for alike in rows.values() for row in alike.items()):
        yield f"| {_names(paths)} | {default if default == _REQUIRED else f'`{default}`'} | {values} | {text} |"


def _names(paths: Iterable[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def _plain(default: object) -> str:
    """Return a default as YAML writes it, in one line."""
    if isinstance(default, list):
        return f"[{', '.join(map(_plain, default))}]"
    if isinstance(default, dict):
        return "{" + ", ".join(f"{name}: {_plain(value)}" for name, value in default.items() if value) + "}"
    if isinstance(default, str):
        return default
    return json.dumps(int(default) if isinstance(default, float) and default.is_integer() else default)


def _values(field_schema: Mapping[str, Any]) -> str:
    """Return the allowed values, from the JSON schema."""
    kinds = [kind for kind in field_schema.get("anyOf", [field_schema]) if kind.get("type") != "null"]
    words = [word for kind in kinds for word in _options(kind)]
    return ", ".join([*words, *(_range(kind) for kind in kinds if not _options(kind))])


def _options(field_schema: Mapping[str, Any]) -> list[str]:
    if field_schema.get("type") == "boolean":
        return ["`true`", "`false`"]
    return [
        f"`{option}`" for option in field_schema.get("enum", [field_schema["const"]] if "const" in field_schema else [])
    ]


def _range(field_schema: Mapping[str, Any]) -> str:
    kind = field_schema.get("type")
    if kind == "object":
        return f"{_many(_range(field_schema['additionalProperties']))} by name"
    if kind == "array":
        return "sections" if "$ref" in field_schema["items"] else _many(_range(field_schema["items"]))
    if kind == "string":
        return "a text" + "".join(f" such as `{example}`" for example in field_schema.get("examples", ()))
    low, above = field_schema.get("minimum"), field_schema.get("exclusiveMinimum")
    high, below = field_schema.get("maximum"), field_schema.get("exclusiveMaximum")
    least = _plain(low) if above is None else f"above {_plain(above)}"
    most = _plain(high) if below is None else f"below {_plain(below)}"
    if high is None and below is None:
        if low is None and above is None:
            return "a whole number" if kind == "integer" else "a number"
        return f"at least {least}" if above is None else least
    return f"{least} to {most}" if above is None else f"{least}, to {most}"


def _many(values: str) -> str:
    return "texts" if values == "a text" else values


def _sentence(docstring: str) -> str:
    """Return a docstring in one line, with links to the pages that it names."""
    return _PAGE.sub(lambda page: f"[{page[1]}]({page[1]}{page[2] or ''})", " ".join(docstring.split()))
