import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.paged_cases import PagedCase, assert_close, in_fp8, paged_case
from tests.rigs import reference
from twostroke.model.cuda.kernels.launch import A100, H100, Architecture, GpuTarget
from twostroke.model.cuda.kernels.paged_attention import (
    DecodeTiling,
    PrefillTiling,
    decode_attention,
    decode_config,
    prefill_attention,
    prefill_config,
)
from twostroke.model.cuda.kernels.segments import SplitConfig

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def wide(*values: Any) -> Any:
    """A case that `make test-wide` has alone, since the interpreter takes its time: more of the same."""
    return pytest.param(*values, marks=pytest.mark.wide)


DIMS = (8, 64, 80, 96, 128, 256, 512)
FEW = list(zip(DIMS, itertools.cycle(DTYPES), strict=False))
DIM_AND_DTYPE = pytest.mark.parametrize(
    ("dim", "dtype"), [*FEW, *(wide(*one) for one in itertools.product(DIMS, DTYPES) if one not in FEW)]
)


def check(case: PagedCase, config: PrefillTiling | DecodeTiling, expected: torch.Tensor | None = None) -> None:
    """All sequences by the kernel that the config is of, against the reference; a decode's query is its last token."""
    layout = case.layout if isinstance(config, DecodeTiling) else replace(case.layout, num_decodes=0)
    out = torch.full_like(case.q.flatten(1), float("nan"))
    if isinstance(config, DecodeTiling):
        decode_attention(case.q, case.kv_layer, layout, case.form, out, config)
    else:
        prefill_attention(case.q, case.kv_layer, layout, case.form, out, config)
    if expected is None:
        expected = reference.attention(case.q, case.kv_layer, layout, case.form)
    assert_close(out, expected)


def decodes_of(case: PagedCase, programs: int, block_n: int = 16) -> DecodeTiling:
    """Return the tiling for the contexts that the layout may have."""
    steps = -(-min(case.layout.max_context_len, abs(case.form.window) or 1 << 20) // block_n) + 1
    return DecodeTiling(block_n, num_warps=4, num_stages=2, split=SplitConfig(programs, steps))


PLAIN = PrefillTiling(16, 16, num_warps=4, num_stages=2)


def test_the_attention_reference_equals_torchs_on_one_unpaged_sequence() -> None:
    case = paged_case([(5, 37)], heads=6, groups=2)
    blocks = case.layout.block_tables[0, :3].long()
    k, v = case.kv_layer[blocks].permute(1, 2, 0, 3, 4).reshape(2, 2, 48, 64)[:, :, :37].repeat_interleave(3, 1)
    visible = torch.arange(37) <= torch.arange(32, 37)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(case.q.transpose(0, 1), k, v, visible)
    tensors = (case.layout.query_starts, case.layout.context_lens, case.layout.block_tables)
    actual = reference.paged_attention(case.q, case.kv_layer, *tensors, case.form)
    torch.testing.assert_close(actual, expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


@DIM_AND_DTYPE
def test_prefill_attention_equals_its_reference_at_every_head_dim(dim: int, dtype: torch.dtype) -> None:
    case = paged_case([(2, 2), (19, 50)], dim=dim, dtype=dtype)
    check(case, PLAIN)


@pytest.mark.parametrize(("block_size", "block_n"), [(16, 16), wide(16, 32), (24, 16), wide(32, 16), (128, 64)])
def test_prefill_attention_is_right_at_the_edges_of_blocks(block_size: int, block_n: int) -> None:
    lengths = [(n, n) for n in (1, block_size - 1, block_size, block_size + 1)]
    lengths += [(1, block_size), (1, block_size + 1), (2, block_size + 1), (3, 2 * block_size)]
    check(paged_case(lengths, block_size=block_size), PrefillTiling(32, block_n, num_warps=4, num_stages=2))


@pytest.mark.parametrize("config", [PLAIN, wide(replace(PLAIN, block_n=32))], ids=str)
def test_prefill_is_right_after_a_cached_prefix_of_any_alignment(config: PrefillTiling) -> None:
    check(paged_case([(3, prefix + 3) for prefix in range(34)], heads=2, groups=1, dim=16), config)


def test_prefill_passes_over_sequences_without_queries() -> None:
    check(paged_case([(0, 0), (5, 20), (0, 70), (130, 133), (0, 0)], dim=16), PLAIN)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), wide(4, 4), (6, 2), (7, 1), wide(16, 1), wide(10, 2)])
def test_prefill_takes_any_number_of_heads_of_a_group(heads: int, groups: int) -> None:
    check(paged_case([(1, 9), (18, 18), (17, 140)], heads=heads, groups=groups, dim=16), PLAIN)


def test_prefill_leaves_the_rows_of_decodes_alone() -> None:
    case = paged_case([(1, 70), (1, 3), (66, 66), (5, 90)], heads=2, groups=1)
    out = torch.full_like(case.q.flatten(1), float("nan"))
    prefill_attention(case.q, case.kv_layer, case.layout, case.form, out, PLAIN)
    assert out[:2].isnan().all()
    assert_close(out[2:], reference.attention(case.q, case.kv_layer, case.layout, case.form)[2:])


