"""The CUDA backend's kernels, projections and embeddings against their references, on the GPU at hand."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import ReferenceBackend, in_fp8, make_layout, paged_case
from tests.rigs import reference
from tests.rigs.cuda_reference import fp8_linear_reference
from twostroke.model.backend import Backend, Chosen, ExpertWeights, KVScales
from twostroke.model.checkpoint.quantization import QuantizedWeight, quantize
from twostroke.model.config import Activation, GatedActivation, Quantization
from twostroke.model.cuda.backend import Fp8CudaLinear
from twostroke.model.cuda.kernels.elementwise import gate, gate_codes
from twostroke.model.cuda.kernels.fp8 import quantize_tokens
from twostroke.model.cuda.kernels.gemm import FP8_GROUP, pack_fp8

pytestmark = pytest.mark.gpu
REFERENCES = ReferenceBackend()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RELATIVE_ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_near(actual: Tensor, expected: Tensor, limit: float | None = None) -> None:
    """Close in the mean, and nowhere off by more than rounding explains; NaN in the same places.

    `limit` is the relative error of the mean; None for what rounding to `expected`'s dtype explains.
    """
    assert torch.equal(actual.isnan(), expected.isnan())
    limit = RELATIVE_ERRORS[expected.dtype] if limit is None else limit
    actual, expected = actual.float().nan_to_num(), expected.float().nan_to_num()
    assert (actual - expected).norm() <= limit * expected.norm()
    assert (actual - expected).abs().max() <= 5 * limit * expected.abs().max()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 288), (7, 2048), (300, 4096), (3, 4100), (2, 16384)])
def test_norms_equal_their_references(backend: Backend, rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(*shape, dtype=dtype) for shape in ((rows, hidden), (rows, hidden), (hidden,)))
    assert_near(backend.rms_norm(x, weight, 1e-5), REFERENCES.rms_norm(x, weight, 1e-5))
    expected, expected_sum = REFERENCES.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    out, total = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert_near(out, expected)
    assert torch.equal(total, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (7, 1433), (33, 64), (300, 1025)])
@pytest.mark.parametrize("activation", get_args(GatedActivation))
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_gate_equals_its_reference(
    backend: Backend, quantization: Quantization, activation: Activation, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, 128, dtype=dtype), randn(2 * width, 128, dtype=dtype) / 3
    gate_up = backend.make_linear(weight, None, quantization, dtype)
    expected = reference.gate(gate_up(x, torch.float32), activation).to(dtype)
    assert_near(backend.gated(x, gate_up, activation), expected, 2 * RELATIVE_ERRORS[dtype])  # prompts round twice


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 128])
def test_rope_and_kv_write_equal_their_reference_and_touch_nothing_else(
    backend: Backend, block_size: int, dim: int, dtype: torch.dtype
) -> None:
    layout, num_blocks = make_layout([(1, 1), (1, 500), (300, 300), (77, 1000)], block_size, "cuda")
    heads, groups = 12, 4
    turns = torch.rand(1000, dim // 2, device="cuda") * 6.3
    cos_sin = torch.cat((turns.cos(), turns.sin()), dim=-1)
    qkv = randn(len(layout.slots), (heads + 2 * groups) * dim, dtype=dtype)
    expected_kv = torch.full((num_blocks, 2, groups, block_size, dim), float("nan"), dtype=dtype, device="cuda")
    kv_layer = expected_kv.clone()
    expected = REFERENCES.rope_and_write_kv(qkv, cos_sin, expected_kv, layout)
    assert_near(backend.rope_and_write_kv(qkv, cos_sin, kv_layer, layout), expected)
    assert_near(kv_layer, expected_kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "groups", "block_size"), [(8, 2, 16), (8, 8, 128), (12, 4, 64), (7, 1, 24)])
def test_attention_equals_its_reference(
    backend: Backend, heads: int, groups: int, block_size: int, dim: int, dtype: torch.dtype
) -> None:
    lengths = [(1, 1), (1, 17), (1, 700), (1, 3001), (3, 40), (2, 2), (130, 130), (257, 1300), (64, 2048)]
    case = paged_case(lengths, heads=heads, groups=groups, dim=dim, block_size=block_size, dtype=dtype, device="cuda")
    actual = backend.attention(case.q, case.kv_layer, case.layout, case.form)
    assert_near(actual, REFERENCES.attention(case.q, case.kv_layer, case.layout, case.form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (64, 128), (80, 64), (128, 64), (256, 64)])
@pytest.mark.parametrize(
    "form", [{"window": 1000}, {"window": 128, "has_sinks": True}, {"window": 300, "soft_cap": 5.0}], ids=str
)
def test_attention_of_every_form_equals_its_reference(
    backend: Backend, form: dict[str, Any], dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [(1, 1), (1, 700), (1, 3001), (3, 40), (130, 130), (257, 1300), (64, 2048)]
    case = paged_case(lengths, heads=8, groups=2, dim=dim, block_size=block_size, dtype=dtype, device="cuda", **form)
    actual = backend.attention(case.q, case.kv_layer, case.layout, case.form)
    assert_near(actual, REFERENCES.attention(case.q, case.kv_layer, case.layout, case.form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (80, 24), (128, 64), (256, 128)])
@pytest.mark.parametrize("form", [{}, {"window": 300, "soft_cap": 5.0, "has_sinks": True}], ids=str)
def test_attention_over_a_cache_in_fp8_equals_its_reference(
    backend: Backend, form: dict[str, Any], dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [(1, 1), (1, 700), (1, 3001), (3, 40), (130, 130), (257, 1300), (64, 2048)]
    case = in_fp8(
        paged_case(lengths, heads=8, groups=2, dim=dim, block_size=block_size, dtype=dtype, device="cuda", **form)
    )
    actual = backend.attention(case.q, case.kv_layer, case.layout, case.form)
    assert_near(actual, REFERENCES.attention(case.q, case.kv_layer, case.layout, case.form))


def test_a_cache_in_fp8_is_written_as_the_reference_rounds(backend: Backend) -> None:
    layout, num_blocks = make_layout([(1, 1), (300, 300)], 16, "cuda")
    qkv = randn(301, 20 * 64, dtype=torch.bfloat16) * torch.logspace(-12, 11, 20 * 64, base=2.0, device="cuda")
    qkv[3, -1] = float("nan")
    cos_sin = torch.ones(300, 64, device="cuda").tril_()  # products are exact
    scales = KVScales(0.5, 1.0)
    shape = (num_blocks, 2, 4, 16, 64)
    written, expected = (torch.zeros(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    backend.rope_and_write_kv(qkv.bfloat16(), cos_sin, written, layout, None, scales)
    REFERENCES.rope_and_write_kv(qkv.bfloat16(), cos_sin, expected, layout, None, scales)
    assert torch.equal(written.float().nan_to_num(1000), expected.float().nan_to_num(1000))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_short_chunks_equals_its_reference(backend: Backend, dtype: torch.dtype) -> None:
    case = paged_case([(5, 5), (16, 300), (9, 129)], heads=8, groups=2, dim=128, dtype=dtype, device="cuda")
    actual = backend.attention(case.q, case.kv_layer, case.layout, case.form)
    assert_near(actual, REFERENCES.attention(case.q, case.kv_layer, case.layout, case.form))


@pytest.mark.parametrize("window", [0, 500])
def test_a_captured_decode_step_stays_right_as_contexts_grow(backend: Backend, window: int) -> None:
    case = paged_case([(1, 900), (1, 2000), (1, 40)], heads=8, groups=2, dim=128, dtype=torch.bfloat16, device="cuda")
    form = replace(case.form, window=window)
    layout = replace(case.layout, context_lens=case.layout.context_lens.clone(), max_context_len=4096)
    backend.attention(case.q, case.kv_layer, layout, form)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attention(case.q, case.kv_layer, layout, form)
    for contexts in ([1, 2, 3], [900, 2000, 40], [0, 513, 0]):
        layout.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        graph.replay()
        assert_near(out, REFERENCES.attention(case.q, case.kv_layer, layout, form))


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize(
    "lengths", [[(4096, 4096)], [(700, 16384), (64, 9001)], [(2048, 12288), (1, 7000), (333, 333)]]
)
def test_prefill_over_long_contexts_equals_its_reference(
    backend: Backend, lengths: list[tuple[int, int]], block_size: int
) -> None:
    case = paged_case(lengths, heads=4, groups=1, dim=128, block_size=block_size, dtype=torch.bfloat16, device="cuda")
    actual = backend.attention(case.q, case.kv_layer, case.layout, case.form)
    assert_near(actual, REFERENCES.attention(case.q, case.kv_layer, case.layout, case.form))


QUANTIZATIONS: list[Quantization] = ["none", "int8", "int4"]
SHAPES = [(4096, 4096), (1024, 14336), (1536, 288), (1000, 1040), (77, 300)]  # split, not split, with ends of all kinds


def case(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias; sums of about 1."""
    torch.manual_seed(tokens + rows + columns)
    x, weight, bias = (torch.randn(shape, device="cuda") for shape in ((tokens, columns), (rows, columns), (rows,)))
    return x.to(dtype), (weight / columns**0.5).to(dtype), bias.to(dtype)


