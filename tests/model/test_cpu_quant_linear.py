"""Quantised projections against the weight that they say they compute with."""

from typing import Literal

import pytest
import torch

from twostroke.model.checkpoint.quantization import quantize
from twostroke.model.cpu import quant_linear as cpu_quant_linear
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.cpu.quant_linear import CpuQuantizedLinear, TorchQuantizedLinear

needs_avx512_bf16 = pytest.mark.skipif(
    not cpu_quant_linear.is_supported(torch.bfloat16, 64), reason="needs AVX512-BF16 and AVX512-VBMI"
)
# Full and part panels of 64 outputs, groups of 64 inputs, chunks of 256.
SHAPES = [(1, 8), (64, 64), (65, 72), (200, 328), (48, 840)]


@needs_avx512_bf16
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_projections_compute_with_the_dequantised_weight(
    bits: Literal[8, 4], outputs: int, inputs: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if has_bias else None
    linear = CpuQuantizedLinear(weight, bias, bits, Launcher())
    meant = quantize(weight, bits).dequantized(torch.float32).double()
    for tokens in (1, 2, 3, 4, 5, 8, 9, 12, 13, 31, 257):
        x = torch.randn(tokens, inputs, generator=generator).bfloat16()
        expected = x.double() @ meant.T + (bias.double() if bias is not None else 0)
        torch.testing.assert_close(linear(x, torch.float32).double(), expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(linear(x).double(), expected, rtol=5e-3, atol=1e-4)


@needs_avx512_bf16
@pytest.mark.parametrize("bits", [8, 4])
def test_a_rows_result_does_not_depend_on_the_others(bits: Literal[8, 4]) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = CpuQuantizedLinear(torch.randn(100, 600, generator=generator).bfloat16(), None, bits, Launcher())
    x = torch.randn(40, 600, generator=generator).bfloat16()
    together = linear(x, torch.float32)
    for first, count in ((0, 1), (3, 2), (5, 4), (2, 7), (10, 9), (20, 17)):
        assert torch.equal(linear(x[first : first + count], torch.float32), together[first : first + count])


@needs_avx512_bf16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_int8_head_serves_as_embedding(dtype: torch.dtype) -> None:
    weight = torch.randn(150, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = CpuQuantizedLinear(weight, None, 8, Launcher())
    expected = quantize(weight, 8).dequantized(dtype)
    assert torch.equal(linear.rows(torch.arange(150), dtype), expected)
    found = linear.embed(torch.tensor([99, 100, 249, 250]), 100, dtype)
    zeros = torch.zeros(72, dtype=dtype)
    assert torch.equal(found, torch.stack((zeros, expected[0], expected[149], zeros)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 7), (600, 130)])
@pytest.mark.parametrize("bits", [8, 4])
def test_any_cpu_computes_with_the_dequantised_weight(
    bits: Literal[8, 4], outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    linear = TorchQuantizedLinear(weight, bias, bits)
    meant = quantize(weight, bits).dequantized(dtype)
    x = torch.randn(5, inputs, generator=generator).to(dtype)
    torch.testing.assert_close(linear(x), x @ meant.T + bias, rtol=2e-2, atol=2e-2)
    chosen = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(linear.rows(chosen, dtype), meant[chosen])