def test_prefill_neither_overflows_on_large_scores_nor_loses_the_largest() -> None:
    case = paged_case([(40, 50), (33, 133)], block_size=64, dtype=torch.float16)
    case.q.mul_(300)
    check(case, PLAIN)


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize("dtype", [wide(torch.float32), torch.bfloat16])
def test_prefill_attention_is_right_with_the_tables_own_tiles(architecture: Architecture, dtype: torch.dtype) -> None:
    case = paged_case([(5, 5), (150, 290)], heads=2, groups=1, dtype=dtype)
    check(case, prefill_config(architecture, 64, dtype, 2, 150))


WIDE = replace(PLAIN, block_m=64)
WINDOWS = pytest.mark.parametrize("window", [1, 37, 64, 1000, -32, -37])  # chunks: whole blocks and others
FORMS = pytest.mark.parametrize(
    "form",
    [
        {"soft_cap": 1.5},
        {"has_sinks": True},
        {"window": 20, "has_sinks": True},
        {"window": 70, "soft_cap": 3.0, "has_sinks": True},
        {"window": -37, "soft_cap": 3.0, "has_sinks": True},
    ],
    ids=str,
)


@WINDOWS
def test_prefill_sees_windows_of_any_length(window: int) -> None:
    check(paged_case([(2, 2), (19, 50), (70, 180)], heads=2, groups=1, dim=16, window=window), WIDE)


@pytest.mark.parametrize("config", [WIDE, replace(WIDE, block_n=32)], ids=["plain", "wide"])
def test_prefills_windows_begin_at_any_place_in_a_block(config: PrefillTiling) -> None:
    lengths = [(3, 40 + prefix) for prefix in range(0, 33, 3)]
    check(paged_case(lengths, heads=2, groups=1, dim=16, window=18), config)


@WINDOWS
@pytest.mark.parametrize(("block_size", "block_n", "programs"), [(16, 32, 1), (16, 32, 3), (64, 16, 3)])
def test_decodes_see_windows_of_any_length(programs: int, block_size: int, block_n: int, window: int) -> None:
    lengths = [(1, context) for context in (1, 37, 64, 65, 200)]
    case = paged_case(lengths, heads=2, groups=1, dim=16, block_size=block_size, window=window)
    check(case, decodes_of(case, programs, block_n))


@FORMS
def test_prefill_caps_scores_and_counts_sinks(form: dict[str, Any]) -> None:
    case = paged_case([(2, 2), (66, 100)], heads=6, groups=2, dim=16, **form)
    case.q.mul_(4)
    check(case, WIDE)


@FORMS
@pytest.mark.parametrize(
    ("programs", "dtype"), [(1, torch.float32), wide(1, torch.bfloat16), wide(4, torch.float32), (4, torch.bfloat16)]
)
def test_decodes_cap_scores_and_count_sinks_once(programs: int, dtype: torch.dtype, form: dict[str, Any]) -> None:
    case = paged_case([(1, 1), (1, 75), (1, 30)], heads=6, groups=2, dim=16, dtype=dtype, **form)
    case.q.mul_(4)
    case.layout.context_lens[2] = 0
    check(case, decodes_of(case, programs))


def test_a_cap_holds_where_its_exponential_would_overflow() -> None:
    case = paged_case([(5, 50)], soft_cap=1.0)
    case.q.mul_(1000)
    check(case, WIDE)


@pytest.mark.parametrize(
    ("query_len", "config"),
    [(64, WIDE), (1, DecodeTiling(16, num_warps=4, num_stages=2, split=SplitConfig(2, 8)))],
    ids=["prefill", "decode"],
)
def test_a_windows_work_does_not_grow_with_the_context(
    query_len: int, config: PrefillTiling | DecodeTiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = 0
    multiply = InterpreterBuilder.create_dot

    def counted(*arguments: Any) -> Any:
        nonlocal products
        products += 1
        return multiply(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)

    def products_of(context: int) -> int:
        nonlocal products
        products = 0
        lengths = [(query_len, context)]
        check(paged_case(lengths, heads=1, groups=1, dim=16, block_size=64, dtype=torch.float16, window=96), config)
        return products

    assert products_of(1024) == products_of(512)


@DIM_AND_DTYPE
@pytest.mark.parametrize("programs", [1, 4])
def test_decode_attention_equals_its_reference_at_every_head_dim(dim: int, programs: int, dtype: torch.dtype) -> None:
    case = paged_case([(1, 1), (1, 75)], dim=dim, dtype=dtype)
    check(case, decodes_of(case, programs))


@pytest.mark.parametrize(("block_size", "block_n"), [(16, 16), (16, 32), (24, 16), (32, 16), (128, 64)])
@pytest.mark.parametrize("programs", [1, wide(2), 7])
def test_decode_attention_is_right_at_the_edges_of_blocks_and_segments(
    block_size: int, block_n: int, programs: int
) -> None:
    edges = (1, block_size - 1, block_size, block_size + 1, 2 * block_n * programs, 2 * block_n * programs + 1)
    case = paged_case([(1, context) for context in edges], heads=2, groups=1, dim=16, block_size=block_size)
    check(case, decodes_of(case, programs, block_n))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 2), (7, 1), (33, 1)])
