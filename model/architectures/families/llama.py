"""Llama, and the families whose layers are Llama's with little changed: Mistral, MiniMax-M2, Phi-3, Granite and
SmolLM3.

Llama 4 (Meta 2025): rotary layers that attend within chunks, and layers without rotation between them.

Each token takes one expert, whose input is weighed by a sigmoid, beside an MLP.
"""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MAX_LAYERS,
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    read_decoder,
    read_routing,
    with_experts,
    with_one_gate_up,
    with_one_qkv,
    with_query_scale,
)
from twostroke.model.config import ExpertsSpec, MlpSpec, ModelConfig, Projection, QueryScale, Routing


def read_llama_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias = fields.boolean("attention_bias", default=False)
    mlp_bias = fields.boolean("mlp_bias", default=False)
    return read_decoder(fields, decoder_spec("Llama", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias))


LLAMA = Family("LlamaForCausalLM", model_type="llama", read_config=read_llama_config)


def read_mistral_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return read_decoder(fields, decoder_spec("Mistral"), Defaults(max_position=131_072, windows=Windows(4096)))


def read_ministral_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    windows = Windows(4096, has_one=lambda layer: True)
    return read_decoder(fields, decoder_spec("Ministral"), Defaults(max_position=131_072, windows=windows))


_MINISTRAL3_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}


def read_ministral3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    fields = fields.over({"rope_parameters": _MINISTRAL3_ROPE})
    defaults = Defaults(head_dim=128, rms_norm_eps=1e-5, max_position=262_144, windows=Windows())
    return with_query_scale(read_decoder(fields, decoder_spec("Ministral 3"), defaults), fields)


def read_mixtral_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    defaults = Defaults(rms_norm_eps=1e-5, rope_theta=1e6, max_position=131_072, windows=Windows())
    config = read_decoder(fields, decoder_spec("Mixtral"), defaults)
    routing = read_routing(fields, "num_local_experts", experts=8, top_k=2, normalises=True)
    return with_experts(config, _mixtral_experts(routing, config.intermediate_size))


def _mixtral_experts(routing: Routing, size: int) -> ExpertsSpec:
    gate, up, down = (Projection(f"block_sparse_moe.experts.*.w{number}") for number in (1, 3, 2))
    return ExpertsSpec(routing, size, Projection("block_sparse_moe.gate"), gate, up, down)


