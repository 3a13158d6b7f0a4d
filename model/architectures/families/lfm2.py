"""LFM2: most layers are gated short convolutions, some attend. All but the first layers of LFM2-MoE have experts."""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MAX_CHANNELS,
    MAX_LAYERS,
    ConfigFields,
    Defaults,
    Family,
    decoder_spec,
    experts_spec,
    read_decoder,
    read_routing,
    with_experts,
)
from twostroke.model.config import ConvolutionSpec, DecoderSpec, ModelConfig, Projection
from twostroke.model.state_sizes import ConvolutionSizes
from twostroke.protocol.kv_layout import STATE_WINDOW


def _spec(family: str, conv_bias: bool) -> DecoderSpec:
    spec = decoder_spec(family)
    convolution = ConvolutionSpec(
        inputs=Projection("conv.in_proj", conv_bias),
        conv="conv.conv.weight",
        conv_bias="conv.conv.bias" if conv_bias else None,
        output=Projection("conv.out_proj", conv_bias),
    )
    gate, up, down = (Projection(f"feed_forward.w{number}") for number in (1, 3, 2))
    layer = replace(
        spec.layer,
        input_norm="operator_norm",
        output=Projection("self_attn.out_proj"),
        mlp_norm="ffn_norm",
        gate=gate,
        up=up,
        down=down,
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        state=convolution,
    )
    return replace(spec, layer=layer, final_norm="model.embedding_norm")


def _read(fields: ConfigFields, family: str) -> ModelConfig:
    """Read what both have, an MLP in each layer. Raises ConfigError."""
    spec = _spec(family, fields.boolean("conv_bias", default=False))
    config = read_decoder(fields, spec, Defaults(rope_theta=1e6, max_position=128_000, is_tied=True))
    is_tied = fields.boolean("tie_embedding", default=config.tie_word_embeddings)
    eps = fields.number("norm_eps", default=1e-5)
    # Whatever other fields say of activations and of norms, which transformers doesn't read here.
    config = replace(config, tie_word_embeddings=is_tied, rms_norm_eps=eps, activation="silu")
    return _with_convolutions(fields, config)


def _with_convolutions(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    layers, taps = config.num_layers, fields.integer("conv_L_cache", default=3)
    attending = fields.counts("full_attn_idxs") if fields.is_set("full_attn_idxs") else range(layers)
    usual = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    kinds = fields.texts("layer_types", usual)
    if len(kinds) != layers or any(kind not in ("conv", "full_attention") for kind in kinds):
        raise fields.error("layer_types", f"expected {layers} times 'conv' or 'full_attention'")
    if "full_attention" not in kinds:
        raise fields.error("layer_types", "a model without any layer that attends is not supported")
    if config.hidden_size % (2 * config.num_kv_heads) or taps < 2 or config.hidden_size > MAX_CHANNELS:
        shares = f"2 num_key_value_heads, which is {2 * config.num_kv_heads}"
        raise fields.error(
            "hidden_size", f"{config.hidden_size} channels of {taps} taps are not shared out by {shares}"
        )
    if "conv" not in kinds:
        return config
    windows = tuple(STATE_WINDOW if kind == "conv" else 0 for kind in kinds)
    return replace(config, windows=windows, state=ConvolutionSizes(config.hidden_size, taps))


def read_lfm2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError. Files as published have the MLP's size, of which two thirds are meant, as `block_ff_dim`."""
    size = fields.integer("block_ff_dim", default=fields.integer("intermediate_size", default=12_288))
    config = _read(fields.over({"intermediate_size": size}), "LFM2")
    of, factor = (
        fields.integer("block_multiple_of", default=256),
        fields.number("block_ffn_dim_multiplier", default=1.0),
    )
    if fields.boolean("block_auto_adjust_ff_dim", default=True):
        size = -(-int(factor * int(2 * size / 3)) // of) * of
    return replace(config, intermediate_size=size)


def read_lfm2_moe_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    config = _read(fields, "LFM2-MoE")
    normalises = fields.boolean("norm_topk_prob", default=True)  # by the sum and 1e-6, which fp32 hardly tells apart
    routing = read_routing(fields, "num_experts", experts=32, top_k=4, normalises=normalises)
    scale = fields.number("routed_scaling_factor", default=1.0)
    routing = replace(routing, scoring="sigmoid", scale=scale)
    gate, up, down = (Projection(f"feed_forward.experts.*.w{number}") for number in (1, 3, 2))
    experts = experts_spec(routing, fields.integer("moe_intermediate_size", default=1792))
    has_bias = fields.boolean("use_expert_bias", default=True)
    correction = "feed_forward.expert_bias" if has_bias else None
    router = Projection("feed_forward.gate")
    experts = replace(experts, router=router, gate=gate, up=up, down=down, correction=correction)
    return with_experts(config, experts, range(fields.count("num_dense_layers", default=2, most=MAX_LAYERS)))


LFM2 = Family("Lfm2ForCausalLM", model_type="lfm2", read_config=read_lfm2_config)
LFM2_MOE = Family("Lfm2MoeForCausalLM", model_type="lfm2_moe", read_config=read_lfm2_moe_config)
