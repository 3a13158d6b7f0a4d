"""Quantised checkpoints of the families of 2025 and 2026 hold what they mean, in the names that publishers give them.

Greedy tokens are compared with those of the same weights, widened, as test_conformance.py compares with
transformers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from tests.model.checkpoint.test_packed_weights import (
    FORMATS,
    Pack,
    Packed,
    compressed,
    fp8,
    told,
)
from tests.model.conftest import make_decoder
from tests.model.parallel.test_tensor_parallel import ranks, runner
from twostroke.model.captured_steps import NOTHING_CAPTURED, StepReplays
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.quantization import QuantizedWeight, two_byte_scales
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.model.costs.sizes import stored_forms
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.parallel.tensor_parallel import SingleRank
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.served import NativeModel

BLOCK_SIZE = 32
LENGTHS = (1, 17, 40)
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
MIXTURE: dict[str, Any] = WIDE | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
STATES: dict[str, Any] = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32}
# By family: sizes that all formats' groups divide, and the modules that publishers leave as they are.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_5": (WIDE | STATES, ("in_proj_a", "in_proj_b")),
    "qwen3_5_moe": (MIXTURE | STATES, ("in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate")),
    "qwen3_next": (MIXTURE | STATES, ("mlp.gate", "shared_expert_gate")),
    "llama4": (
        WIDE | {"head_dim": 32, "intermediate_size": 64, "intermediate_size_mlp": 192},
        ("feed_forward.router",),
    ),
    "glm4_moe_lite": (
        MIXTURE
        | {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        ("mlp.gate",),
    ),
    "minimax_m2": (WIDE | {"head_dim": 32, "rotary_dim": 16}, ("block_sparse_moe.gate", "mlp.gate")),
}


def nvfp4(divides: bool) -> Pack:
    """Two e2m1 numbers a byte, an e4m3 scale a group of 16, and one number for all of them."""

    def pack(weight: Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, 16))
        of_all = groups.abs().max() / (6 * 448)
        scales = (groups.abs().amax(2) / 6 / of_all).to(torch.float8_e4m3fn)
        number = 1 / of_all if divides else of_all
        steps = scales.float() / number if divides else scales.float() * number
        codes, meant = fp4(groups, steps)
        if divides:
            return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": number.view(1)}, meant
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": number, "input_scale": number.clone()}, meant

    return pack


def mxfp4(name: str) -> Pack:
    """Two e2m1 numbers a byte, and a power of two for a group of 32."""

    def pack(weight: Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, 32))
        exponents = (groups.abs().amax(2) / 6).log2().ceil()
        codes, meant = fp4(groups, 2**exponents)
        return {name: codes, "weight_scale": (exponents + 127).to(torch.uint8)}, meant

    return pack


def fp4(groups: Tensor, steps: Tensor) -> Packed:
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat((numbers, -numbers))
    codes = ((groups / steps.clamp(min=1e-30)[..., None])[..., None] - numbers).abs().argmin(-1)
    meant = (numbers[codes] * steps[..., None]).flatten(1)
    codes = codes.flatten(1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), meant


FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
OF_16 = FP4 | {"strategy": "tensor_group", "group_size": 16}
QUARK = {"weight": {"dtype": "fp4", "group_size": 32, "qscheme": "per_group", "scale_format": "e8m0"}}
FP4_FORMATS: dict[str, tuple[dict[str, Any], Callable[[], Pack]]] = {
    "NVFP4 by llm-compressor": (compressed("nvfp4-pack-quantized", **OF_16)[0], lambda: nvfp4(True)),
    "NVFP4 by ModelOpt": (told("modelopt", quant_algo="NVFP4", ignore=["lm_head"]), lambda: nvfp4(False)),
    "MXFP4 by llm-compressor": (
        compressed("mxfp4-pack-quantized", **FP4, strategy="group", group_size=32)[0],
        lambda: mxfp4("weight_packed"),
    ),
    "MXFP4 by Quark": (told("quark", global_quant_config=QUARK, exclude=["lm_head"]), lambda: mxfp4("weight")),
    "FP8 by ModelOpt": (told("modelopt", quant_algo="FP8"), lambda: fp8("tensor")),
}
EVERY_FORMAT = FORMATS | FP4_FORMATS
LEFT_IN = {
    "compressed-tensors": ("ignore", "re:.*{}$"),
    "modelopt": ("ignore", "*{}"),
    "quark": ("exclude", "re:.*{}$"),
}


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return Llama 4's experts as llm-compressor takes them apart: [experts, in, out] -> [out, in] each."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(part) if stem else None
        if parts is None:
            found[name] = tensor
            continue
        for expert, whole in enumerate(tensor):
            for kind, columns in zip(parts, whole.chunk(len(parts), dim=1), strict=True):
                found[f"{stem}.experts.{expert}.{kind}_proj.weight"] = columns.T.contiguous()
    return found


def quantised(folder: Path, into: Path, form: str, left: tuple[str, ...]) -> dict[str, Tensor]:
    """Write the folder's model quantised to `into`, and what that means back. Return what it means."""
    said, pack = EVERY_FORMAT[form]
    field, named = LEFT_IN.get(said["quant_method"], ("modules_to_not_convert", "{}"))
    said = said | {field: [*said.get(field, ()), *map(named.format, left)]}
    tensors, packer = apart(load_file(folder / SINGLE_FILE)), pack()
    parts, meant = dict[str, Tensor](), dict(tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_left = tensor.dim() != 2 or module.endswith((*left, "lm_head", "embed_tokens"))
        packed: dict[str, Tensor] = {}
        if not is_left:
            packed, meant[name] = packer(tensor)
        parts |= {f"{module}.{ending}": part for ending, part in packed.items()} or {name: tensor}
    raw = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(raw | {"quantization_config": said}))
    save_file({name: part.contiguous() for name, part in parts.items()}, into / SINGLE_FILE)
    save_file(meant, folder / SINGLE_FILE)
    return meant