def computed_with(weight: Tensor, quantization: Quantization) -> Tensor:
    """fp32 [out, in]."""
    if quantization == "none":
        return weight.float()
    return quantize(weight, 8 if quantization == "int8" else 4).dequantized(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_linears_equal_their_reference(
    backend: Backend, rows: int, columns: int, quantization: Quantization, dtype: torch.dtype
) -> None:
    _, weight, bias = case(1, rows, columns, dtype)
    linear = backend.make_linear(weight, bias, quantization, dtype)
    for tokens in (1, 2, 16, 17, 32, 40, 64, 65, 200, 1111):
        x = case(tokens, rows, columns, dtype)[0]
        expected = x.float() @ computed_with(weight, quantization).T + bias.float()
        assert_near(linear(x), expected, RELATIVE_ERRORS[dtype])
        assert linear(x).dtype == dtype
        # In fp32 only what is rounded before it is multiplied counts: int4 weights of many tokens.
        logits = linear(x, torch.float32)
        assert logits.dtype == torch.float32
        assert_near(logits, expected, RELATIVE_ERRORS[dtype] if quantization == "int4" else 1e-4)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (1000, 1040), (28672, 512)])
def test_products_of_fp8_equal_their_reference(backend: Backend, rows: int, columns: int, is_grouped: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU knows no FP8")
    groups = -(-columns // FP8_GROUP) if is_grouped else 1
    values = randn(rows, columns, dtype=torch.float32).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows, groups, device="cuda") + 0.1) / 100 / columns**0.5
    weight = QuantizedWeight(values, scales, FP8_GROUP if is_grouped else columns, 8)
    linear = backend.make_linear(weight, None, "auto", torch.bfloat16)
    for tokens in (1, 16, 17, 33, 64, 65, 200, 1111):
        x = randn(tokens, columns, dtype=torch.bfloat16)
        expected = fp8_linear_reference(x, pack_fp8(weight), None, torch.float32)
        assert_near(linear(x, torch.float32), expected, 1e-3)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_fp8_products_of_prompts_are_torchs_on_hopper_and_equal_their_reference(
    backend: Backend, has_blocks: bool, has_bias: bool
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch multiplies by blocks on Hopper alone")
    rows, columns = 1536, 1152
    values = randn(rows, columns, dtype=torch.float32).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    shape = (rows // FP8_GROUP, columns // FP8_GROUP) if has_blocks else (rows, 1)
    scales = (torch.rand(shape, device="cuda") + 0.1) / 100 / columns**0.5
    scales = scales.repeat_interleave(FP8_GROUP, dim=0) if has_blocks else scales
    weight = QuantizedWeight(values, scales, FP8_GROUP if has_blocks else columns, 8)
    bias = randn(rows, dtype=torch.bfloat16) if has_bias else None
    linear = backend.make_linear(weight, bias, "auto", torch.bfloat16)
    assert isinstance(linear, Fp8CudaLinear)
    for tokens in (65, 66, 200, 1111):
        x = randn(tokens, columns, dtype=torch.bfloat16)
        assert_near(linear(x), fp8_linear_reference(x, pack_fp8(weight), bias, torch.bfloat16))
    assert linear.multiplies_by_torch


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("tokens", [1, 40, 300, 2000])
def test_experts_equal_their_reference(backend: Backend, tokens: int, quantization: Quantization) -> None:
    number, top_k, size, hidden = 8, 2, 192, 256
    gate_up, down = (
        (randn(rows, columns, dtype=torch.float32) / columns**0.5).to(torch.bfloat16)
        for rows, columns in ((number * 2 * size, hidden), (number * hidden, size))
    )
    meant = ExpertWeights(number, gate_up, down, None, None)
    if quantization == "int4":
        meant = ExpertWeights(number, quantize(gate_up, 4), quantize(down, 4), None, None)
    scores = torch.rand((tokens, number), device="cuda")
    scores[: tokens // 2, 5] = 2  # one takes half of all tokens, and another none
    scores[:, 3] = -1
    shares, experts = scores.topk(top_k)
    chosen, x = Chosen(experts.int(), shares), randn(tokens, hidden, dtype=torch.bfloat16)
    layer = backend.make_experts(ExpertWeights(number, gate_up, down, None, None), "silu", quantization, x.dtype)
    expected = reference.experts(x, chosen, meant, "silu")
    assert_near(layer(x, chosen), expected)


@pytest.mark.parametrize("width", [1100, 14336])
def test_codes_of_a_gate_are_near_those_of_its_result(width: int) -> None:
    x = randn(300, 2 * width, dtype=torch.bfloat16)
    codes, scales = gate_codes(x, "silu")
    expected, expected_scales = quantize_tokens(gate(x, "silu"))
    assert_near(codes.float() * scales[:, None], expected.float() * expected_scales[:, None], 1e-3)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_splits_give_the_same_bits_every_time_beside_any_rows(backend: Backend, quantization: Quantization) -> None:
    x, weight, _ = case(13, 1024, 14336, torch.bfloat16)
    linear = backend.make_linear(weight, None, quantization, weight.dtype)
    first = linear(x, torch.float32)
    for _ in range(200):
        assert torch.equal(linear(x, torch.float32), first)
    others = x.clone()
    others[:4], others[5:] = float("nan"), 1e30
    assert torch.equal(linear(others, torch.float32)[4], first[4])
    assert torch.equal(linear(x[4:5], torch.float32)[0], first[4])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("tokens", [1, 24, 64])
def test_captured_linears_that_share_a_workspace_stay_right(
    backend: Backend, tokens: int, quantization: Quantization
) -> None:
    x, up, _ = case(tokens, 1536, 1024, torch.bfloat16)
    _, down, _ = case(tokens, 1024, 1536, torch.bfloat16)
    first, second = (backend.make_linear(weight, None, quantization, weight.dtype) for weight in (up, down))
    second(first(x), torch.float32)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = second(first(x), torch.float32)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, second(first(x), torch.float32))
        expected = (x.float() @ computed_with(up, quantization).T).bfloat16().float() @ computed_with(
            down, quantization
        ).T
        assert_near(out, expected, 1e-2)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_embeddings_look_up_the_slice_of_a_rank(backend: Backend, quantization: Quantization) -> None:
    _, weight, _ = case(1, 500, 1030, torch.bfloat16)
    linear = backend.make_linear(weight, None, quantization, weight.dtype)
    token_ids = torch.tensor([1000, 999, 1499, 1500, 0, 1234, 2**40], device="cuda")
    rows = linear.embed(token_ids, 1000, torch.bfloat16)
    assert torch.equal(rows[[0, 2, 5]], computed_with(weight, quantization)[[0, 499, 234]].bfloat16())
    assert not rows[[1, 3, 4, 6]].any()
