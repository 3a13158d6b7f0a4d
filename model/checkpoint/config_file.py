"""A Hugging Face folder's `config.json`: which family it is of, and what it says. No torch here."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from twostroke.model.architectures.families import FAMILIES
from twostroke.model.architectures.families.family import ConfigFields, Family, shown
from twostroke.model.checkpoint.known_fields import check_unread
from twostroke.model.checkpoint.quantization_config import read_stored_quantization
from twostroke.model.config import ModelConfig
from twostroke.protocol.errors import ConfigError

CONFIG_FILE = "config.json"
QUANTIZATION_FILES = {"gptq": "quantize_config.json", "modelopt": "hf_quant_config.json"}
"""Files that say it where config.json does not: AutoGPTQ's and ModelOpt's, of before."""
MOST_JSON_BYTES = 64 << 20


def load_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json of a family of ours. Raises ConfigError naming file and field."""
    return parse_model_config(read_config_file(folder), str(folder / CONFIG_FILE))


def is_native(raw: Mapping[str, Any]) -> bool:
    """Return True if a parsed config.json is of a native family."""
    return _family(raw) is not None


def read_config_file(folder: Path) -> dict[str, Any]:
    """`folder`/config.json, parsed, with what older checkpoints have in a file of its own. Raises ConfigError."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist or is no folder")
    if not path.exists():
        raise ConfigError(f"{path} is missing: {folder} is not a Hugging Face model folder")
    raw = read_json_object(path)
    for method, name in QUANTIZATION_FILES.items():
        if raw.get("quantization_config") is None and (folder / name).exists():
            raw["quantization_config"] = {"quant_method": method, **read_json_object(folder / name)}
    _check_types(raw, path)
    return raw


def _check_types(raw: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError for fields that name the model or its parts, where they are of another type: some are looked
    at by nobody else."""
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise ConfigError(f"{path}: architectures: expected a list of names, found {shown(architectures)}")
    kinds: tuple[tuple[str, type, str], ...] = (
        ("model_type", str, "a name"),
        ("torch_dtype", str, "a type's name"),
        ("dtype", str, "a type's name"),
        ("text_config", dict, "a JSON object"),
    )
    for name, kind, said in kinds:
        value = raw.get(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{path}: {name}: expected {said}, found {shown(value)}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file that is there. Raises ConfigError."""
    if not path.is_file():  # a FIFO would be waited for
        raise ConfigError(f"{path} is no regular file")
    try:
        if (size := path.stat().st_size) > MOST_JSON_BYTES:
            raise ConfigError(f"{path} has {size} bytes: at most {MOST_JSON_BYTES} are read")
        raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_number_if_one)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return cast("dict[str, Any]", raw)


def _number_if_one(value: dict[str, Any]) -> Any:
    """transformers writes numbers that JSON has no words for as objects: {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def parse_model_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The ModelConfig in a parsed config.json; `source` names it in errors. Raises ConfigError."""
    family = _family(raw)
    if family is None:
        found = raw.get("architectures") or f"model_type {raw.get('model_type')!r}"
        are = "is" if len(FAMILIES) == 1 else "are"
        raise ConfigError(f"{source}: architectures: {found} is not supported, only {', '.join(FAMILIES)} {are}")
    fields = ConfigFields(raw, source)
    kind = raw.get("model_type")
    if kind not in (None, family.model_type, *family.other_types):
        raise fields.error(
            "model_type",
            f"{kind!r} is not what {family.architecture} has, which is {family.model_type!r}: say which of the two the "
            "model is",
        )
    config = family.read_config(fields)
    check_unread(fields, family, config)
    return replace(config, stored=read_stored_quantization(fields))


def _family(raw: Mapping[str, Any]) -> Family | None:
    architectures = raw.get("architectures")
    for family in FAMILIES.values():
        if architectures == [family.architecture] or (
            architectures is None and raw.get("model_type") == family.model_type
        ):
            return family
    return None
