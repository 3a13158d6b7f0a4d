"""gpt-oss: windows in every other layer, sinks, and experts with biases and a clamped gate (OpenAI 2025)."""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    read_decoder,
    read_routing,
    with_experts,
)
from twostroke.model.config import GLU_ALPHA, GLU_LIMIT, ExpertsSpec, ModelConfig, Projection

_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError.

    Its weights are the softmax of the chosen experts' logits: that of all, divided by the sum of the chosen ones.
    """
    for name, known in (("swiglu_alpha", GLU_ALPHA), ("swiglu_limit", GLU_LIMIT)):
        if (found := fields.number(name, default=known)) != known:
            raise fields.error(name, f"{found} is not supported, only {known} is")
    if not (fields.has("rope_parameters") or fields.has("rope_scaling")):
        fields = fields.over({"rope_scaling": _ROPE})
    bias = fields.boolean("attention_bias", default=True)
    spec = decoder_spec("gpt-oss", qkv_bias=bias, output_bias=bias)
    spec = replace(spec, layer=replace(spec.layer, sinks="self_attn.sinks"))
    windows = Windows(128, has_one=lambda layer: layer % 2 == 0)
    defaults = Defaults(head_dim=64, rms_norm_eps=1e-5, rope_theta=150_000.0, max_position=131_072, windows=windows)
    config = replace(read_decoder(fields, spec, defaults), activation="clamped")
    gate_up = Projection("mlp.experts.gate_up_proj", has_bias=True)
    experts = ExpertsSpec(
        read_routing(fields, "num_local_experts", experts=128, top_k=4, normalises=True),
        config.intermediate_size,
        router=Projection("mlp.router", has_bias=True),
        gate=gate_up,
        up=gate_up,
        down=Projection("mlp.experts.down_proj", has_bias=True),
        are_stacked=True,
    )
    return with_experts(config, experts)


GPT_OSS = Family("GptOssForCausalLM", model_type="gpt_oss", read_config=read_config)
