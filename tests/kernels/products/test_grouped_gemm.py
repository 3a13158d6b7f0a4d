"""Products of checkpoints' quantised weights in Triton's interpreter, against the weights that they mean."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.model.cpu.test_linears import FORMS, random_quantized
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.cuda.backend import CudaBackend, CudaLinear, GroupedCudaLinear
from twostroke.model.cuda.kernels.grouped_gemm import GroupedConfig, grouped_gemm, pack_groups
from twostroke.model.cuda.kernels.launch import H100

pytestmark = pytest.mark.usefixtures("interpreter")
SMALL = GroupedConfig(16, 16, 64, num_warps=1, num_stages=2)


def assert_near(y: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
    """y fp32: but for the rounding of weights to x's type, and of sums."""
    meant = weight.dequantized(torch.float32)
    expected, size = x.float() @ meant.T, x.float().abs() @ meant.abs().T
    relative = 2e-6 if x.dtype == torch.float32 else 3e-3
    assert ((y - (expected if bias is None else expected + bias.float())).abs() <= relative * size + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(0, 16, 128), (1, 1, 8), (3, 33, 200), (17, 17, 320)])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_that_of_the_dequantised_weight(
    form: str, tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight = random_quantized(form, rows, columns)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    actual = grouped_gemm(x, pack_groups(weight), None, torch.float32, SMALL)
    assert_near(actual, x, weight)


def test_large_tiles_steps_and_biases_change_nothing() -> None:
    weight = random_quantized("int4 by 16 with offsets", 40, 300)
    x, bias = torch.randn(70, 300).bfloat16(), torch.randn(40).bfloat16()
    for block_k in (16, 64, 128):
        config = GroupedConfig(64, 32, block_k, num_warps=4, num_stages=2)
        actual = grouped_gemm(x, pack_groups(weight), bias, torch.float32, config)
        assert_near(actual, x, weight, bias)


def test_each_form_gets_the_kernel_that_knows_it() -> None:
    backend = CudaBackend(H100)
    grouped = random_quantized("int8 by 32 with offsets", 24, 64)
    for weight, kind in ((random_quantized("int8 by rows", 24, 64), CudaLinear), (grouped, GroupedCudaLinear)):
        linear = backend.make_linear(weight, None, "auto", torch.bfloat16)
        assert type(linear) is kind
        x = torch.randn(3, 64).bfloat16()
        assert_near(linear(x, torch.float32), x, weight)
    ordered = replace(grouped, order=torch.randperm(64))
    linear = backend.make_linear(ordered, None, "auto", torch.bfloat16)
    assert_near(linear(x, torch.float32), x, ordered)


@pytest.mark.parametrize("form", FORMS)
def test_embeddings_are_rows_of_a_slice_of_the_vocabulary(form: str) -> None:
    weight = random_quantized(form, 30, 72)
    found = GroupedCudaLinear(weight, None).embed(torch.tensor([99, 100, 129, 130]), 100, torch.float32)
    torch.testing.assert_close(found[1:3], weight.dequantized(torch.float32)[[0, 29]], rtol=1e-5, atol=1e-6)
    assert not found[[0, 3]].any()


def test_groups_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 columns or more, not of 8"):
        pack_groups(QuantizedWeight(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 8), 8, 8))
