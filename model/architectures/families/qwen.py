"""Qwen 2, 2.5 and 3: Llama's layers with biases of queries, keys and values, or with norms of their heads instead. Some
have experts, and those of 2 one more that all tokens take."""

from collections.abc import Mapping
from dataclasses import replace

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    Windows,
    decoder_spec,
    experts_spec,
    read_decoder,
    read_routing,
    with_experts,
)
from twostroke.model.config import ExpertsSpec, MlpSpec, ModelConfig, Projection, RopeType

_MROPE: Mapping[str, RopeType] = {"mrope": "default"}  # positions in three dimensions, which are one in text


def _windows(fields: ConfigFields, first: int = 28) -> Windows:
    """The first layers have none, here and there: by how many."""
    first = fields.count("max_window_layers", default=first)
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


def read_qwen2_5_vl_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    defaults = Defaults(rms_norm_eps=1e-5, rope_theta=1e6, max_position=32_768, windows=_windows(fields, 80))
    return read_decoder(fields, decoder_spec("Qwen2.5-VL", qkv_bias=True), replace(defaults, rope_names=_MROPE))


def read_qwen3_vl_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec("Qwen3-VL", qkv_bias=bias, output_bias=bias, has_head_norms=True)
    return read_decoder(fields, spec, Defaults(128, rope_theta=5e5, max_position=128_000, rope_names=_MROPE))


def read_qwen2_moe_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    spec = decoder_spec("Qwen2-MoE", qkv_bias=fields.boolean("qkv_bias", default=True))
    first = fields.count("max_window_layers", default=28)
    windows = Windows(4096, are_switched=True, has_one=lambda layer: layer < first and layer % 2 == 0)
    config = read_decoder(fields, spec, Defaults(max_position=32_768, windows=windows))
    experts = with_shared_expert(fields, _experts(fields, experts=60, top_k=4, size=1408), size=5632)
    return with_experts(config, experts, dense_layers(fields, config.num_layers))


def read_qwen3_moe_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec("Qwen3-MoE", qkv_bias=bias, output_bias=bias, has_head_norms=True)
    config = read_decoder(fields, spec, Defaults(max_position=32_768, windows=Windows(4096, are_switched=True)))
    experts = _experts(fields, experts=128, top_k=8, size=768)
    return with_experts(config, experts, dense_layers(fields, config.num_layers))


def _experts(fields: ConfigFields, *, experts: int, top_k: int, size: int) -> ExpertsSpec:
    normalises = fields.boolean("norm_topk_prob", default=False)
    number = "num_experts" if fields.is_set("num_experts") else "num_local_experts"
    routing = read_routing(fields, number, experts=experts, top_k=top_k, normalises=normalises)
    return experts_spec(routing, fields.integer("moe_intermediate_size", default=size))


def with_shared_expert(fields: ConfigFields, experts: ExpertsSpec, size: int) -> ExpertsSpec:
    """Return the experts with one more that all tokens take, by a gate; `size` is its default."""
    gate, up, down = (Projection(f"mlp.shared_expert.{name}_proj") for name in ("gate", "up", "down"))
    shared = MlpSpec(gate, up, down, fields.integer("shared_expert_intermediate_size", default=size))
    return replace(experts, shared=shared, shared_gate=Projection("mlp.shared_expert_gate"))


def dense_layers(fields: ConfigFields, num_layers: int) -> set[int]:
    """Return the layers that have an MLP where the others have experts."""
    step = fields.integer("decoder_sparse_step", default=1)
    return {layer for layer in range(num_layers) if (layer + 1) % step} | set(fields.counts("mlp_only_layers"))


QWEN2 = Family("Qwen2ForCausalLM", model_type="qwen2", read_config=read_qwen2_config)
QWEN3 = Family("Qwen3ForCausalLM", model_type="qwen3", read_config=read_qwen3_config)
QWEN2_MOE = Family("Qwen2MoeForCausalLM", model_type="qwen2_moe", read_config=read_qwen2_moe_config)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", model_type="qwen3_moe", read_config=read_qwen3_moe_config)
QWEN2_5_VL_TEXT = Family("Qwen2_5_VLTextModel", model_type="qwen2_5_vl_text", read_config=read_qwen2_5_vl_config)
QWEN3_VL_TEXT = Family("Qwen3VLTextModel", model_type="qwen3_vl_text", read_config=read_qwen3_vl_config)