def read_minimax_m2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError. Files as published have `rotary_dim`, later ones a factor."""
    head_dim = fields.integer("head_dim", default=128)
    defaults = Defaults(
        head_dim=128,
        rope_theta=5e6,
        max_position=196_608,
        rotated_part=fields.integer("rotary_dim", default=head_dim) / head_dim,
    )
    spec = decoder_spec("MiniMax-M2")
    layer = replace(spec.layer, q_row_norm="self_attn.q_norm", k_row_norm="self_attn.k_norm")
    config = read_decoder(fields, replace(spec, layer=layer), defaults)
    number = "num_experts" if fields.is_set("num_experts") else "num_local_experts"
    routing = read_routing(fields, number, experts=256, top_k=8, normalises=True)
    experts = _mixtral_experts(replace(routing, scoring="sigmoid"), config.intermediate_size)
    return with_experts(config, replace(experts, correction="block_sparse_moe.e_score_correction_bias"))


MISTRAL = Family("MistralForCausalLM", model_type="mistral", read_config=read_mistral_config)
MINISTRAL = Family("MinistralForCausalLM", model_type="ministral", read_config=read_ministral_config)
MINISTRAL3 = Family("Ministral3ForCausalLM", model_type="ministral3", read_config=read_ministral3_config)
MIXTRAL = Family("MixtralForCausalLM", model_type="mixtral", read_config=read_mixtral_config)
MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    read_config=read_minimax_m2_config,
    always={"scoring_func": ("sigmoid",)},
)


def read_phi3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    defaults = Defaults(
        rms_norm_eps=1e-5,
        max_position=4096,
        original_max_position=4096,
        rotated_part=1.0,
        rope_names={"su": "longrope", "yarn": "longrope"},  # earlier files' names of it
        windows=Windows(),
    )
    return with_one_qkv(with_one_gate_up(read_decoder(fields, decoder_spec("Phi-3"), defaults)))


PHI3 = Family("Phi3ForCausalLM", model_type="phi3", read_config=read_phi3_config)


def read_granite_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias, mlp_bias = fields.boolean("attention_bias", default=False), fields.boolean("mlp_bias", default=False)
    spec = decoder_spec("Granite", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    return with_multipliers(fields, read_decoder(fields, spec, Defaults()))


def with_multipliers(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    """Return the config with the factors that Granite's files have. Raises ConfigError.

    What all layers add is multiplied by one factor. The residual is kept divided by that instead: the same but for the
    norms' eps, so no weight is changed.
    """
    added = fields.number("residual_multiplier", default=1.0)
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", default=1.0) / added,
        rms_norm_eps=config.rms_norm_eps / added**2,
        attention_scale=fields.number("attention_multiplier", default=1.0),
        logits_scale=1 / fields.number("logits_scaling", default=1.0),
    )


GRANITE = Family("GraniteForCausalLM", model_type="granite", read_config=read_granite_config)


def read_smollm3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias = fields.boolean("attention_bias", default=False)
    mlp_bias = fields.boolean("mlp_bias", default=False)
    spec = decoder_spec("SmolLM3", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    interval = fields.integer("no_rope_layer_interval", default=4)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    rotates = fields.flags("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    windows = Windows(are_switched=True, has_one=lambda layer: not rotates[layer])
    defaults = Defaults(rope_theta=2_000_000.0, max_position=32_768, is_tied=True, windows=windows)
    config = read_decoder(fields, spec, defaults)
    return replace(config, unrotated_layers=frozenset(layer for layer in range(num_layers) if not rotates[layer]))


SMOLLM3 = Family("SmolLM3ForCausalLM", model_type="smollm3", read_config=read_smollm3_config)


_REQUIRED = {  # transformers' defaults of fields that other families must give
    **{"vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192},
    **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8},
}


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    fields = fields.over(_REQUIRED)
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec("Llama 4", qkv_bias=bias, output_bias=bias)
    gate, up, down = (Projection(f"feed_forward.{name}_proj") for name in ("gate", "up", "down"))
    layer = replace(
        spec.layer, gate=gate, up=up, down=down, normalises_rotated=fields.boolean("use_qk_norm", default=True)
    )
    defaults = Defaults(head_dim=128, rms_norm_eps=1e-5, rope_theta=500_000.0, max_position=131_072)
    config = read_decoder(fields, replace(spec, layer=layer), defaults)
    still = frozenset(layer for layer, rotates in enumerate(_rotated_layers(fields, config.num_layers)) if not rotates)
    is_scaled = fields.has("attn_temperature_tuning") or not fields.is_given("attn_temperature_tuning")
    scale = QueryScale(
        tokens=fields.integer("floor_scale", default=8192), factor=fields.number("attn_scale", default=0.1), shift=1
    )
    config = replace(
        config,
        rope=replace(config.rope, interleaves=True),
        windows=_windows(fields, config, still),
        unrotated_layers=still,
        query_scale=scale if is_scaled else None,
        scaled_layers=still if is_scaled else frozenset(),
        intermediate_size=fields.integer("intermediate_size_mlp", default=16_384),
    )
    dense = set(range(config.num_layers)) - set(_layers_with_experts(fields, config.num_layers))
    if len(dense) == config.num_layers:
        return config
    return with_experts(config, _experts(fields), dense)


def _rotated_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return, by layer, if its queries and keys are rotated: `no_rope_layers` has 1 where they do."""
    interval = fields.integer("no_rope_layer_interval", default=4)
    usual = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    return fields.flags("no_rope_layers", usual)[:num_layers] if fields.has("no_rope_layers") else usual


def _windows(fields: ConfigFields, config: ModelConfig, still: frozenset[int]) -> tuple[int, ...]:
    """Return the layers' chunks. `layer_types` says which have them; where it doesn't, the rotary ones do."""
    size = fields.integer("attention_chunk_size", default=8192)
    count = config.num_layers
    kinds = fields.texts("layer_types") or [
        "full_attention" if layer in still else "chunked_attention" for layer in range(count)
    ]
    if len(kinds) != count or any(kind not in ("chunked_attention", "full_attention") for kind in kinds):
        raise fields.error("layer_types", f"expected {count} times 'chunked_attention' or 'full_attention'")
    if size >= config.max_position:
        return ()
    windows = tuple(-size if kind == "chunked_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _layers_with_experts(fields: ConfigFields, num_layers: int) -> list[int]:
    step = fields.integer("interleave_moe_layer_step", default=1)
    return fields.counts("moe_layers") if fields.is_set("moe_layers") else list(range(step - 1, num_layers, step))


def _experts(fields: ConfigFields) -> ExpertsSpec:
    """The one expert with the highest score: its weight is 1, since its input has been weighed."""
    routing = read_routing(fields, "num_local_experts", experts=16, top_k=1, normalises=True)
    if routing.top_k != 1:
        raise fields.error("num_experts_per_tok", f"{routing.top_k} is not supported, only 1 is")
    size = fields.integer("intermediate_size")
    gate, up, down = (Projection(f"feed_forward.shared_expert.{name}_proj") for name in ("gate", "up", "down"))
    return ExpertsSpec(
        routing,
        size,
        router=Projection("feed_forward.router"),
        gate=Projection("feed_forward.experts.gate_up_proj"),
        up=Projection("feed_forward.experts.gate_up_proj", first_row=size),
        down=Projection("feed_forward.experts.down_proj"),
        are_stacked=True,
        scales_input=True,
        shared=MlpSpec(gate, up, down, size),
    )


LLAMA4 = Family("Llama4ForCausalLM", model_type="llama4_text", read_config=read_config)
