"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's layers with fused projections, LongRoPE, and heads turned in part."""

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    read_decoder,
    with_one_gate_up,
    with_one_qkv,
)
from twostroke.model.config import ModelConfig


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    defaults = Defaults(
        rms_norm_eps=1e-5,
        max_position=4096,
        original_max_position=4096,
        rotated_part=1.0,
        rope_names={"su": "longrope", "yarn": "longrope"},  # earlier files' names of it
        windows=Windows(),
    )
    return with_one_qkv(with_one_gate_up(read_decoder(fields, decoder_spec("Phi-3"), defaults)))


PHI3 = Family("Phi3ForCausalLM", model_type="phi3", read_config=read_config)
