"""The reading and checking of `config.json`, which all families share. No torch here.

Everything that would make us compute something else than transformers is refused by name of file and field.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from twostroke.model.config import (
    Activation,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    ModelConfig,
    Projection,
    QueryScale,
    RopeConfig,
    RopeType,
    Routing,
)
from twostroke.protocol.errors import ConfigError

INTERLEAVED = "twostroke_interleaved"
"""A field of our own, of folders that are made of GGUF files: rows of queries and keys are in those files' order."""

MAX_LAYERS, MAX_EXPERTS, MAX_CHANNELS = 1000, 4096, 2**20
"""More than any model has: a file that says more is damaged, and its tensors' names alone would fill the memory."""
_MAX_INTEGER = 2**53
_MAX_NUMBER = 1e18  # so that products of a few are finite in fp32, too

_ROPE_TYPES = tuple(kind for kind in get_args(RopeType) if kind != "proportional")  # which Gemma 4 alone has
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Family:
    """Models that differ in nothing but sizes and what their config.json says."""

    architecture: str  # what `architectures` names
    model_type: str  # for files that have no `architectures`
    read_config: "Callable[[ConfigFields], ModelConfig]"
    other_types: tuple[str, ...] = ()  # that files of this architecture may have as their model_type
    # Fields that need not be read: the values that say what the family does anyway.
    always: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Defaults:
    """Values of fields that a family's config.json may leave out."""

    head_dim: int | None = None  # None: the hidden size's share
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rotated_part: float | None = None  # of each head, for families that may rotate a part; None: all of it, always
    rope_names: Mapping[str, RopeType] = field(default_factory=dict)  # what the family's files call types otherwise
    max_position: int = 2048
    original_max_position: int | None = None  # before the rotation's scaling; None: max_position
    is_tied: bool = False  # the LM head to the embedding
    windows: "Windows | None" = None  # None: no layer has one, whatever is said of them
    local_theta: float | None = None  # of the layers with windows, which have angles of their own; None: they don't
    activation: str = "silu"
    activation_field: str = "hidden_act"


@dataclass(frozen=True)
class Windows:
    """Sliding windows of a family: layers that attend to the last `sliding_window` tokens only."""

    tokens: int = 0  # where nothing is said of `sliding_window`; 0: none
    are_switched: bool = False  # `sliding_window` is for nothing unless `use_sliding_window` says so
    has_one: Callable[[int], bool] | None = None  # a layer, where `layer_types` does not say; None: all, always


def decoder_spec(
    family: str,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    has_head_norms: bool = False,
) -> DecoderSpec:
    """Layers with two norms, their projections one by one, and the names that Llama's checkpoints gave them."""
    layer = LayerSpec(
        input_norm="input_layernorm",
        q=Projection("self_attn.q_proj", qkv_bias),
        k=Projection("self_attn.k_proj", qkv_bias),
        v=Projection("self_attn.v_proj", qkv_bias),
        output=Projection("self_attn.o_proj", output_bias),
        mlp_norm="post_attention_layernorm",
        gate=Projection("mlp.gate_proj", mlp_bias),
        up=Projection("mlp.up_proj", mlp_bias),
        down=Projection("mlp.down_proj", mlp_bias),
        q_norm="self_attn.q_norm" if has_head_norms else None,
        k_norm="self_attn.k_norm" if has_head_norms else None,
    )
    return DecoderSpec(family, "model.embed_tokens", "model.layers", layer, "model.norm", "lm_head")


def with_one_qkv(config: ModelConfig) -> ModelConfig:
    """Checkpoints have queries, keys and values one behind the other in one projection."""
    layer, name = config.spec.layer, "self_attn.qkv_proj"
    q, k, v = (
        replace(part, name=name, first_row=first)
        for part, first in ((layer.q, 0), (layer.k, config.q_size), (layer.v, config.q_size + config.kv_size))
    )
    return replace(config, spec=replace(config.spec, layer=replace(layer, q=q, k=k, v=v)))


def with_one_gate_up(config: ModelConfig) -> ModelConfig:
    """Checkpoints have gate and up in one projection."""
    layer, name = config.spec.layer, "mlp.gate_up_proj"
    up = replace(layer.up, name=name, first_row=config.intermediate_size)
    gate = replace(up, first_row=0)
    return replace(config, spec=replace(config.spec, layer=replace(layer, gate=gate, up=up)))


