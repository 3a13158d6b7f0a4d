"""Parser of the `quantization_config` in a config.json, which says how projections are quantised. No torch here.

How vLLM, llm-compressor, AutoAWQ, AutoGPTQ, GPTQModel, ModelOpt and Quark write it. What a checkpoint says of
activations is not looked at: ours are never quantised.
"""

import fnmatch
from dataclasses import replace
from typing import Literal

from twostroke.model.architectures.families.family import ConfigFields, shown
from twostroke.model.config import StoredQuantization, WeightForm

_METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "mxfp4", "modelopt", "quark")
_INSTEAD = "take one of the model's checkpoints that is, or the unquantised one with model.quantization: int8 or int4"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_FP4_FORMATS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}  # their groups


def read_stored_quantization(top: ConfigFields) -> StoredQuantization | None:
    """None where the checkpoint is not quantised. Raises ConfigError for what can't be held as it is."""
    if not top.is_set("quantization_config"):
        top = top.object("text_config")  # Kimi K2.5's stands there
    if not top.is_set("quantization_config"):
        return None
    fields = top.object("quantization_config")
    match method := fields.text("quant_method", default=""):
        case "fp8":
            return _fp8(fields)
        case "compressed-tensors":
            return _compressed_tensors(fields)
        case "awq":
            return _awq(fields)
        case "gptq":
            return _gptq(fields)
        case "mxfp4":
            return StoredQuantization("mxfp4", WeightForm("fp4", 32), _left(fields))
        case "modelopt" | "modelopt_fp4":
            return _modelopt(fields)
        case "quark":
            return _quark(fields)
    raise fields.error("quant_method", f"{method!r} is not supported, only {', '.join(_METHODS)} are: {_INSTEAD}")


