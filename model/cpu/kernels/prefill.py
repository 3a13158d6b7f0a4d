"""Prefill attention of one sequence in bf16, on AVX512-BF16: FlashAttention's online softmax over tiles of 32 queries
and 256 keys (Dao et al. 2022), scores and sums in fp32. torch's own CPU flash attention multiplies at fp32's rate.

A short chunk, such as is computed beside decodes, would leave most of a tile empty: there the query heads that share a
KV head share the tiles, too.

Reference: model/reference.py.
"""

import threading
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.cpu.kernels import amx, floats
from twostroke.model.cpu.kernels.floats import LANES, exponential, interleave, largest, store, transpose
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    as_halves,
    as_short_integers,
    compiled,
    float_of_bits,
    taken,
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


def _make_prefill(multiply: Any) -> Any:
    """`multiply`: as floats.multiply."""

    @compiled
    def prefill(words):
        """words: q, packed K, packed V, out, rows, heads, KV heads, head dim, tokens, padded tokens, scale, and how
        many heads share tiles.

        A tile's rows are its queries' heads: query by query, head by head.
        """
        rows, heads, kv_heads, dim, tokens, padded_tokens = (
            words[7],
            words[8],
            words[9],
            words[10],
            words[11],
            words[12],
        )
        scale, together = float_of_bits(np.uint32(words[13])), words[14]
        q, out = carray(as_halves(words[3]), (rows, heads, dim)), carray(as_halves(words[6]), (rows, heads, dim))
        queries = np.zeros((QUERY_TILE, dim), np.uint16)
        scores = np.empty((QUERY_TILE, KEY_TILE), np.float32)
        probabilities = np.zeros((QUERY_TILE, KEY_TILE), np.uint16)
        mixed = np.empty((QUERY_TILE, dim), np.float32)
        best, weight_sum = np.empty(QUERY_TILE, np.float32), np.empty(QUERY_TILE, np.float32)
        queries_a_tile = QUERY_TILE // together
        tiles = (rows + queries_a_tile - 1) // queries_a_tile
        for item in taken(words, words[1]):
            head, first = item // tiles * together, (tiles - 1 - item % tiles) * queries_a_tile  # the longest first
            count = min(queries_a_tile, rows - first)
            used = count * together  # rows of the tile
            for row in range(used):
                for i in range(dim):
                    queries[row, i] = q[first + row // together, head + row % together, i]
            mixed[:] = np.float32(0)
            best[:] = np.float32(-np.inf)
            weight_sum[:] = np.float32(0)
            head_bytes = dim * padded_tokens * 2
            group = head * kv_heads // heads
            keys, values = words[4] + group * head_bytes, words[5] + group * head_bytes
            seen = tokens - rows + first  # keys before this tile's first query
            for start in range(0, seen + count, KEY_TILE):
                width = min(KEY_TILE, (seen + count - start + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING)
                place, stride = keys + 4 * start, 4 * padded_tokens
                target = scores.ctypes.data
                multiply(used, queries.ctypes.data, 2 * dim, place, stride, dim // 2, target, 4 * KEY_TILE, width, 0)
                for row in range(used):
                    visible = max(0, min(width, seen + row // together + 1 - start))
                    best[row], weight_sum[row] = soften(
                        scores[row], visible, width, scale, best[row], weight_sum[row], mixed[row], probabilities[row]
                    )
                place, stride = values + 2 * start * dim, 4 * dim
                source = probabilities.ctypes.data
                multiply(used, source, 2 * KEY_TILE, place, stride, width // 2, mixed.ctypes.data, 4 * dim, dim, 1)
            for row in range(used):
                for i in range(dim):
                    store(out[first + row // together, head + row % together], i, mixed[row, i] / weight_sum[row])

    return prefill


_prefill_in_registers, _prefill_in_matrices = _make_prefill(floats.multiply), _make_prefill(amx.multiply)


@Kernel
def _prefill_by_registers(words):
    _prefill_in_registers(words)


@Kernel
def _prefill_by_amx(words):
    _prefill_in_matrices(words)
    amx.release_tiles()


@Kernel
def _pack(words):
    """words: KV layer, block table, packed K and V, KV heads, head dim, block size, tokens, padded tokens.

    An item is one head's part of one block, 16 tokens at a time; what this packs beyond the context means nothing, but
    the last block's brings the zeros behind it.
    """
    items, kv_heads, dim, block_size = words[1], words[7], words[8], words[9]
    tokens, padded_tokens = words[10], words[11]
    blocks = items // kv_heads
    table = carray(as_short_integers(words[4]), (blocks,))
    packed_keys = carray(as_short_integers(words[5]), (kv_heads, dim // 2, padded_tokens))
    packed_values = carray(as_short_integers(words[6]), (kv_heads, padded_tokens // 2, dim))
    head_bytes = block_size * dim * 2
    for item in taken(words, items):
        index, head = item // kv_heads, item % kv_heads
        keys = words[3] + (np.int64(table[index]) * 2 * kv_heads + head) * head_bytes
        values = keys + kv_heads * head_bytes
        first = index * block_size
        count = min(block_size, tokens - first)
        for token in range(0, count, LANES):
            for pair in range(0, dim // 2, LANES):
                place = packed_keys[head, pair:, first + token :].ctypes.data
                transpose(keys + token * dim * 2 + pair * 4, 2 * dim, place, 4 * padded_tokens)
        for token in range(0, count, 2):
            row, place = values + token * dim * 2, packed_values[head, (first + token) // 2].ctypes.data
            interleave(row, row + 2 * dim, dim // (2 * LANES), place)
        if index == blocks - 1:
            packed_keys[head, :, tokens:] = 0
            packed_values[head, (tokens + 1) // 2 :] = 0
            for i in range(dim if tokens % 2 else 0):
                packed_values[head, tokens // 2, i] &= np.int32(0xFFFF)  # the second of a pair is the upper half


def attend(q: Tensor, kv_layer: Tensor, table: Tensor, tokens: int, out: Tensor) -> None:
    """Causal attention of the last rows of a context of `tokens`, all in contiguous bf16, of a shape that `fits_tiles`.

    q and out [rows, H, D]; kv_layer [blocks, 2, G, block_size, D]; table int32, contiguous.
    """
    rows, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = kv_layer.shape
    # One vector more: rows of packed keys a power of two apart would share a few sets of the L1 cache.
    padded_tokens = -(-tokens // KEY_PADDING) * KEY_PADDING + LANES
    # Pairs along the inner dimension of each product go into one 32-bit lane.
    keys, values = _SCRATCH.lanes(kv_heads * dim * padded_tokens).chunk(2)
    items = kv_heads * -(-tokens // block_size)
    _pack.run(items, 8, kv_layer, table, keys, values, kv_heads, dim, block_size, tokens, padded_tokens)
    together = _heads_together(rows, heads // kv_heads)
    (_prefill_by_amx if amx.is_usable() else _prefill_by_registers).run(
        heads // together * _num_tiles(rows, together),
        1,
        *(q, keys, values, out),
        *(rows, heads, kv_heads, dim, tokens, padded_tokens, dim**-0.5, together),
    )


def _heads_together(rows: int, group: int) -> int:
    """How many of a group's heads share tiles: all, where that makes fewer tiles."""
    return group if group <= QUERY_TILE and _num_tiles(rows, group) < group * _num_tiles(rows, 1) else 1


def _num_tiles(rows: int, together: int) -> int:
    return -(-rows // (QUERY_TILE // together))
