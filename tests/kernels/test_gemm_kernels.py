import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import TOLERANCES, assert_close
from twostroke.model.cuda.kernels.launch import A100, H100, Target
from twostroke.model.cuda.kernels.skinny_gemm import (
    GemmConfig,
    SplitWorkspace,
    linear_reference,
    skinny_config,
    skinny_gemm,
    with_splits,
)
from twostroke.model.cuda.linear import CudaLinear

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
