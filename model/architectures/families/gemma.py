"""Gemma 2 and 3: norms before and behind the sublayers, embeddings times the root of their size, GELU, and windows.

Gemma 2 (Gemma Team 2024) caps scores and logits; Gemma 3 (2025) has norms of heads, and other angles in layers with
windows.
"""

import math
from dataclasses import replace

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    read_decoder,
)
from twostroke.model.config import ModelConfig


def _read(fields: ConfigFields, family: str, defaults: Defaults, *, has_head_norms: bool) -> ModelConfig:
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "is not supported: a bidirectional model generates no text")
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec(family, qkv_bias=bias, output_bias=bias, has_head_norms=has_head_norms)
    config = read_decoder(fields, spec, defaults)
    layer = replace(
        spec.layer,
        attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        output_norm="post_feedforward_layernorm",
    )
    return replace(
        config,
        spec=replace(spec, layer=layer, norms_add_one=True),
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        embedding_scale=math.sqrt(config.hidden_size),
        rounds_embedding_scale=True,
    )


def _cap(fields: ConfigFields, name: str, default: float) -> float:
    """0 where it is null, or left out and by default none."""
    if not fields.is_set(name):
        return 0.0 if fields.is_given(name) else default
    return fields.number(name)


def read_gemma2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    windows = Windows(4096, has_one=lambda layer: layer % 2 == 0)
    defaults = Defaults(
        head_dim=256,
        max_position=8192,
        is_tied=True,
        windows=windows,
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
    )
    config = _read(fields, "Gemma 2", defaults, has_head_norms=False)
    return replace(
        config,
        soft_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logits_cap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    interval = fields.integer("sliding_window_pattern", default=6)
    defaults = Defaults(
        head_dim=256,
        rope_theta=1_000_000.0,
        local_theta=10_000.0,
        max_position=131_072,
        is_tied=True,
        windows=Windows(4096, has_one=lambda layer: (layer + 1) % interval != 0),
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
    )
    config = _read(fields, "Gemma 3", defaults, has_head_norms=True)
    # Its attention reads no cap, whatever its file says.
    return replace(config, logits_cap=_cap(fields, "final_logit_softcapping", 0.0))


GEMMA2 = Family("Gemma2ForCausalLM", model_type="gemma2", read_config=read_gemma2_config)
GEMMA3 = Family("Gemma3ForCausalLM", model_type="gemma3_text", read_config=read_gemma3_config)
