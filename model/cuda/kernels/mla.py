"""MLA (DeepSeek-AI 2024, section 2.1): the write into the cache, decodes, and parts of prompts.

A row of the cache is a token's latent, R numbers, and P rotary ones; rows are keys and values of all heads alike. q [T,
H, N + P], of each head the rotary part last, contiguous; kv_layer [num_blocks, 1, 1, block_size, R + P], of rows that
may be longer.

Decodes are split into segments (segments.py). One program reads a segment's rows once for as many heads as a tile has,
and multiplies the latents with queries that have absorbed what makes keys, and with weights. A prompt's context comes
in parts, of which keys and values have been made: a program takes up where it left off with the part before.

Reference: tests/rigs/reference.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.launch import (
    LOG2_E,
    Architecture,
    GpuTarget,
    dot_precision,
    padded_head,
    power_of_two,
)
from twostroke.model.cuda.kernels.paged_attention import (
    NO_SCORE,
    cached_kv_offsets,
    prompt_chunks,
)
from twostroke.model.cuda.kernels.segments import (
    LN_2,
    SplitConfig,
    make_partials,
    merge_segments,
    part_of,
    segment_at,
    split_config,
)


@triton.jit(do_not_specialize=["positions", "slots"])
def write_latents_kernel(
    rows,
    gains,
    eps,
    cos_sin,
    kv_layer,
    positions,
    slots,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    ROW: tl.constexpr,
):
    """One program per token. A negative slot writes nothing; its position must still be within cos_sin."""
    WIDTH: tl.constexpr = RANK + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        source, target = rows + token * WIDTH, kv_layer + slot * ROW
        dims = tl.arange(0, RANK_PADDED)
        real = dims < RANK
        latent = tl.load(source + dims, mask=real, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(latent * latent, axis=0) / RANK + eps)
        normalised = latent * scale * tl.load(gains + dims, mask=real, other=0.0)
        tl.store(target + dims, normalised.to(kv_layer.dtype.element_ty), mask=real)
        rotate_in_place(
            source + RANK, target + RANK, cos_sin + tl.load(positions + token) * (2 * HALF), HALF, HALF_PADDED
        )


@triton.jit
def rotate_in_place(source, target, angles, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """2 HALF numbers at `source`, rotated, to `target`, which may be the same."""
    dims = tl.arange(0, HALF_PADDED)
    real = dims < HALF
    cos, sin = tl.load(angles + dims, mask=real, other=0.0), tl.load(angles + HALF + dims, mask=real, other=0.0)
    first = tl.load(source + dims, mask=real, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dims, mask=real, other=0.0).to(tl.float32)
    kind: tl.constexpr = target.dtype.element_ty
    tl.store(target + dims, (first * cos - second * sin).to(kind), mask=real)
    tl.store(target + HALF + dims, (second * cos + first * sin).to(kind), mask=real)


def write_latents(
    rows: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
) -> None:
    """Implement Backend.write_latents."""
    rank, half = len(norm), (rows.shape[1] - len(norm)) // 2
    if len(rows):
        write_latents_kernel[(len(rows),)](
            rows, norm, eps, cos_sin, kv_layer, layout.positions, layout.slots,
            RANK=rank, RANK_PADDED=power_of_two(rank), HALF=half, HALF_PADDED=power_of_two(half),
            ROW=kv_layer.shape[4], num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["positions"])
def turn_queries_kernel(
    q, cos_sin, positions, NUM_HEADS: tl.constexpr, KEY: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr
):
    """One program per token and a head, in place."""
    token = tl.program_id(0).to(tl.int64)
    place = q + (token * NUM_HEADS + tl.program_id(1)) * (KEY + 2 * HALF) + KEY
    rotate_in_place(place, place, cos_sin + tl.load(positions + token) * (2 * HALF), HALF, HALF_PADDED)


def turn_queries(q: Tensor, key: int, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotate the rotary part of queries [T, H, N + P], in place; `key` is N."""
    tokens, heads, width = q.shape
    half = (width - key) // 2
    if tokens:
        turn_queries_kernel[(tokens, heads)](
            q, cos_sin, positions, NUM_HEADS=heads, KEY=key, HALF=half, HALF_PADDED=power_of_two(half), num_warps=1
        )


