"""Fields of a quantization_config, and those that are refused by name."""

import re
from typing import Any

import pytest

from tests.model.conftest import TINY
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.config import ModelConfig, StoredQuantization, WeightForm
from twostroke.model.costs.sizes import stored_forms, weight_bytes, weights_as
from twostroke.protocol.errors import ConfigError

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def compressed(layout: str = "pack-quantized", weights: dict[str, Any] = INT4, **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, **fields}


def parsed(told: dict[str, Any], **fields: Any) -> ModelConfig:
    return parse_model_config(TINY | fields | {"quantization_config": told}, "config.json")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"quant_method": "fp8"}, StoredQuantization("fp8", WeightForm("fp8", None), ("lm_head",))),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 128], "modules_to_not_convert": ["a"]},
            StoredQuantization("fp8", WeightForm("fp8", 128), ("lm_head", "a"), (64, 128)),
        ),
        ({"quant_method": "awq"}, StoredQuantization("awq", WeightForm("int4", 128, True), ("lm_head",))),
        (GPTQ, StoredQuantization("gptq", WeightForm("int4", 128), ("lm_head",), zero_shift=1)),
        (
            GPTQ | {"bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2", "lm_head": True},
            StoredQuantization("gptq", WeightForm("int8", None, True)),
        ),
        (compressed(ignore=["lm_head"]), StoredQuantization("packed", WeightForm("int4", 128), ("lm_head",))),
        (
            compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
            StoredQuantization("int8", WeightForm("int8", None, True)),
        ),
        (
            compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}, ignore=["lm_head"]),
            StoredQuantization("fp4", WeightForm("fp4", 16), ("lm_head",)),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a"]},
            StoredQuantization("fp4", WeightForm("fp4", 16), ("lm_head", "a")),
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
            StoredQuantization("fp8", WeightForm("fp8", None), ("lm_head",)),
        ),
        (
            compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
            StoredQuantization("fp8", WeightForm("fp8", None)),
        ),
    ],
)
def test_what_a_checkpoint_says_of_its_projections(told: dict[str, Any], expected: StoredQuantization) -> None:
    assert parsed(told).stored == expected


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (
            {},
            "quant_method: '' is not supported, only fp8, compressed-tensors, awq, gptq, mxfp4, modelopt, quark are",
        ),
        ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: expected a list of 2"),
        ({"quant_method": "awq", "bits": 3}, "bits: 3"),
        ({"quant_method": "awq", "version": "gemv"}, "version: 'gemv'"),
        (GPTQ | {"bits": 2}, "bits: 2"),
        (GPTQ | {"group_size": 0}, "group_size: expected a positive integer"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (GPTQ | {"dynamic": {"+:down": {"bits": 8}}}, "dynamic.+:down.bits: 8 differs from that of other modules"),
        (GPTQ | {"dynamic": {"up": {"group_size": 32}}}, "dynamic.up.group_size: 32 differs"),
        (compressed("mxfp8-quantized"), "format: 'mxfp8-quantized'"),
        (compressed("nvfp4-pack-quantized"), "config_groups.group_0.weights.group_size: 128 is not supported, only 16"),
        (
            compressed("mxfp4-pack-quantized", {"group_size": 32, "symmetric": False}),
            "config_groups.group_0.weights.symmetric: zero points of FP4",
        ),
        ({"quant_method": "modelopt"}, "quant_algo: '' is not supported, only 'NVFP4' and 'FP8' are"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}}, "quantization.quant_algo: 'MXFP8'"),
        ({"quant_method": "quark", "layer_quant_config": {"a": {}}}, "layer_quant_config: forms that differ"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
            "global_quant_config.weight.dtype: 'fp8_e4m3'",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "scale_format": "e4m3"}}},
            "global_quant_config.weight.scale_format: 'e4m3'",
        ),
        (compressed(config_groups={}), "config_groups: expected a group, found none"),
        (
            compressed(config_groups={"a": {"weights": INT4}, "b": {"weights": INT4 | {"num_bits": 2}}}),
            "config_groups.b.weights.num_bits: int of 2 bits",
        ),
        (compressed(weights=INT4 | {"num_bits": 3}), "config_groups.group_0.weights.num_bits: int of 3 bits"),
        (compressed(weights=INT4 | {"strategy": "token"}), "config_groups.group_0.weights.strategy: 'token'"),
        (compressed("int-quantized"), "config_groups.group_0.weights.num_bits: 4 are not supported"),
        (compressed(ignore="lm_head"), "ignore: expected a list of strings"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: sparse weights"),
        (compressed(transform_config={"a": {}}), "transform_config: transformed activations"),
    ],
)
def test_what_cant_be_held_is_refused_by_field(told: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: quantization_config\.{re.escape(named)}"):
        parsed(told)


def test_modules_that_are_left_are_found_by_name_part_and_pattern() -> None:
    left = ["re:.*layers\\.0\\.self_attn.*", "mlp.gate_proj", "model.layers.1.self_attn.o_proj", "lm_head"]
    forms = stored_forms(parsed(compressed(ignore=left)))
    layers = [f"model.layers.{i}." for i in range(2)]
    quantised = {f"{layer}mlp.{name}_proj.weight" for layer in layers for name in ("up", "down")}
    quantised |= {f"{layers[1]}self_attn.{name}_proj.weight" for name in "qkv"}
    assert forms.keys() == quantised


def test_the_bytes_are_those_of_the_form_that_they_are_held_in() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = parsed({"quant_method": "awq"}, **sizes)
    weights, rows = 2 * (4 * 256 * 256 + 3 * 256 * 512), 2 * (4 * 256 + 2 * 512 + 256)
    others = (2 * 96 * 256 + 5 * 256) * 2
    awq = weights // 2 + weights // 128 * 4 + rows * 4
    assert weight_bytes(config, 2, "auto") == others + awq
    assert weight_bytes(config, 2, "none") == others + 2 * weights
    assert weights_as("auto", stored_forms(config)) == "int4 (groups of 128)"
    # What is computed by one projection is held in one form: keys that are left leave queries and values, too.
    mixed = parsed({"quant_method": "awq", "modules_to_not_convert": ["k_proj", "gate_proj"]}, **sizes)
    plain = 2 * (3 * 256 * 256 + 2 * 256 * 512)
    held = weights - plain
    expected = 2 * plain + held // 2 + held // 128 * 4 + 2 * (256 + 256) * 4
    assert weight_bytes(mixed, 2, "auto") == others + expected
