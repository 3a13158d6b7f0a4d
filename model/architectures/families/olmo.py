"""OLMo 2 and 3: norms behind the sublayers instead of before, and of all heads' queries and keys together (OLMo et al.
2025). OLMo 3 has windows in three layers of four, which rotate by angles without scaling. OLMoE: Llama's norms, and
experts (Muennighoff et al. 2024)."""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    experts_spec,
    read_decoder,
    read_routing,
    with_experts,
)
from twostroke.model.config import ModelConfig


def _read(fields: ConfigFields, family: str, defaults: Defaults) -> ModelConfig:
    bias = fields.boolean("attention_bias", default=False)
    config = read_decoder(fields, decoder_spec(family, qkv_bias=bias, output_bias=bias), defaults)
    layer = replace(
        config.spec.layer,
        input_norm=None,
        mlp_norm=None,
        attention_norm="post_attention_layernorm",
        output_norm="post_feedforward_layernorm",
        q_row_norm="self_attn.q_norm",
        k_row_norm="self_attn.k_norm",
    )
    return replace(config, spec=replace(config.spec, layer=layer))


def read_olmo2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return _read(fields, "OLMo 2", Defaults(rms_norm_eps=1e-5))


def read_olmo3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    windows = Windows(4096, has_one=lambda layer: (layer + 1) % 4 != 0)
    return _read(
        fields, "OLMo 3", Defaults(rms_norm_eps=1e-5, rope_theta=500_000.0, local_theta=500_000.0, windows=windows)
    )


def read_olmoe_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    if fields.is_set("clip_qkv"):
        raise fields.error(
            "clip_qkv", "queries, keys and values that are clipped are not supported: take a model without"
        )
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec("OLMoE", qkv_bias=bias, output_bias=bias)
    spec = replace(spec, layer=replace(spec.layer, q_row_norm="self_attn.q_norm", k_row_norm="self_attn.k_norm"))
    config = read_decoder(fields, spec, Defaults(rms_norm_eps=1e-5, max_position=4096))
    normalises = fields.boolean("norm_topk_prob", default=False)
    routing = read_routing(fields, "num_experts", experts=64, top_k=8, normalises=normalises)
    return with_experts(config, experts_spec(routing, config.intermediate_size))


OLMO2 = Family("Olmo2ForCausalLM", model_type="olmo2", read_config=read_olmo2_config)
OLMO3 = Family("Olmo3ForCausalLM", model_type="olmo3", read_config=read_olmo3_config)
OLMOE = Family("OlmoeForCausalLM", model_type="olmoe", read_config=read_olmoe_config)
