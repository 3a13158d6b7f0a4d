"""The CUDA backend's kernels against their references, on the GPU at hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import make_layout, paged_case
from twostroke.model.backend import Backend

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RELATIVE_ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Close in the mean, and nowhere off by more than rounding explains; NaN in the same places."""
    assert torch.equal(actual.isnan(), expected.isnan())
    limit = RELATIVE_ERRORS[expected.dtype]
    actual, expected = actual.float().nan_to_num(), expected.float().nan_to_num()
    assert (actual - expected).norm() <= limit * expected.norm()
    assert (actual - expected).abs().max() <= 5 * limit * expected.abs().max()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 288), (7, 2048), (300, 4096), (3, 4100), (2, 16384)])
def test_norms_equal_their_references(
    backend: Backend, references: Backend, rows: int, hidden: int, dtype: torch.dtype
) -> None:
    x, residual, weight = (
        randn(rows, hidden, dtype=dtype),
        randn(rows, hidden, dtype=dtype),
        randn(hidden, dtype=dtype),
    )
    assert_near(backend.rms_norm(x, weight, 1e-5), references.rms_norm(x, weight, 1e-5))
    expected, expected_sum = references.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    out, total = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert_near(out, expected)
    assert torch.equal(total, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (7, 14336), (300, 1025)])
def test_silu_mul_equals_its_reference(
    backend: Backend, references: Backend, rows: int, width: int, dtype: torch.dtype
) -> None:
    gate_up = 4 * randn(rows, 2 * width, dtype=dtype)
    assert_near(backend.silu_mul(gate_up), references.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 128])
def test_rope_and_kv_write_equal_their_reference_and_touch_nothing_else(
    backend: Backend, references: Backend, block_size: int, dim: int, dtype: torch.dtype
) -> None:
    layout, num_blocks = make_layout([(1, 1), (1, 500), (300, 300), (77, 1000)], block_size, "cuda")
    heads, groups = 12, 4
    turns = torch.rand(1000, dim // 2, device="cuda") * 6.3
    cos_sin = torch.cat((turns.cos(), turns.sin()), dim=-1)
    qkv = randn(len(layout.slots), (heads + 2 * groups) * dim, dtype=dtype)
    expected_kv = torch.full((num_blocks, 2, groups, block_size, dim), float("nan"), dtype=dtype, device="cuda")
    kv_layer = expected_kv.clone()
    expected = references.rope_and_write_kv(qkv, cos_sin, expected_kv, layout)
    assert_near(backend.rope_and_write_kv(qkv, cos_sin, kv_layer, layout), expected)
    assert_near(kv_layer, expected_kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "groups", "block_size"), [(8, 2, 16), (8, 8, 128), (12, 4, 64), (7, 1, 24)])
def test_attention_equals_its_reference(
    backend: Backend, references: Backend, heads: int, groups: int, block_size: int, dim: int, dtype: torch.dtype
) -> None:
    lengths = [(1, 1), (1, 17), (1, 700), (1, 3001), (3, 40), (2, 2), (130, 130), (257, 1300), (64, 2048)]
    case = paged_case(lengths, heads=heads, groups=groups, dim=dim, block_size=block_size, dtype=dtype, device="cuda")
    actual = backend.attention(case.q, case.kv_layer, case.layout)
    assert_near(actual, references.attention(case.q, case.kv_layer, case.layout))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_short_chunks_equals_its_reference(
    backend: Backend, references: Backend, dtype: torch.dtype
) -> None:
    case = paged_case([(5, 5), (16, 300), (9, 129)], heads=8, groups=2, dim=128, dtype=dtype, device="cuda")
    actual = backend.attention(case.q, case.kv_layer, case.layout)
    assert_near(actual, references.attention(case.q, case.kv_layer, case.layout))


def test_a_captured_decode_step_stays_right_as_contexts_grow(backend: Backend, references: Backend) -> None:
    case = paged_case([(1, 900), (1, 2000), (1, 40)], heads=8, groups=2, dim=128, dtype=torch.bfloat16, device="cuda")
    layout = replace(case.layout, context_lens=case.layout.context_lens.clone(), max_context_len=4096)
    backend.attention(case.q, case.kv_layer, layout)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attention(case.q, case.kv_layer, layout)
    for contexts in ([1, 2, 3], [900, 2000, 40], [0, 513, 0]):
        layout.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        graph.replay()
        assert_near(out, references.attention(case.q, case.kv_layer, layout))


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize(
    "lengths", [[(4096, 4096)], [(700, 16384), (64, 9001)], [(2048, 12288), (1, 7000), (333, 333)]]
)
def test_prefill_over_long_contexts_equals_its_reference(
    backend: Backend, references: Backend, lengths: list[tuple[int, int]], block_size: int
) -> None:
    case = paged_case(lengths, heads=4, groups=1, dim=128, block_size=block_size, dtype=torch.bfloat16, device="cuda")
    actual = backend.attention(case.q, case.kv_layer, case.layout)
    assert_near(actual, references.attention(case.q, case.kv_layer, case.layout))
