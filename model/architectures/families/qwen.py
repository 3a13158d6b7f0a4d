"""Qwen 2, 2.5 and 3: Llama's layers with biases of queries, keys and values, or with norms of their heads instead. Some
have experts, and those of 2 one more that all tokens take.

Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, every fourth attends, with a gate of its output.

Norms' weights are kept without 1, but for those within the delta nets. A quarter of each head is rotary. Of the
published checkpoints, which see images, too, the text's part is served.
"""

from collections.abc import Mapping
from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MAX_CHANNELS,
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
from twostroke.model.config import DeltaSpec, ExpertsSpec, MlpSpec, ModelConfig, Projection, RopeType
from twostroke.model.state_sizes import DeltaSizes
from twostroke.protocol.kv_layout import STATE_WINDOW

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


_DELTA = DeltaSpec(
    qkv=Projection("linear_attn.in_proj_qkv"),
    gate=Projection("linear_attn.in_proj_z"),
    beta=Projection("linear_attn.in_proj_b"),
    decay=Projection("linear_attn.in_proj_a"),
    conv="linear_attn.conv1d.weight",
    decay_log="linear_attn.A_log",
    decay_bias="linear_attn.dt_bias",
    norm="linear_attn.norm",
    output=Projection("linear_attn.out_proj"),
)
_DELTA_OF_NEXT = replace(
    _DELTA,
    qkv=Projection("linear_attn.in_proj_qkvz"),
    gate=Projection("linear_attn.in_proj_qkvz"),
    beta=Projection("linear_attn.in_proj_ba"),
    decay=Projection("linear_attn.in_proj_ba"),
    by_key_heads=True,
)
_DEFAULTS = Defaults(head_dim=256, max_position=32_768, rotated_part=0.25)


def _read(fields: ConfigFields, family: str, delta: DeltaSpec) -> ModelConfig:
    """Read what all of them have, an MLP in each layer. Raises ConfigError."""
    if fields.boolean("attention_bias", default=False):
        raise fields.error("attention_bias", "biases of gated attention are not supported")
    spec = decoder_spec(family, has_head_norms=True)
    config = read_decoder(fields, replace(spec, norms_add_one=True), _DEFAULTS)
    if config.activation != "silu":  # which the convolution takes, too
        raise fields.error("hidden_act", f"{fields.value('hidden_act')!r} is not supported here, only 'silu' is")
    layer = replace(spec.layer, gates_output=True, state=delta)
    return replace(
        config,
        spec=replace(config.spec, layer=layer, ignored=("mtp.",)),
        windows=_state_windows(fields, config.num_layers),
        state=_read_sizes(fields, config.num_kv_heads),
    )


def _state_windows(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    interval = fields.integer("full_attention_interval", default=4)
    usual = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]
    kinds = fields.texts("layer_types", usual)
    if len(kinds) != num_layers or any(kind not in ("linear_attention", "full_attention") for kind in kinds):
        raise fields.error("layer_types", f"expected {num_layers} times 'linear_attention' or 'full_attention'")
    if "full_attention" not in kinds:
        raise fields.error("layer_types", "a model without any layer that attends is not supported")
    return tuple(STATE_WINDOW if kind == "linear_attention" else 0 for kind in kinds)


def _read_sizes(fields: ConfigFields, num_kv_heads: int) -> DeltaSizes:
    sizes = DeltaSizes(
        key_heads=fields.integer("linear_num_key_heads", default=16),
        value_heads=fields.integer("linear_num_value_heads", default=32),
        key=fields.integer("linear_key_head_dim", default=128),
        value=fields.integer("linear_value_head_dim", default=128),
        taps=fields.integer("linear_conv_kernel_dim", default=4),
    )
    if sizes.value_heads % sizes.key_heads:
        raise fields.error(
            "linear_num_value_heads", f"{sizes.value_heads} is no multiple of {sizes.key_heads} key heads"
        )
    if sizes.key_heads % num_kv_heads:
        raise fields.error(
            "linear_num_key_heads", f"{sizes.key_heads} is no multiple of num_key_value_heads, which is {num_kv_heads}"
        )
    if sizes.key % 2 or sizes.taps < 2 or sizes.conv_width > MAX_CHANNELS:
        raise fields.error(
            "linear_key_head_dim",
            f"{sizes.conv_width} channels of {sizes.taps} taps, with keys of {sizes.key}, are not supported",
        )
    return sizes


def read_qwen3_next_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    config = _read(fields, "Qwen3-Next", _DELTA_OF_NEXT)
    return _with_experts(fields, config, dense_layers(fields, config.num_layers), 512)


def _with_experts(fields: ConfigFields, config: ModelConfig, dense: set[int], number: int) -> ModelConfig:
    normalises = fields.boolean("norm_topk_prob", default=True)
    routing = read_routing(fields, "num_experts", experts=number, top_k=10, normalises=normalises)
    experts = experts_spec(routing, fields.integer("moe_intermediate_size", default=512))
    return with_experts(config, with_shared_expert(fields, experts, size=512), dense)


def read_qwen35_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    return _read(fields, "Qwen3.5", _DELTA)


def read_qwen35_moe_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    experts = fields.integer("shared_expert_intermediate_size", default=512)
    config = _read(fields.over({"intermediate_size": experts}), "Qwen3.5-MoE", _DELTA)
    fields.is_set("norm_topk_prob")  # whatever it says, transformers normalises
    return _with_experts(fields.over({"norm_topk_prob": True, "num_experts_per_tok": 8}), config, set(), 256)


QWEN3_NEXT = Family("Qwen3NextForCausalLM", model_type="qwen3_next", read_config=read_qwen3_next_config)
QWEN35 = Family("Qwen3_5ForCausalLM", model_type="qwen3_5_text", read_config=read_qwen35_config)
QWEN35_MOE = Family("Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text", read_config=read_qwen35_moe_config)
