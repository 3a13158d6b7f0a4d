"""What quantising a weight keeps of it."""

from typing import Literal

import pytest
import torch

from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.checkpoint.decoder_weights import weight_bytes
from twostroke.model.checkpoint.quantization import quantize
from twostroke.model.checkpoint.weights import expected_shapes


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
    plain = sum(torch.Size(shape).numel() for _, shape in expected_shapes(config)) * 2
    assert weight_bytes(config, torch.bfloat16, "none") == plain
    int8 = sum(count * (columns + 4) for columns, count in rows.items())
    int4 = sum(count * (columns // 2 + columns // 64 * 2 + 4) for columns, count in rows.items())
    assert weight_bytes(config, torch.bfloat16, "int8") == norms_and_biases + table + head + int8
    assert weight_bytes(config, torch.bfloat16, "int4") == norms_and_biases + table + head + int4
