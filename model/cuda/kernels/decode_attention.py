"""Attention of one token a sequence over the paged cache, each context split into segments that run at once.

One program reads one segment of one KV group for all the query heads that share it; a second kernel merges the segments
(split-KV, as in Flash-Decoding: Dao et al. 2023). The number of segments is a function of shapes, and each segment's
length is found on the device: the grid stays the same while contexts grow, so a captured graph stays valid.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.cuda.kernels.launch import Architecture, Target, dot_precision, padded_head, power_of_two
from twostroke.model.cuda.kernels.prefill_attention import attend_tile


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How one launch is tiled."""

    block_n: int  # keys a loop step
    num_warps: int
    num_stages: int
    num_segments: int  # at most MOST_SEGMENTS; 1 writes the result without the merging kernel


# For 16-bit types, by architecture and padded head dimension; the least sufficient row wins: keys a step, warps,
# stages. Predicted, not measured: a key is multiplied by the queries of one group only, some 4 operations a byte, so
# what counts are bytes in flight. Each two stages past the third keep one more step of keys and values (32 KiB on
# Hopper, 16 on Ampere) in flight, as the table's entries take a level of the pipeline; two programs of 104 and 54 KiB
# fit a multiprocessor: 2 x 2 x 32 KiB in flight beside what is in use. An H100 needs 3.35 TB/s x 0.7 us / 132 = 18 KiB
# for its bandwidth, an A100 13: several times that, since loads come in bursts.
_CONFIGS: dict[Architecture, tuple[tuple[int, tuple[int, int, int]], ...]] = {
    Architecture.HOPPER: ((64, (128, 4, 7)), (128, (64, 4, 7)), (256, (32, 4, 7))),
    Architecture.AMPERE: ((64, (64, 4, 7)), (128, (32, 4, 7)), (256, (32, 4, 5))),
    Architecture.SMALL: ((64, (64, 4, 5)), (128, (32, 4, 5)), (256, (16, 4, 5))),
}
# fp32 multiplies on the ordinary lanes, whose operands live in registers: short steps, on any GPU.
_FP32_CONFIGS = ((64, (32, 4, 5)), (128, (16, 4, 5)), (256, (16, 4, 5)))
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MOST_WAVES = 4  # of programs; more segments would even out little more, and each starts with a wait for memory
_NEARLY = 1.05  # as good as the best, if it takes fewer segments
MOST_SEGMENTS = 128
_LEAST_SEGMENT_STEPS = 2  # a shorter segment costs more in the merge than it saves
_MERGE_SEGMENTS = 16  # segments a step of the merging kernel