def _fp8(fields: ConfigFields) -> StoredQuantization:
    if (fmt := fields.text("fmt", default="e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", f"{fmt!r} is not supported, only 'e4m3' is: {_INSTEAD}")
    block = _block(fields, "weight_block_size")
    return StoredQuantization("fp8", WeightForm("fp8", block[1] if block else None), ("lm_head", *_left(fields)), block)


def _awq(fields: ConfigFields) -> StoredQuantization:
    if (bits := fields.integer("bits", default=4)) != 4:
        raise fields.error("bits", f"{bits} are not supported, only 4 are: {_INSTEAD}")
    if (version := fields.text("version", default="gemm").lower()) != "gemm":
        raise fields.error("version", f"{version!r} is not supported, only 'gemm' is: {_INSTEAD}")
    form = WeightForm("int4", _group_size(fields, 128), has_offsets=fields.boolean("zero_point", default=True))
    return StoredQuantization("awq", form, ("lm_head", *_left(fields)))


def _gptq(fields: ConfigFields) -> StoredQuantization:
    if (bits := fields.integer("bits", default=4)) not in (4, 8):
        raise fields.error("bits", f"{bits} are not supported, only 4 and 8 are: {_INSTEAD}")
    layout = fields.text("checkpoint_format", default="gptq")
    if layout not in ("gptq", "gptq_v2") or fields.boolean("is_marlin_format", default=False):
        raise fields.error("checkpoint_format", f"{layout!r} is not supported, only 'gptq' and 'gptq_v2': {_INSTEAD}")
    unquantised = _gptq_unquantised(fields)
    kind: Literal["int4", "int8"] = "int4" if bits == 4 else "int8"
    form = WeightForm(kind, _group_size(fields, 128), has_offsets=not fields.boolean("sym", default=True))
    head = () if fields.boolean("lm_head", default=False) else ("lm_head",)
    # The first version of the format stores zero points less one.
    left = (*head, *unquantised, *_left(fields))
    return StoredQuantization("gptq", form, left, zero_shift=1 if layout == "gptq" else 0)


def _gptq_unquantised(fields: ConfigFields) -> tuple[str, ...]:
    """Return the patterns of modules that GPTQModel's `dynamic` leaves unquantised, which begin with `-:`.

    Raises ConfigError for a pattern whose modules are quantised in another form than the rest.
    """
    dynamic = fields.object("dynamic")
    for name in dynamic.names:
        module = None if name.startswith("-:") else dynamic.object(name)
        for field in ("bits", "group_size", "sym", "pack_dtype"):
            if module is not None and module.is_set(field) and module.value(field) != fields.value(field):
                what = f"{shown(module.value(field))} differs from that of other modules, which is not supported"
                raise module.error(field, f"{what}: {_INSTEAD}")
    return tuple(name.replace("-:", "re:", 1) for name in dynamic.names if name.startswith("-:"))


def _compressed_tensors(fields: ConfigFields) -> StoredQuantization | None:
    """None where the KV cache alone is quantised, or activations are."""
    if fields.object("sparsity_config").text("format", default="dense") != "dense":
        raise fields.error("sparsity_config", f"sparse weights are not supported: {_INSTEAD}")
    if fields.has("transform_config"):
        raise fields.error("transform_config", f"transformed activations are not supported: {_INSTEAD}")
    groups = fields.objects("config_groups")
    if not groups and not fields.has("kv_cache_scheme"):
        raise fields.error("config_groups", f"expected a group, found none: {_INSTEAD}")
    forms = [_compressed_group(fields, group) for group in groups if group.has("weights")]
    if len(forms) < 2:
        return replace(forms[0], targets=()) if forms else None  # tensors tell which modules the only form is of
    return replace(forms[0], others=tuple(forms[1:]))


def _compressed_group(fields: ConfigFields, group: ConfigFields) -> StoredQuantization:
    """Return the form of one of a checkpoint's groups of modules. Raises ConfigError."""
    layout = group.text("format", default=fields.text("format", default=""))
    if layout not in (*_FORMATS, *_FP4_FORMATS):
        raise fields.error(
            "format", f"{layout!r} is not supported, only {', '.join((*_FORMATS, *_FP4_FORMATS))} are: {_INSTEAD}"
        )
    weights, targets = group.object("weights"), tuple(group.texts("targets"))
    left = tuple(fields.texts("ignore"))
    if layout in _FP4_FORMATS:
        return replace(_fp4(weights, _FP4_FORMATS[layout], left), targets=targets)
    bits, kind = weights.integer("num_bits"), weights.text("type", default="int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise weights.error("num_bits", f"{kind} of {bits} bits is not supported, only int4, int8 and FP8: {_INSTEAD}")
    strategy = weights.text("strategy", default="tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise weights.error("strategy", f"{strategy!r} is not supported: {_INSTEAD}")
    size = weights.integer("group_size") if strategy == "group" else None
    block = _block(weights, "block_structure") if strategy == "block" else None
    has_offsets = not weights.boolean("symmetric", default=True)
    if kind == "float":
        form = WeightForm("fp8", block[1] if block else size)
        return StoredQuantization("fp8", form, left, block, targets=targets)
    if layout == "pack-quantized":
        form = WeightForm("int4" if bits == 4 else "int8", size, has_offsets)
        return StoredQuantization("packed", form, left, targets=targets)
    if bits != 8 or block:
        raise weights.error("num_bits", f"{bits} are not supported for {layout!r} by {strategy}: {_INSTEAD}")
    return StoredQuantization("int8", WeightForm("int8", size, has_offsets), left, targets=targets)


def _fp4(weights: ConfigFields, group: int, left: tuple[str, ...]) -> StoredQuantization:
    if (size := weights.integer("group_size", default=group)) != group:
        raise weights.error("group_size", f"{size} is not supported, only {group} is: {_INSTEAD}")
    if not weights.boolean("symmetric", default=True):
        raise weights.error("symmetric", f"zero points of FP4 are not supported: {_INSTEAD}")
    return StoredQuantization("fp4", WeightForm("fp4", group), left)


def _modelopt(fields: ConfigFields) -> StoredQuantization | None:
    """Read what ModelOpt writes into config.json or a file of its own, where modules' names have wildcards.

    None where the KV cache alone is quantised.
    """
    inner = fields.object("quantization") if fields.is_set("quantization") else fields
    if not inner.has("quant_algo") and (inner.has("kv_cache_quant_algo") or inner.has("kv_cache_scheme")):
        return None
    named = (*inner.texts("exclude_modules"), *inner.texts("ignore"))
    left = ("lm_head", *(f"re:{fnmatch.translate(name)}" if "*" in name else name for name in named))
    match algorithm := inner.text("quant_algo", default=""):
        case "NVFP4":
            return _fp4(inner, 16, left)
        case "FP8":
            return StoredQuantization("fp8", WeightForm("fp8", None), left)
    raise inner.error("quant_algo", f"{algorithm!r} is not supported, only 'NVFP4' and 'FP8' are: {_INSTEAD}")


def _quark(fields: ConfigFields) -> StoredQuantization:
    if fields.has("layer_quant_config"):
        raise fields.error("layer_quant_config", f"forms that differ by module are not supported: {_INSTEAD}")
    weight = fields.object("global_quant_config").object("weight")
    if (kind := weight.text("dtype", default="")) != "fp4":
        raise weight.error("dtype", f"{kind!r} is not supported, only 'fp4' is: {_INSTEAD}")
    if (scales := weight.text("scale_format", default="e8m0")) != "e8m0":
        raise weight.error("scale_format", f"{scales!r} is not supported, only 'e8m0' is: {_INSTEAD}")
    return _fp4(weight, 32, tuple(fields.texts("exclude")))


def _group_size(fields: ConfigFields, default: int) -> int | None:
    """-1 is a row."""
    return None if fields.is_minus_one("group_size") else fields.integer("group_size", default=default)


def _block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    if not fields.is_set(name):
        return None
    sizes = fields.numbers(name, 2)
    if not all(size.is_integer() for size in sizes):
        raise fields.error(name, "expected a list of 2 positive integers: rows and columns")
    return int(sizes[0]), int(sizes[1])


def _left(fields: ConfigFields) -> tuple[str, ...]:
    """Return the patterns of modules that are not quantised."""
    return (*fields.texts("modules_to_not_convert"), *fields.texts("ignored_layers"))
