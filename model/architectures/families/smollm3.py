"""SmolLM3: Llama's layers, of which every fourth does not rotate queries and keys."""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MOST_LAYERS,
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
    bias = fields.boolean("attention_bias", default=False)
    mlp_bias = fields.boolean("mlp_bias", default=False)
    spec = decoder_spec("SmolLM3", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    interval = fields.integer("no_rope_layer_interval", default=4)
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    rotates = fields.flags("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    windows = Windows(are_switched=True, has_one=lambda layer: not rotates[layer])
    defaults = Defaults(rope_theta=2_000_000.0, max_position=32_768, is_tied=True, windows=windows)
    config = read_decoder(fields, spec, defaults)
    return replace(config, unrotated_layers=frozenset(layer for layer in range(num_layers) if not rotates[layer]))


SMOLLM3 = Family("SmolLM3ForCausalLM", model_type="smollm3", read_config=read_config)