def test_decode_attention_packs_any_number_of_heads_of_a_group(heads: int, groups: int) -> None:
    case = paged_case([(1, 40), (1, 3)], heads=heads, groups=groups, dim=16)
    check(case, decodes_of(case, 2))


def test_decode_attention_merges_more_segments_than_one_step_of_the_merge() -> None:
    case = paged_case([(1, 600), (1, 17), (1, 320)], heads=1, groups=1, dim=16)
    check(case, decodes_of(case, 37))


@pytest.mark.parametrize("programs", [1, 4])
def test_decode_attention_gives_zeros_for_an_empty_context(programs: int) -> None:
    case = paged_case([(1, 20), (1, 30)])
    case.layout.context_lens[1] = 0
    check(case, decodes_of(case, programs))


@pytest.mark.parametrize("programs", [1, 4])
def test_decodes_neither_overflow_on_large_scores_nor_lose_the_largest(programs: int) -> None:
    case = paged_case([(1, 50), (1, 33)])
    case.q.mul_(1000)
    check(case, decodes_of(case, programs))


def test_a_tile_holds_all_heads_of_a_token_and_short_chunks_take_small_tiles() -> None:
    assert prefill_config(Architecture.HOPPER, 128, torch.bfloat16, 4, 4096).block_m == 128
    assert prefill_config(Architecture.HOPPER, 128, torch.bfloat16, 4, 16).block_m == 64
    assert prefill_config(Architecture.HOPPER, 128, torch.bfloat16, 200, 16).block_m == 256


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("lengths", [(700, 9, 1, 30, 17), (3, 0, 300, 301, 0), (16,) * 5], ids=str)
@pytest.mark.parametrize("dtype", [wide(torch.float32), torch.bfloat16])
def test_decodes_of_skewed_lengths_equal_the_reference(
    lengths: tuple[int, ...], window: int, dtype: torch.dtype
) -> None:
    case = paged_case([(1, max(1, length)) for length in lengths], dim=16, dtype=dtype, window=window, has_sinks=True)
    case.layout.context_lens.copy_(torch.tensor(lengths))
    check(case, decodes_of(case, 3))


def test_decodes_of_more_rows_than_a_program_looks_at_at_once_equal_the_reference() -> None:
    lengths = [(1, 1 + 7 * row % 40) for row in range(270)]
    lengths[3] = lengths[265] = (1, 190)
    case = paged_case(lengths, heads=1, groups=1, dim=16, block_size=32)
    check(case, decodes_of(case, 40))


def test_a_step_whose_contexts_grow_needs_no_other_launch() -> None:
    """A captured graph's launch is for the longest contexts to come, and their lengths are on the device."""
    case = paged_case([(1, 400), (1, 300), (1, 200)], heads=2, groups=1, dim=16)
    config = decodes_of(case, 5)
    for lengths in ((1, 1, 1), (30, 300, 1), (400, 2, 0), (400, 300, 200)):
        case.layout.context_lens.copy_(torch.tensor(lengths))
        check(case, config)


def test_heads_wider_than_the_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 520"):
        prefill_config(Architecture.AMPERE, 520, torch.bfloat16, 1, 16)
    with pytest.raises(ValueError, match="head_dim 520"):
        decode_config(H100, 520, torch.bfloat16, 1, 16)


def test_gpus_below_ampere_are_refused_and_later_ones_fall_into_classes() -> None:
    with pytest.raises(ValueError, match=r"7\.5"):
        GpuTarget.of((7, 5), 40)
    assert GpuTarget.of((8, 0), 108) == A100
    assert GpuTarget.of((9, 0), 132) == H100
    assert GpuTarget.of((10, 0), 148).architecture is Architecture.HOPPER
    assert GpuTarget.of((8, 9), 142).architecture is Architecture.SMALL
    assert GpuTarget.of((12, 0), 170).architecture is Architecture.SMALL


@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.parametrize("dtype", [wide(torch.float32), wide(torch.float16), torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [PLAIN, DecodeTiling(16, 4, 2, SplitConfig(1, 8)), DecodeTiling(16, 4, 2, SplitConfig(3, 8))],
    ids=["prefill", "decode", "segments"],
)
def test_a_cache_in_fp8_is_read_as_the_numbers_it_holds(
    config: PrefillTiling | DecodeTiling, dtype: torch.dtype, as_bits: bool
) -> None:
    lengths = [(1, 1), (1, 33), (1, 90)] if isinstance(config, DecodeTiling) else [(2, 2), (19, 50)]
    form = {"window": 40, "soft_cap": 5.0, "has_sinks": True}
    case = in_fp8(paged_case(lengths, heads=6, dim=40, dtype=dtype, **form))
    expected = reference.attention(case.q, case.kv_layer, case.layout, case.form)
    if as_bits:  # as GPUs read it that don't know FP8
        case = replace(case, kv_layer=case.kv_layer.view(torch.int8))
    check(case, config, expected)
