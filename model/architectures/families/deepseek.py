"""DeepSeek-V2 and V3 (R1, Kimi K2 and others that took V3's name): multi-head latent attention (DeepSeek-AI 2024), so
far where all MLPs are dense; YaRN scales the scores, too."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twostroke.model.architectures.families.family import ConfigFields, Defaults, Family, decoder_spec, read_decoder
from twostroke.model.config import LatentSizes, LatentSpec, ModelConfig, Projection


def read_v2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    mlp_bias = fields.boolean("mlp_bias", default=False)
    return _read(fields, "DeepSeek-V2", max_position=2048, mlp_bias=mlp_bias, interleaves=True)


def read_v3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    interleaves = fields.boolean("rope_interleave", default=True)
    return _read(fields, "DeepSeek-V3", max_position=4096, mlp_bias=False, interleaves=interleaves)


def _read(fields: ConfigFields, family: str, *, max_position: int, mlp_bias: bool, interleaves: bool) -> ModelConfig:
    sizes = LatentSizes(
        rank=fields.integer("kv_lora_rank", default=512),
        rotary=fields.integer("qk_rope_head_dim", default=64),
        key=fields.integer("qk_nope_head_dim", default=128),
        value=fields.integer("v_head_dim", default=128),
        # Where it is left out transformers takes 1536; null is none.
        query_rank=fields.integer("q_lora_rank", default=1536) if _has_query_rank(fields) else 0,
    )
    if fields.integer("head_dim", default=sizes.rotary) != sizes.rotary:
        raise fields.error("head_dim", f"it must be qk_rope_head_dim, which is {sizes.rotary}")
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec(family, output_bias=bias, mlp_bias=mlp_bias)
    # Heads have keys and values of their own, whatever is cached of them.
    config = read_decoder(fields, spec, Defaults(head_dim=sizes.rotary, max_position=max_position))
    query = Projection("self_attn.q_b_proj" if sizes.query_rank else "self_attn.q_proj")
    up = "self_attn.kv_b_proj"
    layer = replace(
        spec.layer,
        q=query,
        k=Projection(up),
        v=Projection(up, first_row=sizes.key),
        latent=LatentSpec(
            down=Projection("self_attn.kv_a_proj_with_mqa", bias),
            norm="self_attn.kv_a_layernorm",
            query_down=Projection("self_attn.q_a_proj", bias) if sizes.query_rank else None,
            query_norm="self_attn.q_a_layernorm" if sizes.query_rank else None,
        ),
    )
    ignored = (f"{spec.layers}.{config.num_layers}.",)  # a layer that predicts one more token
    return replace(
        config,
        spec=replace(spec, layer=layer, ignored=ignored),
        rope=replace(config.rope, interleaves=interleaves),
        num_kv_heads=1,
        head_dim=sizes.rank + sizes.rotary,
        latent=sizes,
        attention_scale=sizes.query**-0.5 * _temperature(fields, config) ** 2,
    )


def _has_query_rank(fields: ConfigFields) -> bool:
    return fields.is_set("q_lora_rank") or not fields.is_given("q_lora_rank")


def _temperature(fields: ConfigFields, config: ModelConfig) -> float:
    """Of YaRN (Peng et al. 2023, eq. 22), which these families put on queries and keys alike, and not on their part
    that turns alone: the table of angles has what is left of it."""
    scaling = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    if config.rope.type == "default" or not scaling.has("mscale_all_dim"):
        return 1.0
    factor = scaling.number("factor")
    return 1.0 if factor <= 1 else 0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1.0


def _all_dense(raw: Mapping[str, Any]) -> bool:
    """Whether no layer has experts: where some have, transformers computes them."""
    first, layers = raw.get("first_k_dense_replace"), raw.get("num_hidden_layers")
    return isinstance(first, int) and isinstance(layers, int) and first >= layers


DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", read_v2_config, covers=_all_dense)
DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", read_v3_config, covers=_all_dense)
