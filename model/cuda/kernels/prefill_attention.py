"""Causal attention of prompt chunks over the paged cache: variable lengths, cached prefixes, grouped query heads."""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.cuda.kernels.launch import Architecture, dot_precision, padded_head, power_of_two


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How one launch is tiled."""

    block_m: int  # rows of a tile: (token, head of the group) pairs
    block_n: int  # keys a loop step
    num_warps: int
    num_stages: int  # depth of the loop's software pipeline


# For 16-bit types, by architecture and head dimension; the least sufficient row wins. Chosen from what compiles without
# spills within the shared memory; predicted, not measured. A load through the block table takes two levels of the
# pipeline, table entry and then keys, so 3 stages hold one step in use and one in flight on Hopper (5 elsewhere).
#
# A tile of M rows does M operations for each byte of keys and values that it loads. At M = 128 an A100's 312 TFLOP/s
# ask 2.4 TB/s of its second-level cache, which is why M is 128 wherever sums (M D / threads), scores and weights
# (1.5 M N / threads) fit beside the addresses in 255 registers: at D = 128, N = 64 and 256 threads, 64 + 48. A head of
# 80 or 96 keeps masks of its padding too, and takes half the keys a step on Ampere.
_CONFIGS: dict[Architecture, tuple[tuple[int, PrefillConfig], ...]] = {
    Architecture.HOPPER: (
        (128, PrefillConfig(128, 128, 8, 3)),
        (256, PrefillConfig(128, 64, 8, 3)),
    ),
    Architecture.AMPERE: (
        (64, PrefillConfig(128, 64, 4, 5)),
        (96, PrefillConfig(128, 32, 8, 5)),
        (128, PrefillConfig(128, 64, 8, 5)),
        (256, PrefillConfig(64, 32, 8, 5)),
    ),
    Architecture.SMALL: (
        (64, PrefillConfig(128, 64, 4, 3)),
        (128, PrefillConfig(64, 32, 4, 3)),
        (256, PrefillConfig(32, 32, 4, 3)),
    ),
}
# fp32 multiplies on the ordinary lanes, whose operands live in registers: small tiles, on any GPU.
_FP32_CONFIGS = (
    (64, PrefillConfig(32, 32, 4, 3)),
    (128, PrefillConfig(16, 16, 4, 3)),
    (256, PrefillConfig(16, 16, 4, 3)),
)
# Chunks of at most this many rows take tiles of as many, since half of a larger one would be padding, and half the keys
# a step, since half the warps hold half the registers.
_SHORT_ROWS, _SHORT_WARPS = 64, 4


def prefill_config(
    architecture: Architecture, head_dim: int, dtype: torch.dtype, heads_per_group: int, max_query_len: int
) -> PrefillConfig:
    """The table's row for a batch. Raises ValueError for heads wider than the table goes."""
    for widest, config in _FP32_CONFIGS if dtype == torch.float32 else _CONFIGS[architecture]:
        if head_dim <= widest:
            if max_query_len * heads_per_group <= _SHORT_ROWS < config.block_m:
                config = replace(config, block_m=_SHORT_ROWS, block_n=config.block_n // 2, num_warps=_SHORT_WARPS)
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
def attend_tile(
    q,
    k_head,
    block_table,
    kind_stride,
    block_stride,
    start,
    context_len,
    positions,
    scale_log2,
    best,
    total,
    acc,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): keys [start, start + BLOCK_N).

    q [rows, HEAD_DIM_PADDED] with zeros in the padding; `positions` are the rows' own, of which no later key is seen
    where MASKED. State: `best` the rows' largest score in base-2 units, `total` the sum and `acc` the weighted values
    relative to it. Every row must have seen a key after its first step, or `best` would stay -inf and give NaN.
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
        k = tl.load(k_at, mask=(keys < context_len)[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(keys < context_len)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM_PADDED != HEAD_DIM:
        k = tl.load(k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        visible = (keys[None, :] <= positions[:, None]) & (keys < context_len)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * shrink[:, None], input_precision=PRECISION)
    return new_best, total, acc


# The table's width and where slices of the layout start change from step to step: specialised on them, the kernel would
# be compiled again in the midst of serving.
@triton.jit(do_not_specialize=["query_starts", "context_lens", "block_tables", "table_stride"])
def prefill_attention_kernel(
    q,
    kv_layer,
    query_starts,
    context_lens,
    block_tables,
    out,
    scale_log2,
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
    PRECISION: tl.constexpr,
):
    """One program a tile of tokens, a KV group and a sequence; the tile's rows are (token, head of the group) pairs."""
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
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)

    # Whole steps that every row sees need no mask; the rest cross the diagonal or the context's end. Key 0, which every
    # row sees (those past the query too), is in the first step either way.
    unmasked_end = (first + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first + TOKENS, context_len)
    for start in range(0, unmasked_end, BLOCK_N):
        best, total, acc = attend_tile(
            q_tile, k_head, block_table, kind_stride, block_stride, start, context_len, positions, scale_log2,
            best, total, acc, False, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
    for start in range(unmasked_end, end, BLOCK_N):
        best, total, acc = attend_tile(
            q_tile, k_head, block_table, kind_stride, block_stride, start, context_len, positions, scale_log2,
            best, total, acc, True, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip

    tl.store(
        out + query_start.to(tl.int64) * out_stride
        + tokens.to(tl.int64)[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )  # fmt: skip


def prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    out: Tensor,
    config: PrefillConfig,
) -> None:
    """`paged_attention` of model/reference.py, written to out [T, H * D].

    q [T, H, D] and out are the whole batch's: `query_starts` int32 [B + 1] count from their first rows, and rows
    outside are not touched. context_lens int32 [B] count this step's own tokens, whose KV is in the cache by now;
    block_tables int32 [B, any], entries past a context are not read.
    """
    _, heads, dim = q.shape
    groups, block_size = kv_layer.shape[2], kv_layer.shape[3]
    heads_per_group = heads // groups
    tiles = triton.cdiv(max_query_len, config.block_m // heads_per_group)
    prefill_attention_kernel[(tiles, groups, context_lens.shape[0])](
        q, kv_layer, query_starts, context_lens, block_tables, out, math.log2(math.e) / math.sqrt(dim),
        q.stride(0), out.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), block_tables.stride(0),
        HEADS_PER_GROUP=heads_per_group, HEAD_DIM=dim, HEAD_DIM_PADDED=padded_head(dim), BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, PRECISION=dot_precision(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