def with_query_scale(config: ModelConfig, fields: "ConfigFields") -> ModelConfig:
    """Return the config with the scale of queries by position that Mistral's files have with their rotation's fields.

    Raises ConfigError.
    """
    rope = fields.object("rope_parameters")
    if not rope.has("llama_4_scaling_beta"):
        return config
    scale = QueryScale(rope.integer("original_max_position_embeddings"), rope.number("llama_4_scaling_beta"))
    return replace(config, query_scale=scale, scaled_layers=frozenset(range(config.num_layers)))


def experts_spec(routing: Routing, size: int) -> ExpertsSpec:
    """Experts by the names that most checkpoints have."""
    gate, up, down = (Projection(f"mlp.experts.*.{name}_proj") for name in ("gate", "up", "down"))
    return ExpertsSpec(routing, size, Projection("mlp.gate"), gate, up, down)


def with_experts(config: ModelConfig, experts: ExpertsSpec, dense_layers: Iterable[int] = ()) -> ModelConfig:
    """Return the config with experts in all layers but `dense_layers`."""
    spec = replace(config.spec, layer=replace(config.spec.layer, experts=experts))
    return replace(config, spec=spec, dense_layers=frozenset(dense_layers))


def read_routing(fields: "ConfigFields", number: str, *, experts: int, top_k: int, normalises: bool = False) -> Routing:
    """Softmax over all experts, as many as the field `number` says. Raises ConfigError."""
    count, chosen = (
        fields.integer(number, default=experts, most=MAX_EXPERTS),
        fields.integer("num_experts_per_tok", default=top_k),
    )
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"{chosen} are more than {number}, which is {count}")
    return Routing(count, chosen, normalises=normalises)


