"""A Hugging Face folder's `config.json`: which family it is of, and what it says. No torch here.

Of fields that a family does not read some change nothing, and some must not be passed over. A field that no
transformers class of a family has is ignored there as here, unless it is known to change what other decoders compute: a
file that has it describes another model than the one that would be served.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from twostroke.model.architectures.families import FAMILIES
from twostroke.model.architectures.families.family import ConfigFields, Family, shown
from twostroke.model.checkpoint.quantization_config import read_stored_quantization
from twostroke.model.config import ModelConfig
from twostroke.protocol.errors import ConfigError

CONFIG_FILE = "config.json"
QUANTIZATION_FILES = {"gptq": "quantize_config.json", "modelopt": "hf_quant_config.json"}
"""Files that say it where config.json does not: AutoGPTQ's and ModelOpt's, of before."""
MAX_JSON_BYTES = 64 << 20


def load_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json of a family of ours. Raises ConfigError naming file and field."""
    return parse_model_config(read_config_file(folder), str(folder / CONFIG_FILE))


def is_native(raw: Mapping[str, Any]) -> bool:
    """Return True if a parsed config.json is of a native family."""
    return _family(raw) is not None


def read_config_file(folder: Path) -> dict[str, Any]:
    """`folder`/config.json, parsed, with what older checkpoints have in a file of its own. Raises ConfigError."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist or is no folder")
    if not path.exists():
        raise ConfigError(f"{path} is missing: {folder} is not a Hugging Face model folder")
    raw = read_json_object(path)
    for method, name in QUANTIZATION_FILES.items():
        if raw.get("quantization_config") is None and (folder / name).exists():
            raw["quantization_config"] = {"quant_method": method, **read_json_object(folder / name)}
    _check_types(raw, path)
    return raw


def _check_types(raw: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError for fields that name the model or its parts, where they are of another type: some are looked
    at by nobody else."""
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise ConfigError(f"{path}: architectures: expected a list of names, found {shown(architectures)}")
    kinds: tuple[tuple[str, type, str], ...] = (
        ("model_type", str, "a name"),
        ("torch_dtype", str, "a type's name"),
        ("dtype", str, "a type's name"),
        ("text_config", dict, "a JSON object"),
    )
    for name, kind, said in kinds:
        value = raw.get(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{path}: {name}: expected {said}, found {shown(value)}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file that is there. Raises ConfigError."""
    if not path.is_file():  # a FIFO would be waited for
        raise ConfigError(f"{path} is no regular file")
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ConfigError(f"{path} has {size} bytes: at most {MAX_JSON_BYTES} are read")
        raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_number_if_one)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return cast("dict[str, Any]", raw)


def _number_if_one(value: dict[str, Any]) -> Any:
    """transformers writes numbers that JSON has no words for as objects: {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def parse_model_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The ModelConfig in a parsed config.json; `source` names it in errors. Raises ConfigError."""
    family = _family(raw)
    if family is None:
        found = raw.get("architectures") or f"model_type {raw.get('model_type')!r}"
        are = "is" if len(FAMILIES) == 1 else "are"
        raise ConfigError(f"{source}: architectures: {found} is not supported, only {', '.join(FAMILIES)} {are}")
    fields = ConfigFields(raw, source)
    kind = raw.get("model_type")
    if kind not in (None, family.model_type, *family.other_types):
        raise fields.error(
            "model_type",
            f"{kind!r} is not what {family.architecture} has, which is {family.model_type!r}: say which of the two the "
            "model is",
        )
    config = family.read_config(fields)
    check_unread(fields, family, config)
    return replace(config, stored=read_stored_quantization(fields))


def _family(raw: Mapping[str, Any]) -> Family | None:
    architectures = raw.get("architectures")
    for family in FAMILIES.values():
        if architectures == [family.architecture] or (
            architectures is None and raw.get("model_type") == family.model_type
        ):
            return family
    return None


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