def generated(folder: Path, generate: Any, block_size: int = BLOCK_SIZE) -> list[list[int]]:
    config = load_model_config(folder)
    decoder, cache = make_decoder(
        folder, CpuBackend(), num_blocks=24 * config.kv_groups.count, block_size=block_size, max_context=256
    )
    whole = ModelRunner(decoder, Sampler(decoder.vocab_size), cache, 256, StepReplays(NOTHING_CAPTURED))
    return generate(whole, random_prompts(96, 1, LENGTHS), 8, chunk=13, block_size=block_size)


NAMES = (
    *("FP8 by blocks", "FP8 by ModelOpt", "AWQ", "GPTQ", "packed int4", "int8 by row", "float by row"),
    *(name for name in FP4_FORMATS if name != "FP8 by ModelOpt"),
)


CASES = [  # `make test` has each format and each family
    pytest.param(
        family,
        form,
        id=f"{family}, {form}",
        marks=[] if family == "qwen3_5_moe" or form in ("FP8 by blocks", "NVFP4 by ModelOpt") else pytest.mark.models,
    )
    for family in FAMILIES
    for form in NAMES
]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_a_quantised_checkpoint_of_a_family_is_what_its_weights_mean(
    family: str, form: str, tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    sizes, left = FAMILIES[family]
    folder = write_checkpoint(**FAMILY_SHAPES[family] | sizes)
    meant = quantised(folder, tmp_path, form, left)
    config = load_model_config(tmp_path)
    checkpoint = Checkpoint(tmp_path, config)
    assert checkpoint.forms
    if family != "llama4":  # config.json does not tell that its experts are apart
        assert dict(checkpoint.forms) == stored_forms(config)
    for name in checkpoint.forms:
        found = checkpoint.weight(name)
        assert isinstance(found, QuantizedWeight)
        torch.testing.assert_close(found.dequantized(torch.float32), meant[name], rtol=1e-6, atol=0)
        if found.is_fp4:  # two bytes hold the scales exactly
            factors, scales, _ = two_byte_scales(found)
            torch.testing.assert_close(factors[:, None] * scales.float(), found.scales, rtol=1e-6, atol=0)
    assert generated(tmp_path, generate) == generated(folder, generate)


@pytest.mark.parametrize("form", ["NVFP4 by llm-compressor", "NVFP4 by ModelOpt", "MXFP4 by llm-compressor"])
def test_two_ranks_share_what_is_in_fp4(form: str, tmp_path: Path, write_checkpoint: Any, generate: Any) -> None:
    sizes, left = FAMILIES["minimax_m2"]
    folder = write_checkpoint(**FAMILY_SHAPES["minimax_m2"] | sizes)
    quantised(folder, tmp_path, form, left)
    prompts = random_prompts(96, 1, LENGTHS)
    expected = generate(runner(folder, SingleRank()), prompts, 8, chunk=37, block_size=8)
    for has_whole_experts in (False, True):
        with ranks(tmp_path, 2, has_whole_experts) as both:
            assert generate(both, prompts, 8, chunk=37, block_size=8) == expected


def test_experts_that_llm_compressor_took_apart_are_those_of_one_tensor(write_checkpoint: Any, generate: Any) -> None:
    folder = write_checkpoint(**FAMILY_SHAPES["llama4"])
    expected = generated(folder, generate)
    save_file(apart(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE)
    assert generated(folder, generate) == expected
    shape = NativeModel(folder).shape
    assert shape.spec.layer.experts is not None
    assert not shape.spec.layer.experts.are_stacked


def test_experts_in_fp8_may_be_one_tensor_with_one_of_scales(
    tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    sizes, left = FAMILIES["qwen3_5_moe"]
    folder = write_checkpoint(**FAMILY_SHAPES["qwen3_5_moe"] | sizes | {"moe_intermediate_size": 128})
    quantised(folder, tmp_path, "FP8 by blocks", left)
    tensors = load_file(tmp_path / SINGLE_FILE)
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts"
        for stack, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            for ending, name in (("weight", stack), ("weight_scale_inv", f"{stack}_scale_inv")):
                each = [
                    torch.cat([tensors.pop(f"{stem}.{expert}.{kind}_proj.{ending}") for kind in kinds])
                    for expert in range(6)
                ]
                tensors[f"{stem}.{name}"] = torch.stack(each)
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert generated(tmp_path, generate) == generated(folder, generate)


def test_modelopts_own_file_says_it_where_config_json_does_not(
    tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(**WIDE)
    quantised(folder, tmp_path, "NVFP4 by ModelOpt", ())
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    own = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.0*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": own}))
    config = load_model_config(tmp_path)
    assert all(name.startswith("model.layers.1") for name in stored_forms(config))
    assert generated(tmp_path, generate) == generated(folder, generate)
