"""Accuracy of quantised weights."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from tests.model.cpu.test_linears import random_quantized
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.checkpoint.quantization import QuantizedWeight, one_below_the_other, quantize, two_byte_scales
from twostroke.model.config import WeightForm
from twostroke.model.costs.sizes import common_form, weight_bytes
from twostroke.model.parameters import expected_shapes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_each_weight_is_rounded_to_a_neighbouring_step(bits: Literal[8, 4], columns: int) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(0))
    quantized = quantize(weight, bits)
    assert quantized.values.shape == weight.shape
    steps = quantized.scales.repeat_interleave(quantized.group_size, 1)[:, :columns]
    error = ((quantized.dequantized(torch.float32) - weight) / steps).abs()
    reached = weight / steps <= (127 if bits == 8 else 7)
    assert error[reached].max() <= 0.52  # half a step, and int4's steps are rounded
    assert error.max() <= (0.52 if bits == 8 else 1.02)  # nearly 8 steps of int4 become 7


def test_the_largest_of_a_group_is_minus_eight_steps_of_int4() -> None:
    weight = torch.tensor([[4.0, -3.0, 0.5, 0.0], [2.0, -4.0, -0.5, 0.0]])
    quantized = quantize(weight, 4)
    assert quantized.scales.flatten().tolist() == [-0.5, 0.5]
    assert quantized.values.tolist() == [[-8, 6, -1, 0], [4, -8, -1, 0]]
    assert torch.equal(quantized.dequantized(torch.float32), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_zeros_stays_zero(bits: Literal[8, 4]) -> None:
    assert quantize(torch.zeros(2, 128), bits).dequantized(torch.float32).count_nonzero() == 0


def test_int4_scales_fit_into_bf16() -> None:
    scales = quantize(torch.randn(4, 256), 4).scales
    assert torch.equal(scales, scales.bfloat16().float())


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_bytes_of_quantised_weights_are_those_that_their_parts_take(is_tied: bool) -> None:
    sizes = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mlp_bias": True, "tie_word_embeddings": is_tied}
    config = parse_model_config({"architectures": ["LlamaForCausalLM"], **sizes, **heads}, "test")
    table, head = 0 if is_tied else 100 * 128 * 2, 100 * 128 + 100 * 4
    norms_and_biases = (7 * 128 + 3 * (2 * 192 + 128)) * 2
    rows = {128: 3 * (128 + 64 + 64 + 128 + 2 * 192), 192: 3 * 128}  # of projections, by their columns
    plain = sum(torch.Size(shape).numel() for shape in expected_shapes(config).values()) * 2
    assert weight_bytes(config, 2, "none") == plain
    int8 = sum(count * (columns + 4) for columns, count in rows.items())
    int4 = sum(count * (columns // 2 + columns // 64 * 2 + 4) for columns, count in rows.items())
    assert weight_bytes(config, 2, "int8") == norms_and_biases + table + head + int8
    assert weight_bytes(config, 2, "int4") == norms_and_biases + table + head + int4


def random_weight(bits: Literal[8, 4], group: int, offsets: bool, rows: int = 5) -> QuantizedWeight:
    """Return a random weight of 96 columns."""
    generator = torch.Generator().manual_seed(group + bits)
    values = torch.randint(-8, 8, (rows, 96), generator=generator, dtype=torch.int8)
    scales, added = torch.randn(2, rows, 96 // group, generator=generator)
    return QuantizedWeight(values, scales, group, bits, added if offsets else None)


@pytest.mark.parametrize("group", [16, 32, 96])
def test_columns_that_cut_groups_make_them_smaller(group: int) -> None:
    weight = random_weight(8, group, offsets=True)
    whole = weight.dequantized(torch.float32)
    for first, end in ((0, 48), (48, 96), (24, 72), (0, 96), (64, 96)):
        part = weight.columns(slice(first, end))
        assert torch.equal(part.dequantized(torch.float32), whole[:, first:end])
        assert part.num_groups <= 12
    assert torch.equal(weight.with_groups_within(64).dequantized(torch.float32), whole)
    with pytest.raises(ValueError, match="an order of their own"):
        replace(weight, order=torch.randperm(96)).columns(slice(0, 48))


def test_weights_of_different_forms_are_put_one_below_the_other_without_a_loss() -> None:
    """Q4_K and Q6_K meet like this in one layer of a file."""
    parts = [random_weight(4, 32, True), random_weight(8, 48, False, rows=3), random_weight(4, 96, False, rows=1)]
    together = one_below_the_other(parts)
    assert together is not None
    assert torch.equal(
        together.dequantized(torch.float32), torch.cat([part.dequantized(torch.float32) for part in parts])
    )
    assert (together.bits, together.group_size) == (8, 16)
    forms = [WeightForm("int4", 32, True), WeightForm("int8", 48), WeightForm("int4", None)]
    assert common_form(forms) == WeightForm("int8", 16, True)
    order = torch.randperm(96)
    ordered = [replace(part, order=order) for part in parts]
    found = one_below_the_other(ordered)
    assert found is not None
    assert torch.equal(found.dequantized(torch.float32)[:5], ordered[0].dequantized(torch.float32))
    assert one_below_the_other([*ordered, parts[0]]) is None
    assert one_below_the_other([parts[0], replace(parts[0], values=parts[0].values.to(torch.float8_e4m3fn))]) is None
    assert common_form([*forms, None]) is common_form([*forms, WeightForm("fp8", None)]) is None


def test_rows_with_numbers_of_their_own_stay_exact_in_two_bytes() -> None:
    weights = [random_quantized("NVFP4", 5, 64), random_quantized("int4 by 32", 3, 64)]
    weights[1] = replace(weights[1], values=weights[0].values[:3])
    found = one_below_the_other([*weights, weights[0].rows(slice(1, 3)).columns(slice(0, 64))])
    assert found is not None
    factors, halves, _ = two_byte_scales(found)
    torch.testing.assert_close(halves.float() * factors[:, None], found.scales, rtol=3e-7, atol=0)
    meant = torch.cat([weights[0].scales, weights[1].scales.repeat_interleave(2, dim=1), weights[0].scales[1:3]])
    assert torch.equal(found.scales, meant)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e8])
def test_two_bytes_hold_any_scales_of_fp16_and_bf16(size: float) -> None:
    scales = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * size).bfloat16().float()
    scales[3] = 0
    factors, halves, offsets = two_byte_scales(QuantizedWeight(torch.zeros(6, 8), scales, 2, 4, 64 * scales))
    assert offsets is not None
    assert torch.equal(halves.float() * factors[:, None], scales)
    assert torch.equal(offsets.float() * factors[:, None], 64 * scales)
