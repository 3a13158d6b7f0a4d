"""Llama 2 to 3.3, and all that took its architecture's name: SmolLM2, TinyLlama, Yi (Touvron et al. 2023)."""

from twostroke.model.architectures.families.family import ConfigFields, Family, decoder_spec, read_decoder
from twostroke.model.config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias = fields.boolean("attention_bias", default=False)
    mlp_bias = fields.boolean("mlp_bias", default=False)
    return read_decoder(fields, decoder_spec("Llama", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias))


LLAMA = Family("LlamaForCausalLM", model_type="llama", read_config=read_config)
