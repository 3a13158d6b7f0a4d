"""Qwen 2, 2.5 and 3: Llama's layers with biases of queries, keys and values, or with norms of their heads instead."""

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    read_decoder,
)
from twostroke.model.config import ModelConfig


def _windows(fields: ConfigFields) -> Windows:
    """The first layers have none, here and there: by how many."""
    first = fields.count("max_window_layers", default=28)
    return Windows(4096, are_switched=True, has_one=lambda layer: layer >= first)


def read_qwen2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    spec = decoder_spec("Qwen2", qkv_bias=True)
    return read_decoder(fields, spec, Defaults(max_position=32_768, windows=_windows(fields)))


def read_qwen3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec("Qwen3", qkv_bias=bias, output_bias=bias, has_head_norms=True)
    return read_decoder(fields, spec, Defaults(head_dim=128, max_position=32_768, windows=_windows(fields)))


QWEN2 = Family("Qwen2ForCausalLM", model_type="qwen2", read_config=read_qwen2_config)
QWEN3 = Family("Qwen3ForCausalLM", model_type="qwen3", read_config=read_qwen3_config)
