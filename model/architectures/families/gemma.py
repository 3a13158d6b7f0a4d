"""Gemma 2, 3 and 4: norms before and behind the sublayers, embeddings times the root of their size, GELU, and windows.

Gemma 2 (Gemma Team 2024) caps scores and logits; Gemma 3 (2025) has norms of heads, and other angles in layers with
windows.

Gemma 4: layers that attend to all tokens have wider heads, and sometimes fewer of them, than layers with windows.

The last layers of the small ones attend to the keys and values of layers before them, and each layer is given an
embedding of its own for each token. In the 26B's layers experts stand beside the MLP. Values are normalised; in layers
of the large ones that attend to all tokens, they are made by the keys' projection.
"""

import math
from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MAX_EXPERTS,
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    experts_spec,
    read_decoder,
)
from twostroke.model.config import (
    DecoderSpec,
    ExpertNorms,
    ExpertsSpec,
    KVHeads,
    LayerEmbeddingSpec,
    MlpSpec,
    ModelConfig,
    Projection,
    RopeConfig,
    Routing,
)


def _read(fields: ConfigFields, family: str, defaults: Defaults, *, has_head_norms: bool) -> ModelConfig:
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "is not supported: a bidirectional model generates no text")
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec(family, qkv_bias=bias, output_bias=bias, has_head_norms=has_head_norms)
    config = read_decoder(fields, spec, defaults)
    layer = replace(
        spec.layer,
        attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        output_norm="post_feedforward_layernorm",
    )
    return replace(
        config,
        spec=replace(spec, layer=layer, norms_add_one=True),
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        embedding_scale=math.sqrt(config.hidden_size),
        rounds_embedding_scale=True,
    )


def _cap(fields: ConfigFields, name: str, default: float) -> float:
    """0 where it is null, or left out and by default none."""
    if not fields.is_set(name):
        return 0.0 if fields.is_given(name) else default
    return fields.number(name)


