"""DeepSeek-V2 and V3 (R1, Kimi K2 and others that took V3's name), GLM-4.7-Flash and Mistral Small 4: multi-head latent
attention and experts in groups, some of which all tokens take (DeepSeek-AI 2024); YaRN scales the scores, too.
DeepSeek-V3.2 and GLM-5: the same, where an index chooses the tokens that are attended to (DeepSeek-AI 2025).
"""

import math
from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MAX_LAYERS,
    ConfigFields,
    Defaults,
    Family,
    decoder_spec,
    experts_spec,
    read_decoder,
    read_routing,
    with_experts,
    with_query_scale,
)
from twostroke.model.architectures.families.glm import experts_by_groups
from twostroke.model.config import (
    ExpertsSpec,
    IndexSizes,
    IndexSpec,
    MLASizes,
    MLASpec,
    MlpSpec,
    ModelConfig,
    MtpSpec,
    Projection,
)


def read_v2_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    mlp_bias = fields.boolean("mlp_bias", default=False)
    config = _read(fields, "DeepSeek-V2", max_position=2048, mlp_bias=mlp_bias, interleaves=True)
    dense = fields.count("first_k_dense_replace", default=0)
    if dense >= config.num_layers:
        return config
    return with_experts(config, _v2_experts(fields, mlp_bias), range(dense))


def read_v3_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    interleaves = fields.boolean("rope_interleave", default=True)
    config = _read(fields, "DeepSeek-V3", max_position=4096, mlp_bias=False, interleaves=interleaves)
    dense = fields.count("first_k_dense_replace", default=3)
    if dense >= config.num_layers:
        return config
    fields = fields.over({"routed_scaling_factor": 2.5, "topk_group": 4})
    size = fields.integer("moe_intermediate_size", default=2048)
    experts = experts_by_groups(fields, size, experts=256, top_k=8, groups=8, normalises=True)
    return with_experts(config, experts, range(dense))


