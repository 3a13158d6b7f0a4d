"""Mistral: Llama's layers, with a window in its first version (Jiang et al. 2023)."""

from twostroke.model.architectures.family import ConfigFields, Defaults, Family, decoder_spec, read_decoder
from twostroke.model.config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return read_decoder(fields, decoder_spec("Mistral"), Defaults(max_position=131_072, window=4096))


MISTRAL = Family("MistralForCausalLM", model_type="mistral", read_config=read_config)
