"""Quantised checkpoints as others write them generate what transformers does with the weights that they mean.

compressed-tensors' weights are packed and widened by the library of that name, FP8 ones are widened by transformers,
AWQ's and GPTQ's packed by loops that follow the formats' descriptions.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.model.architectures.test_conformance import FAMILY_SHAPES, MIN_MARGIN, NEW_TOKENS, random_prompts, reference
from tests.model.architectures.test_experts import choices
from tests.model.conftest import make_decoder
from tests.model.cpu.test_linears import needs_avx512_bf16
from tests.model.parallel.test_tensor_parallel import ranks, runner
from twostroke.model.backend import Experts, LoadOptions
from twostroke.model.captured_steps import NOTHING_CAPTURED, StepReplays
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.model.config import Quantization
from twostroke.model.costs.sizes import stored_forms
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.captured_steps import CpuCapturedSteps
from twostroke.model.cpu.experts import CpuExperts
from twostroke.model.cpu.linears import CpuQuantizedLinear
from twostroke.model.parallel.form import Shard
from twostroke.model.parallel.tensor_parallel import SingleRank
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.protocol.errors import ConfigError

Packed = tuple[dict[str, Tensor], Tensor]
"""A weight's tensors, by their names' endings, and what they mean, fp32."""
Pack = Callable[[Tensor], Packed]

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2}
LENGTHS = (1, 17, 64)
E4M3 = torch.float8_e4m3fn


def fp8(scale_shape: str, name: str = "weight_scale") -> Pack:
    def pack(weight: Tensor) -> Packed:
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "row": (1, columns), "blocks": (128, 128)}[scale_shape]
        of_blocks = torch.zeros(-(-rows // high), -(-columns // wide))
        values, meant = torch.empty(rows, columns, dtype=E4M3), torch.empty(rows, columns)
        for i in range(of_blocks.shape[0]):
            for j in range(of_blocks.shape[1]):
                block = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale = weight[block].abs().max() / 448
                values[block] = (weight[block] / scale).to(E4M3)
                meant[block] = values[block].float() * scale
                of_blocks[i, j] = scale
        if rows % high == columns % wide == 0:  # else transformers takes the blocks to be smaller ones
            theirs = Fp8Dequantize(None)._dequantize_one(values, of_blocks, torch.float32)
            torch.testing.assert_close(theirs, meant)
        return {"weight": values, name: of_blocks.squeeze() if scale_shape == "tensor" else of_blocks}, meant

    return pack


def by_library(layout: str, **arguments: Any) -> Pack:
    """Pack a weight as llm-compressor writes it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def pack(weight: Tensor) -> Packed:
        groups = weight.view(len(weight), -1, arguments.get("group_size", weight.shape[1]))
        if arguments["strategy"] == "tensor":
            groups = weight.view(1, 1, -1)
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
        if arguments["strategy"] == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        state = {"weight": weight.clone(), "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(layout)
        packed = compressor.compress(state, scheme)
        meant = compressor.decompress(packed, scheme)["weight"]
        return {name: part.contiguous() for name, part in packed.items()}, meant.float()

    return pack


def affine(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers without a sign [out, in], and each group's zero point and fp16 scale, [out, groups]."""
    groups = weight.view(len(weight), -1, group)
    low, high, steps = groups.amin(2), groups.amax(2), 2**bits - 1
    if symmetric:
        high = torch.maximum(high, -low)
        scale, zero = (2 * high / steps).half(), torch.full(low.shape, 2 ** (bits - 1))
    else:
        scale = ((high - low) / steps).half()
        zero = (-low / scale.float()).round().clamp(1, steps).int()
    numbers = (groups / scale.float()[:, :, None]).round() + zero[:, :, None]
    return numbers.clamp(0, steps).int().view(weight.shape), zero.int(), scale


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]; `order[i]` says which of a word's numbers is its i-th from below."""
    count = 32 // bits
    found = torch.zeros(len(numbers), numbers.shape[1] // count, dtype=torch.int64)
    for i in range(count):
        found |= numbers[:, (order[i] if order else i) :: count].long() << (bits * i)
    return torch.from_numpy(found.numpy().astype("uint32").view("int32"))


def awq(zero_point: bool) -> Pack:
    def pack(weight: Tensor) -> Packed:
        numbers, zero, scale = affine(weight, 4, 64, not zero_point)
        meant = (numbers - zero.repeat_interleave(64, 1)) * scale.float().repeat_interleave(64, 1)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": words(numbers.T, 4, order), "qzeros": words(zero.T, 4, order), "scales": scale.T}
        return {name: part.contiguous() for name, part in parts.items()}, meant

    return pack


def gptq(bits: int, symmetric: bool = True, desc_act: bool = False, zero_shift: int = 1) -> Pack:
    def pack(weight: Tensor) -> Packed:
        columns = weight.shape[1]
        generator = torch.Generator().manual_seed(columns)  # q, k and v are quantised in the same order
        order = torch.randperm(columns, generator=generator) if desc_act else torch.arange(columns)
        numbers, zero, scale = affine(weight[:, order], bits, 32, symmetric)
        g_idx, unordered = torch.empty(columns, dtype=torch.int32), torch.empty_like(numbers)
        for place, column in enumerate(order.tolist()):
            g_idx[column], unordered[:, column] = place // 32, numbers[:, place]
        meant = torch.stack([(unordered[:, i] - zero[:, g]) * scale[:, g].float() for i, g in enumerate(g_idx)], dim=1)
        qweight, qzeros = words(unordered, bits).T, words(zero.T - zero_shift, bits)
        parts = {"qweight": qweight, "qzeros": qzeros, "scales": scale.T, "g_idx": g_idx}
        return {name: part.contiguous() for name, part in parts.items()}, meant

    return pack


def with_more(pack: Pack, **more: Callable[[dict[str, Tensor]], Tensor]) -> Pack:
    """Add further tensors to each weight, made of its others."""

    def also(weight: Tensor) -> Packed:
        parts, meant = pack(weight)
        return parts | {name: make(parts) for name, make in more.items()}, meant

    return also


def compressed(layout: str, **arguments: Any) -> tuple[dict[str, Any], Callable[[], Pack]]:
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    return {**said, "config_groups": {"group_0": group}}, lambda: by_library(layout, **arguments)


def with_zero_points(
    form: tuple[dict[str, Any], Callable[[], Pack]], zeros: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Any], Callable[[], Pack]]:
    said, pack = form
    return said, lambda: with_more(pack(), weight_zero_point=lambda parts: zeros(parts["weight_scale"]))


def told(method: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": method, **fields}


GPTQ = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[], Pack]]] = {
    "FP8 by tensor": (told("fp8", activation_scheme="static"), lambda: fp8("tensor")),
    "FP8 by row": (told("fp8"), lambda: fp8("row")),
    "FP8 by blocks": (told("fp8", weight_block_size=[128, 128]), lambda: fp8("blocks", "weight_scale_inv")),
    "AWQ": (told("awq", bits=4, group_size=64, zero_point=True, version="gemm"), lambda: awq(True)),
    "AWQ without zero points": (told("awq", bits=4, group_size=64, zero_point=False), lambda: awq(False)),
    "GPTQ": (told("gptq", **GPTQ), lambda: gptq(4)),
    "GPTQ with zero points": (told("gptq", **GPTQ | {"sym": False}), lambda: gptq(4, symmetric=False)),
    "GPTQ of 8 bits": (told("gptq", **GPTQ | {"bits": 8}), lambda: gptq(8)),
    "GPTQ of its second version": (
        told("gptq", **GPTQ | {"sym": False}, checkpoint_format="gptq_v2"),
        lambda: gptq(4, symmetric=False, zero_shift=0),
    ),
    "GPTQ with desc_act": (
        told("gptq", **GPTQ | {"sym": False, "desc_act": True}),
        lambda: gptq(4, symmetric=False, desc_act=True),
    ),
    "GPTQ whose g_idx is of zeros": (
        told("gptq", **GPTQ),
        lambda: with_more(gptq(4), g_idx=lambda parts: torch.zeros_like(parts["g_idx"])),
    ),
    "packed int4, symmetric with zero points": with_zero_points(
        compressed("pack-quantized", **INT4, symmetric=True),
        lambda scale: torch.full((scale.shape[0] // 8, scale.shape[1]), -0x77777778, dtype=torch.int32),
    ),
    "int8 by row, symmetric with zero points": with_zero_points(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        lambda scale: torch.zeros(scale.shape, dtype=torch.int8),
    ),
    "float by tensor, symmetric with zero points": with_zero_points(
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True),
        lambda scale: torch.zeros(scale.shape).to(E4M3),
    ),
    "packed int4": compressed("pack-quantized", **INT4, symmetric=True),
    "packed int4 with zero points": compressed("pack-quantized", **INT4, symmetric=False),
    "packed int8": compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "int8 by row": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "int8 with zero points": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "float by row": compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    "float by tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True),
}
SEEDS = {"FP8 by tensor": 1, "FP8 by blocks": 1, "float by tensor": 1, "float by tensor, symmetric with zero points": 1}
"""Chosen for their margins; 0 for the others."""


def quantised(folder: Path, told: dict[str, Any], pack: Pack, into: Path) -> None:
    """The folder's model with its layers' projections packed, in `into`; `folder` has what these mean from then on."""
    raw = json.loads((folder / "config.json").read_text())
    tensors, parts = load_file(folder / SINGLE_FILE), {}
    for name, tensor in tensors.items():
        if "proj" not in name:
            parts[name] = tensor
            continue
        packed, tensors[name] = pack(tensor)
        parts |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in packed.items()}
    (into / "config.json").write_text(json.dumps(raw | {"quantization_config": told}))
    save_file(parts, into / SINGLE_FILE, metadata={"format": "pt"})
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_generates_what_transformers_does_with_its_weights(
    name: str, tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(seed=SEEDS.get(name, 0), **SIZES)
    told, pack = FORMATS[name]
    quantised(folder, told, pack(), tmp_path)
    prompts = random_prompts(96, 1, LENGTHS)
    expected, margins = reference(folder, prompts)
    assert margins.min() > MIN_MARGIN, "choose another seed: this model has a near-tie"
    assert generate(runner(tmp_path, SingleRank()), prompts, NEW_TOKENS, chunk=37, block_size=8) == expected
    checkpoint, meant = (Checkpoint(each, load_model_config(each)) for each in (tmp_path, folder))
    assert dict(checkpoint.forms) == stored_forms(load_model_config(tmp_path)) != {}
    for weight in checkpoint.forms:
        found = checkpoint.weight(weight)
        assert isinstance(found, QuantizedWeight)
        torch.testing.assert_close(found.dequantized(torch.float32), meant.tensor(weight), rtol=1e-5, atol=1e-6)
    if "desc_act" in name:
        with pytest.raises(ConfigError, match=r"o_proj\.weight is quantised with desc_act.*tensor_parallel: 1"):
            checkpoint.weight("model.layers.0.self_attn.o_proj.weight", columns=slice(0, 64))
        return
    with ranks(tmp_path, 2) as both:
        assert generate(both, prompts, NEW_TOKENS, chunk=37, block_size=8) == expected


QUANTISED_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {  # two ranks have 128 features of each expert
    "FP8 by blocks": ("qwen3_moe", {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 32}),
    "AWQ": ("qwen3_moe", {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}),
    "GPTQ with desc_act": ("qwen3_moe", {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}),
    # As DeepSeek publishes V3, the latents' projections among them; blocks are cut by heads, and end with a latent.
    "FP8 by blocks, with latents": (
        "deepseek_v3_experts",
        {"hidden_size": 128, "moe_intermediate_size": 256, "intermediate_size": 384, "kv_lora_rank": 160},
    ),
}


@pytest.mark.parametrize("name", QUANTISED_EXPERTS)
def test_quantised_experts_generate_what_transformers_does_with_their_weights(
    name: str, tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    family, more = QUANTISED_EXPERTS[name]
    folder = write_checkpoint(**FAMILY_SHAPES[family] | more)
    told, pack = FORMATS[name.removesuffix(", with latents")]
    quantised(folder, told, pack(), tmp_path)
    prompts = random_prompts(96, 1, LENGTHS)
    expected, margins = reference(folder, prompts)
    assert margins.min() > MIN_MARGIN, "choose another seed: this model has a near-tie"
    assert generate(runner(tmp_path, SingleRank()), prompts, NEW_TOKENS, chunk=37, block_size=8) == expected
    if "desc_act" in name:
        return  # its columns can't be shared out
    with ranks(tmp_path, 2) as both:
        assert generate(both, prompts, NEW_TOKENS, chunk=37, block_size=8) == expected


def mxfp4(weight: Tensor) -> Packed:
    """weight [experts, in, out], in groups of 32 inputs: blocks, scales, and what they mean."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat((numbers, -numbers))
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3) / 6).log2().ceil()
    scaled = groups / 2 ** exponents[..., None]
    codes = (scaled[..., None] - numbers).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    meant = (numbers[codes] * 2 ** exponents[..., None]).flatten(2).transpose(1, 2).contiguous()
    return {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}, meant


def in_mxfp4(folder: Path, into: Path) -> None:
    """Write a folder's stacked experts as `quantised` does, in MXFP4."""
    packed: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / SINGLE_FILE).items():
        is_weight = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        parts, meant[name] = mxfp4(tensor) if is_weight else ({}, tensor)
        packed |= {f"{name}_{part}": held for part, held in parts.items()} or {name: tensor}
    save_file(meant, folder / SINGLE_FILE, metadata={"format": "pt"})
    save_file(packed, into / SINGLE_FILE, metadata={"format": "pt"})
    told = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": told}
    (into / "config.json").write_text(json.dumps(raw))


def test_experts_in_mxfp4_generate_what_their_numbers_mean(
    tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(**FAMILY_SHAPES["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 128})
    in_mxfp4(folder, tmp_path)
    prompts = random_prompts(96, 5, LENGTHS)
    expected, margins = reference(folder, prompts)
    assert margins.min() > MIN_MARGIN, "choose another seed: this model has a near-tie"
    assert generate(runner(tmp_path, SingleRank()), prompts, NEW_TOKENS, chunk=37, block_size=8) == expected
    for has_whole_experts in (False, True):
        with ranks(tmp_path, 2, has_whole_experts) as both:
            assert generate(both, prompts, NEW_TOKENS, chunk=37, block_size=8) == expected
    config = load_model_config(tmp_path)
    assert Checkpoint(tmp_path, config).forms == stored_forms(config)


@needs_avx512_bf16
@pytest.mark.parametrize("form", ["int8", "int4", "FP8 by blocks", "AWQ", "mxfp4"])
def test_two_ranks_kernels_compute_with_their_parts_of_quantised_experts(
    form: str, tmp_path: Path, write_checkpoint: Any
) -> None:
    """Against fp32 with the weights as they were, or as what is stored means: two ranks come as near as one does."""
    if form == "mxfp4":
        folder = write_checkpoint(**FAMILY_SHAPES["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 128})
        in_mxfp4(folder, tmp_path)
    else:
        more = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 5, "head_dim": 32}
        folder = write_checkpoint(**FAMILY_SHAPES["qwen3_moe"] | more)
        if form in FORMATS:
            told, pack = FORMATS[form]
            quantised(folder, told, pack(), tmp_path)
    anew: dict[str, Quantization] = {"int8": "int8", "int4": "int4"}

    def of_rank(source: Path, dtype: torch.dtype, held: Quantization, shard: Shard) -> Experts:
        config = load_model_config(source)
        options = LoadOptions(dtype, torch.device("cpu"), 64, held)
        weights = load_decoder_weights(Checkpoint(source, config), config, options, CpuBackend(), shard)
        assert weights.layers[0].routed is not None
        return weights.layers[0].routed.experts

    whole = of_rank(folder, torch.float32, "none", Shard())
    hidden, chosen = load_model_config(folder).hidden_size, choices(40, len(whole.hits), 2)
    x = torch.randn(40, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    meant = whole(x.float(), chosen)
    source = folder if form in anew else tmp_path

    def error(size: int, has_whole_experts: bool = False) -> float:
        shards = [Shard(rank, size, has_whole_experts) for rank in range(size)]
        ranks_own = [of_rank(source, torch.bfloat16, anew.get(form, "auto"), shard) for shard in shards]
        assert all(isinstance(one, CpuExperts) for one in ranks_own)
        total = sum((one(x, chosen).float() for one in ranks_own), torch.zeros_like(meant))
        return float((total - meant).norm() / meant.norm())

    limit = {"int8": 0.02, "int4": 0.2}.get(form, 0.008)  # bf16 alone rounds by up to 0.004
    of_one = error(1)
    assert of_one < limit
    assert error(2) < 1.1 * of_one
    assert error(4, has_whole_experts=True) < 1.1 * of_one


@needs_avx512_bf16
@pytest.mark.parametrize("name", ["FP8 by blocks", "GPTQ with desc_act"])
def test_recorded_steps_of_bf16_draw_what_eager_ones_do(
    name: str, tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    told, pack = FORMATS[name]
    quantised(write_checkpoint(**SIZES), told, pack(), tmp_path)
    prompts, drawn = random_prompts(96, 1, LENGTHS), []
    for records in (False, True):
        backend = CpuBackend()
        decoder, cache = make_decoder(tmp_path, backend, num_blocks=64, block_size=8, dtype=torch.bfloat16)
        assert isinstance(decoder._weights.layers[0].qkv, CpuQuantizedLinear)
        captured = CpuCapturedSteps(decoder, backend.launcher, cache, 1024) if records else NOTHING_CAPTURED
        runner = ModelRunner(decoder, Sampler(decoder.vocab_size), cache, 1024, StepReplays(captured))
        drawn.append(generate(runner, prompts, 24, chunk=37, block_size=8))
    assert drawn[0] == drawn[1]


def test_a_setting_widens_or_quantises_anew(tmp_path: Path, write_checkpoint: Any) -> None:
    folder = write_checkpoint(**SIZES)
    told, pack = FORMATS["AWQ"]
    quantised(folder, told, pack(), tmp_path)
    checkpoints = [Checkpoint(each, load_model_config(each)) for each in (tmp_path, folder)]
    x = torch.randn(3, 128)
    settings: tuple[Quantization, ...] = ("none", "int8")
    for quantization in settings:
        of_packed, of_meant = (
            load_decoder_weights(
                checkpoint,
                load_model_config(folder),
                LoadOptions(torch.float32, torch.device("cpu"), 64, quantization),
                CpuBackend(),
            )
            for checkpoint in checkpoints
        )
        for layer, expected in zip(of_packed.layers, of_meant.layers, strict=True):
            assert layer.mlp is not None
            assert expected.mlp is not None
            torch.testing.assert_close(layer.mlp.gate_up(x), expected.mlp.gate_up(x))
            torch.testing.assert_close(layer.output(x), expected.output(x))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scales": None}, r"q_proj\.scales is missing, which quantization_config asks for"),
        ({"qweight": torch.zeros(4, 4, dtype=torch.int32)}, r"qweight has shape \[4, 4\], .* asks for \[128, 16\]"),
        ({"scales": torch.zeros(2, 128, dtype=torch.int32)}, r"scales is I32, only F32, F16, BF16 are supported"),
        ({"bias": torch.ones(128)}, r"q_proj\.bias is none of a Llama decoder"),
    ],
)
def test_tensors_that_dont_fit_are_named(
    change: dict[str, Tensor | None], named: str, tmp_path: Path, write_checkpoint: Any
) -> None:
    told, pack = FORMATS["AWQ"]
    quantised(write_checkpoint(**SIZES), told, pack(), tmp_path)
    tensors: dict[str, Tensor | None] = dict(load_file(tmp_path / SINGLE_FILE))
    stem = "model.layers.0.self_attn.q_proj"
    digest = Checkpoint(tmp_path, load_model_config(tmp_path)).digest()
    extra = {f"{stem}.bias": torch.zeros(128), "model.layers.1.self_attn.k_proj.k_scale": torch.ones(1)}
    save_file(tensors | extra, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path, load_model_config(tmp_path))  # what some writers add, and nobody needs
    assert checkpoint.digest() == digest
    changed = tensors | {f"{stem}.{ending}": part for ending, part in change.items()}
    kept = {name: part for name, part in changed.items() if part is not None}
    save_file(kept, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=named):
        Checkpoint(tmp_path, load_model_config(tmp_path))


def test_the_digest_covers_every_part_of_a_weight(tmp_path: Path, write_checkpoint: Any) -> None:
    told, pack = FORMATS["GPTQ with desc_act"]
    quantised(write_checkpoint(**SIZES), told, pack(), tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    digests = {Checkpoint(tmp_path, load_model_config(tmp_path)).digest()}
    for ending in ("qweight", "qzeros", "scales"):
        name = f"model.layers.1.mlp.down_proj.{ending}"
        changed = tensors[name].clone()
        changed[0, 0] += 1
        save_file(tensors | {name: changed}, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
        digests.add(Checkpoint(tmp_path, load_model_config(tmp_path)).digest())
    assert len(digests) == 4


def test_zero_points_of_a_symmetric_weight_that_are_not_zero_are_refused_by_name(
    tmp_path: Path, write_checkpoint: Any
) -> None:
    told, pack = with_zero_points(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        lambda scale: torch.ones(scale.shape, dtype=torch.int8),
    )
    quantised(write_checkpoint(**SIZES), told, pack(), tmp_path)
    with pytest.raises(ConfigError, match=r"weight_zero_point: quantization_config says symmetric, and it is not zero"):
        Checkpoint(tmp_path, load_model_config(tmp_path))


def test_what_a_checkpoint_is_quantised_by_may_stand_in_a_file_of_its_own(
    tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(**SIZES)
    told, pack = FORMATS["GPTQ"]
    quantised(folder, told, pack(), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    own = {name: value for name, value in raw.pop("quantization_config").items() if name != "quant_method"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "quantize_config.json").write_text(json.dumps(own))
    prompts = random_prompts(96, 1, LENGTHS)
    expected, margins = reference(folder, prompts)
    assert margins.min() > MIN_MARGIN, "choose another seed: this model has a near-tie"
    assert generate(runner(tmp_path, SingleRank()), prompts, NEW_TOKENS, chunk=37, block_size=8) == expected


@pytest.mark.parametrize("scales", ["one a layer", "one a head", "in FP8's own words"])
def test_scales_of_kv_are_no_hindrance_where_kv_is_not_in_fp8(
    scales: str, tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(seed=SEEDS["FP8 by tensor"], **SIZES)
    told, pack = FORMATS["FP8 by tensor"]
    quantised(folder, told, pack(), tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        if scales == "one a layer":
            tensors[f"{attention}.kv_scale"] = torch.tensor([0.5])
        elif scales == "one a head":
            tensors |= {f"{attention}.{kind}_scale": torch.tensor([0.5, 0.25]) for kind in "kv"}
        else:
            tensors |= {f"{attention}.{kind}_scale": torch.tensor(-1.0) for kind in "kv"}
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    prompts = random_prompts(96, 1, LENGTHS)
    expected, _ = reference(folder, prompts)
    assert generate(runner(tmp_path, SingleRank()), prompts, NEW_TOKENS, chunk=37, block_size=8) == expected
    checkpoint = Checkpoint(tmp_path, load_model_config(tmp_path))
    assert len(checkpoint.digest()) == 16
    if scales == "one a layer":
        assert checkpoint.kv_scales(0) == (0.5, 0.5)
    else:
        with pytest.raises(ConfigError, match="is to be one positive number"):
            checkpoint.kv_scales(0)
