"""GLM-4 dense: neighbouring dimensions are a pair, half of a head is rotated; from 0414 on each sublayer's result has a
norm of its own, too. GLM-4.5: halves of a head are rotated in Llama's pairs, and most layers have experts (GLM-4.5 Team
2025)."""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MAX_LAYERS,
    ConfigFields,
    Defaults,
    Family,
    decoder_spec,
    experts_spec,
    read_decoder,
    read_routing,
    with_experts,
    with_one_gate_up,
)
from twostroke.model.config import ExpertsSpec, MlpSpec, ModelConfig, MtpSpec, Projection

_DEFAULTS = Defaults(head_dim=128, rms_norm_eps=1.5625e-7, rotated_part=0.5, max_position=131_072)


def read_glm_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    spec = decoder_spec("GLM-4", qkv_bias=fields.boolean("attention_bias", default=True))
    config = read_decoder(fields, spec, _DEFAULTS)
    return with_one_gate_up(replace(config, rope=replace(config.rope, interleaves=True)))


def read_glm4_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    config = read_glm_config(fields)
    layer = replace(config.spec.layer, attention_norm="post_self_attn_layernorm", output_norm="post_mlp_layernorm")
    return replace(config, spec=replace(config.spec, layer=layer))


def read_glm4_moe_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError. Layers behind the last one, which draft tokens, are left on disk."""
    has_norms = fields.boolean("use_qk_norm", default=False)
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec("GLM-4.5", qkv_bias=bias, has_head_norms=has_norms)
    config = read_decoder(fields, spec, Defaults(rms_norm_eps=1e-5, rotated_part=0.5, max_position=131_072))
    first, size = config.num_layers, fields.integer("moe_intermediate_size", default=1408)
    drafting = range(first, first + fields.count("num_nextn_predict_layers", default=1, most=MAX_LAYERS))
    mtp = MtpSpec() if drafting else None
    spec = replace(config.spec, ignored=tuple(f"{spec.layers}.{layer}." for layer in drafting), mtp=mtp)
    experts = experts_by_groups(fields, size, experts=128, top_k=8, groups=1, normalises=True)
    dense = range(fields.count("first_k_dense_replace", default=1, most=MAX_LAYERS))
    return with_experts(replace(config, spec=spec), experts, dense)


def experts_by_groups(
    fields: ConfigFields, size: int, *, experts: int, top_k: int, groups: int, normalises: bool
) -> ExpertsSpec:
    """Experts as DeepSeek-V3's, with some that all tokens take, which are one MLP: scores are sigmoids, corrected where
    they choose, out of the best groups. Raises ConfigError."""
    routing = replace(
        read_routing(fields, "n_routed_experts", experts=experts, top_k=top_k),
        scoring="sigmoid",
        normalises=fields.boolean("norm_topk_prob", default=normalises),
        scale=fields.number("routed_scaling_factor", default=1.0),
        groups=fields.integer("n_group", default=groups),
        top_groups=fields.integer("topk_group", default=groups),
        summed=2,
    )
    if routing.num_experts % routing.groups:
        raise fields.error("n_group", f"{routing.groups} does not divide n_routed_experts, {routing.num_experts}")
    if not routing.top_k <= routing.top_groups * (routing.num_experts // routing.groups) <= routing.num_experts:
        what = (
            f"{routing.top_groups} of {routing.groups} groups have not {routing.top_k} to {routing.num_experts} experts"
        )
        raise fields.error("topk_group", what)
    gate, up, down = (Projection(f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down"))
    shared = fields.integer("n_shared_experts", default=1) * size
    return replace(
        experts_spec(routing, size),
        correction="mlp.gate.e_score_correction_bias",
        shared=MlpSpec(gate, up, down, shared),
    )


GLM = Family("GlmForCausalLM", model_type="glm", read_config=read_glm_config)
GLM4 = Family("Glm4ForCausalLM", model_type="glm4", read_config=read_glm4_config)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    model_type="glm4_moe",
    read_config=read_glm4_moe_config,
    always={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