def decode_config(
    target: Target, head_dim: int, dtype: torch.dtype, groups: int, num_sequences: int, max_context_len: int
) -> DecodeConfig:
    """The table's row for a batch, and the number of segments. Raises ValueError for too wide heads."""
    table = _FP32_CONFIGS if dtype == torch.float32 else _CONFIGS[target.architecture]
    for widest, (block_n, warps, stages) in table:
        if head_dim <= widest:
            at_once = target.multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
            useful = min(max_context_len // (block_n * _LEAST_SEGMENT_STEPS), MOST_SEGMENTS)
            return DecodeConfig(block_n, warps, stages, _num_segments(num_sequences * groups, at_once, useful))
    raise ValueError(f"head_dim {head_dim} in {dtype} is wider than the attention kernels go")


def _num_segments(programs: int, at_once: int, useful: int) -> int:
    """How far to split contexts, at most `useful`: the fewest segments that take nearly the least time.

    `programs` run for each segment, `at_once` in a wave. Waves follow each other, and each takes the time of a segment:
    320 programs on 264 places would take two whole contexts' time, while split by 3 they take 4 waves of a third.
    """
    candidates = range(1, max(1, min(useful, at_once * _MOST_WAVES // programs)) + 1)
    times = {segments: math.ceil(programs * segments / at_once) / segments for segments in candidates}
    enough = min(times.values()) * _NEARLY
    return next(segments for segments, time in times.items() if time <= enough)


@triton.jit
def segment_len(context_len, num_segments, BLOCK_N: tl.constexpr):
    """Keys of a segment: whole steps, the same for all segments of a sequence; at least one step."""
    per_segment = (context_len + num_segments - 1) // num_segments
    return tl.maximum((per_segment + BLOCK_N - 1) // BLOCK_N, 1) * BLOCK_N


# As for prefill: nothing that changes from step to step, nor the number of segments, may cause a compilation.
@triton.jit(do_not_specialize=["context_lens", "block_tables", "table_stride"])
def decode_attention_kernel(
    q,
    kv_layer,
    context_lens,
    block_tables,
    out,
    partial_out,
    partial_log_sums,
    scale_log2,
    token_stride,
    out_stride,
    block_stride,
    kind_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a KV group, a segment and a sequence; its rows are the group's heads.

    Without SPLIT there is one segment, and the result goes to out. With it, the segment's own softmax average goes to
    partial_out [B, H, segments, D] and the base-2 logarithm of its sum to partial_log_sums [B, H, segments]; segments
    past the context write neither.
    """
    group = tl.program_id(0)
    segment = tl.program_id(1)
    num_segments = tl.num_programs(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    length = segment_len(context_len, num_segments, BLOCK_N)
    begin = segment * length
    if SPLIT and begin >= context_len:
        return
    end = tl.minimum(begin + length, context_len)
    block_table = block_tables + sequence * table_stride
    k_head = kv_layer + group.to(tl.int64) * head_stride

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    heads = group * HEADS_PER_GROUP + rows
    inside = (rows < HEADS_PER_GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    in_token = heads[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q + sequence * token_stride + in_token, mask=inside, other=0.0)
    last = tl.zeros([BLOCK_M], tl.int32) + context_len
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    # Always masked: the loop waits for memory, and one loop keeps its loads in flight to the end.
    for start in range(begin, end, BLOCK_N):
        best, total, acc = attend_tile(
            q_tile, k_head, block_table, kind_stride, block_stride, start, context_len, last, scale_log2,
            best, total, acc, True, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
    # An empty context (a padding row of a captured graph) gives zeros.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:
        partial = (sequence * NUM_HEADS + heads) * num_segments + segment
        tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
        tl.store(partial_log_sums + partial, best + tl.log2(total), mask=rows < HEADS_PER_GROUP)
    else:
        tl.store(out + sequence * out_stride + in_token, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["context_lens", "num_segments"])
def merge_segments_kernel(
    partial_out,
    partial_log_sums,
    context_lens,
    out,
    out_stride,
    num_segments,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST_SEGMENTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program a head and a sequence: the segments' averages, weighted by their sums, to out [B, H * D]."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    length = segment_len(context_len, num_segments, BLOCK_N)
    used = (context_len + length - 1) // length
    partial = (sequence * NUM_HEADS + head) * num_segments
    segments = tl.arange(0, MOST_SEGMENTS)
    log_sums = tl.load(partial_log_sums + partial + segments, mask=segments < used, other=float("-inf"))
    # Without any segment the maximum is -inf; a finite stand-in makes all weights 0 instead of NaN.
    best = tl.maximum(tl.max(log_sums, axis=0), -1.0e30)
    total = tl.sum(tl.exp2(log_sums - best), axis=0)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    real = dims < HEAD_DIM
    acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for first in range(0, used, STEP):
        some = first + tl.arange(0, STEP)
        weights = tl.exp2(tl.load(partial_log_sums + partial + some, mask=some < used, other=float("-inf")) - best)
        values = tl.load(
            partial_out + (partial + some)[:, None] * HEAD_DIM + dims[None, :],
            mask=(some < used)[:, None] & real[None, :],
            other=0.0,
        )
        acc += tl.sum(weights[:, None] * values, axis=0)
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + sequence * out_stride + head * HEAD_DIM + dims, acc.to(out.dtype.element_ty), mask=real)


def decode_attention(
    q: Tensor, kv_layer: Tensor, context_lens: Tensor, block_tables: Tensor, out: Tensor, config: DecodeConfig
) -> None:
    """As in model/reference.py, written to out [B, H * D].

    q [B, H, D]; kv_layer [num_blocks, 2, G, block_size, D]; context_lens int32 [B] count the query's own token; entries
    of block_tables int32 [B, any] past a context are not read.
    """
    sequences, heads, dim = q.shape
    groups, block_size = kv_layer.shape[2], kv_layer.shape[3]
    heads_per_group = heads // groups
    segments = config.num_segments
    if segments > 1:
        partial_out = torch.empty((sequences, heads, segments, dim), dtype=torch.float32, device=q.device)
        partial_log_sums = torch.empty((sequences, heads, segments), dtype=torch.float32, device=q.device)
    else:
        partial_out = partial_log_sums = out  # not touched
    decode_attention_kernel[(groups, segments, sequences)](
        q, kv_layer, context_lens, block_tables, out, partial_out, partial_log_sums,
        math.log2(math.e) / math.sqrt(dim),
        q.stride(0), out.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), block_tables.stride(0),
        NUM_HEADS=heads, HEADS_PER_GROUP=heads_per_group, HEAD_DIM=dim, HEAD_DIM_PADDED=padded_head(dim),
        BLOCK_SIZE=block_size, BLOCK_M=max(16, power_of_two(heads_per_group)), BLOCK_N=config.block_n,
        SPLIT=segments > 1, PRECISION=dot_precision(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if segments > 1:
        merge_segments_kernel[(heads, sequences)](
            partial_out, partial_log_sums, context_lens, out, out.stride(0), segments,
            NUM_HEADS=heads, HEAD_DIM=dim, HEAD_DIM_PADDED=padded_head(dim), BLOCK_N=config.block_n,
            MOST_SEGMENTS=MOST_SEGMENTS, STEP=_MERGE_SEGMENTS, num_warps=4,
        )  # fmt: skip
