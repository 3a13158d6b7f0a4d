"""Products of few tokens and of quantised weights in Triton's interpreter, against their references."""

import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import TOLERANCES, assert_close
from twostroke.model.checkpoint.quantization import QuantizedWeight, quantize
from twostroke.model.cuda.kernels.launch import A100, H100, Target
from twostroke.model.cuda.kernels.quant_gemm import (
    PackedWeight,
    pack,
    quant_config,
    quant_gemm,
    quant_reference,
    unpack,
)
from twostroke.model.cuda.kernels.skinny_gemm import (
    GemmConfig,
    SplitWorkspace,
    linear_reference,
    skinny_config,
    skinny_gemm,
    with_splits,
)
from twostroke.model.cuda.linears import CudaLinear

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = GemmConfig(16, 16, 32, num_warps=1, num_stages=2)


def case(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias; sums of about 1."""
    generator = torch.Generator().manual_seed(tokens + rows + columns)
    shapes = ((tokens, columns), (rows, columns), (rows,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype), (weight / columns**0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(0, 16, 32), (1, 1, 1), (1, 16, 32), (3, 40, 96), (16, 17, 33), (7, 15, 31), (5, 33, 130)],
)
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_skinny_gemm_equals_its_reference(
    tokens: int, rows: int, columns: int, splits: int, dtype: torch.dtype
) -> None:
    x, weight, bias = case(tokens, rows, columns, dtype)
    workspace = SplitWorkspace(x.device)
    config = replace(SMALL, splits=splits)
    for b, out_dtype in ((None, dtype), (bias, torch.float32)):
        actual = skinny_gemm(x, weight, b, out_dtype, workspace, config)
        assert_close(actual, linear_reference(x, weight, b, out_dtype), scale=2)
    assert not workspace.arrived.any()  # ready for the next launch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 17, 33, 64])
def test_linears_of_few_tokens_take_the_skinny_kernel(tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = case(tokens, 72, 160, dtype)
    linear = CudaLinear(weight, bias, H100, SplitWorkspace(x.device))
    assert_close(linear(x), linear_reference(x, weight, bias, dtype), scale=2)
    assert_close(linear(x, torch.float32), linear_reference(x, weight, bias, torch.float32), scale=2)


def test_linears_of_many_tokens_are_torchs() -> None:
    x, weight, bias = case(65, 24, 40, torch.float32)
    linear = CudaLinear(weight, bias, H100, SplitWorkspace(x.device))
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight, bias))


def test_skinny_gemm_takes_rows_that_are_part_of_wider_ones() -> None:
    wide, weight, _ = case(4, 20, 64, torch.float32)
    x = wide[:, 8:40]
    actual = skinny_gemm(x, weight[:, 8:40].contiguous(), None, torch.float32, SplitWorkspace(x.device), SMALL)
    assert_close(actual, linear_reference(x, weight[:, 8:40], None, torch.float32))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_rows_result_does_not_depend_on_the_others(splits: int) -> None:
    x, weight, _ = case(9, 40, 200, torch.bfloat16)
    workspace, config = SplitWorkspace(x.device), replace(SMALL, splits=splits)
    together = skinny_gemm(x, weight, None, torch.float32, workspace, config)
    x[:4], x[5:] = float("nan"), 1e30
    alone = skinny_gemm(x, weight, None, torch.float32, workspace, config)
    assert torch.equal(alone[4], together[4])


def test_sums_of_splits_are_added_in_the_order_of_the_columns() -> None:
    x, weight, _ = case(1, 16, 128, torch.float32)
    workspace = SplitWorkspace(x.device)
    y = skinny_gemm(x, weight, None, torch.float32, workspace, replace(SMALL, splits=4))
    parts = workspace.sums[: 4 * 16].view(4, 16)
    assert torch.equal(y[0], ((parts[0] + parts[1]) + parts[2]) + parts[3])
    for split in range(4):
        part = slice(32 * split, 32 * split + 32)
        torch.testing.assert_close(parts[split], (x[:, part] @ weight[:, part].T)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", [H100, A100, Target.of((8, 9), 142)])
def test_every_split_has_columns_and_room_in_the_workspace(target: Target) -> None:
    workspace = SplitWorkspace(torch.device("meta"))
    shapes = itertools.product((1, 16, 1024, 4096, 6144, 28672, 32768, 32769, 128256), (1, 64, 512, 4096, 14336))
    for (rows, columns), tokens, dtype in itertools.product(shapes, (1, 16, 17, 64), TOLERANCES):
        config = skinny_config(target, dtype, tokens, rows, columns)
        assert config.splits <= -(-columns // config.block_k)
        if config.splits > 1:
            assert config.splits * tokens * rows <= workspace.sums.numel()
            assert -(-rows // config.block_n) <= workspace.arrived.numel()


def test_few_rows_are_split_and_many_are_not() -> None:
    config = GemmConfig(16, 16, 128, num_warps=1, num_stages=8, seats=2)
    assert with_splits(config, H100, rows=256, columns=4096, row_bytes=8192).splits == 8
    assert with_splits(config, H100, rows=4096, columns=4096, row_bytes=8192).splits == 1
    assert with_splits(config, H100, rows=6144, columns=4096, row_bytes=8192).splits == 1  # 3 each of nearly all
    assert with_splits(config, H100, rows=128256, columns=4096, row_bytes=8192).splits == 1


def quantized_case(
    tokens: int, rows: int, columns: int, bits: Literal[8, 4], dtype: torch.dtype
) -> tuple[Tensor, PackedWeight]:
    """x and a weight, for sums of about 1."""
    generator = torch.Generator().manual_seed(tokens + rows + columns)
    weight = torch.randn((rows, columns), generator=generator) / columns**0.5
    return torch.randn((tokens, columns), generator=generator).to(dtype), pack(quantize(weight, bits))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(0, 16, 128), (1, 1, 1), (1, 16, 128), (3, 33, 200), (16, 17, 65), (20, 40, 256), (35, 17, 300)],
)
def test_quant_gemm_equals_its_reference(
    tokens: int, rows: int, columns: int, bits: Literal[8, 4], dtype: torch.dtype
) -> None:
    x, weight = quantized_case(tokens, rows, columns, bits, dtype)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(1)).to(dtype)
    workspace = SplitWorkspace(x.device)
    for b, out_dtype in ((None, dtype), (bias, torch.float32)):
        actual = quant_gemm(x, weight, b, out_dtype, workspace, SMALL)
        assert_close(actual, quant_reference(x, weight, b, out_dtype), scale=2)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("splits", [2, 4])
def test_quant_gemm_adds_up_its_splits(splits: int, bits: Literal[8, 4]) -> None:
    workspace = SplitWorkspace(torch.device("cpu"))
    # 5 blocks of int4 columns: two a split, and none for the last of four.
    for tokens, rows, columns in ((1, 20, 128), (9, 33, 640), (16, 16, 600)):
        x, weight = quantized_case(tokens, rows, columns, bits, torch.bfloat16)
        actual = quant_gemm(x, weight, None, torch.float32, workspace, replace(SMALL, splits=splits))
        assert_close(actual, quant_reference(x, weight, None, torch.float32), scale=2)
        assert not workspace.arrived.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiles_of_many_tokens_scale_int4_weights_before_they_are_multiplied(dtype: torch.dtype) -> None:
    x, weight = quantized_case(130, 24, 300, 4, dtype)
    config = GemmConfig(128, 16, 128, num_warps=8, num_stages=2)
    actual = quant_gemm(x, weight, None, torch.float32, SplitWorkspace(x.device), config)
    expected = x.float() @ unpack(weight).to(dtype).float().T  # a weight is rounded to x's dtype
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_a_quantised_product_does_not_depend_on_the_others(bits: Literal[8, 4]) -> None:
    x, weight = quantized_case(20, 33, 200, bits, torch.bfloat16)
    workspace = SplitWorkspace(x.device)
    together = quant_gemm(x, weight, None, torch.float32, workspace, SMALL)
    x[:4], x[5:] = float("nan"), 1e30
    alone = quant_gemm(x, weight, None, torch.float32, workspace, SMALL)
    assert torch.equal(alone[4], together[4])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_linears_compute_with_the_dequantized_weight(bits: Literal[8, 4]) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = quantize(torch.randn((72, 200), generator=generator) / 14, bits)
    bias = torch.randn(72, generator=generator).half()
    linear = CudaLinear(weight, bias, H100, SplitWorkspace(bias.device))
    for tokens in (1, 17, 64, 70, 150):
        x = torch.randn((tokens, 200), generator=generator).half()
        expected = x.float() @ weight.dequantized(torch.float32).T + bias.float()
        assert_close(linear(x), expected.half(), scale=2)
    assert (linear.in_features, linear.out_features) == (200, 72)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_first_call_compiles_every_tile(bits: Literal[8, 4], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, torch.dtype]] = []

    def launch(x: Tensor, *arguments: object) -> Tensor:
        *_, out_dtype, _, config = arguments
        launched.append((config.block_t, out_dtype))
        return torch.zeros(len(x), 8)

    monkeypatch.setattr("twostroke.model.cuda.linears.quant_gemm", launch)
    linear = CudaLinear(quantize(torch.zeros(8, 128), bits), None, H100, SplitWorkspace(torch.device("cpu")))
    for out_dtype in (torch.bfloat16, torch.float32):
        launched.clear()
        linear(torch.zeros(3, 128, dtype=torch.bfloat16), out_dtype)
        assert launched == [(block_t, out_dtype) for block_t in (16, 32, 64, 128, 256, 16)]


@pytest.mark.parametrize("bits", [8, 4])
def test_only_few_tokens_are_split(bits: Literal[8, 4]) -> None:
    assert quant_config(H100, torch.bfloat16, bits, 64, 1024, 4096).splits > 1
    assert quant_config(H100, torch.bfloat16, bits, 65, 1024, 4096).splits == 1
