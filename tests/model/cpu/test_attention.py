"""Decode and prefill attention over paged KV against the plain torch reference; what no kernel may read is NaN."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import PagedCase, in_fp8, paged_case
from tests.rigs import reference
from twostroke.model.backend import AttentionForm
from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels import paged_attention as cpu_attention
from twostroke.model.cpu.kernels.launch import Launcher
from twostroke.protocol.kv_layout import first_seen

SHAPES = [(4, 4, 16), (8, 2, 64), (6, 1, 40), (2, 1, 72), (4, 2, 80), (3, 1, 128), (12, 2, 96)]
DTYPES = [torch.float32, torch.bfloat16]


def plain(case: PagedCase) -> AttentionForm:
    return AttentionForm(case.q.shape[2] ** -0.5)


def sinks(heads: int) -> Tensor:
    return torch.linspace(-3.0, 4.0, heads)


def forgetful(case: PagedCase, window: int) -> BatchLayout:
    """The case's layout, whose tables name block 0, which is full of NaN, for what lies before the windows."""
    layout, block_size = case.layout, case.kv_layer.shape[3]
    tables = layout.block_tables.clone()
    lengths = layout.query_starts.diff()
    for row, (context, length) in enumerate(zip(layout.context_lens.tolist(), lengths.tolist(), strict=True)):
        tables[row, : first_seen(window, context - length) // block_size] = 0
    return replace(layout, block_tables=tables)


def decoded(case: PagedCase, form: AttentionForm | None = None) -> Tensor:
    form = form or plain(case)
    out = torch.empty_like(case.q)
    layout = forgetful(case, form.window) if form.window else case.layout
    cpu_attention.decode_attention(Launcher(), case.q, case.kv_layer, layout, form, out)
    return out


def prefilled(case: PagedCase, form: AttentionForm | None = None) -> Tensor:
    form = form or plain(case)
    out = torch.empty_like(case.q)
    layout = forgetful(case, form.window) if form.window else case.layout
    cpu_attention.prefill_attention(case.q, case.kv_layer, layout, form, out)
    return out


def check(out: Tensor, case: PagedCase, form: AttentionForm | None = None) -> None:
    expected = reference.attention(case.q, case.kv_layer, case.layout, form or plain(case)).view_as(case.q)
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


SHARING = {
    "drafts": ([list(range(600, 613)), [40], [1, 2, 3]], 0),
    "drafts around the ends of a block, a chunk of scores and a segment": ([list(range(505, 530)), [65, 66]], 0),
    "drafts of which one is missing": ([[90, 91, 95, 93, 94]], 0),
    "a common prefix": ([[1300], [700], [1301]], 528),
    "drafts behind a common prefix": ([[700, 701, 702], [600], [540, 541]], 528),
}


@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize(
    ("window", "cap", "has_sinks"), [(0, 0.0, False), (37, 5.0, True), (513, 0.0, False), (-64, 0.0, False)]
)
@pytest.mark.parametrize(("heads", "groups", "dim", "block_size"), [(6, 2, 64, 16), (2, 2, 40, 33), (8, 1, 72, 48)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8"])
def test_rows_that_share_blocks_have_the_bits_that_they_have_alone(
    kind: str, heads: int, groups: int, dim: int, block_size: int, window: int, cap: float, has_sinks: bool, case: str
) -> None:
    """The last row's own token is broken in the end, as a draft that fails may leave it."""
    contexts, prefix = SHARING[case]
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    shape: dict[str, Any] = {"heads": heads, "groups": groups, "dim": dim, "block_size": block_size, "dtype": dtype}
    longest = paged_case([(1, max(rows)) for rows in contexts], **shape)
    if kind == "fp8":
        longest = in_fp8(longest)
    tables = longest.layout.block_tables
    tables[:, : prefix // block_size] = tables[0, : prefix // block_size].clone()
    lens = torch.tensor([context for rows in contexts for context in rows], dtype=torch.int32)
    tables = torch.repeat_interleave(tables, torch.tensor([len(rows) for rows in contexts]), dim=0)
    places = torch.zeros(len(lens), dtype=torch.int64)
    layout = BatchLayout.of_decodes(lens.long() - 1, places, lens, tables, int(lens.max()))
    q = torch.randn((len(lens), heads, dim), generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    form = held_form(replace(longest, q=q), window, cap, has_sinks)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            together = decoded(PagedCase(q, longest.kv_layer, layout, form), form)
        finally:
            torch.set_num_threads(1)
        assert together.isfinite().all()
        for row in range(len(lens)):
            one = BatchLayout.of_decodes(*(of[row : row + 1] for of in (places, places, lens, tables)), int(lens[row]))
            alone = decoded(PagedCase(q[row : row + 1], longest.kv_layer, one, form), form)
            assert torch.equal(alone[0], together[row]), row
    # The last token of the longest context of a sequence: no other row of it may be touched by it.
    last = int(lens.argmax())
    block = int(tables[last, (int(lens[last]) - 1) // block_size])
    longest.kv_layer[block, :, :, (int(lens[last]) - 1) % block_size] = float("nan")
    broken = decoded(PagedCase(q, longest.kv_layer, layout, form), form)
    others = [row for row in range(len(lens)) if row != last]
    assert broken[last].isnan().all()
    assert torch.equal(broken[others], together[others])


def test_rows_are_cut_into_runs_where_their_blocks_differ() -> None:
    tables = torch.tensor([[1, 2, 3], [1, 2, 0], [4, 5, 6], [4, 7, 0], [0, 7, 8]], dtype=torch.int32).numpy()
    contexts = torch.tensor([40, 32, 33, 20, 40], dtype=torch.int32).numpy()

    def cut(window: int, most: int) -> list[int]:
        starts, firsts = np.zeros(6, np.int64), np.zeros(5, np.int64)
        runs, _ = cpu_attention._cut(tables, contexts, window, 16, 16, most, starts, firsts)
        return starts[: runs + 1].tolist()

    assert cut(100, 16) == [0, 2, 4, 5]
    assert cut(16, 16) == [0, 2, 3, 5]  # of what they see, the last two have a block in common, and those before not
    assert cut(100, 1) == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 150), (1, 63), (64, 64), (700, 33), (3, 2)])
@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_after_a_cached_prefix_equals_the_reference(
    dtype: torch.dtype, heads: int, groups: int, dim: int, start: int, count: int
) -> None:
    case = paged_case([(count, start + count), (20, 25)], heads=heads, groups=groups, dim=dim, dtype=dtype)
    check(prefilled(case), case)


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
    cpu_attention.prefill_attention(case.q, case.kv_layer, case.layout, plain(case), out)
    check(out, case)
    assert (around[[0, -1]] == 7.0).all()


WINDOWS = [1, 2, 16, 17, 37, 64, 513, 5000, -1, -16, -37, -64, -513, -5000]  # chunks are negative
FORMED_SHAPES = [(4, 2, 64), (6, 1, 40), (15, 3, 96), (4, 1, 256)]
CAPS_AND_SINKS = [(50.0, False), (0.0, True), (5.0, True)]
FORMS = [
    *((window, 0.0, False) for window in WINDOWS),
    *((window, cap, has_sinks) for window in (0, 37) for cap, has_sinks in CAPS_AND_SINKS),
]


def held_form(case: PagedCase, window: int, cap: float, has_sinks: bool) -> AttentionForm:
    return AttentionForm(0.2, window, cap, sinks(case.q.shape[1]) if has_sinks else None)


@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize(("window", "cap", "has_sinks"), FORMS)
@pytest.mark.parametrize(("heads", "groups", "dim"), FORMED_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_caps_and_sinks_equal_the_reference_and_no_block_before_a_window_is_read(
    dtype: torch.dtype, heads: int, groups: int, dim: int, cap: float, has_sinks: bool, window: int
) -> None:
    shape = {"heads": heads, "groups": groups, "dim": dim}
    decodes = paged_case([(1, context) for context in (1, 17, 40, 513, 1100)], dtype=dtype, **shape)
    chunks = paged_case([(5, 5), (64, 128), (40, 90), (3, 700)], dtype=dtype, **shape)
    for case, computed in ((decodes, decoded), (chunks, prefilled)):
        case.q.mul_(3)  # scores that caps are felt by
        form = held_form(case, window, cap, has_sinks)
        check(computed(case, form), case, form)
        if cap or has_sinks:
            without = reference.attention(case.q, case.kv_layer, case.layout, held_form(case, window, 0.0, False))
            assert (computed(case, form).flatten(1) - without).abs().max() > 0.02, "the form makes no difference here"


@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_two_chunks_share_a_tile_though_their_keys_do_not(dtype: torch.dtype) -> None:
    """The rows behind the border see nothing of the first tile of keys."""
    case = paged_case([(40, 1040)], heads=2, groups=1, dim=64, dtype=dtype)
    form = AttentionForm(0.1, -513)
    check(prefilled(case, form), case, form)


@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("block_size", [16, 33])
@pytest.mark.parametrize(("window", "cap", "has_sinks"), [(0, 0.0, False), (100, 5.0, True)])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 64), (6, 1, 40), (15, 3, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_in_fp8_is_read_as_the_numbers_it_holds(
    dtype: torch.dtype, heads: int, groups: int, dim: int, window: int, cap: float, has_sinks: bool, block_size: int
) -> None:
    shape: dict[str, Any] = {"heads": heads, "groups": groups, "dim": dim, "block_size": block_size, "dtype": dtype}
    # Enough decodes that a thread takes all KV heads of one.
    decodes = in_fp8(paged_case([(1, context) for context in (1, 40, 17, 600, 130)], **shape))
    chunks = in_fp8(paged_case([(5, 5), (40, 90), (3, 700)], **shape))
    for case, computed in ((decodes, decoded), (chunks, prefilled)):
        form = replace(held_form(case, window, cap, has_sinks), kv_scales=case.form.kv_scales)
        check(computed(case, form), case, form)


@pytest.mark.parametrize("dim", [64, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_numbers_of_a_cache_in_fp8_stay_broken(dtype: torch.dtype, dim: int) -> None:
    for lengths, computed in (([(1, 40)], decoded), ([(20, 40)], prefilled)):
        case = in_fp8(paged_case(lengths, heads=2, groups=1, dim=dim, dtype=dtype))
        block = int(case.layout.block_tables[0, 1])
        case.kv_layer[block, 1, 0, 2, 3] = float("nan")
        assert computed(case, case.form)[:, :, 3].isnan().all()
        assert not computed(case, case.form)[:, :, 4].isnan().any()
