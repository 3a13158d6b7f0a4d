"""Llama 4 (Meta 2025): rotary layers that attend within chunks, and layers without rotation between them.

Each token takes one expert, whose input is weighed by a sigmoid, beside an MLP.
"""

from dataclasses import replace

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    decoder_spec,
    read_decoder,
    read_routing,
    with_experts,
)
from twostroke.model.config import ExpertsSpec, MlpSpec, ModelConfig, Projection, QueryScale

_REQUIRED = {  # transformers' defaults of fields that other families must give
    **{"vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192},
    **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8},
}


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    fields = fields.over(_REQUIRED)
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec("Llama 4", qkv_bias=bias, output_bias=bias)
    gate, up, down = (Projection(f"feed_forward.{name}_proj") for name in ("gate", "up", "down"))
    layer = replace(
        spec.layer, gate=gate, up=up, down=down, normalises_rotated=fields.boolean("use_qk_norm", default=True)
    )
    defaults = Defaults(head_dim=128, rms_norm_eps=1e-5, rope_theta=500_000.0, max_position=131_072)
    config = read_decoder(fields, replace(spec, layer=layer), defaults)
    still = frozenset(layer for layer, turns in enumerate(_rotated_layers(fields, config.num_layers)) if not turns)
    is_scaled = fields.has("attn_temperature_tuning") or not fields.is_given("attn_temperature_tuning")
    scale = QueryScale(
        tokens=fields.integer("floor_scale", default=8192), factor=fields.number("attn_scale", default=0.1), shift=1
    )
    config = replace(
        config,
        rope=replace(config.rope, interleaves=True),
        windows=_windows(fields, config, still),
        unrotated_layers=still,
        query_scale=scale if is_scaled else None,
        scaled_layers=still if is_scaled else frozenset(),
        intermediate_size=fields.integer("intermediate_size_mlp", default=16_384),
    )
    dense = set(range(config.num_layers)) - set(_layers_with_experts(fields, config.num_layers))
    if len(dense) == config.num_layers:
        return config
    return with_experts(config, _experts(fields), dense)


def _rotated_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return, by layer, if its queries and keys turn: `no_rope_layers` has 1 where they do."""
    interval = fields.integer("no_rope_layer_interval", default=4)
    usual = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    return fields.flags("no_rope_layers", usual)[:num_layers] if fields.has("no_rope_layers") else usual


def _windows(fields: ConfigFields, config: ModelConfig, still: frozenset[int]) -> tuple[int, ...]:
    """Return the layers' chunks. `layer_types` says which have them; where it doesn't, those that turn do."""
    size = fields.integer("attention_chunk_size", default=8192)
    count = config.num_layers
    kinds = fields.texts("layer_types") or [
        "full_attention" if layer in still else "chunked_attention" for layer in range(count)
    ]
    if len(kinds) != count or any(kind not in ("chunked_attention", "full_attention") for kind in kinds):
        raise fields.error("layer_types", f"expected {count} times 'chunked_attention' or 'full_attention'")
    if size >= config.max_position:
        return ()
    windows = tuple(-size if kind == "chunked_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _layers_with_experts(fields: ConfigFields, num_layers: int) -> list[int]:
    step = fields.integer("interleave_moe_layer_step", default=1)
    return fields.counts("moe_layers") if fields.is_set("moe_layers") else list(range(step - 1, num_layers, step))


def _experts(fields: ConfigFields) -> ExpertsSpec:
    """The one expert with the highest score: its weight is 1, since its input has been weighed."""
    routing = read_routing(fields, "num_local_experts", experts=16, top_k=1, normalises=True)
    if routing.top_k != 1:
        raise fields.error("num_experts_per_tok", f"{routing.top_k} is not supported, only 1 is")
    size = fields.integer("intermediate_size")
    gate, up, down = (Projection(f"feed_forward.shared_expert.{name}_proj") for name in ("gate", "up", "down"))
    return ExpertsSpec(
        routing,
        size,
        router=Projection("feed_forward.router"),
        gate=Projection("feed_forward.experts.gate_up_proj"),
        up=Projection("feed_forward.experts.gate_up_proj", first_row=size),
        down=Projection("feed_forward.experts.down_proj"),
        are_stacked=True,
        scales_input=True,
        shared=MlpSpec(gate, up, down, size),
    )


LLAMA4 = Family("Llama4ForCausalLM", model_type="llama4_text", read_config=read_config)
