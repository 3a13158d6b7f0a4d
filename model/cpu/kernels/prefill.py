"""Prefill attention of one sequence in bf16, on AVX512-BF16: FlashAttention's online softmax over tiles of 32 queries
and 256 keys (Dao et al. 2022), scores and sums in fp32. torch's own CPU flash attention multiplies at fp32's rate.

A short chunk, such as is computed beside decodes, would leave most of a tile empty: there the query heads that share a
KV head share the tiles, too.

Reference: model/reference.py.
"""

import functools
import threading

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.cpu.kernels.floats import (
    LANES,
    TILE_ROWS,
    dot_tile_16,
    dot_tile_32,
    dot_tile_48,
    dot_tile_64,
    exponential,
    interleave,
    largest,
    store,
    transpose,
)
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    as_halves,
    as_short_integers,
    compiled,
    float_bits,
    float_of_bits,
    take_items,
)

QUERY_TILE = 32
KEY_TILE = 256
KEY_PADDING = 64


class _Scratch(threading.local):
    """Memory for one packed context, each thread's own. It stays: new pages from the system for every chunk and layer
    would cost more time than the packing."""

    def __init__(self) -> None:
        self._lanes = torch.empty(0, dtype=torch.int32)

    def lanes(self, count: int) -> Tensor:
        """So many lanes of 32 bits, with anything in them."""
        if len(self._lanes) < count:
            self._lanes = torch.empty(count + count // 4, dtype=torch.int32)
        return self._lanes[:count]


_SCRATCH = _Scratch()


@compiled
def _multiply(rows, a, a_stride, b, b_stride, pairs, c, c_stride, columns, add):
    """c[rows, columns] (+)= a b in tiles, whose last may reach beyond `rows`, up to QUERY_TILE; addresses, strides in
    bytes; `columns` is a multiple of 16."""
    for row in range(0, rows, TILE_ROWS):
        left, result = a + row * a_stride, c + row * c_stride
        column = np.int64(0)
        while column < columns:
            right, place = b + 4 * column, result + 4 * column
            rest = columns - column
            if rest >= 64:
                dot_tile_64(left, a_stride, right, b_stride, pairs, place, c_stride, add)
                column += 64
            elif rest >= 48:
                dot_tile_48(left, a_stride, right, b_stride, pairs, place, c_stride, add)
                column += 48
            elif rest >= 32:
                dot_tile_32(left, a_stride, right, b_stride, pairs, place, c_stride, add)
                column += 32
            else:
                dot_tile_16(left, a_stride, right, b_stride, pairs, place, c_stride, add)
                column += 16


@compiled
def soften(scores, visible, width, scale, best, weight_sum, mixed, probabilities):
    """One row: scores [width] to bf16 probabilities, 0 from `visible` on; rescales mixed; returns new best and sum.

    The loops over scores run to `width`, in whole vectors: what is left over of a vector loop is done one by one.
    """
    for i in range(visible, width):
        scores[i] = np.float32(-np.inf)
    highest = max(best, largest(scores, width) * scale)
    if highest > best:
        shrink = exponential(best - highest)
        weight_sum *= shrink
        for i in range(mixed.shape[0]):
            mixed[i] *= shrink
    total = np.float32(0)
    for i in range(width):
        probability = exponential(scores[i] * scale - highest)
        total += probability  # what is not visible adds 1e-38: nothing
        store(probabilities, i, probability)
    for i in range(visible, width):
        probabilities[i] = 0
    return highest, weight_sum + total


def _prefill(words):
    """words: q, packed K, packed V, out, rows, heads, KV heads, head dim, padded dim, tokens, padded tokens, scale, and
    how many heads share tiles.

    A tile's rows are its queries' heads: query by query, head by head.
    """
    items, grain = words[1], words[2]
    rows, heads, kv_heads, dim, padded_dim = words[7], words[8], words[9], words[10], words[11]
    tokens, padded_tokens = words[12], words[13]
    scale, together = float_of_bits(np.uint32(words[14])), words[15]
    q, out = carray(as_halves(words[3]), (rows, heads, dim)), carray(as_halves(words[6]), (rows, heads, dim))
    queries = np.zeros((QUERY_TILE, dim), np.uint16)
    scores = np.empty((QUERY_TILE, KEY_TILE), np.float32)
    probabilities = np.zeros((QUERY_TILE, KEY_TILE), np.uint16)
    mixed = np.empty((QUERY_TILE, padded_dim), np.float32)
    best, weight_sum = np.empty(QUERY_TILE, np.float32), np.empty(QUERY_TILE, np.float32)
    queries_a_tile = QUERY_TILE // together
    tiles = (rows + queries_a_tile - 1) // queries_a_tile
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            head, first = item // tiles * together, (tiles - 1 - item % tiles) * queries_a_tile  # the longest first
            count = min(queries_a_tile, rows - first)
            for row in range(count * together):
                for i in range(dim):
                    queries[row, i] = q[first + row // together, head + row % together, i]
            mixed[:] = np.float32(0)
            best[:] = np.float32(-np.inf)
            weight_sum[:] = np.float32(0)
            group = head * kv_heads // heads
            keys = words[4] + group * (dim // 2) * padded_tokens * 4
            values = words[5] + group * (padded_tokens // 2) * padded_dim * 4
            seen = tokens - rows + first  # keys before this tile's first query
            for start in range(0, seen + count, KEY_TILE):
                width = min(KEY_TILE, (seen + count - start + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING)
                _multiply(
                    count * together,
                    queries.ctypes.data,
                    2 * dim,
                    keys + 4 * start,
                    4 * padded_tokens,
                    dim // 2,
                    scores.ctypes.data,
                    4 * KEY_TILE,
                    width,
                    0,
                )
                for row in range(count * together):
                    visible = max(0, min(width, seen + row // together + 1 - start))
                    best[row], weight_sum[row] = soften(
                        scores[row], visible, width, scale, best[row], weight_sum[row], mixed[row], probabilities[row]
                    )
                _multiply(
                    count * together,
                    probabilities.ctypes.data,
                    2 * KEY_TILE,
                    values + 2 * start * padded_dim,
                    4 * padded_dim,
                    width // 2,
                    mixed.ctypes.data,
                    4 * padded_dim,
                    padded_dim,
                    1,
                )
            for row in range(count * together):
                for i in range(dim):
                    store(out[first + row // together, head + row % together], i, mixed[row, i] / weight_sum[row])


@compiled
def _pack_by_vectors(keys, values, packed_keys, packed_values, count, dim, padded_tokens):
    """One head's part of a block, 16 tokens at a time; addresses. What is packed beyond `count` means nothing."""
    for token in range(0, count, LANES):
        for pair in range(0, dim // 2, LANES):
            place = packed_keys + (pair * padded_tokens + token) * 4
            transpose(keys + token * dim * 2 + pair * 4, 2 * dim, place, 4 * padded_tokens)
    for token in range(0, count, 2):
        row = values + token * dim * 2
        interleave(row, row + 2 * dim, dim // (2 * LANES), packed_values + token * dim * 2)


def _pack(words):
    """words: KV layer, block table, packed K and V, KV heads, head dim, padded dim, block size, tokens, padded tokens.

    An item is one head's part of one block; the last block's brings the zeros behind the context.
    """
    items, grain, kv_heads, dim, padded_dim = words[1], words[2], words[7], words[8], words[9]
    block_size, tokens, padded_tokens = words[10], words[11], words[12]
    blocks = items // kv_heads
    table = carray(as_short_integers(words[4]), (blocks,))
    packed_keys = carray(as_short_integers(words[5]), (kv_heads, dim // 2, padded_tokens))
    packed_values = carray(as_halves(words[6]), (kv_heads, padded_tokens // 2, padded_dim, 2))
    head_bytes = block_size * dim * 2
    by_vectors = dim % (2 * LANES) == 0 and block_size % LANES == 0
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            index, head = item // kv_heads, item % kv_heads
            place = words[3] + (np.int64(table[index]) * 2 * kv_heads + head) * head_bytes
            keys = carray(as_short_integers(place), (block_size, dim // 2))
            values = carray(as_halves(place + kv_heads * head_bytes), (block_size, dim))
            first = index * block_size
            count = min(block_size, tokens - first)
            if by_vectors:
                _pack_by_vectors(
                    place,
                    place + kv_heads * head_bytes,
                    words[5] + (head * (dim // 2) * padded_tokens + first) * 4,
                    words[6] + (head * (padded_tokens // 2) + first // 2) * dim * 4,
                    count,
                    dim,
                    padded_tokens,
                )
            for pair in range(0 if by_vectors else dim // 2):
                for token in range(count):
                    packed_keys[head, pair, first + token] = keys[token, pair]
            for token in range(0 if by_vectors else count):
                row, half = (first + token) // 2, (first + token) % 2
                for i in range(dim):
                    packed_values[head, row, i, half] = values[token, i]
                for i in range(dim, padded_dim):
                    packed_values[head, row, i, half] = 0
            if index == blocks - 1:
                for pair in range(dim // 2):
                    for token in range(tokens, padded_tokens):
                        packed_keys[head, pair, token] = 0
                for token in range(tokens, padded_tokens):
                    for i in range(padded_dim):
                        packed_values[head, token // 2, i, token % 2] = 0


def attend(q: Tensor, kv_layer: Tensor, table: Tensor, tokens: int, out: Tensor) -> None:
    """Causal attention of the last rows of a context of `tokens`, all in contiguous bf16.

    q and out [rows, H, D]; kv_layer [blocks, 2, G, block_size, D]; table int32, contiguous. D is even.
    """
    rows, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = kv_layer.shape
    # One vector more: rows of packed keys a power of two apart would share a few sets of the L1 cache.
    padded_tokens = -(-tokens // KEY_PADDING) * KEY_PADDING + LANES
    padded_dim = -(-dim // LANES) * LANES
    # Pairs along the inner dimension of each product go into one 32-bit lane: see cpu_dot.
    key_lanes, value_lanes = kv_heads * dim // 2 * padded_tokens, kv_heads * padded_tokens // 2 * padded_dim
    packed = _SCRATCH.lanes(key_lanes + value_lanes)
    packed_keys, packed_values = packed[:key_lanes], packed[key_lanes:]
    _packing_kernel().run(
        kv_heads * -(-tokens // block_size),
        8,
        kv_layer.data_ptr(),
        table.data_ptr(),
        packed_keys.data_ptr(),
        packed_values.data_ptr(),
        kv_heads,
        dim,
        padded_dim,
        block_size,
        tokens,
        padded_tokens,
    )
    together = _heads_together(rows, heads // kv_heads)
    _kernel().run(
        heads // together * _num_tiles(rows, together),
        1,
        q.data_ptr(),
        packed_keys.data_ptr(),
        packed_values.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        kv_heads,
        dim,
        padded_dim,
        tokens,
        padded_tokens,
        float_bits(dim**-0.5),
        together,
    )


def _heads_together(rows: int, group: int) -> int:
    """How many of a group's heads share tiles: all, where that makes fewer tiles."""
    return group if group <= QUERY_TILE and _num_tiles(rows, group) < group * _num_tiles(rows, 1) else 1


def _num_tiles(rows: int, together: int) -> int:
    return -(-rows // (QUERY_TILE // together))


@functools.cache
def _packing_kernel() -> Kernel:
    return Kernel(_pack)


@functools.cache
def _kernel() -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    return Kernel(_prefill)
