import math
from typing import get_args

import pytest
import torch

from tests.kernels.paged_cases import assert_close, make_layout
from tests.rigs import reference
from twostroke.model.backend import HeadNorms, KVScales, RowNorms
from twostroke.model.checkpoint.quantization import quantize
from twostroke.model.config import Activation, GatedActivation
from twostroke.model.cuda.backend import CudaBackend, CudaLinear
from twostroke.model.cuda.kernels.elementwise import (
    add_rms_norm,
    gate,
    norm_rows,
    rms_norm,
    rope_and_write_kv,
    square_sums,
)
from twostroke.model.cuda.kernels.gemm import Bits, SplitWorkspace
from twostroke.model.cuda.kernels.launch import H100

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def angles(max_position: int, dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    turns = torch.arange(max_position)[:, None] * frequencies
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (1, 1), (3, 33), (2, 288), (2, 1024), (1, 4100)])
def test_rms_norm_equals_its_reference(rows: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(rows, hidden)).to(dtype), torch.randn(hidden)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (1, 1), (3, 33), (2, 1024)])
def test_add_rms_norm_equals_its_reference_in_both_results(rows: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
    weight = torch.randn(hidden)
    expected, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-5)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert_close(out, expected, scale=4)
    assert torch.equal(total, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(3, 1, 8), (16, 4, 80), (2, 2, 500)])
def test_norms_of_all_queries_and_all_keys_equal_their_references_and_leave_the_values(
    heads: int, groups: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norms = RowNorms(torch.rand(heads * dim), torch.rand(groups * dim), ranks=2, eps=1e-5)
    qkv = (3 * torch.randn(2, (heads + 2 * groups) * dim)).to(dtype)
    sums = reference.square_sums(qkv, norms)
    torch.testing.assert_close(square_sums(qkv, norms), sums, rtol=1e-5, atol=0)
    expected = reference.norm_rows(qkv, sums, norms)
    assert_close(norm_rows(qkv, sums, norms), expected, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (3, 1), (2, 1023), (1, 1024), (2, 1025)])
@pytest.mark.parametrize("activation", get_args(GatedActivation))
def test_gate_equals_its_reference(activation: Activation, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(rows, 2 * width)).to(dtype)
    assert_close(gate(gate_up, activation), reference.gate(gate_up, activation), scale=16)


