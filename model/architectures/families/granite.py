"""Granite 3: Llama's layers, with factors for embeddings, scores, what a layer adds, and logits."""

from dataclasses import replace

from twostroke.model.architectures.families.family import ConfigFields, Defaults, Family, decoder_spec, read_decoder
from twostroke.model.config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError.

    What all layers add is multiplied by one factor. The residual is kept divided by that instead: the same but for the
    norms' eps, so no weight is changed.
    """
    bias, mlp_bias = fields.boolean("attention_bias", default=False), fields.boolean("mlp_bias", default=False)
    spec = decoder_spec("Granite", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    config = read_decoder(fields, spec, Defaults())
    added = fields.number("residual_multiplier", default=1.0)
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", default=1.0) / added,
        rms_norm_eps=config.rms_norm_eps / added**2,
        attention_scale=fields.number("attention_multiplier", default=1.0),
        logits_scale=1 / fields.number("logits_scaling", default=1.0),
    )


GRANITE = Family("GraniteForCausalLM", model_type="granite", read_config=read_config)