def read_glm4_moe_lite_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError. Files as published have `first_k_dense_replace`, later ones a list by layer."""
    interleaves = fields.boolean("rope_interleave", default=True)
    fields = fields.over({"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256})
    fields = fields.over({"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8})
    config = _read(fields, "GLM-4.7-Flash", max_position=202_752, mlp_bias=False, interleaves=interleaves)
    dense = _dense_layers(fields, config.num_layers, first=1)
    if len(dense) == config.num_layers:
        return config
    size = fields.integer("moe_intermediate_size", default=1536)
    experts = experts_by_groups(fields, size, experts=64, top_k=4, groups=1, normalises=True)
    return with_experts(config, experts, dense)


def read_v32_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    config = _read_indexed(fields, "DeepSeek-V3.2", max_position=163_840, index_heads=64, index_interleaves=False)
    return _with_v32_experts(config, fields.over({"topk_group": 4}), groups=8)


def read_glm_moe_dsa_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    fields = fields.over({"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5})
    config = _read_indexed(fields, "GLM-5", max_position=202_752, index_heads=32, index_interleaves=True)
    assert config.latent is not None
    assert config.index is not None
    index = replace(config.index, sharing=_sharing_layers(fields, config.num_layers))
    return _with_v32_experts(replace(config, latent=replace(config.latent, index=index)), fields, groups=1)


def _with_v32_experts(config: ModelConfig, fields: ConfigFields, groups: int) -> ModelConfig:
    dense = _dense_layers(fields, config.num_layers, first=3)
    if len(dense) == config.num_layers:
        return config
    fields = fields.over({"routed_scaling_factor": 2.5})
    size = fields.integer("moe_intermediate_size", default=2048)
    experts = experts_by_groups(fields, size, experts=256, top_k=8, groups=groups, normalises=True)
    return with_experts(config, experts, dense)


def _dense_layers(fields: ConfigFields, num_layers: int, first: int) -> list[int]:
    """Return the layers without experts: by a list, or the first ones."""
    first = fields.count("first_k_dense_replace", default=first, most=MAX_LAYERS)
    usual = ["dense" if layer < first else "sparse" for layer in range(num_layers)]
    kinds = fields.texts("mlp_layer_types", usual)
    if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"expected {num_layers} times 'dense' or 'sparse'")
    return [layer for layer, kind in enumerate(kinds) if kind == "dense"]


def _read_indexed(
    fields: ConfigFields, family: str, *, max_position: int, index_heads: int, index_interleaves: bool
) -> ModelConfig:
    """Latents of which each token attends to the best alone. Raises ConfigError."""
    for name, expected in (("rope_interleave", True), ("indexer_rope_interleave", index_interleaves)):
        if fields.boolean(name, default=expected) != expected:
            raise fields.error(name, f"only {str(expected).lower()} is supported for this family")
    config = _read(fields, family, max_position=max_position, mlp_bias=False, interleaves=True)
    latent, spec = config.latent, config.spec.layer.latent
    assert latent is not None
    assert spec is not None
    if not latent.query_rank:
        raise fields.error("q_lora_rank", "the index's queries are made of the queries' latents: it must be set")
    if any(kind != "indexed_attention" for kind in fields.texts("layer_types")):
        raise fields.error("layer_types", "only 'indexed_attention' is supported for this family")
    sizes = IndexSizes(
        heads=fields.integer("index_n_heads", default=index_heads),
        key=fields.integer("index_head_dim", default=128),
        top_k=fields.integer("index_topk", default=2048),
    )
    if sizes.key < latent.rotary:
        raise fields.error("index_head_dim", f"{sizes.key} is less than qk_rope_head_dim, which is {latent.rotary}")
    query, key, weights = (Projection(f"self_attn.indexer.{name}") for name in ("wq_b", "wk", "weights_proj"))
    index = IndexSpec(query, key, "self_attn.indexer.k_norm", weights, index_interleaves)
    layer = replace(config.spec.layer, latent=replace(spec, index=index))
    latent = replace(latent, index=sizes)
    return replace(config, spec=replace(config.spec, layer=layer), latent=latent, head_dim=latent.row)


def _sharing_layers(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    """Return the layers that attend to what the layer before them does: by a list, a pattern or a period."""
    pattern, letters = fields.value("index_topk_pattern"), {"F": "full", "S": "shared"}
    period = max(1, fields.count("index_topk_freq", default=1))
    first = fields.count("index_skip_topk_offset", default=2) - 1
    if isinstance(pattern, str) and fields.is_set("index_topk_pattern"):
        usual = [letters.get(letter, letter) for letter in pattern]
    else:
        periodic = ["shared" if max(layer - first, 0) % period else "full" for layer in range(num_layers)]
        usual = fields.texts("index_topk_pattern", periodic)
    kinds = fields.texts("indexer_types", usual)
    if len(kinds) != num_layers or not {*kinds} <= {"full", "shared"} or kinds[0] != "full":
        raise fields.error("indexer_types", f"expected 'full' and then {num_layers - 1} times 'full' or 'shared'")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "shared")


_MISTRAL4_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}


def read_mistral4_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError. Its `head_dim` is that of whole queries, of which a part is rotary."""
    interleaves = fields.boolean("rope_interleave", default=True)
    fields = fields.over({"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64})
    fields = fields.over({"rope_parameters": _MISTRAL4_ROPE})
    config = _read(
        fields, "Mistral 4", max_position=1_048_576, mlp_bias=False, interleaves=interleaves, has_whole_heads=True
    )
    config = with_query_scale(config, fields)
    dense = fields.count("first_k_dense_replace", default=0)
    if dense >= config.num_layers:
        return config
    size = fields.integer("moe_intermediate_size", default=2048)
    experts = experts_by_groups(fields, size, experts=128, top_k=4, groups=1, normalises=True)
    routing = replace(experts.routing, scoring="softmax")
    return with_experts(config, replace(experts, routing=routing, correction=None), range(dense))


def _v2_experts(fields: ConfigFields, mlp_bias: bool) -> ExpertsSpec:
    """Scores are a softmax, and a group is as good as its best expert."""
    size = fields.integer("moe_intermediate_size", default=1407)
    routing = read_routing(fields, "n_routed_experts", experts=64, top_k=6)
    method = fields.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", f"{method!r} is not supported, only greedy and group_limited_greedy are")
    if method == "group_limited_greedy":
        groups, top_groups = fields.integer("n_group"), fields.integer("topk_group")
        if routing.num_experts % groups:
            raise fields.error("n_group", f"{groups} does not divide n_routed_experts, {routing.num_experts}")
        if not routing.top_k <= top_groups * (routing.num_experts // groups) <= routing.num_experts:
            raise fields.error("topk_group", f"{top_groups} of {groups} groups have not {routing.top_k} experts")
        routing = replace(routing, groups=groups, top_groups=top_groups)
    gate, up, down = (Projection(f"mlp.shared_experts.{name}_proj", mlp_bias) for name in ("gate", "up", "down"))
    return replace(
        experts_spec(replace(routing, scale=fields.number("routed_scaling_factor", default=1.0)), size),
        shared=MlpSpec(gate, up, down, fields.integer("n_shared_experts", default=2) * size),
    )


def _read(
    fields: ConfigFields,
    family: str,
    *,
    max_position: int,
    mlp_bias: bool,
    interleaves: bool,
    has_whole_heads: bool = False,
) -> ModelConfig:
    """`has_whole_heads`: what is said of heads and their rotary part is of all of a query, not of that part."""
    sizes = MLASizes(
        rank=fields.integer("kv_lora_rank", default=512),
        rotary=fields.integer("qk_rope_head_dim", default=64),
        key=fields.integer("qk_nope_head_dim", default=128),
        value=fields.integer("v_head_dim", default=128),
        # Where it is left out transformers takes 1536; null is none.
        query_rank=fields.integer("q_lora_rank", default=1536) if _has_query_rank(fields) else 0,
    )
    head, part, names = sizes.rotary, None, "qk_rope_head_dim"
    if has_whole_heads:
        head, part, names = sizes.query, sizes.rotary / sizes.query, "qk_nope_head_dim + qk_rope_head_dim"
    if fields.integer("head_dim", default=head) != head:
        raise fields.error("head_dim", f"it must be {names}, which is {head}")
    bias = fields.boolean("attention_bias", default=False)
    spec = decoder_spec(family, output_bias=bias, mlp_bias=mlp_bias)
    # Heads have keys and values of their own, whatever is cached of them.
    config = read_decoder(fields, spec, Defaults(head_dim=head, rotated_part=part, max_position=max_position))
    if has_whole_heads and config.rope.rotated != sizes.rotary:
        raise fields.error("rope_parameters", f"partial_rotary_factor must make {sizes.rotary} dimensions of {head}")
    query = Projection("self_attn.q_b_proj" if sizes.query_rank else "self_attn.q_proj")
    up = "self_attn.kv_b_proj"
    layer = replace(
        spec.layer,
        q=query,
        k=Projection(up),
        v=Projection(up, first_row=sizes.key),
        latent=MLASpec(
            down=Projection("self_attn.kv_a_proj_with_mqa", bias),
            norm="self_attn.kv_a_layernorm",
            query_down=Projection("self_attn.q_a_proj", bias) if sizes.query_rank else None,
            query_norm="self_attn.q_a_layernorm" if sizes.query_rank else None,
        ),
    )
    ignored = (f"{spec.layers}.{config.num_layers}.",)  # the MTP head's
    mtp = MtpSpec() if fields.count("num_nextn_predict_layers", default=0, most=MAX_LAYERS) else None
    return replace(
        config,
        spec=replace(spec, layer=layer, ignored=ignored, mtp=mtp),
        rope=replace(config.rope, interleaves=interleaves, rotated=0),
        num_kv_heads=1,
        head_dim=sizes.rank + sizes.rotary,
        latent=sizes,
        attention_scale=sizes.query**-0.5 * _temperature(fields, config) ** 2,
    )


def _has_query_rank(fields: ConfigFields) -> bool:
    return fields.is_set("q_lora_rank") or not fields.is_given("q_lora_rank")


def _temperature(fields: ConfigFields, config: ModelConfig) -> float:
    """Return YaRN's temperature (Peng et al. 2023, eq. 22). These families apply it to whole queries and keys, not only
    to their rotated part; the table of angles holds the remaining factor."""
    scaling = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    if config.rope.type == "default" or not scaling.has("mscale_all_dim"):
        return 1.0
    factor = scaling.number("factor")
    return 1.0 if factor <= 1 else 0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1.0


DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    read_config=read_v2_config,
    always={"scoring_func": ("softmax",), "topk_method": ("greedy",)},
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    read_config=read_v3_config,
    other_types=("kimi_k2",),
    always={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    read_config=read_glm4_moe_lite_config,
    always={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
DEEPSEEK_V32 = Family(
    "DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    read_config=read_v32_config,
    always={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
GLM_MOE_DSA = Family(
    "GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    read_config=read_glm_moe_dsa_config,
    always={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
MISTRAL4 = Family("Mistral4ForCausalLM", model_type="mistral4", read_config=read_mistral4_config)
