"""Paged attention on GPUs: causal attention over the paged cache, of prompt chunks and of one token a sequence.

Chunks: variable lengths, cached prefixes, grouped query heads.

Decodes: contexts are split into segments that run at once (segments.py). One program reads a segment of one KV group
for all the query heads that share it; a second kernel merges the segments.

q [T, H, D], out [T, H * D] and kv_layer [num_blocks, 2, G, block_size, D] are contiguous. Contexts count this step's
own tokens, whose KV is in the cache by now; entries of block tables past a context are not read. A cache in FP8 is
widened as it is loaded; as int8 are its bits, for GPUs that don't know the type.

`model.backend.AttentionForm` says what becomes of scores. A window saves work: keys before it are neither loaded nor
multiplied but for those of its first step. Window and soft cap are compiled in, so a layer that has neither pays for
neither. A sink is where the online softmax starts: its score is the largest so far, and its weight the sum.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.backend import AttentionForm
from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.fp8 import beside_cache, of_cache
from twostroke.model.cuda.kernels.launch import (
    LOG2_E,
    Architecture,
    GpuTarget,
    await_inputs,
    dependent_launch,
    dot_precision,
    padded_head,
    power_of_two,
)
from twostroke.model.cuda.kernels.segments import (
    SplitConfig,
    first_seen,
    make_partials,
    merge_segments,
    part_of,
    segment_at,
    split_config,
)

_LOG2_E = tl.constexpr(LOG2_E)
# The largest score of a row that has seen no key yet: with -inf, weights relative to it would be NaN.
NO_SCORE = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Tiling of one launch."""

    block_m: int  # rows of a tile: (token, head of the group) pairs
    block_n: int  # keys a loop step
    num_warps: int
    num_stages: int  # depth of the loop's software pipeline


# For 16-bit types, by architecture and head dimension; the least sufficient row wins. Chosen from what compiles
# without spills within the shared memory. Hopper's row of 128 is the fastest of ten that an H200 measured (2026-11-26,
# Triton 3.6, docs/results/index.md): 365 to 425 TFLOP/s where 8 warps with 128 keys a step reach 343 to 368. All other
# rows are predicted. A load through the block table takes two levels of the pipeline, table entry and then keys, so 3
# stages hold one step in use and one in flight on Hopper (5 elsewhere).
#
# A tile of M rows does M operations for each byte of keys and values that it loads. At M = 128 an A100's 312 TFLOP/s
# ask 2.4 TB/s of its second-level cache, which is why M is 128 wherever sums (M D / threads), scores and weights
# (1.5 M N / threads) fit beside the addresses in 255 registers: at D = 128, N = 64 and 256 threads, 64 + 48. A head of
# 80 or 96 keeps masks of its padding too, and takes half the keys a step on Ampere.
_PREFILL: dict[Architecture, tuple[tuple[int, PrefillTiling], ...]] = {
    Architecture.HOPPER: (
        (64, PrefillTiling(128, 128, 8, 3)),
        (128, PrefillTiling(128, 64, 4, 3)),
        (256, PrefillTiling(128, 64, 8, 3)),
        (512, PrefillTiling(64, 16, 8, 3)),
    ),
    Architecture.AMPERE: (
        (64, PrefillTiling(128, 64, 4, 5)),
        (96, PrefillTiling(128, 32, 8, 5)),
        (128, PrefillTiling(128, 64, 8, 5)),
        (256, PrefillTiling(64, 32, 8, 5)),
        (512, PrefillTiling(32, 16, 8, 3)),
    ),
    Architecture.SMALL: (
        (64, PrefillTiling(128, 64, 4, 3)),
        (128, PrefillTiling(64, 32, 4, 3)),
        (256, PrefillTiling(32, 32, 4, 3)),
        (512, PrefillTiling(16, 16, 4, 2)),
    ),
}
# fp32 multiplies on the ordinary lanes, whose operands live in registers: small tiles, on any GPU.
_FP32_PREFILL = (
    (64, PrefillTiling(32, 32, 4, 3)),
    (128, PrefillTiling(16, 16, 4, 3)),
    (256, PrefillTiling(16, 16, 4, 3)),
    (512, PrefillTiling(16, 16, 8, 2)),
)
# Chunks of at most this many rows take tiles of as many, since half of a larger one would be padding, and half the keys
# a step, since half the warps hold half the registers.
_SHORT_ROWS, _SHORT_WARPS = 64, 4
# Head dimensions from which a cache in FP8, widened in registers, leaves room for half the keys a step.
_FP8_HALVES = {Architecture.HOPPER: 256, Architecture.AMPERE: 128}


