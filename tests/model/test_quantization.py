"""What quantising a weight keeps of it."""

from typing import Literal

import pytest
import torch

from model.quantization import quantize


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_each_weight_is_rounded_to_a_neighbouring_step(bits: Literal[8, 4], columns: int) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(0))
    quantized = quantize(weight, bits)
    assert quantized.values.shape == weight.shape
    steps = quantized.scales.repeat_interleave(quantized.group_size, 1)[:, :columns]
    inside = (weight / steps).abs() <= (127 if bits == 8 else 7)
    error = (quantized.dequantized(torch.float32) - weight).abs() / steps
    assert error[inside].max() <= 0.501
    assert error.max() <= (0.501 if bits == 8 else 1.6)  # a group's largest may be cut for the others' sake


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_zeros_stays_zero(bits: Literal[8, 4]) -> None:
    assert quantize(torch.zeros(2, 128), bits).dequantized(torch.float32).count_nonzero() == 0


def test_int4_scales_fit_into_bf16() -> None:
    scales = quantize(torch.randn(4, 256), 4).scales
    assert torch.equal(scales, scales.bfloat16().float())
