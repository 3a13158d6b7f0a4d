"""GLM-4 dense: neighbouring dimensions are a pair, half of a head is turned; from 0414 on each sublayer's result has a
norm of its own, too."""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    decoder_spec,
    read_decoder,
    with_one_gate_up,
)
from twostroke.model.config import ModelConfig

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


GLM = Family("GlmForCausalLM", model_type="glm", read_config=read_glm_config)
GLM4 = Family("Glm4ForCausalLM", model_type="glm4", read_config=read_glm4_config)