@pytest.mark.parametrize("activation", get_args(GatedActivation))
def test_gate_stays_finite_where_the_exponential_would_overflow(activation: Activation) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 1.0, 2.0, 3.0, 4.0, 5.0]])
    most = 7 / (1 + math.exp(-1.702 * 7))  # of the clamped gate, which is multiplied by up + 1
    largest = [5 * most, 6 * most] if activation == "clamped" else [800.0, 5e4]
    assert_close(gate(gate_up, activation), torch.tensor([[0.0, 0.0, 0.0, *largest]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "heads", "groups", "block_size"),
    [
        (64, 6, 2, 16),
        (80, 4, 4, 32),
        (96, 3, 1, 24),
        (128, 17, 1, 128),
        (256, 2, 1, 64),
        (10, 2, 1, 16),
        (64, 3, 0, 16),
    ],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_and_kv_write_equal_their_reference_and_touch_nothing_else(
    has_norms: bool, dim: int, heads: int, groups: int, block_size: int, dtype: torch.dtype
) -> None:
    layout, num_blocks = make_layout([(1, 1), (1, block_size + 1), (3, block_size), (4, block_size + 2)], block_size)
    qkv = torch.randn(len(layout.slots), (heads + 2 * groups) * dim).to(dtype)
    expected_kv = torch.full((num_blocks, 2, groups, block_size, dim), float("nan"), dtype=dtype)
    kv_layer = expected_kv.clone()
    cos_sin = angles(2 * block_size, dim)
    slots = layout.slots.clone()
    slots[3] = -1
    norms = HeadNorms(*torch.rand(2, dim), eps=1e-5, v=torch.rand(dim)) if has_norms else None
    of_queries = 1 + torch.rand(2 * block_size) if has_norms else None
    expected = reference.rope_and_write_kv(
        qkv, cos_sin, expected_kv, layout.positions, slots, norms, query_scales=of_queries
    )
    assert_close(
        rope_and_write_kv(qkv, cos_sin, kv_layer, layout.positions, slots, norms, query_scales=of_queries),
        expected,
        scale=4,
    )
    assert_close(kv_layer, expected_kv, scale=4)
    assert not kv_layer[slots[0] // block_size, :, :, slots[0] % block_size].isnan().any()


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_in_fp8_is_written_as_the_reference_rounds(dtype: torch.dtype, has_norms: bool) -> None:
    """Numbers of all sizes that e4m3 has, beyond its largest, and NaN."""
    layout, num_blocks = make_layout([(2, 2), (7, 12)], 5)
    heads, groups, dim, scales = 3, 2, 24, KVScales(key=0.7, value=1.0)
    sizes = torch.logspace(-12, 11, (heads + 2 * groups) * dim, base=2.0)
    qkv = (torch.randn(9, len(sizes)) * sizes).to(dtype)
    qkv[3, -1] = float("nan")
    norms = HeadNorms(*torch.rand(2, dim), eps=1e-5) if has_norms else None
    kv_layer, expected_kv = (torch.zeros(num_blocks, 2, groups, 5, dim, dtype=torch.float8_e4m3fn) for _ in range(2))
    where = layout.positions, layout.slots
    expected = reference.rope_and_write_kv(qkv, angles(12, dim), expected_kv, *where, norms, scales)
    q = rope_and_write_kv(qkv, angles(12, dim), kv_layer, *where, norms, scales)
    assert_close(q.float().nan_to_num(), expected.float().nan_to_num(), scale=2000)
    assert torch.equal(kv_layer.float().nan_to_num(1000), expected_kv.float().nan_to_num(1000))
    assert kv_layer.float().abs().nan_to_num(0).max() == 448


def test_norms_of_heads_are_not_rounded_to_the_activations_dtype() -> None:
    layout, num_blocks = make_layout([(3, 3)], block_size=16)
    qkv, norms = torch.randn(3, 4 * 64).bfloat16(), HeadNorms(*(1 + 1e-3 * torch.rand(2, 64)), eps=1e-5)
    expected_kv = torch.zeros(num_blocks, 2, 1, 16, 64)
    kv_layer = expected_kv.bfloat16()
    where = layout.positions, layout.slots
    # The reference in fp32: what differs is one rounding after the norm, and one after the rotation.
    expected = reference.rope_and_write_kv(qkv.float(), angles(16, 64), expected_kv, *where, norms)
    assert_close(rope_and_write_kv(qkv, angles(16, 64), kv_layer, *where, norms), expected.bfloat16())
    assert_close(kv_layer, expected_kv.bfloat16())


def test_rope_turns_each_pair_by_its_position() -> None:
    """The reference itself, against complex numbers."""
    x, positions = torch.randn(5, 2, 8), torch.tensor([0, 1, 2, 7, 30])
    pairs = torch.complex(x[..., :4], x[..., 4:])
    turned = pairs * torch.polar(torch.ones(4), positions[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8))[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(reference.rope(x, positions, angles(31, 8)), expected, rtol=1e-5, atol=1e-5)


# The slice holds tokens 100 to 139.
TOKEN_IDS = torch.tensor([100, 99, 139, 140, 0, 117, 117, -1, 2**40])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("hidden", [1, 65, 128, 1030])
def test_vocab_embedding_looks_up_its_slice_and_gives_zeros_elsewhere(
    hidden: int, bits: Bits, dtype: torch.dtype
) -> None:
    table = torch.randn(40, hidden).to(dtype)
    quantized = None if bits == 16 else quantize(table, bits)
    rows = table if quantized is None else quantized.dequantized(dtype)
    linear = CudaLinear(table if quantized is None else quantized, None, H100, SplitWorkspace(table.device))
    actual = linear.embed(TOKEN_IDS, 100, dtype)
    assert torch.equal(actual[[0, 2, 5, 6]], rows[[0, 39, 17, 17]])
    assert not actual[[1, 3, 4, 7, 8]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_scaled_by_their_positions_equal_their_reference(dtype: torch.dtype) -> None:
    x, scales, positions = torch.randn(9, 40).to(dtype), torch.rand(64) + 1, torch.randint(64, (9,))
    expected = reference.scale_by_position(x, scales, positions)
    assert_close(CudaBackend(H100).scale_by_position(x, scales, positions), expected)
