"""Llama, and the families whose layers are Llama's with little changed: Mistral, MiniMax-M2, Phi-3, Granite and
SmolLM3."""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MOST_LAYERS,
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
from twostroke.model.config import ExpertsSpec, ModelConfig, Projection, Routing


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
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    rotates = fields.flags("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    windows = Windows(are_switched=True, has_one=lambda layer: not rotates[layer])
    defaults = Defaults(rope_theta=2_000_000.0, max_position=32_768, is_tied=True, windows=windows)
    config = read_decoder(fields, spec, defaults)
    return replace(config, unrotated_layers=frozenset(layer for layer in range(num_layers) if not rotates[layer]))


SMOLLM3 = Family("SmolLM3ForCausalLM", model_type="smollm3", read_config=read_smollm3_config)