def read_gemma2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    windows = Windows(4096, has_one=lambda layer: layer % 2 == 0)
    defaults = Defaults(
        head_dim=256,
        max_position=8192,
        is_tied=True,
        windows=windows,
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
    )
    config = _read(fields, "Gemma 2", defaults, has_head_norms=False)
    return replace(
        config,
        soft_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logits_cap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    interval = fields.integer("sliding_window_pattern", default=6)
    defaults = Defaults(
        head_dim=256,
        rope_theta=1_000_000.0,
        local_theta=10_000.0,
        max_position=131_072,
        is_tied=True,
        windows=Windows(4096, has_one=lambda layer: (layer + 1) % interval != 0),
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
    )
    config = _read(fields, "Gemma 3", defaults, has_head_norms=True)
    # Its attention reads no cap, whatever its file says.
    return replace(config, logits_cap=_cap(fields, "final_logit_softcapping", 0.0))


GEMMA2 = Family("Gemma2ForCausalLM", model_type="gemma2", read_config=read_gemma2_config)
GEMMA3 = Family("Gemma3ForCausalLM", model_type="gemma3_text", read_config=read_gemma3_config)


_FULL, _WINDOW = "full_attention", "sliding_attention"
_MAX_PARTS = 64
"""More blocks than a row of any model's wide layers takes: a file that says more is damaged."""
_NORMS = ExpertNorms(
    router="router.scale",
    input="pre_feedforward_layernorm_2",
    output="post_feedforward_layernorm_2",
    beside="post_feedforward_layernorm_1",
)


def _read_gemma4(fields: ConfigFields, family: str, *, window: int, max_position: int) -> ModelConfig:
    """Read what all of them have. Raises ConfigError."""
    if fields.value("use_bidirectional_attention") == "all":
        raise fields.error("use_bidirectional_attention", "'all' is not supported: such a model generates no text")
    fields.is_set("use_bidirectional_attention")  # "vision": images' tokens alone see those behind them
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec(family, qkv_bias=bias, output_bias=bias, has_head_norms=True)
    defaults = Defaults(
        head_dim=256,
        local_theta=10_000.0,
        rotated_part=1.0,
        rope_names={"proportional": "default"},
        max_position=max_position,
        is_tied=True,
        windows=Windows(window, has_one=lambda layer: (layer + 1) % 6 != 0),
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
    )
    config = read_decoder(fields.over({"sliding_window": window}), spec, defaults)
    kinds = _kinds(fields, config.num_layers)
    heads = _layer_heads(fields, config, kinds)
    number = min(one.number for one in heads)
    width = min(one.width // number for one in heads)
    unit = number * width
    if any(one.number % number or one.width % unit or one.width > _MAX_PARTS * unit for one in heads):
        shapes = ", ".join(sorted({f"{one.number} heads of {one.dim}" for one in heads}))
        what = f"wider ones are to be multiples of others, at most {_MAX_PARTS} times as wide"
        raise fields.error("per_layer_config", f"layers' keys have {shapes}: {what}")
    owners = _owners(fields, kinds)
    layer = replace(
        spec.layer,
        attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        output_norm="post_feedforward_layernorm",
        normalises_values=True,
        output_scale="layer_scalar",
        experts=_experts(fields, spec.layer.gate, spec.layer.up, spec.layer.down, config),
    )
    is_full = frozenset(index for index, kind in enumerate(kinds) if kind == _FULL)
    is_wide = fields.boolean("use_double_wide_mlp", default=False)
    tokens = fields.integer("sliding_window", default=window)
    return replace(
        config,
        spec=replace(
            spec, layer=layer, layer_embedding=_layer_embedding(fields, config), ignored=_unused(spec, owners)
        ),
        rope=_rope(fields, _FULL, RopeConfig("proportional", 1_000_000.0, rotated=heads[-1].dim // 4), heads[-1].dim),
        local_rope=_rope(fields, _WINDOW, RopeConfig("default", 10_000.0), config.head_dim),
        num_kv_heads=number,
        head_dim=width,
        layer_heads=heads,
        kv_owners=owners,
        # Windows that no context exceeds are kept, too: layers of one window are to be alike.
        windows=tuple(0 if index in is_full else tokens for index in range(config.num_layers)),
        local_layers=frozenset(range(config.num_layers)) - is_full,
        wide_layers=frozenset(index for index, owner in enumerate(owners) if owner != index and is_wide),
        keys_as_values=is_full if fields.boolean("attention_k_eq_v", default=False) else frozenset(),
        attention_scale=1.0,
        embedding_scale=math.sqrt(config.hidden_size),
        rounds_embedding_scale=True,
        logits_cap=fields.number("final_logit_softcapping") if fields.is_set("final_logit_softcapping") else 0.0,
    )


def _kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return each layer's kind. The last one attends to all tokens, whatever is said of it, as in transformers."""
    usual = [_FULL if (layer + 1) % 6 == 0 else _WINDOW for layer in range(num_layers)]
    return [*fields.texts("layer_types", usual)[:-1], _FULL]


def _layer_heads(fields: ConfigFields, config: ModelConfig, kinds: list[str]) -> tuple[KVHeads, ...]:
    """Return the heads of each layer, those of a kind alike: as published, or by layer, as transformers writes them."""
    usual = KVHeads(config.num_kv_heads, config.head_dim)
    by_layer = fields.object("per_layer_config")
    number = usual.number
    if fields.boolean("attention_k_eq_v", default=False):
        number = fields.integer("num_global_key_value_heads", default=number)
    full = KVHeads(number, fields.integer("global_head_dim", default=512))
    found: list[KVHeads] = []
    for index, kind in enumerate(kinds):
        heads = full if kind == _FULL else usual
        if fields.is_set("per_layer_config"):
            own = by_layer.object(str(index))
            heads = KVHeads(
                own.integer("num_key_value_heads", default=usual.number), own.integer("head_dim", default=usual.dim)
            )
            if unread := own.unread():
                raise own.error(unread[0], "is not supported of single layers")
        if heads.dim % 2 or config.num_heads % heads.number:
            what = f"{heads.number} heads of {heads.dim} can't be those of {config.num_heads} heads of queries"
            raise fields.error("per_layer_config" if by_layer.has_objects else "global_head_dim", what)
        found.append(heads)
    if len({*zip(kinds, found, strict=True)}) > len({*kinds}):
        raise fields.error("per_layer_config", "heads that differ between layers of one kind are not supported")
    return tuple(found)


def _owners(fields: ConfigFields, kinds: list[str]) -> tuple[int, ...]:
    """Return the layer whose keys and values each one attends to: of the last ones, the last of its kind before."""
    shared = fields.count("num_kv_shared_layers", default=0)
    own = len(kinds) - shared
    if {*kinds[: max(0, own)]} != {*kinds}:
        raise fields.error("num_kv_shared_layers", f"{shared} leaves no layer of each kind with keys of its own")
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    return tuple(index if index < own else last[kind] for index, kind in enumerate(kinds))


def _unused(spec: DecoderSpec, owners: tuple[int, ...]) -> tuple[str, ...]:
    """Return what names of tensors begin with that published files have for layers without keys of their own."""
    parts = (spec.layer.k.name, spec.layer.v.name, spec.layer.k_norm)
    shared = (layer for layer, owner in enumerate(owners) if owner != layer)
    return tuple(f"{spec.layers}.{layer}.{part}." for layer in shared for part in parts)


def _rope(fields: ConfigFields, kind: str, default: RopeConfig, dim: int) -> RopeConfig:
    """Return the angles of one kind of layers, whose heads have `dim` dimensions; `default` where nothing is said."""
    given = fields.object("rope_parameters").object(kind)
    if not fields.has("rope_parameters"):
        return default
    theta = given.number("rope_theta", default=default.theta)
    match given.text("rope_type", default=default.type):
        case "proportional":
            rotated = 2 * int(given.number("partial_rotary_factor", default=1.0) * dim // 2)
            return RopeConfig("proportional", theta, given.number("factor", default=1.0), rotated=rotated % dim)
        case "default":
            return RopeConfig("default", theta)
        case other:
            raise given.error("rope_type", f"{other!r} is not supported, only default and proportional are")


def _layer_embedding(fields: ConfigFields, config: ModelConfig) -> LayerEmbeddingSpec | None:
    size = fields.count("hidden_size_per_layer_input", default=0)
    if not size:
        fields.is_set("vocab_size_per_layer_input")
        return None
    vocabulary = fields.integer("vocab_size_per_layer_input", default=config.vocab_size)
    if vocabulary != config.vocab_size:
        raise fields.error(
            "vocab_size_per_layer_input", f"{vocabulary} is not vocab_size, which is {config.vocab_size}"
        )
    return LayerEmbeddingSpec(
        size=size,
        table="model.embed_tokens_per_layer",
        projection=Projection("model.per_layer_model_projection"),
        projection_norm="model.per_layer_projection_norm",
        gate=Projection("per_layer_input_gate"),
        output=Projection("per_layer_projection"),
        norm="post_per_layer_input_norm",
    )


def _experts(
    fields: ConfigFields, gate: Projection | None, up: Projection, down: Projection, config: ModelConfig
) -> ExpertsSpec | None:
    """Return the experts beside the MLP, whose projections are given; None: there are none."""
    if not fields.boolean("enable_moe_block", default=False):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.is_set(name)
        return None
    count, chosen = fields.integer("num_experts", most=MAX_EXPERTS), fields.integer("top_k_experts")
    if chosen > count:
        raise fields.error("top_k_experts", f"{chosen} are more than num_experts, which is {count}")
    spec = experts_spec(Routing(count, chosen, normalises=True), fields.integer("moe_intermediate_size"))
    own_gate, own_up, own_down = (Projection(f"experts.*.{part}_proj") for part in ("gate", "up", "down"))
    return replace(
        spec,
        router=Projection("router.proj"),
        gate=own_gate,
        up=own_up,
        down=own_down,
        shared=MlpSpec(gate, up, down, config.intermediate_size),
        scales="router.per_expert_scale",
        norms=_NORMS,
    )


def read_gemma4_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return _read_gemma4(fields.over({"hidden_size_per_layer_input": 256}), "Gemma 4", window=512, max_position=131_072)


def read_gemma4_unified_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return _read_gemma4(fields, "Gemma 4 12B", window=1024, max_position=262_144)


GEMMA4 = Family("Gemma4ForCausalLM", model_type="gemma4_text", read_config=read_gemma4_config)
GEMMA4_UNIFIED = Family(
    "Gemma4UnifiedForCausalLM", model_type="gemma4_unified_text", read_config=read_gemma4_unified_config
)
