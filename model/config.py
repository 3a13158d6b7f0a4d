"""What a Hugging Face `config.json` says about a Llama model, checked. No torch here.

Both spellings of the rotary settings are read: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`
(before). Everything that would make us compute something else than transformers is refused by name of file and field.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from twostroke.protocol.errors import ConfigError

ARCHITECTURE = "LlamaForCausalLM"
CONFIG_FILE = "config.json"

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the fields beyond `theta` are those of the type named (transformers' names).

    `dynamic` equals `default` up to the model's maximum position, and we never go beyond it.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn: positions the model was trained on before scaling
    attention_factor: float = 1.0  # yarn: scales cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # positions the model accepts, prompt and output together
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or the values) of one token."""
        return self.num_kv_heads * self.head_dim


def load_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises ConfigError naming file and field."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist or is no folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {folder} is not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return parse_model_config(cast("dict[str, object]", raw), str(path))


def parse_model_config(raw: Mapping[str, object], source: str) -> ModelConfig:
    """The ModelConfig in a parsed config.json; `source` names it in errors. Raises ConfigError."""
    _check_architecture(raw, source)
    fields = _Fields(raw, source)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads, which is {num_heads}"
        )
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads, which is {num_heads}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, but rotary embedding turns pairs")
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{activation!r} is not supported, only 'silu' is")
    if raw.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantised checkpoints are not supported")
    max_position = fields.integer("max_position_embeddings", default=2048)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=_parse_rope(raw, source, max_position),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=fields.boolean("attention_bias", default=False),
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


def _check_architecture(raw: Mapping[str, object], source: str) -> None:
    architectures = raw.get("architectures")
    if architectures is None and raw.get("model_type") == "llama":
        return
    if architectures != [ARCHITECTURE]:
        found = architectures if architectures is not None else f"model_type {raw.get('model_type')!r}"
        raise ConfigError(f"{source}: architectures: {found} is not supported, only {ARCHITECTURE} is")


def _parse_rope(raw: Mapping[str, object], source: str, max_position: int) -> RopeConfig:
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    table = raw.get(name) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name}: expected an object, found {type(table).__name__}")
    rope = _Fields(cast("dict[str, object]", table), source, prefix=f"{name}.")
    top = _Fields(raw, source)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind not in _ROPE_TYPES:
        raise rope.error("rope_type", f"{kind!r} is not supported, only {', '.join(_ROPE_TYPES)} are")
    for fields in (rope, top):
        if fields.number("partial_rotary_factor", default=1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "only 1.0 is supported")
    theta = rope.number("rope_theta", default=top.number("rope_theta", default=10_000.0))
    if kind in ("default", "dynamic"):
        return RopeConfig(type=kind, theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=factor)
    # As in transformers, the value beside the scaling wins over the one within it.
    inner = rope.integer("original_max_position_embeddings", default=max_position)
    original = top.integer("original_max_position_embeddings", default=inner)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"{high} must be greater than low_freq_factor, which is {low}")
        return RopeConfig(
            kind, theta, factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
        )
    return RopeConfig(
        kind,
        theta,
        factor,
        original_max_position=original,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.boolean("truncate", default=True),
    )


def _yarn_attention_factor(rope: "_Fields", factor: float) -> float:
    """The temperature of YaRN (Peng et al. 2023, eq. 22), with the `mscale` variant that transformers reads."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.has("mscale") and rope.has("mscale_all_dim"):
        default = temperature(rope.number("mscale")) / temperature(rope.number("mscale_all_dim"))
    else:
        default = temperature(1.0)
    return rope.number("attention_factor", default=default)


class _Fields:
    """Typed access to a JSON object; every complaint names source and field."""

    def __init__(self, raw: Mapping[str, object], source: str, prefix: str = ""):
        self._raw = raw
        self._source = source
        self._prefix = prefix

    def error(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self._source}: {self._prefix}{name}: {what}")

    def has(self, name: str) -> bool:
        return bool(self._raw.get(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"expected a positive integer, found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, f"expected a positive number, found {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, found {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, found {value!r}")
        return value

    def _get(self, name: str, default: object | None) -> object:
        value = self._raw.get(name)
        if value is None:  # transformers writes null for "not set"
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
