"""Products of few tokens and of quantised weights in Triton's interpreter, against their references."""

import itertools
from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import TOLERANCES, assert_close
from tests.rigs import reference
from tests.rigs.cuda_reference import linear_reference, unpack
from twostroke.model.checkpoint.quantization import QuantizedWeight, quantize
from twostroke.model.config import Activation, GatedActivation
from twostroke.model.cuda.backend import CudaLinear
from twostroke.model.cuda.kernels.gemm import (
    Bits,
    CudaPackedWeight,
    GemmConfig,
    SplitWorkspace,
    gemm,
    gemm_config,
    pack,
    with_splits,
)
from twostroke.model.cuda.kernels.launch import A100, H100, GpuTarget

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL_BITS: list[Bits] = [16, 8, 4]
SMALL = GemmConfig(16, 16, 32, num_warps=1, num_stages=2)


def case(
    tokens: int, rows: int, columns: int, bits: Bits = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, CudaPackedWeight, Tensor]:
    """x, weight and bias; sums of about 1."""
    generator = torch.Generator().manual_seed(tokens + rows + columns)
    shapes = ((tokens, columns), (rows, columns), (rows,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    weight = weight / columns**0.5
    return x.to(dtype), pack(weight.to(dtype) if bits == 16 else quantize(weight, bits)), bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(0, 16, 128), (1, 1, 1), (1, 16, 128), (3, 33, 200), (16, 17, 65), (7, 15, 31)]
)
def test_gemm_equals_its_reference(tokens: int, rows: int, columns: int, bits: Bits, dtype: torch.dtype) -> None:
    x, weight, bias = case(tokens, rows, columns, bits, dtype)
    for b, out_dtype in ((None, dtype), (bias, torch.float32)):
        actual = gemm(x, weight, b, out_dtype, SplitWorkspace(x.device), SMALL)
        assert_close(actual, linear_reference(x, weight, b, out_dtype), scale=2)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("activation", get_args(GatedActivation))
@pytest.mark.parametrize(("tokens", "width", "columns"), [(1, 1, 128), (5, 8, 160), (16, 21, 256), (3, 40, 128)])
def test_a_product_ends_in_the_gate_of_its_halves(
    tokens: int, width: int, columns: int, activation: Activation, bits: Bits, splits: int
) -> None:
    x, weight, bias = case(tokens, 2 * width, columns, bits, torch.bfloat16)
    config = replace(SMALL, block_n=32, splits=splits)
    for b in (None, bias):
        actual = gemm(x, weight, b, x.dtype, SplitWorkspace(x.device), config, activation=activation)
        expected = reference.gate(linear_reference(x, weight, b, torch.float32), activation).to(x.dtype)
        assert_close(actual, expected, scale=2)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("splits", [2, 4])
# 5 blocks of int4 columns: two a split, and none for the last of four.
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 20, 128), (9, 33, 640), (16, 16, 600)])
def test_splits_are_added_up(tokens: int, rows: int, columns: int, splits: int, bits: Bits) -> None:
    x, weight, bias = case(tokens, rows, columns, bits, torch.bfloat16)
    workspace = SplitWorkspace(x.device)
    actual = gemm(x, weight, bias, torch.float32, workspace, replace(SMALL, splits=splits))
    assert_close(actual, linear_reference(x, weight, bias, torch.float32), scale=2)
    assert not workspace.arrived.any()  # ready for the next launch


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_rows_result_does_not_depend_on_the_others(splits: int, bits: Bits) -> None:
    x, weight, _ = case(9, 40, 200, bits, torch.bfloat16)
    workspace, config = SplitWorkspace(x.device), replace(SMALL, splits=splits)
    together = gemm(x, weight, None, torch.float32, workspace, config)
    x[:4], x[5:] = float("nan"), 1e30
    alone = gemm(x, weight, None, torch.float32, workspace, config)
    assert torch.equal(alone[4], together[4])


