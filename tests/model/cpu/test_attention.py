"""Decode and prefill attention over paged KV against the plain torch reference."""

import pytest
import torch

from twostroke.model import reference
from twostroke.model.batch import make_layout
from twostroke.model.cpu.kernels import attention as cpu_attention
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.step import SequenceStep

CPU = torch.device("cpu")
SHAPES = [(4, 4, 16), (8, 2, 64), (6, 1, 40), (2, 1, 72), (4, 2, 80), (3, 1, 128), (12, 2, 96)]


@pytest.mark.parametrize("block_size", [1, 16, 33, 48])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_equals_the_reference(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    contexts = [1, 2, block_size, block_size + 1, 200]
    num_blocks = sum(-(-context // block_size) for context in contexts)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    steps = [
        SequenceStep([0], context - 1, [free.pop() for _ in range(-(-context // block_size))], None)
        for context in contexts
    ]
    layout = make_layout(steps, block_size, CPU)
    q = torch.randn(len(contexts), heads, dim, generator=generator).to(dtype)
    # Scores of +-20 in fp32: the running maximum has to move more than once.
    kv_layer = (torch.randn(num_blocks, 2, kv_heads, block_size, dim, generator=generator) * 3).to(dtype)
    out = torch.empty_like(q)
    cpu_attention.decode_attention(Launcher(), q, kv_layer, layout, out)
    expected = reference.attention(q, kv_layer, layout).view_as(q)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "dim", "block_size"),
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
def test_any_number_of_threads_gives_the_same_bits(
    dtype: torch.dtype, kv_heads: int, dim: int, block_size: int
) -> None:
    """Contexts of one segment and of several."""
    generator = torch.Generator().manual_seed(0)
    contexts = [1, 129, 600, 511, 2000]
    width = -(-max(contexts) // block_size)
    steps = [
        SequenceStep([0], context - 1, range(width * row, width * (row + 1)), None)
        for row, context in enumerate(contexts)
    ]
    layout = make_layout(steps, block_size, CPU)
    q = torch.randn(5, 3 * kv_heads, dim, generator=generator).to(dtype)
    kv_layer = (torch.randn(5 * width, 2, kv_heads, block_size, dim, generator=generator) * 3).to(dtype)
    alone, shared = torch.empty_like(q), torch.empty_like(q)
    cpu_attention.decode_attention(Launcher(), q, kv_layer, layout, alone)
    torch.set_num_threads(3)
    try:
        cpu_attention.decode_attention(Launcher(), q, kv_layer, layout, shared)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, shared)
    expected = reference.attention(q, kv_layer, layout).view_as(q)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(shared, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 150), (1, 63), (64, 64), (150, 33), (3, 2)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_after_a_cached_prefix_equals_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, start: int, count: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    steps = [
        SequenceStep([0] * count, start, range(13, 0, -1), None),
        SequenceStep([0] * 20, 5, [14, 15], None),
    ]
    layout = make_layout(steps, 16, CPU)
    q = torch.randn(count + 20, heads, dim, generator=generator).to(dtype)
    kv_layer = torch.randn(16, 2, kv_heads, 16, dim, generator=generator).to(dtype)
    out = torch.empty_like(q)
    cpu_attention.prefill_attention(q, kv_layer, layout, out)
    expected = reference.attention(q, kv_layer, layout).view_as(q)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 5), (41, 17), (300, 33), (7, 70)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 64), (6, 2, 80), (32, 2, 96), (15, 3, 128), (33, 1, 64)])
@pytest.mark.parametrize("block_size", [16, 33])
def test_short_chunks_whose_heads_share_tiles_equal_the_reference_with_poison_around(
    heads: int, kv_heads: int, dim: int, start: int, count: int, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    num_blocks = -(-(start + count) // block_size)
    steps = [SequenceStep([0] * count, start, range(num_blocks, 0, -1), None)]
    layout = make_layout(steps, block_size, CPU)
    q = torch.randn(count, heads, dim, generator=generator).to(torch.bfloat16)
    clean = torch.randn(num_blocks + 2, 2, kv_heads, block_size, dim, generator=generator).to(torch.bfloat16)
    poisoned = clean.clone()
    poisoned[[0, num_blocks + 1]] = float("nan")
    poisoned[1, :, :, (start + count - 1) % block_size + 1 :] = float("nan")
    around = torch.full((count + 2, heads, dim), 7.0, dtype=torch.bfloat16)
    out = around[1:-1]
    cpu_attention.prefill_attention(q, poisoned, layout, out)
    expected = reference.attention(q, clean, layout).view_as(q)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert (around[[0, -1]] == 7.0).all()


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_beyond_the_context_is_not_read(dtype: torch.dtype, block_size: int) -> None:
    steps = [SequenceStep([0], 4, [1], None), SequenceStep([0, 0], 2, [0], None)]
    layout = make_layout(steps, block_size, CPU)
    q = torch.randn(3, 2, 32).to(dtype)
    kv_layer = torch.randn(2, 2, 1, block_size, 32).to(dtype)
    out, again = torch.empty_like(q), torch.empty_like(q)
    for result in (out, again):
        cpu_attention.decode_attention(Launcher(), q, kv_layer, layout, result)
        cpu_attention.prefill_attention(q, kv_layer, layout, result)
        kv_layer[1, :, :, 5:] = float("nan")
        kv_layer[0, :, :, 4:] = float("nan")
    assert torch.equal(out, again)
