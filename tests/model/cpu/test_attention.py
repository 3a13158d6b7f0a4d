"""Decode and prefill attention over paged KV against the plain torch reference; what no kernel may read is NaN."""

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import PagedCase, paged_case
from twostroke.model import reference
from twostroke.model.cpu.kernels import attention as cpu_attention
from twostroke.model.cpu.kernels.program import Launcher

SHAPES = [(4, 4, 16), (8, 2, 64), (6, 1, 40), (2, 1, 72), (4, 2, 80), (3, 1, 128), (12, 2, 96)]
DTYPES = [torch.float32, torch.bfloat16]


def decoded(case: PagedCase) -> Tensor:
    out = torch.empty_like(case.q)
    cpu_attention.decode_attention(Launcher(), case.q, case.kv_layer, case.layout, out)
    return out


def check(out: Tensor, case: PagedCase) -> None:
    expected = reference.attention(case.q, case.kv_layer, case.layout).view_as(case.q)
    tolerance = 2e-5 if case.q.dtype == torch.float32 else 1e-2 if case.layout.num_decodes else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block_size", [1, 16, 33, 48])
@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_the_reference(dtype: torch.dtype, heads: int, groups: int, dim: int, block_size: int) -> None:
    lengths = [(1, context) for context in (1, 2, block_size, block_size + 1, 200)]
    case = paged_case(lengths, heads=heads, groups=groups, dim=dim, block_size=block_size, dtype=dtype)
    # Scores of +-20 in fp32: the running maximum has to move more than once.
    case.kv_layer.mul_(3)
    check(decoded(case), case)


@pytest.mark.parametrize(
    ("dtype", "groups", "dim", "block_size"),
    [
        (torch.float32, 1, 64, 16),
        (torch.float32, 1, 40, 48),
        (torch.bfloat16, 1, 64, 16),
        (torch.bfloat16, 1, 40, 48),
        # One thread takes all KV heads of a sequence; three are too many for that.
        (torch.bfloat16, 2, 64, 16),
        (torch.bfloat16, 2, 64, 48),
        (torch.bfloat16, 2, 64, 256),
    ],
)
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype, groups: int, dim: int, block_size: int) -> None:
    """Contexts of one segment and of several."""
    lengths = [(1, context) for context in (1, 129, 600, 511, 2000)]
    case = paged_case(lengths, heads=3 * groups, groups=groups, dim=dim, block_size=block_size, dtype=dtype)
    case.kv_layer.mul_(3)
    alone = decoded(case)
    torch.set_num_threads(3)
    try:
        shared = decoded(case)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, shared)
    check(shared, case)


@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 150), (1, 63), (64, 64), (700, 33), (3, 2)])
@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_after_a_cached_prefix_equals_the_reference(
    dtype: torch.dtype, heads: int, groups: int, dim: int, start: int, count: int
) -> None:
    case = paged_case([(count, start + count), (20, 25)], heads=heads, groups=groups, dim=dim, dtype=dtype)
    out = torch.empty_like(case.q)
    cpu_attention.prefill_attention(case.q, case.kv_layer, case.layout, out)
    check(out, case)


@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 5), (41, 17), (600, 33), (7, 70)])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(7, 1, 64), (6, 2, 80), (32, 2, 96), (15, 3, 128), (33, 1, 64)])
@pytest.mark.parametrize("block_size", [16, 33])
def test_short_chunks_whose_heads_share_tiles_equal_the_reference_and_write_nothing_else(
    heads: int, groups: int, dim: int, start: int, count: int, block_size: int
) -> None:
    shape = {"heads": heads, "groups": groups, "dim": dim, "block_size": block_size}
    case = paged_case([(count, start + count)], dtype=torch.bfloat16, **shape)
    around = torch.full((count + 2, heads, dim), 7.0, dtype=torch.bfloat16)
    out = around[1:-1]
    cpu_attention.prefill_attention(case.q, case.kv_layer, case.layout, out)
    check(out, case)
    assert (around[[0, -1]] == 7.0).all()