def test_sums_of_splits_are_added_in_the_order_of_the_columns() -> None:
    x, weight, _ = case(1, 16, 128)
    workspace = SplitWorkspace(x.device)
    y = gemm(x, weight, None, torch.float32, workspace, replace(SMALL, splits=4))
    parts = workspace.sums[: 4 * 16].view(4, 16)
    assert torch.equal(y[0], ((parts[0] + parts[1]) + parts[2]) + parts[3])
    for split in range(4):
        part = slice(32 * split, 32 * split + 32)
        torch.testing.assert_close(parts[split], (x[:, part] @ weight.packed[:, part].T)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", [H100, A100, GpuTarget.of((8, 9), 142)])
def test_every_split_has_columns_and_room_in_the_workspace(target: GpuTarget) -> None:
    workspace = SplitWorkspace(torch.device("meta"))
    shapes = itertools.product((1, 16, 1024, 4096, 6144, 28672, 32768, 32769, 128256), (1, 64, 512, 4096, 14336))
    for (rows, columns), tokens, dtype in itertools.product(shapes, (1, 16, 17, 64), TOLERANCES):
        config = gemm_config(target, dtype, 16, tokens, rows, columns)
        assert config.splits <= -(-columns // config.block_k)
        if config.splits > 1:
            assert config.splits * tokens * rows <= workspace.sums.numel()
            assert -(-rows // config.block_n) <= workspace.arrived.numel()


def test_few_rows_are_split_and_many_are_not() -> None:
    config = GemmConfig(16, 64, 128, num_warps=4, num_stages=6, fill=0.7)  # 92 programs on 132 multiprocessors
    found = [with_splits(config, H100, rows, 4096).splits for rows in (64, 256, 2048, 4096, 6144, 128256)]
    assert found == [8, 8, 4, 2, 1, 1]
    assert with_splits(config, H100, rows=64, columns=256).splits == 2  # a step each
    assert with_splits(replace(config, fill=2.0), H100, rows=6144, columns=4096).splits == 4


@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_of_several_tiles_are_not_split(bits: Literal[8, 4]) -> None:
    config = gemm_config(H100, torch.float32, bits, 40, 16, 8192)
    assert config.block_t < 40
    x, weight, _ = case(40, 16, 8192, bits, torch.float32)
    workspace = SplitWorkspace(x.device)
    actual = gemm(x, weight, None, torch.float32, workspace, config)
    torch.testing.assert_close(actual, linear_reference(x, weight, None, torch.float32), rtol=1e-4, atol=1e-4)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 127, 128, 129, 300])
def test_packing_loses_nothing(columns: int, bits: Literal[8, 4]) -> None:
    weight = quantize(torch.randn(5, columns), bits)
    least, most = (-128, 127) if bits == 8 else (-8, 7)
    weight.values[0], weight.values[1] = least, most
    packed = pack(weight)
    assert torch.equal(unpack(packed), weight.dequantized(torch.float32))
    assert packed.packed.numel() <= 5 * (columns if bits == 8 else 64 * -(-columns // 128))


def test_groups_and_scales_that_no_kernel_knows_are_refused() -> None:
    values = torch.zeros(2, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="one scale a row, not 2"):
        pack(QuantizedWeight(values, torch.ones(2, 2), 32, 8))
    with pytest.raises(ValueError, match="groups of 64 columns, not 32"):
        pack(QuantizedWeight(values, torch.ones(2, 2), 32, 4))
    with pytest.raises(ValueError, match="bf16"):
        pack(QuantizedWeight(values, torch.full((2, 1), 0.3), 64, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiles_of_many_tokens_scale_int4_weights_before_they_are_multiplied(dtype: torch.dtype) -> None:
    x, weight, _ = case(130, 24, 300, 4, dtype)
    config = GemmConfig(128, 16, 128, num_warps=8, num_stages=2)
    actual = gemm(x, weight, None, torch.float32, SplitWorkspace(x.device), config)
    expected = x.float() @ unpack(weight).to(dtype).float().T  # a weight is rounded to x's dtype
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 17, 33, 64])
def test_linears_of_few_tokens_take_our_kernel(tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = case(tokens, 72, 160, dtype=dtype)
    linear = CudaLinear(weight.packed, bias, H100, SplitWorkspace(x.device))
    for out_dtype in (dtype, torch.float32):
        assert_close(linear(x, out_dtype), linear_reference(x, weight, bias, out_dtype), scale=2)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_linears_compute_with_the_dequantised_weight(bits: Literal[8, 4]) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = quantize(torch.randn((72, 200), generator=generator) / 14, bits)
    bias = torch.randn(72, generator=generator).half()
    linear = CudaLinear(weight, bias, H100, SplitWorkspace(bias.device))
    for tokens in (1, 17, 64, 70, 150):
        x = torch.randn((tokens, 200), generator=generator).half()
        expected = x.float() @ weight.dequantized(torch.float32).T + bias.float()
        assert_close(linear(x), expected.half(), scale=2)
    assert (linear.in_features, linear.out_features) == (200, 72)


def test_unquantised_linears_of_many_tokens_are_torchs() -> None:
    x, weight, bias = case(65, 24, 40)
    linear = CudaLinear(weight.packed, bias, H100, SplitWorkspace(x.device))
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.packed, bias))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_first_call_compiles_every_tile(bits: Literal[8, 4], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, torch.dtype]] = []

    def launch(x: Tensor, *arguments: object, activation: Activation | None) -> Tensor:
        *_, out_dtype, _, config = arguments
        launched.append((config.block_t, out_dtype))
        return torch.zeros(len(x), 8)

    monkeypatch.setattr("twostroke.model.cuda.backend.gemm", launch)
    linear = CudaLinear(quantize(torch.zeros(8, 128), bits), None, H100, SplitWorkspace(torch.device("cpu")))
    for out_dtype in (torch.bfloat16, torch.float32):
        launched.clear()
        linear(torch.zeros(3, 128, dtype=torch.bfloat16), out_dtype)
        assert launched == [(block_t, out_dtype) for block_t in (16, 32, 64, 128, 256, 16)]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_first_gate_compiles_what_prompts_need_too(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for name in ("gemm", "elementwise.gate"):
        monkeypatch.setattr(f"twostroke.model.cuda.backend.{name}", lambda *args, **options: launched.append(options))
    weight = torch.zeros(8, 128, dtype=torch.bfloat16)
    linear = CudaLinear(weight if bits == 16 else quantize(weight, bits), None, H100, SplitWorkspace(weight.device))
    linear(weight[:3], activation="silu")
    fused, products, gates = {"activation": "silu"}, {"activation": None}, {}
    prompts = [gates] if bits == 16 else [products, gates, products, gates]
    assert launched == [fused, fused, fused, *prompts, fused]
