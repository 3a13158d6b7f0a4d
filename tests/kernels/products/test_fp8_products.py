"""Products of FP8 that torch computes, held against ours in Triton's interpreter."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.paged_cases import assert_close
from tests.rigs.cuda_reference import fp8_linear_reference
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import Activation, GatedActivation
from twostroke.model.cuda.backend import CudaBackend, Fp8CudaLinear
from twostroke.model.cuda.fp8_products import TorchProducts, torch_product
from twostroke.model.cuda.kernels.elementwise import gate, gate_codes
from twostroke.model.cuda.kernels.fp8 import quantize_tokens
from twostroke.model.cuda.kernels.gemm import FP8_GROUP, SplitWorkspace, pack_fp8
from twostroke.model.cuda.kernels.launch import H100

pytestmark = pytest.mark.usefixtures("interpreter")
CPU = torch.device("cpu")


def make_weight(rows: int, columns: int, has_blocks: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(rows + columns)
    values = (torch.randn((rows, columns), generator=generator) * 100).to(torch.float8_e4m3fn)
    shape = (rows // FP8_GROUP, columns // FP8_GROUP) if has_blocks else (rows, 1)
    scales = (torch.rand(shape, generator=generator) * 0.9 + 0.1) / 100 / columns**0.5
    if has_blocks:
        return QuantizedWeight(values, scales.repeat_interleave(FP8_GROUP, dim=0), FP8_GROUP, 8)
    return QuantizedWeight(values, scales, columns, 8)


def by_blocks(codes: Tensor, weight: Tensor, a: Tensor, a_kind: Any, b: Tensor, b_kind: Any, **options: Any) -> Tensor:
    """Multiply as torch does on a Hopper GPU, with scales as cuBLASLt finds them in memory."""
    (tokens, columns), rows = codes.shape, weight.shape[1]
    steps, padded = columns // FP8_GROUP, -(-columns // FP8_GROUP // 4) * 4
    assert (a_kind, b_kind) == (functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128)
    assert tokens % 4 == 0
    assert (a.shape, a.stride()) == ((tokens, steps), (1, tokens))
    assert (b.shape, b.stride()) == ((padded, rows // FP8_GROUP), (1, padded))
    of_rows = b[:steps].repeat_interleave(FP8_GROUP, 0).repeat_interleave(FP8_GROUP, 1)
    return (codes.float() * a.repeat_interleave(FP8_GROUP, 1) @ (weight.float() * of_rows)).to(options["output_dtype"])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_torch_multiplies_many_tokens_and_we_few(
    has_blocks: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    whole = torch._scaled_mm

    def by_rows(codes: Tensor, *arguments: Any, bias: Tensor | None, **options: Any) -> Tensor:
        counted.append(len(codes))
        y = whole(codes, *arguments, **options)
        return y if bias is None else y + bias

    def count(codes: Tensor, *arguments: Any, **options: Any) -> Tensor:
        counted.append(len(codes))
        return by_blocks(codes, *arguments, **options)

    monkeypatch.setattr(torch, "_scaled_mm", by_rows)
    monkeypatch.setattr(functional, "scaled_mm", count)
    weight = make_weight(256, 384, has_blocks)
    bias = torch.randn(256).bfloat16() if has_bias else None
    linear = Fp8CudaLinear(weight, bias, H100, SplitWorkspace(CPU), TorchProducts())
    for tokens, out_dtype, is_torchs in (
        (64, torch.bfloat16, False),
        (65, torch.bfloat16, True),
        (65, torch.float32, False),
        (130, torch.bfloat16, True),
    ):
        x = torch.randn(tokens, 384).bfloat16()
        linear(x, out_dtype)  # compiles, and chooses
        counted.clear()
        expected = fp8_linear_reference(x, pack_fp8(weight), bias, out_dtype)
        assert_close(linear(x, out_dtype), expected, scale=4)
        assert counted == ([-(-tokens // 4) * 4 if has_blocks else tokens] if is_torchs else [])


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (RuntimeError("no such GPU\nat"), "fails (no such GPU)"),
        (AttributeError("no scaled_mm"), "fails (no scaled_mm)"),
        (1.05, "is off by 5"),
        (float("nan"), "is off by nan"),
    ],
    ids=str,
)
def test_ours_is_taken_where_torch_fails_or_is_wrong(
    fault: Exception | float, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = torch._scaled_mm

    def faulty(*arguments: Any, bias: object, **options: Any) -> Tensor:
        if isinstance(fault, Exception):
            raise fault
        return whole(*arguments, **options) * fault

    monkeypatch.setattr(torch, "_scaled_mm", faulty)
    weight, products = make_weight(32, 128, False), TorchProducts()
    x = torch.randn(70, 128).bfloat16()
    for _ in range(2):
        linear = Fp8CudaLinear(weight, None, H100, SplitWorkspace(CPU), products)
        assert_close(linear(x), fp8_linear_reference(x, pack_fp8(weight), None, x.dtype), scale=2)
    assert len(caplog.records) == 1
    assert told in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", get_args(GatedActivation))
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 16), (5, 2100), (3, 4096)])
def test_codes_of_the_gate_are_those_of_its_result(
    rows: int, width: int, activation: Activation, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, 2 * width) * torch.logspace(-3, 1, rows)[:, None]).to(dtype)
    if rows > 3:
        x[1, 3], x[2, width + 4], x[3] = float("nan"), float("inf"), 0.0
    codes, scales = gate_codes(x, activation)
    expected, expected_scales = quantize_tokens(gate(x, activation))
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_blocks", [False, True])
def test_prompts_activations_reach_the_next_product_as_codes(has_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend(H100)
    gate_up, down = (
        backend.make_linear(make_weight(*shape, has_blocks), None, "auto", torch.bfloat16)
        for shape in ((512, 128), (128, 256))
    )
    inputs = [torch.randn(tokens, 128).bfloat16() for tokens in (64, 65, 130)]
    expected = [down(backend.gated(x, gate_up, "silu")) for x in inputs]
    backend.feed_forward(inputs[0], gate_up, down, "silu")  # compiles
    monkeypatch.setattr("twostroke.model.cuda.kernels.elementwise.gate", None)  # which prompts don't take
    for x, apart in zip(inputs, expected, strict=True):
        assert torch.equal(backend.feed_forward(x, gate_up, down, "silu"), apart)


def test_scales_that_differ_within_a_block_are_none_that_torch_knows() -> None:
    weight = make_weight(256, 256, True)
    assert torch_product(pack_fp8(weight)) is not None
    weight.scales[3] *= 2
    assert torch_product(pack_fp8(weight)) is None
    assert torch_product(pack_fp8(make_weight(256, 256, False))) is not None
    assert torch_product(pack_fp8(QuantizedWeight(*_part(make_weight(256, 256, True), 200)))) is None


def _part(weight: QuantizedWeight, rows: int) -> tuple[Any, ...]:
    return weight.values[:rows], weight.scales[:rows], FP8_GROUP, 8