def prefill_config(
    architecture: Architecture,
    head_dim: int,
    dtype: torch.dtype,
    heads_per_group: int,
    max_query_len: int,
    is_fp8: bool = False,
) -> PrefillTiling:
    """The table's row for a batch; `is_fp8` of the cache. Raises ValueError for heads wider than the table goes."""
    for widest, config in _FP32_PREFILL if dtype == torch.float32 else _PREFILL[architecture]:
        if head_dim <= widest:
            if max_query_len * heads_per_group <= _SHORT_ROWS < config.block_m:
                config = replace(config, block_m=_SHORT_ROWS, block_n=config.block_n // 2, num_warps=_SHORT_WARPS)
            if is_fp8 and widest >= _FP8_HALVES.get(architecture, math.inf) and config.block_n > 16:
                config = replace(config, block_n=config.block_n // 2)
            # A tile holds at least all heads of one token.
            return replace(config, block_m=max(config.block_m, power_of_two(heads_per_group)))
    raise ValueError(f"head_dim {head_dim} in {dtype} is wider than the attention kernels go")


@triton.jit
def cached_kv_offsets(
    block_table,
    start,
    context_len,
    block_stride,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Offsets of the BLOCK_N tokens from position `start` (a multiple of BLOCK_N) on, within one head of K, int64.

    Lanes past the context get the offset of block 0 where MASKED; the caller masks their loads.
    """
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        # The tile lies in one block: one scalar look-up, and rows at a constant stride.
        block = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
        offsets = block * block_stride + (start % BLOCK_SIZE + lanes) * HEAD_DIM
    else:
        positions = start + lanes
        entries = block_table + positions // BLOCK_SIZE
        if MASKED:
            blocks = tl.load(entries, mask=positions < context_len, other=0).to(tl.int64)
        else:
            blocks = tl.load(entries).to(tl.int64)
        offsets = blocks * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM
    return offsets


@triton.jit
def soft_capped(scores, scale_log2, SOFT_CAP: tl.constexpr):
    """Unscaled scores that, scaled, are SOFT_CAP tanh(s / SOFT_CAP) of the scaled ones s.

    tanh(x) = 1 - 2 / (exp(2 x) + 1), within 2^-23 of SOFT_CAP; from exp(2 x) = 2^30 on that is 1 in fp32.
    """
    cap = SOFT_CAP * _LOG2_E / scale_log2
    doubled = tl.exp2(tl.minimum(scores * (2.0 * _LOG2_E / cap), 30.0))
    return cap - 2.0 * cap / (doubled + 1.0)


@triton.jit
def attend_tile(
    q,
    k_head,
    block_table,
    kind_stride,
    block_stride,
    start,
    least,
    context_len,
    positions,
    scale_log2,
    best,
    total,
    acc,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): keys [start, start + BLOCK_N).

    q [rows, HEAD_DIM_PADDED] with zeros in the padding; `positions` are the rows' own. Where MASKED, a row sees no
    later key, and with a WINDOW none before its own; keys before `least`, the first that any row sees, are not read.
    State: `best` the rows' largest score in base-2 units, NO_SCORE before the first, `total` the sum and `acc` the
    weighted values relative to it.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    keys = start + tl.arange(0, BLOCK_N)
    offsets = cached_kv_offsets(
        block_table, start, context_len, block_stride, MASKED, HEAD_DIM, BLOCK_SIZE, BLOCK_N
    )  # fmt: skip
    k_at = k_head + offsets[None, :] + dims[:, None]
    v_at = k_head + kind_stride + offsets[:, None] + dims[None, :]
    if MASKED:
        # Slots past the context may hold NaN, which a weight of zero would not silence.
        present = keys < context_len
        if WINDOW:
            present = present & (keys >= least)
        k = tl.load(k_at, mask=present[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM_PADDED != HEAD_DIM:
        k = tl.load(k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    k, v = of_cache(k, q.dtype), of_cache(v, q.dtype)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if SOFT_CAP > 0.0:
        scores = soft_capped(scores, scale_log2, SOFT_CAP)
    if MASKED:
        visible = (keys[None, :] <= positions[:, None]) & (keys < context_len)[None, :]
        if WINDOW:
            visible = visible & (keys[None, :] >= first_seen(positions, WINDOW)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * shrink[:, None], input_precision=PRECISION)
    return new_best, total, acc


# The table's width and where slices of the layout start change from step to step: specialised on them, the kernel would
# be compiled again in the midst of serving.
@triton.jit(do_not_specialize=["query_starts", "context_lens", "block_tables", "sinks", "table_stride"])
def prefill_attention_kernel(
    q,
    kv_layer,
    query_starts,
    context_lens,
    block_tables,
    sinks,
    out,
    scale_log2,
    value_scale,
    token_stride,
    out_stride,
    block_stride,
    kind_stride,
    head_stride,
    table_stride,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per tile of tokens, a KV group and a sequence; the tile's rows are (token, head of the group)
    pairs."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS_PER_GROUP
    sequence = tl.program_id(2)
    group = tl.program_id(1)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    # The last tile sees the most keys: it starts first, so that no long program is left over at the end.
    tile = (query_len + TOKENS - 1) // TOKENS - 1 - tl.program_id(0)
    if tile < 0:
        return
    context_len = tl.load(context_lens + sequence)
    block_table = block_tables + sequence.to(tl.int64) * table_stride
    k_head = kv_layer + group.to(tl.int64) * head_stride

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    tokens = tile * TOKENS + rows // HEADS_PER_GROUP
    heads = group * HEADS_PER_GROUP + rows % HEADS_PER_GROUP
    inside = ((rows < TOKENS * HEADS_PER_GROUP) & (tokens < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
    first = context_len - query_len + tile * TOKENS  # position of the tile's first token
    positions = context_len - query_len + tokens

    q_tile = tl.load(
        q + query_start.to(tl.int64) * token_stride
        + tokens.to(tl.int64)[:, None] * token_stride + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=inside,
        other=0.0,
    )  # fmt: skip
    q_tile = beside_cache(q_tile, kv_layer.dtype.element_ty)
    best = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    if sinks is not None:
        best = tl.load(sinks + heads) * _LOG2_E
        total += 1.0

    end = tl.minimum(first + TOKENS, context_len)
    if WINDOW:
        # Masked throughout: steps that all rows see whole would need a loop between two others.
        least = first_seen(first, WINDOW)
        masked_from = least // BLOCK_N * BLOCK_N
    else:
        # Whole steps that every row sees need no mask; the rest cross the diagonal or the context's end.
        least = 0
        masked_from = (first + 1) // BLOCK_N * BLOCK_N
        for start in range(0, masked_from, BLOCK_N):
            best, total, acc = attend_tile(
                q_tile, k_head, block_table, kind_stride, block_stride, start, least, context_len, positions,
                scale_log2, best, total, acc, False, WINDOW, SOFT_CAP, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N,
                PRECISION,
            )  # fmt: skip
    for start in range(masked_from, end, BLOCK_N):
        best, total, acc = attend_tile(
            q_tile, k_head, block_table, kind_stride, block_stride, start, least, context_len, positions, scale_log2,
            best, total, acc, True, WINDOW, SOFT_CAP, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip

    tl.store(
        out + query_start.to(tl.int64) * out_stride
        + tokens.to(tl.int64)[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :],
        # Rows past the query, which are not stored, may have seen no key.
        (acc * value_scale / tl.where(total > 0.0, total, 1.0)[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )  # fmt: skip


def prompt_chunks(layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
    """(query starts, context lengths, block tables) of the sequences behind the decodes."""
    first = layout.num_decodes
    return layout.query_starts[first:], layout.context_lens[first:], layout.block_tables[first:]


def prefill_attention(
    q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor, config: PrefillTiling
) -> None:
    """`paged_attention` of tests/rigs/reference.py for the layout's chunks, written to their rows of out."""
    _, heads, dim = q.shape
    groups, block_size = kv_layer.shape[2], kv_layer.shape[3]
    query_starts, context_lens, block_tables = prompt_chunks(layout)
    heads_per_group = heads // groups
    tiles = triton.cdiv(layout.max_query_len, config.block_m // heads_per_group)
    prefill_attention_kernel[(tiles, groups, context_lens.shape[0])](
        q, kv_layer, query_starts, context_lens, block_tables, form.sinks, out,
        form.cached_scale * LOG2_E, form.kv_scales.value,
        q.stride(0), out.stride(0), *kv_layer.stride()[:3], block_tables.stride(0),
        HEADS_PER_GROUP=heads_per_group, HEAD_DIM=dim, HEAD_DIM_PADDED=padded_head(dim),
        BLOCK_SIZE=block_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WINDOW=form.window, SOFT_CAP=form.soft_cap, PRECISION=dot_precision(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Tiling of one launch."""

    block_n: int  # keys a loop step
    num_warps: int
    num_stages: int
    split: SplitConfig


# For 16-bit types, by architecture and padded head dimension; the least sufficient row wins: keys a step, warps,
# stages. Predicted, not measured: a key is multiplied by the queries of one group only, some 4 operations a byte, so
# what counts are bytes in flight. Each two stages past the third keep one more step of keys and values (32 KiB on
# Hopper, 16 on Ampere) in flight, as the table's entries take a level of the pipeline; two programs of 104 and 54 KiB
# fit a multiprocessor: 2 x 2 x 32 KiB in flight beside what is in use. An H100 needs 3.35 TB/s x 0.7 us / 132 = 18 KiB
# for its bandwidth, an A100 13: several times that, since loads come in bursts.
_DECODE: dict[Architecture, tuple[tuple[int, tuple[int, int, int]], ...]] = {
    Architecture.HOPPER: ((64, (128, 4, 7)), (128, (64, 4, 7)), (256, (32, 4, 7)), (512, (16, 4, 5))),
    Architecture.AMPERE: ((64, (64, 4, 7)), (128, (32, 4, 7)), (256, (32, 4, 5)), (512, (16, 4, 4))),
    Architecture.SMALL: ((64, (64, 4, 5)), (128, (32, 4, 5)), (256, (16, 4, 5)), (512, (16, 4, 2))),
}
# fp32 multiplies on the ordinary lanes, whose operands live in registers: short steps, on any GPU.
_FP32_DECODE = ((64, (32, 4, 5)), (128, (16, 4, 5)), (256, (16, 4, 5)), (512, (16, 4, 2)))


def decode_config(
    target: GpuTarget, head_dim: int, dtype: torch.dtype, groups: int, max_context_len: int
) -> DecodeTiling:
    """The table's row for a batch. Raises ValueError for too wide heads.

    `max_context_len`: the most keys that a sequence reads, so a window's where that is shorter.
    """
    table = _FP32_DECODE if dtype == torch.float32 else _DECODE[target.architecture]
    for widest, (block_n, warps, stages) in table:
        if head_dim <= widest:
            return DecodeTiling(block_n, warps, stages, split_config(target, groups, max_context_len, block_n))
    raise ValueError(f"head_dim {head_dim} in {dtype} is wider than the attention kernels go")


# As for prefill: nothing that changes from step to step may cause a compilation.
@triton.jit(do_not_specialize=["context_lens", "block_tables", "sinks", "table_stride", "num_rows"])
def decode_attention_kernel(
    q,
    kv_layer,
    context_lens,
    block_tables,
    sinks,
    out,
    partial_out,
    partial_log_sums,
    splits,
    scale_log2,
    value_scale,
    token_stride,
    out_stride,
    block_stride,
    kind_stride,
    head_stride,
    table_stride,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (KV group, equal part of all contexts); rows are the group's heads.

    The result of a row's only segment goes to out. Of several, each one's own softmax average goes to partial_out
    [segments, H, D] and the base-2 logarithm of its sum to partial_log_sums [segments, H]; splits as in Partials.
    """
    await_inputs(DEPENDENT)
    group = tl.program_id(0)
    program = tl.program_id(1)
    share, row, end_row, row_start = part_of(context_lens, num_rows, program, tl.num_programs(1), WINDOW, BLOCK_N)
    k_head = kv_layer + group.to(tl.int64) * head_stride
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    heads = group * HEADS_PER_GROUP + rows
    inside = (rows < HEADS_PER_GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    in_token = heads[:, None] * HEAD_DIM + dims[None, :]
    for _ in tl.range(row, end_row, num_stages=1):
        sequence = row.to(tl.int64)
        context_len = tl.load(context_lens + sequence)
        begin, end, first_program, segments, steps = segment_at(context_len, row_start, program, share, WINDOW, BLOCK_N)
        is_first = program == first_program
        if is_first & (group == 0):
            tl.store(splits + 2 * sequence, row + program)
            tl.store(splits + 2 * sequence + 1, segments)
        row_start += steps
        block_table = block_tables + sequence * table_stride
        q_tile = tl.load(q + sequence * token_stride + in_token, mask=inside, other=0.0)
        q_tile = beside_cache(q_tile, kv_layer.dtype.element_ty)
        last = tl.zeros([BLOCK_M], tl.int32) + context_len - 1
        best = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
        if sinks is not None:
            # Among the first segment's keys: once.
            sink = tl.load(sinks + heads, mask=rows < HEADS_PER_GROUP, other=0.0) * _LOG2_E
            best = tl.where(is_first, sink, best)
            total = tl.where(is_first, 1.0, total)
        # Always masked: the loop waits for memory, and one loop keeps its loads in flight to the end.
        least = 0
        if WINDOW:
            least = first_seen(context_len - 1, WINDOW)
        for start in range(begin, end, BLOCK_N):
            best, total, acc = attend_tile(
                q_tile, k_head, block_table, kind_stride, block_stride, start, least, context_len, last,
                scale_log2, best, total, acc, True, WINDOW, SOFT_CAP, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N,
                PRECISION,
            )  # fmt: skip
        # An empty context (a padding row of a captured graph) gives zeros.
        acc = acc * value_scale / tl.where(total > 0.0, total, 1.0)[:, None]
        if segments > 1:
            partial = ((row + program) * NUM_HEADS + heads).to(tl.int64)
            tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
            tl.store(partial_log_sums + partial, best + tl.log2(total), mask=rows < HEADS_PER_GROUP)
        else:
            tl.store(out + sequence * out_stride + in_token, acc.to(out.dtype.element_ty), mask=inside)
        row += 1


def decode_attention(
    q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor, config: DecodeTiling
) -> None:
    """Attend as tests/rigs/reference.py does, for the layout's decodes, whose rows come first; zeros for an empty
    context."""
    _, heads, dim = q.shape
    groups, block_size = kv_layer.shape[2], kv_layer.shape[3]
    sequences, split = layout.num_decodes, config.split
    heads_per_group = heads // groups
    partials = make_partials(split, sequences, heads, dim, q.device)
    decode_attention_kernel[(groups, split.programs_for(sequences))](
        q, kv_layer, layout.context_lens, layout.block_tables, form.sinks, out, partials.out, partials.log_sums,
        partials.splits, form.cached_scale * LOG2_E, form.kv_scales.value,
        q.stride(0), out.stride(0), *kv_layer.stride()[:3], layout.block_tables.stride(0), sequences,
        NUM_HEADS=heads, HEADS_PER_GROUP=heads_per_group, HEAD_DIM=dim, HEAD_DIM_PADDED=padded_head(dim),
        BLOCK_SIZE=block_size, BLOCK_M=max(16, power_of_two(heads_per_group)), BLOCK_N=config.block_n,
        WINDOW=form.window, SOFT_CAP=form.soft_cap, PRECISION=dot_precision(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages, **dependent_launch(q),
    )  # fmt: skip
    if split.may_split:
        merge_segments(partials, out, out.stride(0))
