"""Decode attention in bf16 on AVX512-BF16: FlashAttention's online softmax (Dao et al. 2022) over chunks of 128 tokens,
all query heads of a KV head together, so that every key and value is read from memory once. Where there are enough
sequences, a thread takes all KV heads of one and reads whole blocks.

Reference: model/reference.py.

Decode attention in segments of the context, so that few long sequences can be shared by many cores (flash-decoding,
Dao et al. 2023).

A segment's attention begins afresh, with its own maximum, and segments are merged in their order. That is so whether
one thread takes all of them or each thread one: a result depends neither on the batch nor on the number of threads.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.cpu.kernels import floats as cpu_dot
from twostroke.model.cpu.kernels.floats import (
    LANES,
    TILE_ROWS,
    dot_rows,
    dot_tile_32,
    dot_tile_64,
    exponential,
    interleave,
    store,
)
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    KernelPair,
    as_floats,
    as_halves,
    as_short_integers,
    compiled,
    float_of_bits,
    prefetch,
    take_items,
)
from twostroke.model.cpu.kernels.prefill import KEY_PADDING, soften
from twostroke.model.cpu.kernels.program import Launcher

SEGMENT_TOKENS = 512  # about; whole blocks


@dataclass(frozen=True)
class SegmentPlan:
    """How the work of a launch is cut. An item is a segment of a (sequence, KV head) pair, or the whole pair."""

    tokens: int  # of a segment
    num_items: int  # at most: kernels leave out the segments that all contexts end before
    partials: Tensor | None  # fp32 [pairs, segments, heads of a group, D + 2]: sums, maximum, sum of weights

    @property
    def address(self) -> int:
        """Of the partial results; 0 where there are none."""
        return 0 if self.partials is None else self.partials.data_ptr()


def plan(launcher: Launcher, pairs: int, group: int, dim: int, block_size: int, max_context: int) -> SegmentPlan:
    """Segments are taken apart where whole pairs would leave threads idle."""
    tokens = -(-SEGMENT_TOKENS // block_size) * block_size
    segments = -(-max_context // tokens)
    threads = torch.get_num_threads()
    if threads == 1 or segments == 1 or pairs >= 2 * threads:
        return SegmentPlan(tokens, pairs, None)
    return SegmentPlan(tokens, pairs * segments, launcher.empty((pairs, segments, group, dim + 2), torch.float32))


@compiled
def num_segments(contexts, tokens):
    """Of the longest."""
    longest = np.int64(1)
    for i in range(contexts.shape[0]):
        longest = max(longest, np.int64(contexts[i]))
    return (longest + tokens - 1) // tokens


@compiled
def keep(partials, index, group, dim, mixed, best, weight_sum):
    """Write a segment's sums [group, D], maxima and sums of weights [group] to its place, the `index`-th."""
    place = carray(as_floats(partials + index * group * (dim + 2) * 4), (group, dim + 2))
    for row in range(group):
        for i in range(dim):
            place[row, i] = mixed[row, i]
        place[row, dim], place[row, dim + 1] = best[row], weight_sum[row]


@compiled
def merge(mixed, best, weight_sum, more, more_best, more_weight_sum):
    """Add a segment's row to that of those before it, mixed [D] (0 at first, best -inf); returns maximum and sum."""
    highest = max(best, more_best)
    shrink, grow = exponential(best - highest), exponential(more_best - highest)
    for i in range(mixed.shape[0]):
        mixed[i] = mixed[i] * shrink + more[i] * grow
    return highest, weight_sum * shrink + more_weight_sum * grow


