"""Well-known models by the config.json that their makers published, as far as sizes depend on it: models.json.

Each is named as on the hub, without its owner. `source` names the paper or card that the makers tell of it in; the
fields of `config` are those of the `config.json` in that repository.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.config import ModelConfig
from twostroke.protocol.errors import ConfigError


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that can be planned with by its name alone."""

    name: str
    source: str
    config: dict[str, Any]
    stands_for: str = ""  # where `config` has the sizes of a model that no family of ours computes: how it has them


def read_models(content: bytes, source: str) -> dict[str, Published]:
    """Return a file's models by name. Raises ConfigError, which names the field that is wrong."""
    try:
        found = msgspec.json.decode(content, type=list[Published])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}") from error
    return {one.name: one for one in found}


_FILE = Path(__file__).with_name("models.json")
MODELS: Mapping[str, Published] = read_models(_FILE.read_bytes(), str(_FILE))


def known_as(name: str, *, is_served: bool = True) -> str | None:
    """Return the table's name of a model, whose hub id may have any owner; None where it is unknown, or is a local
    folder.

    `is_served`: only models that a family of ours computes.
    """
    bare = name.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-hf").lower()
    known = {one.lower(): one for one, model in MODELS.items() if not (is_served and model.stands_for)}
    return known.get(bare) if not Path(name).exists() else None


@cache
def published_model(name: str) -> ModelConfig:
    """Raises ConfigError for a model that the table does not have."""
    if name not in MODELS:
        raise ConfigError(f"{name}: none of the models known by name, which are {', '.join(MODELS)}")
    return parse_model_config(MODELS[name].config, name)
