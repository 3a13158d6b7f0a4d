"""Decode attention in bf16 on AVX512-BF16: FlashAttention's online softmax (Dao et al. 2022) over chunks of 128 tokens,
all query heads of a KV head together, so that every key and value is read from memory once.

Reference: model/kernels/cpu_reference.py.
"""

import functools

import numpy as np
from numba import carray

from model.kernels import cpu_dot
from model.kernels.cpu_dot import LANES, TILE_ROWS, dot_rows, dot_tile_32, dot_tile_64, interleave
from model.kernels.cpu_floats import store
from model.kernels.cpu_launch import (
    Kernel,
    as_halves,
    as_short_integers,
    compiled,
    float_of_bits,
    prefetch,
    take_items,
)
from model.kernels.cpu_prefill import KEY_PADDING, soften
from model.kernels.cpu_segments import keep, merge, num_segments

CHUNK_TOKENS = 128  # keys and values of a chunk stay in the L1 cache


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
def _score(query, rows, keys, values, following, dim, scores, stride):
    """scores [rows, 16 of a row] of one vector's worth of tokens, fetching their values and the following keys."""
    for line in range(0, LANES * 2 * dim, 64):
        prefetch(values + line)
        prefetch(following + line)
    for row in range(rows):
        dot_rows(query + row * 2 * dim, keys, 2 * dim, dim // (2 * LANES), scores + row * stride)


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
def _attend(words, query, head, table, begin, context, scratch, mixed, best, weight_sum):
    """All query heads of a KV head, from the address `query` on, over the tokens `begin` to `context`.

    scratch: scores, probabilities, packed values, zeros. Results fp32: sums [rows, D], maxima and sums of weights.
    """
    scores, probabilities, packed, nothing = scratch
    kv_heads, dim, block_size = words[9], words[10], words[11]
    head_bytes = block_size * dim * 2
    group = scores.shape[0]
    mixed[:] = np.float32(0)
    best[:] = np.float32(-np.inf)
    weight_sum[:] = np.float32(0)
    for start in range(begin, context, CHUNK_TOKENS):
        count = min(CHUNK_TOKENS, context - start)
        for token in range(0, count, LANES):
            keys = _place(words, table, head, start + token)
            values = keys + kv_heads * head_bytes
            following = _place(words, table, head, min(start + token + LANES, context - 1))
            _score(query, group, keys, values, following, dim, scores.ctypes.data + 4 * token, 4 * CHUNK_TOKENS)
        width = (count + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING
        scale = float_of_bits(np.uint32(words[14]))
        for row in range(group):
            best[row], weight_sum[row] = soften(
                scores[row], count, width, scale, best[row], weight_sum[row], mixed[row], probabilities[row]
            )
        for token in range(0, count, LANES):
            values = _place(words, table, head, start + token) + kv_heads * head_bytes
            place = packed.ctypes.data + token * 2 * dim
            _pack(values, min(LANES, count - token), nothing.ctypes.data, dim, place)
        for row in range(0, mixed.shape[0], TILE_ROWS):
            _mix(
                probabilities.ctypes.data + row * 2 * CHUNK_TOKENS,
                2 * CHUNK_TOKENS,
                packed.ctypes.data,
                (count + 1) // 2,
                dim,
                mixed.ctypes.data + row * 4 * dim,
            )


def _decode(words):
    """words: q, KV layer, out, tables, contexts, heads, KV heads, head dim, block size, blocks, table width, scale,
    sequences, segment tokens, partials."""
    items, grain = words[1], words[2]
    heads, kv_heads, dim, sequences, tokens, partials = words[8], words[9], words[10], words[15], words[16], words[17]
    group = heads // kv_heads
    out = carray(as_halves(words[5]), (sequences, heads, dim))
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    rows = (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    scratch = (
        np.empty((group, CHUNK_TOKENS), np.float32),
        np.zeros((rows, CHUNK_TOKENS), np.uint16),
        np.empty((CHUNK_TOKENS // 2, dim), np.uint32),
        np.zeros(dim, np.uint16),
    )
    mixed, part = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
    best, part_best = np.empty(group, np.float32), np.empty(group, np.float32)
    weight_sum, part_weight_sum = np.empty(group, np.float32), np.empty(group, np.float32)
    most, segments = items // (sequences * kv_heads), np.int64(1)
    if partials != 0:
        segments = num_segments(contexts, tokens)
        items = sequences * kv_heads * segments
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            pair, segment = item // segments, item % segments
            sequence, head = pair // kv_heads, pair % kv_heads
            table, context = tables[sequence], np.int64(contexts[sequence])
            query = words[3] + (sequence * heads + head * group) * dim * 2
            if partials != 0:
                start = segment * tokens
                if start < context:
                    end = min(start + tokens, context)
                    _attend(words, query, head, table, start, end, scratch, part, part_best, part_weight_sum)
                    keep(partials, pair * most + segment, group, dim, part, part_best, part_weight_sum)
                continue
            _attend(words, query, head, table, 0, min(tokens, context), scratch, mixed, best, weight_sum)
            for start in range(tokens, context, tokens):
                end = min(start + tokens, context)
                _attend(words, query, head, table, start, end, scratch, part, part_best, part_weight_sum)
                for row in range(group):
                    best[row], weight_sum[row] = merge(
                        mixed[row], best[row], weight_sum[row], part[row], part_best[row], part_weight_sum[row]
                    )
            for row in range(group):
                for i in range(dim):
                    store(out[sequence, head * group + row], i, mixed[row, i] / weight_sum[row])


@functools.cache
def kernel() -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    return Kernel(_decode)
