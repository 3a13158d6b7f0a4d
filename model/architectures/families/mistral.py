"""Mistral: Llama's layers, with a window in its first version (Jiang et al. 2023). Ministral: in some layers alone."""

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    read_decoder,
)
from twostroke.model.config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return read_decoder(fields, decoder_spec("Mistral"), Defaults(max_position=131_072, windows=Windows(4096)))


def read_ministral_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    windows = Windows(4096, has_one=lambda layer: True)
    return read_decoder(fields, decoder_spec("Ministral"), Defaults(max_position=131_072, windows=windows))


MISTRAL = Family("MistralForCausalLM", model_type="mistral", read_config=read_config)
MINISTRAL = Family("MinistralForCausalLM", model_type="ministral", read_config=read_ministral_config)
