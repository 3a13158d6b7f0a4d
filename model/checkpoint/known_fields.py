"""Fields of config.json that a family does not read: which of them change nothing, and which must not be passed over.

A field that no transformers class of a family has is ignored there as here, unless it is known to change what other
decoders compute: a file that has it describes another model than the one that would be served.
"""

from collections.abc import Collection, Mapping
from typing import Any

from twostroke.model.architectures.families.family import ConfigFields, Family, shown
from twostroke.model.config import ModelConfig

INERT = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "auto_map"),
        *("initializer_range", "use_cache", "pretraining_tp", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        *("id2label", "label2id", "output_attentions", "output_hidden_states", "problem_type", "return_dict"),
        *("vision_config", "mm_tokens_per_image", "text_config", "quantization_config"),
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_feature_layer"),
        *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        *("audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_index", "eoi_token_id"),
        *("projection_hidden_size", "projection_layer_norm_eps"),
        *("num_logits_to_keep", "z_loss_coefficient", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
        *("mamba_chunk_size", "chunk_size", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
        *("residual_in_fp32", "moe_shared_expert_overlap", "mtp_layers_block_type"),
    }
)
"""Fields that change nothing of what a decoder computes from text, or are read elsewhere."""

_NOTHING: tuple[Any, ...] = (None, False, 0, [], {})

CHANGES: Mapping[str, tuple[Any, ...]] = {
    # scores and logits
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier"), _NOTHING),
    **dict.fromkeys(("query_pre_attn_scalar", "use_logn_attn", "attn_temperature_tuning"), _NOTHING),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "use_qk_l2_norm", "qk_l2_clip_threshold"), _NOTHING),
    **dict.fromkeys(("alibi", "use_alibi", "clip_qkv", "use_bidirectional_attention"), _NOTHING),
    **dict.fromkeys(("logit_scale", "logits_scaling", "lm_head_multiplier", "key_multiplier"), (None, 1)),
    "is_causal": (None, True),
    # which tokens and layers are attended to
    **dict.fromkeys(("attention_chunk_size", "num_kv_shared_layers", "per_layer_config", "index_topk"), _NOTHING),
    **dict.fromkeys(("indexer_types", "index_topk_pattern"), _NOTHING),
    "index_topk_freq": (None, 1),
    **dict.fromkeys(("interleaved_sliding_window", "attention_layers", "local_layer_ids"), _NOTHING),
    # positions
    **dict.fromkeys(
        ("rope_local_base_freq", "layer_rope_theta", "no_rope_layer_interval", "use_dynamic_ntk"), _NOTHING
    ),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (None, 1)),
    # what layers add, and how
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "embedding_scale", "scale_emb"), (None, 1)),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), (None, 1)),
    **dict.fromkeys(("scale_depth", "mlp_multipliers", "mup_enabled", "swiglu_limit", "swiglu_alpha"), _NOTHING),
    **dict.fromkeys(
        ("use_parallel_residual", "parallel_attn", "use_post_norm", "hc_mult", "rope_interleaved"), _NOTHING
    ),
    "apply_residual_connection_post_layernorm": _NOTHING,
    # experts
    **dict.fromkeys(("scoring_func", "topk_method", "expert_selection_fn", "norm_topk_prob"), _NOTHING),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "router_scaling_factor"), (None, 1)),
    "moe_layer_freq": (None, 1),
}
"""Fields that change what some decoder computes, tensors being the same, and the values with which they don't."""


ROPE_CHANGES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("short_mscale", "long_mscale", "alpha"), (None, 1)),
    "llama_4_scaling_beta": _NOTHING,
}
"""The same of the objects that describe the rotation."""


def check_unread(fields: ConfigFields, family: Family, config: ModelConfig) -> None:
    """Raises ConfigError for a field that would change the arithmetic, and that the family has not read."""
    is_of_text = fields.value("text_config") is not None and "text_config" not in fields.unread()
    for part in (fields, *((fields.object("text_config"),) if is_of_text else ())):
        _check_changes(part, CHANGES, family)
        for name in ("rope_scaling", "rope_parameters"):
            _check_changes(part.object(name), ROPE_CHANGES, family)
        _check_windows(part, config)


def _check_changes(fields: ConfigFields, changes: Mapping[str, tuple[Any, ...]], family: Family) -> None:
    for name in fields.unread():
        said, harmless = fields.value(name), (*changes.get(name, ()), *family.always.get(name, ()))
        if name in changes and not _is_among(said, harmless):
            raise fields.error(
                name,
                f"{shown(said)} changes what a model computes, and {family.architecture} does not have it here: take a "
                "model without, or remove the field if it says nothing of this one",
            )


def _is_among(said: object, harmless: Collection[object]) -> bool:
    return any(said == value and isinstance(said, bool) == isinstance(value, bool) for value in harmless)


def _check_windows(fields: ConfigFields, config: ModelConfig) -> None:
    """Check that windows in the config, where the family does not read them, are what its layers have."""
    unread = fields.unread()
    tokens = fields.value("sliding_window")
    is_switched_off = fields.value("use_sliding_window") is False
    has_windows = isinstance(tokens, int) and 0 < tokens < config.max_position and not is_switched_off
    if has_windows and "sliding_window" in unread:
        raise fields.error(
            "sliding_window", f"{tokens}: {config.spec.family} has no windows: remove the field if the model has none"
        )
    if config.windows and "max_window_layers" in unread and fields.value("max_window_layers"):
        raise fields.error("max_window_layers", f"all layers of {config.spec.family} have the window here")
    kinds = fields.value("layer_types")
    if "layer_types" not in unread or kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise fields.error("layer_types", f"expected a list of {config.num_layers}")
    for layer, kind in enumerate(kinds):
        is_right = kind == ("sliding_attention" if config.window(layer) else "full_attention")
        if not (is_right or (kind == "sliding_attention" and not has_windows)):
            has = f"a window of {config.window(layer)} tokens" if config.window(layer) else "no window"
            raise fields.error(
                "layer_types",
                f"layer {layer} is {kind!r}, and has {has} here, for {config.spec.family} has them in all layers or in "
                "none: for Mistral's layers with windows in some, set architectures to MinistralForCausalLM and "
                "model_type to ministral",
            )