@compiled
def _combine(words, out):
    """words: partials, out, contexts, heads, KV heads, head dim, segment tokens, segments; items are query heads."""
    items, grain = words[1], words[2]
    heads, kv_heads, dim, tokens, segments = words[6], words[7], words[8], words[9], words[10]
    sequences, group = items // heads, heads // kv_heads
    partials = carray(as_floats(words[3]), (sequences * kv_heads, segments, group, dim + 2))
    contexts = carray(as_short_integers(words[5]), (sequences,))
    out = carray(out, (items, dim))
    mixed = np.empty(dim, np.float32)
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            pair, row = item // group, item % group
            mixed[:] = np.float32(0)
            best, weight_sum = np.float32(-np.inf), np.float32(0)
            for segment in range((np.int64(contexts[item // heads]) + tokens - 1) // tokens):
                part = partials[pair, segment, row]
                best, weight_sum = merge(mixed, best, weight_sum, part[:dim], part[dim], part[dim + 1])
            for i in range(dim):
                store(out[item], i, mixed[i] / weight_sum)


def _combine_fp32(words):
    _combine(words, as_floats(words[4]))


def _combine_bf16(words):
    _combine(words, as_halves(words[4]))


_COMBINE = KernelPair(_combine_fp32, _combine_bf16)


def combine(
    launcher: Launcher, plan: SegmentPlan, contexts: Tensor, sequences: int, kv_heads: int, out: Tensor
) -> None:
    """The first `sequences` rows of out [T, H, D] from the plan's partial results."""
    if plan.partials is None:
        return
    _, heads, dim = out.shape
    launcher.run(
        _COMBINE.of(out.dtype),
        sequences * heads,
        4,
        plan.address,
        out.data_ptr(),
        contexts.data_ptr(),
        heads,
        kv_heads,
        dim,
        plan.tokens,
        plan.partials.shape[1],
    )


CHUNK_TOKENS = 128  # packed values of a chunk: one head's stay in the L1 cache, all heads' in L2
SEQUENCES_A_THREAD = 4  # of these each thread takes whole sequences: shares then differ little


def is_supported(dim: int, block_size: int) -> bool:
    """Whether this CPU has the instructions, and vectors of 32 elements and 16 tokens fill heads and blocks."""
    return cpu_dot.is_supported() and dim % (2 * LANES) == 0 and block_size % LANES == 0


@compiled
def _place(words, table, head, token):
    """The address of the keys of the 16 tokens that `token` is among."""
    kv_heads, dim, block_size = words[9], words[10], words[11]
    block, offset = np.int64(table[token // block_size]), token % block_size // LANES * LANES
    return words[4] + (((block * 2 * kv_heads) + head) * block_size + offset) * dim * 2


@compiled
def _pack(values, count, nothing, dim, packed):
    """The first `count` of 16 tokens' values, two by two; a missing one is `nothing`. Addresses."""
    for token in range(0, count, 2):
        first = values + token * 2 * dim
        second = first + 2 * dim if token + 1 < count else nothing
        interleave(first, second, dim // (2 * LANES), packed + token * 2 * dim)


@compiled
def _mix(probabilities, probability_stride, packed, pairs, dim, mixed):
    """mixed [TILE_ROWS, dim] += probabilities times values; addresses."""
    for column in range(0, dim // 64 * 64, 64):
        dot_tile_64(
            probabilities, probability_stride, packed + 4 * column, 4 * dim, pairs, mixed + 4 * column, 4 * dim, 1
        )
    if dim % 64:
        column = dim - 32
        dot_tile_32(
            probabilities, probability_stride, packed + 4 * column, 4 * dim, pairs, mixed + 4 * column, 4 * dim, 1
        )


@compiled
def _score_and_pack(words, queries, table, first_head, num_heads, start, end, scores, packed, nothing):
    """Read the keys and values of some KV heads for the tokens `start` to `end`, at most a chunk, block after block as
    they lie in memory: scores [KV heads, group, CHUNK_TOKENS], packed values [KV heads, CHUNK_TOKENS / 2, D].

    queries: the address of the first head's. With a head at a time, 2 KiB here and 2 KiB there, the CPU sees no stream.
    """
    kv_heads, dim, block_size = words[9], words[10], words[11]
    head_bytes, group = block_size * dim * 2, scores.shape[1]
    token = start
    while token < end:
        stop = min(end, token + block_size - token % block_size)  # where the block ends
        for part in range(num_heads):
            query = queries + part * group * 2 * dim
            for first in range(token, stop, LANES):
                keys = _place(words, table, first_head + part, first)
                following = _place(words, table, first_head + part, min(first + block_size, end - 1))
                for line in range(0, LANES * 2 * dim, 64):
                    prefetch(keys + kv_heads * head_bytes + line)
                    prefetch(following + line)
                place = scores[part].ctypes.data + 4 * (first - start)
                for row in range(group):
                    dot_rows(query + row * 2 * dim, keys, 2 * dim, dim // (2 * LANES), place + 4 * CHUNK_TOKENS * row)
        for part in range(num_heads):
            for first in range(token, stop, LANES):
                values = _place(words, table, first_head + part, first) + kv_heads * head_bytes
                place = packed[part].ctypes.data + (first - start) * 2 * dim
                _pack(values, min(LANES, end - first), nothing.ctypes.data, dim, place)
        token = stop


@compiled
def _attend(words, tables, item, begin, end, scratch, state):
    """Query heads of one or all KV heads of a sequence over its tokens `begin` to `end`.

    item: the sequence, its first KV head and how many. scratch: scores, packed values, probabilities, zeros. state,
    fp32: sums [KV heads, rows, D], maxima and sums of weights.
    """
    sequence, first_head, num_heads = item
    scores, packed, probabilities, nothing = scratch
    mixed, best, weight_sum = state
    heads, dim = words[8], words[10]
    group, rows, table = scores.shape[1], mixed.shape[1], tables[sequence]
    queries = words[3] + (sequence * heads + first_head * group) * dim * 2
    scale = float_of_bits(np.uint32(words[14]))
    mixed[:] = np.float32(0)
    best[:] = np.float32(-np.inf)
    weight_sum[:] = np.float32(0)
    for start in range(begin, end, CHUNK_TOKENS):
        count = min(CHUNK_TOKENS, end - start)
        width = (count + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING
        _score_and_pack(words, queries, table, first_head, num_heads, start, start + count, scores, packed, nothing)
        for part in range(num_heads):
            for row in range(group):
                best[part, row], weight_sum[part, row] = soften(
                    scores[part, row],
                    count,
                    width,
                    scale,
                    best[part, row],
                    weight_sum[part, row],
                    mixed[part, row],
                    probabilities[row],
                )
            for row in range(0, rows, TILE_ROWS):
                _mix(
                    probabilities.ctypes.data + row * 2 * CHUNK_TOKENS,
                    2 * CHUNK_TOKENS,
                    packed[part].ctypes.data,
                    (count + 1) // 2,
                    dim,
                    mixed[part].ctypes.data + row * 4 * dim,
                )


def _decode(words):
    """words: q, KV layer, out, tables, contexts, heads, KV heads, head dim, block size, blocks, table width, scale,
    sequences, segment tokens, partials, KV heads of an item."""
    items, grain = words[1], words[2]
    heads, kv_heads, dim, sequences, tokens, partials = words[8], words[9], words[10], words[15], words[16], words[17]
    group, together = heads // kv_heads, words[18]
    out = carray(as_halves(words[5]), (sequences, kv_heads, group, dim))
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    rows = (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    scratch = (
        np.empty((together, group, CHUNK_TOKENS), np.float32),
        np.empty((together, CHUNK_TOKENS // 2, dim), np.uint32),
        np.zeros((rows, CHUNK_TOKENS), np.uint16),
        np.zeros(dim, np.uint16),
    )
    mixed, part = np.empty((together, rows, dim), np.float32), np.empty((together, rows, dim), np.float32)
    best, part_best = np.empty((together, group), np.float32), np.empty((together, group), np.float32)
    weight_sum, part_weight_sum = np.empty((together, group), np.float32), np.empty((together, group), np.float32)
    state, part_state = (mixed, best, weight_sum), (part, part_best, part_weight_sum)
    shares = kv_heads // together  # of a sequence
    most, segments = items // (sequences * shares), np.int64(1)
    if partials != 0:
        segments = num_segments(contexts, tokens)
        items = sequences * shares * segments
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for index in range(begin, min(begin + grain, items)):
            share, segment = index // segments, index % segments
            sequence, first_head = share // shares, share % shares * together
            item, context = (sequence, first_head, together), np.int64(contexts[sequence])
            if partials != 0:  # one KV head an item
                start = segment * tokens
                if start < context:
                    _attend(words, tables, item, start, min(start + tokens, context), scratch, state)
                    keep(partials, share * most + segment, group, dim, mixed[0], best[0], weight_sum[0])
                continue
            _attend(words, tables, item, np.int64(0), min(tokens, context), scratch, state)
            for start in range(tokens, context, tokens):
                _attend(words, tables, item, start, min(start + tokens, context), scratch, part_state)
                for head in range(together):
                    for row in range(group):
                        best[head, row], weight_sum[head, row] = merge(
                            mixed[head, row],
                            best[head, row],
                            weight_sum[head, row],
                            part[head, row],
                            part_best[head, row],
                            part_weight_sum[head, row],
                        )
            for head in range(together):
                for row in range(group):
                    for i in range(dim):
                        store(out[sequence, first_head + head, row], i, mixed[head, row, i] / weight_sum[head, row])


@functools.cache
def kernel() -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    return Kernel(_decode)