def read_decoder(fields: "ConfigFields", spec: DecoderSpec, defaults: Defaults = Defaults()) -> ModelConfig:
    """The fields that all families spell alike. Raises ConfigError."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads, which is {num_heads}"
        )
    if not fields.is_set("head_dim") and defaults.head_dim is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads, which is {num_heads}")
    head_dim = fields.integer("head_dim", default=defaults.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, but rotary embedding rotates pairs")
    activation = fields.text(defaults.activation_field, default=defaults.activation)
    if activation not in _ACTIVATIONS:
        are = ", ".join(_ACTIVATIONS)
        what = f"{activation!r} is not supported, only {are} are: take a model that was trained with one of them"
        raise fields.error(defaults.activation_field, what)
    max_position = fields.integer("max_position_embeddings", default=defaults.max_position)
    rope, local_rope = _read_ropes(fields, max_position, head_dim, defaults)
    num_layers, windows = fields.integer("num_hidden_layers", most=MAX_LAYERS), defaults.windows
    has_window = [False] * num_layers if windows is None else _window_layers(fields, num_layers, windows)
    window = 0 if windows is None else _read_window(fields, max_position, windows)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", default=defaults.rms_norm_eps),
        rope=rope,
        spec=spec,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=defaults.is_tied),
        windows=tuple(window if has_one else 0 for has_one in has_window) if window else (),
        activation=_ACTIVATIONS[activation],
        local_rope=local_rope,
        local_layers=frozenset(layer for layer in range(num_layers) if local_rope is not None and has_window[layer]),
    )


def _read_window(fields: "ConfigFields", max_position: int, windows: Windows) -> int:
    """Tokens; 0 where no context is longer, or nothing has one."""
    if windows.are_switched and not fields.boolean("use_sliding_window", default=False):
        fields.is_set("sliding_window")  # whatever it says: transformers writes 0
        return 0
    tokens = fields.integer("sliding_window", default=max_position)
    if not fields.is_given("sliding_window"):
        tokens = windows.tokens
    if tokens == 1:
        raise fields.error("sliding_window", "1 leaves a token itself alone: windows of 2 and more are supported")
    return tokens if tokens < max_position else 0


def _window_layers(fields: "ConfigFields", num_layers: int, windows: Windows) -> list[bool]:
    """Return, by layer, if it is one of those with a window when the model has one."""
    has_one = windows.has_one
    if has_one is None:
        return [True] * num_layers
    usual = ["sliding_attention" if has_one(layer) else "full_attention" for layer in range(num_layers)]
    kinds = fields.texts("layer_types", usual)
    if len(kinds) != num_layers or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise fields.error("layer_types", f"expected {num_layers} times 'sliding_attention' or 'full_attention'")
    return [kind == "sliding_attention" for kind in kinds]


def _read_ropes(
    top: "ConfigFields", max_position: int, head_dim: int, defaults: Defaults
) -> tuple[RopeConfig, RopeConfig | None]:
    """All layers', or the full ones' and that of the layers with windows.

    Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before).
    """
    parameters, scaling = top.object("rope_parameters"), top.object("rope_scaling")
    theta = top.number("rope_theta", default=defaults.rope_theta)
    if defaults.local_theta is None:
        if parameters.has_objects:
            raise top.error("rope_parameters", "angles that differ by layer are not supported for this family")
        rope = scaling if top.has("rope_scaling") else parameters
        return _read_rope(top, rope, theta, max_position, head_dim, defaults), None
    if top.has("rope_parameters") and not parameters.has_objects:
        raise top.error("rope_parameters", "expected objects named full_attention and sliding_attention")
    full = scaling if top.has("rope_scaling") else parameters.object("full_attention")
    local_theta = top.number("rope_local_base_freq", default=defaults.local_theta)
    return (
        _read_rope(top, full, theta, max_position, head_dim, defaults),
        _read_rope(top, parameters.object("sliding_attention"), local_theta, max_position, head_dim, defaults),
    )


def _read_rope(
    top: "ConfigFields", rope: "ConfigFields", theta: float, max_position: int, head_dim: int, defaults: Defaults
) -> RopeConfig:
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    kind = defaults.rope_names.get(kind, kind)
    if kind not in _ROPE_TYPES:
        raise rope.error("rope_type", f"{kind!r} is not supported, only {', '.join(_ROPE_TYPES)} are")
    part = top.number("partial_rotary_factor", default=defaults.rotated_part or 1.0)
    part = rope.number("partial_rotary_factor", default=part)
    rotated = int(head_dim * part)
    if part != 1 and defaults.rotated_part is None:
        raise top.error("partial_rotary_factor", "only 1.0 is supported for this family")
    if part > 1 or rotated % 2:
        raise top.error("partial_rotary_factor", f"{part} makes {rotated} dimensions of {head_dim}, not pairs of them")
    scaled = _read_scaling(top, rope, cast("RopeType", kind), max_position, rotated, defaults)
    theta = rope.number("rope_theta", default=theta)
    interleaves = top.boolean(INTERLEAVED, default=False)
    return replace(scaled, theta=theta, rotated=0 if rotated == head_dim else rotated, interleaves=interleaves)


def _read_scaling(
    top: "ConfigFields",
    rope: "ConfigFields",
    kind: RopeType,
    max_position: int,
    rotated: int,
    defaults: Defaults,
) -> RopeConfig:
    if kind in ("default", "dynamic"):
        return RopeConfig(type=kind)
    # As in transformers, the value beside the scaling wins over the one within it.
    known = defaults.original_max_position or max_position
    inner = rope.integer("original_max_position_embeddings", default=known)
    original = top.integer("original_max_position_embeddings", default=inner)
    if kind == "longrope":
        if original < 2:
            raise top.error("original_max_position_embeddings", f"{original} is too few")
        # By what the model can do, not by a worker's cache or a request: KV of both factors must never meet.
        factors = "long_factor" if max_position > original else "short_factor"
        factor = rope.number("factor", default=max_position / original)
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeConfig(
            kind,
            attention_factor=rope.number("attention_factor", default=attention_factor),
            factors=rope.numbers(factors, rotated // 2),
        )
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(type=kind, factor=factor)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high < low:  # Llama 4's are equal: no wavelength lies between
            raise rope.error("high_freq_factor", f"{high} must not be less than low_freq_factor, which is {low}")
        return RopeConfig(
            kind, factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
        )
    return RopeConfig(
        kind,
        factor=factor,
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


def shown(value: object) -> str:
    """A value of a file, in an error: its beginning."""
    text = repr(value) if not isinstance(value, int) or abs(value) < _MAX_INTEGER else "a number of many digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


class ConfigFields:
    """Typed access to config.json or an object within it; every complaint is a ConfigError naming source and field.

    It remembers which fields were taken.
    """

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "", taken: set[str] | None = None):
        """`taken` are the paths of the fields that were taken, in the whole file."""
        self._raw = raw
        self._source = source
        self._prefix = prefix
        self._taken: set[str] = set() if taken is None else taken

    def error(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self._source}: {self._prefix}{name}: {what}")

    def unread(self) -> list[str]:
        """Fields of the file that no reader has taken."""
        return [name for name in self._raw if f"{self._prefix}{name}" not in self._taken]

    def value(self, name: str) -> Any:
        """Whatever the field has, without asking for it; None where it is not there."""
        return self._raw.get(name)

    def object(self, name: str) -> "ConfigFields":
        """The fields of an object within this one; none where it is not set."""
        value = self._ask(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, found {type(value).__name__}")
        return ConfigFields(cast("dict[str, Any]", value), self._source, f"{self._prefix}{name}.", self._taken)

    def objects(self, name: str) -> "list[ConfigFields]":
        """The objects within an object, by whatever names."""
        inner = self.object(name)
        return [inner.object(key) for key in inner.names]

    @property
    def names(self) -> list[str]:
        """Names of the fields that are given."""
        return list(self._raw)

    @property
    def has_objects(self) -> bool:
        return any(isinstance(value, dict) for value in self._raw.values())

    def is_set(self, name: str) -> bool:
        return self._ask(name) is not None

    def is_given(self, name: str) -> bool:
        """Return True if the field stands in the file, even as null."""
        self._ask(name)
        return name in self._raw

    def over(self, defaults: Mapping[str, Any]) -> "ConfigFields":
        """Return the given fields, and those of `defaults` that are left out."""
        return ConfigFields({**defaults, **self._raw}, self._source, self._prefix, self._taken)

    def is_minus_one(self, name: str) -> bool:
        """Return True if the field is -1, which files write for "all"."""
        return bool(self._ask(name) == -1)

    def has(self, name: str) -> bool:
        """Return True if the field is set and not empty."""
        return bool(self._ask(name))

    def count(self, name: str, default: int, most: int = _MAX_INTEGER) -> int:
        """An integer that is not negative."""
        value = self._get(name, default)
        return 0 if value == 0 and not isinstance(value, bool) else self.integer(name, default, most)

    def integer(self, name: str, default: int | None = None, most: int = _MAX_INTEGER) -> int:
        """A positive integer."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"expected a positive integer, found {shown(value)}")
        if value > most:
            raise self.error(name, f"{shown(value)} is more than any model has: at most {most} are taken")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise self.error(name, f"expected a positive number, found {shown(value)}")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` positive finite numbers."""
        values = self._get(name, None)
        are_numbers = isinstance(values, list) and all(
            isinstance(value, int | float) and 0 < value <= _MAX_NUMBER for value in values
        )
        if not are_numbers or len(values) != count:
            raise self.error(name, f"expected a list of {count} positive numbers")
        return tuple(map(float, values))

    def limits(self, name: str) -> tuple[float, float]:
        """Return the least and the greatest of some positive numbers, which may be infinite; (0, infinity) where it is
        not set."""
        values = self._get(name, [0.0, math.inf])
        are_numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
        if not are_numbers or len(values) != 2 or not 0 <= values[0] <= values[1]:
            raise self.error(name, f"expected the least and the greatest of positive numbers, found {shown(values)}")
        return float(values[0]), float(values[1])

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, found {value!r}")
        return value

    def flags(self, name: str, default: list[bool]) -> list[bool]:
        """A list of as many 0 and 1, or more, as `default` has."""
        values = self._get(name, default)
        if not isinstance(values, list) or len(values) < len(default) or any(value not in (0, 1) for value in values):
            raise self.error(name, f"expected a list of {len(default)} times 0 or 1")
        return [bool(value) for value in values]

    def counts(self, name: str) -> list[int]:
        """A list of integers that are not negative; empty where it is not set."""
        values = self._get(name, [])
        if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
            raise self.error(name, "expected a list of integers that are not negative")
        return values

    def texts(self, name: str, default: Sequence[str] = ()) -> list[str]:
        values = self._get(name, list(default))
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(name, "expected a list of strings")
        return values

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, found {value!r}")
        return value

    def _ask(self, name: str) -> Any:
        self._taken.add(f"{self._prefix}{name}")
        return self._raw.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._ask(name)
        if value is None:  # transformers writes null for "not set"
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