@dataclass(frozen=True, slots=True)
class MLADecodeConfig:
    """Tiling of one launch."""

    block_m: int  # heads of a program
    block_n: int  # tokens a loop step
    num_warps: int
    num_stages: int
    split: SplitConfig


# Heads of a program at most, tokens a step, warps, stages. Sums [heads, R] are in registers. A step of 32 tokens of 576
# bf16 numbers is 36 KiB, twice, and with 5 stages two steps are in shared memory: one in use, one in flight. Predicted
# from what compiles without spills within the shared memory, not measured.
_DECODE: dict[Architecture, tuple[int, int, int, int]] = {
    Architecture.HOPPER: (32, 32, 8, 6),
    Architecture.AMPERE: (16, 32, 8, 5),
    Architecture.SMALL: (16, 16, 8, 5),
}
_FP32_DECODE = (16, 16, 8, 2)


def latent_decode_config(target: GpuTarget, heads: int, dtype: torch.dtype, max_context_len: int) -> MLADecodeConfig:
    """The table's row for a batch."""
    most, block_n, warps, stages = _FP32_DECODE if dtype == torch.float32 else _DECODE[target.architecture]
    block_m = max(16, min(most, power_of_two(heads)))
    split = split_config(target, -(-heads // block_m), max_context_len, block_n)
    return MLADecodeConfig(block_m, block_n, warps, stages, split)


@triton.jit(do_not_specialize=["context_lens", "block_tables", "table_stride", "num_rows"])
def latent_decode_kernel(
    absorbed,
    q,
    kv_layer,
    context_lens,
    block_tables,
    out,
    partial_out,
    partial_log_sums,
    splits,
    log_sums,
    scale_log2,
    absorbed_head_stride,
    absorbed_row_stride,
    table_stride,
    num_rows,
    NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_LOG_SUMS: tl.constexpr,
):
    """Programs (tile of heads, equal part of all contexts). Results as decode_attention_kernel has, and, where
    HAS_LOG_SUMS, of rows of one segment natural logarithms of their sums of weights, -inf for an empty context."""
    program = tl.program_id(1)
    share, row, end_row, row_start = part_of(context_lens, num_rows, program, tl.num_programs(1), 0, BLOCK_N)
    heads = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ours = (heads < NUM_HEADS)[:, None]
    dims, rotary = tl.arange(0, RANK_PADDED), tl.arange(0, ROTARY_PADDED)
    inside = ours & (dims < RANK)[None, :]
    for _ in tl.range(row, end_row, num_stages=1):
        sequence = row.to(tl.int64)
        context_len = tl.load(context_lens + sequence)
        begin, end, first_program, segments, steps = segment_at(context_len, row_start, program, share, 0, BLOCK_N)
        if (program == first_program) & (tl.program_id(0) == 0):
            tl.store(splits + 2 * sequence, row + program)
            tl.store(splits + 2 * sequence + 1, segments)
        row_start += steps
        block_table = block_tables + sequence * table_stride
        still_q = tl.load(
            absorbed
            + heads.to(tl.int64)[:, None] * absorbed_head_stride
            + sequence * absorbed_row_stride
            + dims[None, :],
            mask=ours & (dims < RANK)[None, :],
            other=0.0,
        )
        rotary_q = tl.load(
            q + (sequence * NUM_HEADS + heads)[:, None] * (KEY + ROTARY) + KEY + rotary[None, :],
            mask=ours & (rotary < ROTARY)[None, :],
            other=0.0,
        )
        best = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, RANK_PADDED], tl.float32)
        for start in range(begin, end, BLOCK_N):
            present = start + tl.arange(0, BLOCK_N) < context_len
            offsets = cached_kv_offsets(
                block_table, start, context_len, BLOCK_SIZE * ROW, True, ROW, BLOCK_SIZE, BLOCK_N
            )  # fmt: skip
            # Once to be scored and once to be mixed: a load for both is not kept in flight, and both are of one line.
            k = tl.load(
                kv_layer + offsets[None, :] + dims[:, None], mask=present[None, :] & (dims < RANK)[:, None], other=0.0
            )
            v = tl.load(
                kv_layer + offsets[:, None] + dims[None, :], mask=present[:, None] & (dims < RANK)[None, :], other=0.0
            )
            rotary_keys = tl.load(
                kv_layer + offsets[None, :] + RANK + rotary[:, None],
                mask=present[None, :] & (rotary < ROTARY)[:, None],
                other=0.0,
            )
            scores = tl.dot(rotary_q, rotary_keys, input_precision=PRECISION)
            scores = tl.dot(still_q, k, acc=scores, input_precision=PRECISION)
            scores = tl.where(present[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(v.dtype), v, acc=acc * shrink[:, None], input_precision=PRECISION)
            best = new_best
        # An empty context (a padding row of a captured graph) gives zeros.
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        if segments > 1:
            partial = ((row + program) * NUM_HEADS + heads).to(tl.int64)
            tl.store(partial_out + partial[:, None] * RANK + dims[None, :], acc, mask=inside)
            tl.store(partial_log_sums + partial, best + tl.log2(total), mask=heads < NUM_HEADS)
        else:
            place = out + (sequence * NUM_HEADS + heads)[:, None] * RANK + dims[None, :]
            tl.store(place, acc.to(out.dtype.element_ty), mask=inside)
            if HAS_LOG_SUMS:
                log_sum = (best + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN_2
                log_sum = tl.where(total > 0.0, log_sum, float("-inf"))
                tl.store(log_sums + sequence * NUM_HEADS + heads, log_sum, mask=heads < NUM_HEADS)
        row += 1


def latent_decode(
    absorbed: Tensor,
    q: Tensor,
    kv_layer: Tensor,
    layout: BatchLayout,
    scale: float,
    out: Tensor,
    config: MLADecodeConfig,
    log_sums: Tensor | None = None,
) -> None:
    """The layout's decodes, whose rows come first: mixtures of latents to out [B, H, R]; zeros for an empty context.

    absorbed [H, B, R], its last dimension contiguous; q [T, H, N + P], rotated. `log_sums`, fp32 [B, H], gets natural
    logarithms of sums of weights, -inf for an empty context.
    """
    heads, sequences, rank = absorbed.shape
    rotary, split = kv_layer.shape[4] - rank, config.split
    partials = make_partials(split, sequences, heads, rank, q.device)
    latent_decode_kernel[(triton.cdiv(heads, config.block_m), split.programs_for(sequences))](
        absorbed, q, kv_layer, layout.context_lens, layout.block_tables, out, partials.out, partials.log_sums,
        partials.splits, log_sums, scale * LOG2_E, absorbed.stride(0), absorbed.stride(1),
        layout.block_tables.stride(0), sequences,
        NUM_HEADS=heads, KEY=q.shape[2] - rotary, RANK=rank, RANK_PADDED=padded_head(rank), ROTARY=rotary,
        ROTARY_PADDED=padded_head(rotary), ROW=kv_layer.stride(3), BLOCK_SIZE=kv_layer.shape[3],
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, PRECISION=dot_precision(q.dtype),
        HAS_LOG_SUMS=log_sums is not None, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if split.may_split:
        merge_segments(partials, out, heads * rank, log_sums)


@dataclass(frozen=True, slots=True)
class MLAPartConfig:
    """Tiling of one launch."""

    block_m: int  # queries of a tile
    block_n: int  # tokens a loop step
    num_warps: int
    num_stages: int


_PARTS: dict[Architecture, MLAPartConfig] = {
    Architecture.HOPPER: MLAPartConfig(128, 64, 8, 3),
    Architecture.AMPERE: MLAPartConfig(128, 32, 8, 3),
    Architecture.SMALL: MLAPartConfig(64, 32, 4, 2),
}
_FP32_PARTS = MLAPartConfig(16, 16, 4, 2)


def latent_part_config(architecture: Architecture, dtype: torch.dtype) -> MLAPartConfig:
    """The table's row."""
    return _FP32_PARTS if dtype == torch.float32 else _PARTS[architecture]


@triton.jit(do_not_specialize=["query_starts", "context_lens", "part_start", "part_tokens"])
def latent_part_kernel(
    q,
    keys,
    values,
    rows,
    query_starts,
    context_lens,
    mixed,
    log_sums,
    part_start,
    part_tokens,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per tile of a sequence's queries and a head."""
    sequence = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    tile = (query_len + BLOCK_M - 1) // BLOCK_M - 1 - tl.program_id(0)
    if tile < 0:
        return
    context_len = tl.load(context_lens + sequence)
    tokens = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    positions = context_len - query_len + tokens
    last = tl.minimum(context_len - query_len + (tile + 1) * BLOCK_M, context_len)
    end = tl.minimum(last - part_start, part_tokens)
    if end <= 0:
        return
    ours = tokens < query_len
    still, rotary, dims = tl.arange(0, KEY_PADDED), tl.arange(0, ROTARY_PADDED), tl.arange(0, VALUE_PADDED)
    pairs = (query_start + tokens).to(tl.int64) * NUM_HEADS + head
    still_q = tl.load(
        q + pairs[:, None] * (KEY + ROTARY) + still[None, :], mask=ours[:, None] & (still < KEY)[None, :], other=0.0
    )
    rotary_q = tl.load(
        q + pairs[:, None] * (KEY + ROTARY) + KEY + rotary[None, :],
        mask=ours[:, None] & (rotary < ROTARY)[None, :],
        other=0.0,
    )
    inside = ours[:, None] & (dims < VALUE)[None, :]
    if part_start == 0:
        best = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)
    else:
        best = tl.load(log_sums + pairs, mask=ours, other=0.0)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.load(mixed + pairs[:, None] * VALUE + dims[None, :], mask=inside, other=0.0)
    for start in range(0, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        present = at < end
        token = sequence * part_tokens + at
        k = tl.load(
            keys + (token * NUM_HEADS + head)[None, :] * KEY + still[:, None],
            mask=present[None, :] & (still < KEY)[:, None],
            other=0.0,
        )
        rotary_keys = tl.load(
            rows + token[None, :] * (RANK + ROTARY) + RANK + rotary[:, None],
            mask=present[None, :] & (rotary < ROTARY)[:, None],
            other=0.0,
        )
        v = tl.load(
            values + (token * NUM_HEADS + head)[:, None] * VALUE + dims[None, :],
            mask=present[:, None] & (dims < VALUE)[None, :],
            other=0.0,
        )
        scores = tl.dot(rotary_q, rotary_keys, input_precision=PRECISION)
        scores = tl.dot(still_q, k, acc=scores, input_precision=PRECISION)
        visible = present[None, :] & (part_start + at[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc=acc * shrink[:, None], input_precision=PRECISION)
        best = new_best
    # Rows past the query, which are not stored, may have seen no key; others have seen one in the first part.
    seen = tl.where(total > 0.0, total, 1.0)
    tl.store(mixed + pairs[:, None] * VALUE + dims[None, :], acc / seen[:, None], mask=inside)
    tl.store(log_sums + pairs, best + tl.log2(seen), mask=ours)


def latent_part(
    q: Tensor,
    kinds: tuple[Tensor, Tensor],
    rows: Tensor,
    layout: BatchLayout,
    start: int,
    scale: float,
    state: tuple[Tensor, Tensor],
    config: MLAPartConfig,
) -> None:
    """Let all chunks' queries attend to one part of their contexts as well, from position `start` on.

    q [T, H, N + P], rotated. kinds: keys [chunks, tokens, H, N] and values [chunks, tokens, H, V] of the part; rows
    [chunks, tokens, R + P] of the cache, which they were made of. state, written by the part from 0 on and then read:
    fp32 averages [T, H, V] and base-2 logarithms of sums of weights [T, H].
    """
    keys, values = kinds
    query_starts, context_lens, _ = prompt_chunks(layout)
    heads, key, value, rotary = q.shape[1], keys.shape[3], values.shape[3], q.shape[2] - keys.shape[3]
    latent_part_kernel[(triton.cdiv(layout.max_query_len, config.block_m), heads, context_lens.shape[0])](
        q, keys, values, rows, query_starts, context_lens, *state, start, rows.shape[1], scale * LOG2_E,
        NUM_HEADS=heads, KEY=key, KEY_PADDED=padded_head(key), ROTARY=rotary, ROTARY_PADDED=padded_head(rotary),
        VALUE=value, VALUE_PADDED=padded_head(value), RANK=rows.shape[2] - rotary,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, PRECISION=dot_precision(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
