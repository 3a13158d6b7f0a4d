"""What the families have in common: how a `config.json` is read and checked. No torch here.

Everything that would make us compute something else than transformers is refused by name of file and field.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from twostroke.model.config import DecoderSpec, ModelConfig, RopeConfig, RopeType
from twostroke.protocol.errors import ConfigError

_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """Models that differ in nothing but sizes and what their config.json says."""

    architecture: str  # what `architectures` names
    model_type: str  # for files that have no `architectures`
    read_config: "Callable[[ConfigFields], ModelConfig]"


def read_decoder(fields: "ConfigFields", spec: DecoderSpec) -> ModelConfig:
    """The fields that all families spell alike. Raises ConfigError."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads, which is {num_heads}"
        )
    if not fields.is_set("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads, which is {num_heads}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, but rotary embedding turns pairs")
    if fields.is_set("quantization_config"):
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
        rope=_read_rope(fields, max_position),
        spec=spec,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
    )


def _read_rope(top: "ConfigFields", max_position: int) -> RopeConfig:
    """Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before)."""
    rope = top.object("rope_parameters" if top.has("rope_parameters") else "rope_scaling")
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


def _yarn_attention_factor(rope: "ConfigFields", factor: float) -> float:
    """The temperature of YaRN (Peng et al. 2023, eq. 22), with the `mscale` variant that transformers reads."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.has("mscale") and rope.has("mscale_all_dim"):
        default = temperature(rope.number("mscale")) / temperature(rope.number("mscale_all_dim"))
    else:
        default = temperature(1.0)
    return rope.number("attention_factor", default=default)


class ConfigFields:
    """Typed access to config.json or an object within it; every complaint is a ConfigError naming source and field."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = ""):
        self._raw = raw
        self._source = source
        self._prefix = prefix

    def error(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self._source}: {self._prefix}{name}: {what}")

    def object(self, name: str) -> "ConfigFields":
        """The fields of an object within this one; none where it is not set."""
        value = self._raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, found {type(value).__name__}")
        return ConfigFields(cast("dict[str, Any]", value), self._source, prefix=f"{self._prefix}{name}.")

    def is_set(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def has(self, name: str) -> bool:
        """Whether it is set, and not empty."""
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

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is None:  # transformers writes null for "not set"
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
