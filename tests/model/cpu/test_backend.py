"""Each CPU kernel against its plain torch reference, in fp32 and bf16."""

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import make_layout
from tests.rigs import reference
from twostroke.model.backend import HeadNorms, KVScales
from twostroke.model.config import Activation
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.kernels import elementwise

DTYPES = [torch.float32, torch.bfloat16]
BACKEND = CpuBackend()


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    # bf16: one unit in the last place, where the orders of addition fall on two sides of a rounding
    tolerance = 1e-5 if actual.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 32), (7, 33), (1000, 72)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_the_reference(dtype: torch.dtype, shape: tuple[int, int], threads: int) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1])
    total = x + residual
    torch.set_num_threads(threads)
    try:
        close(BACKEND.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        normed, new_residual = BACKEND.add_rms_norm(x, residual, weight, 1e-5)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(new_residual, total)
    close(normed, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scaled_by_their_positions_as_the_reference_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, scales, positions = torch.randn(9, 40).to(dtype), torch.rand(64) + 1, torch.randint(64, (9,))
    expected = reference.scale_by_position(x, scales, positions)
    assert torch.equal(BACKEND.scale_by_position(x.clone(), scales, positions), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("gate", [-1e30, -200.0, -90.0, 0.0, 90.0, 1e30])
def test_the_gated_activation_stays_finite_at_the_ends(gate: float, activation: Activation) -> None:
    gate_up = torch.tensor([[gate, 2.0]])
    actual = elementwise.gate(BACKEND.launcher, gate_up, activation)
    expected = reference.gate(gate_up, activation)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_multiplied_by_activated_gates(dtype: torch.dtype) -> None:
    gates, x = torch.randn(7, 24).to(dtype), torch.randn(7, 60).to(dtype)
    for activation in ("silu", "gelu_tanh", "clamped"):
        close(BACKEND.gate_columns(gates, x, 16, activation), reference.gate_columns(gates, x, 16, activation))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 40), (3, 1, 72), (3, 0, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_and_kv_write_equal_the_reference(
    has_norms: bool, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    torch.manual_seed(0)
    layout, num_blocks = make_layout([(1, 10), (1, 1), (21, 21), (8, 21)], block_size=5)
    qkv = torch.randn(31, (heads + 2 * kv_heads) * dim).to(dtype)
    cos_sin = torch.randn(64, dim)
    norms = HeadNorms(*torch.rand(2, dim), eps=1e-5, v=torch.rand(dim)) if has_norms else None
    of_queries = 1 + torch.rand(64) if has_norms else None
    written, expected = (torch.full((num_blocks, 2, kv_heads, 5, dim), 7.0, dtype=dtype) for _ in range(2))
    close(
        BACKEND.rope_and_write_kv(qkv.clone(), cos_sin, written, layout, norms, query_scales=of_queries),
        reference.rope_and_write_kv(
            qkv, cos_sin, expected, layout.positions, layout.slots, norms, query_scales=of_queries
        ),
    )
    close(written, expected)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_in_fp8_is_written_as_the_reference_rounds(dtype: torch.dtype, has_norms: bool) -> None:
    """Numbers of all sizes that e4m3 has, beyond its largest, and NaN."""
    layout, num_blocks = make_layout([(2, 2), (7, 12)], 5)
    heads, kv_heads, dim, scales = 3, 2, 24, KVScales(key=0.7, value=1.0)
    sizes = torch.logspace(-12, 11, (heads + 2 * kv_heads) * dim, base=2.0)
    qkv = (torch.randn(9, len(sizes)) * sizes).to(dtype)
    qkv[3, -1] = float("nan")
    norms = HeadNorms(*torch.rand(2, dim), eps=1e-5) if has_norms else None
    cos_sin = torch.rand(12, dim)
    written, expected = (torch.zeros(num_blocks, 2, kv_heads, 5, dim, dtype=torch.float8_e4m3fn) for _ in range(2))
    close(
        BACKEND.rope_and_write_kv(qkv.clone(), cos_sin, written, layout, norms, scales),
        reference.rope_and_write_kv(qkv, cos_sin, expected, layout.positions, layout.slots, norms, scales),
    )
    assert torch.equal(written.float().nan_to_num(1000), expected.float().nan_to_num(1000))
    assert written.float().abs().nan_to_num(0).max() == 448
