"""Mistral: Llama's layers, with a window in its first version (Jiang et al. 2023). Ministral: in some layers alone.
Mixtral: experts (Jiang et al. 2024)."""

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
from twostroke.model.config import ExpertsSpec, ModelConfig, Projection


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return read_decoder(fields, decoder_spec("Mistral"), Defaults(max_position=131_072, windows=Windows(4096)))


def read_ministral_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    windows = Windows(4096, has_one=lambda layer: True)
    return read_decoder(fields, decoder_spec("Ministral"), Defaults(max_position=131_072, windows=windows))


def read_mixtral_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    defaults = Defaults(rms_norm_eps=1e-5, rope_theta=1e6, max_position=131_072, windows=Windows())
    config = read_decoder(fields, decoder_spec("Mixtral"), defaults)
    routing = read_routing(fields, "num_local_experts", experts=8, top_k=2, normalises=True)
    gate, up, down = (Projection(f"block_sparse_moe.experts.*.w{number}") for number in (1, 3, 2))
    router = Projection("block_sparse_moe.gate")
    return with_experts(config, ExpertsSpec(routing, config.intermediate_size, router, gate, up, down))


MISTRAL = Family("MistralForCausalLM", model_type="mistral", read_config=read_config)
MINISTRAL = Family("MinistralForCausalLM", model_type="ministral", read_config=read_ministral_config)
MIXTRAL = Family("MixtralForCausalLM", model_type="mixtral", read_config=read_mixtral_config)
