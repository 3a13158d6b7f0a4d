"""Refusals of models that transformers' modules could not serve over our attention, named by field or by layer."""

from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from twostroke.model.architectures.families.family import MAX_EXPERTS, MAX_LAYERS, shown
from twostroke.model.architectures.transformers_decoder import AttentionCall
from twostroke.protocol.errors import ConfigError


def read_transformers_config(raw: dict[str, Any], source: str) -> Any:
    """The configuration as transformers understands it. Raises ConfigError for what is refused by what it says."""

    def refused(field: str, why: str) -> ConfigError:
        return ConfigError(f"{source}: {field}: {why}")

    for field, most in _MAX_OF.items():
        if isinstance(count := raw.get(field), int) and count > most:
            raise refused(field, f"{shown(count)} is more than any model has: at most {most} are taken")
    kind, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise refused("auto_map", "its own code would have to be run (`trust_remote_code`), which we never do")
        named = f"{architectures} of model_type {kind!r}"
        raise refused("architectures", f"{named} is neither a family of ours nor known to transformers {_VERSION}")
    if raw.get("quantization_config"):
        raise refused(
            "quantization_config",
            "quantised checkpoints are for families of ours alone: take it unquantised, and set model.quantization",
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # its validation has classes of its own
        raise refused("model_type", f"transformers can't read this {kind}: {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise refused("architectures", f"{architectures} has an encoder; only decoders are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused("architectures", f"{architectures} is no decoder that writes text, as transformers knows it")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if architectures and model_class.__name__ not in architectures:
        raise refused("architectures", f"{architectures} is not the decoder of {kind!r}, {model_class.__name__}")
    if getattr(model_class, "_is_stateful", False):
        raise refused("model_type", f"{kind!r} keeps a state beside KV (state-space or linear attention layers)")
    if getattr(config, "num_kv_shared_layers", 0):
        raise refused("num_kv_shared_layers", "layers that use another one's KV are not supported")
    if getattr(config, "attention_chunk_size", None):
        raise refused("attention_chunk_size", "attention within chunks is not supported")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if (scaling := rope.get("rope_type")) in ("longrope", "dynamic"):
            raise refused("rope_parameters", f"{scaling} changes over within a request, and with the batch")
    return config


_MAX_OF = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), MAX_EXPERTS),
}
_VERSION = transformers.__version__
# Tensors that attention may be handed and needs not: ours takes positions and masks from the layout.
_IGNORED_TENSORS = {"position_ids", "cache_position"}


def check_calls(calls: Sequence[AttentionCall], config: Any, error: Any) -> None:
    """Check that our attention computes what these calls ask for. Raises the result of `error` where it can't."""
    layers = config.num_hidden_layers
    if len(calls) != layers or len({call.module for call in calls}) != layers:
        what = f"{layers} layers called the attention {len(calls)} times: some keep no KV, or something else"
        raise error(what, asks_for_ours=bool(calls))
    first = calls[0]
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = (
        getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"] * layers
    )
    for index, call in enumerate(calls):
        if kinds[index] == "sliding_attention" and not call.window:
            raise error(f"layer {index} has a window that its attention does not get")
        if call.key.shape != first.key.shape or call.query.shape != first.query.shape:
            raise error(f"the KV of layer {index} has another shape than the first one's")
        if call.value.shape[:3] != call.key.shape[:3] or call.value.shape[-1] > call.key.shape[-1]:
            raise error(f"layer {index} has values of shape {list(call.value.shape[1:])}")
        if call.query.shape[-1] != call.key.shape[-1] or call.query.shape[1] % call.key.shape[1]:
            raise error(f"layer {index} has {list(call.query.shape[1:])} queries over {list(call.key.shape[1:])} keys")
        if call.query.shape[-1] % 2:
            raise error(f"heads of {call.query.shape[-1]} dimensions, an odd number, are not supported")
        if call.others.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
            raise error(f"layer {index} attends to tokens that come later")
        for name, value in call.others.items():
            if isinstance(value, Tensor) and name not in _IGNORED_TENSORS:
                raise error(f"the attention of layer {index} takes {name!r}, which ours does not know")


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
