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


def _decode(words):
    """words: q, KV layer, out, tables, contexts, heads, KV heads, head dim, block size, blocks, table width, scale."""
    items, grain = words[1], words[2]
    heads, kv_heads, dim, block_size = words[8], words[9], words[10], words[11]
    sequences, group = items // kv_heads, heads // kv_heads
    scale = float_of_bits(np.uint32(words[14]))
    out = carray(as_halves(words[5]), (sequences, heads, dim))
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    rows = (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    scores = np.empty((group, CHUNK_TOKENS), np.float32)
    probabilities = np.zeros((rows, CHUNK_TOKENS), np.uint16)
    packed = np.empty((CHUNK_TOKENS // 2, dim), np.uint32)
    mixed = np.empty((rows, dim), np.float32)
    best, weight_sum = np.empty(group, np.float32), np.empty(group, np.float32)
    nothing = np.zeros(dim, np.uint16)
    head_bytes = block_size * dim * 2
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            sequence, head = item // kv_heads, item % kv_heads
            table, context = tables[sequence], int(contexts[sequence])
            query = words[3] + (sequence * heads + head * group) * dim * 2
            mixed[:] = np.float32(0)
            best[:] = np.float32(-np.inf)
            weight_sum[:] = np.float32(0)
            for start in range(0, context, CHUNK_TOKENS):
                count = min(CHUNK_TOKENS, context - start)
                for token in range(0, count, LANES):
                    keys = _place(words, table, head, start + token)
                    following = _place(words, table, head, min(start + token + LANES, context - 1))
                    _score(
                        query,
                        group,
                        keys,
                        keys + kv_heads * head_bytes,
                        following,
                        dim,
                        scores.ctypes.data + 4 * token,
                        4 * CHUNK_TOKENS,
                    )
                width = (count + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING
                for row in range(group):
                    best[row], weight_sum[row] = soften(
                        scores[row], count, width, scale, best[row], weight_sum[row], mixed[row], probabilities[row]
                    )
                for token in range(0, count, LANES):
                    values = _place(words, table, head, start + token) + kv_heads * head_bytes
                    _pack(
                        values,
                        min(LANES, count - token),
                        nothing.ctypes.data,
                        dim,
                        packed.ctypes.data + token * 2 * dim,
                    )
                for row in range(0, rows, TILE_ROWS):
                    _mix(
                        probabilities.ctypes.data + row * 2 * CHUNK_TOKENS,
                        2 * CHUNK_TOKENS,
                        packed.ctypes.data,
                        (count + 1) // 2,
                        dim,
                        mixed.ctypes.data + row * 4 * dim,
                    )
            for row in range(group):
                for i in range(dim):
                    store(out[sequence, head * group + row], i, mixed[row, i] / weight_sum[row])


@functools.cache
def kernel() -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    return Kernel(_decode)
