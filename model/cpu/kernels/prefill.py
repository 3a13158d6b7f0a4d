"""Prefill attention of one sequence in bf16, on AVX512-BF16: FlashAttention's online softmax over tiles of 32 queries
and 512 keys (Dao et al. 2022), scores and sums in fp32. torch's own CPU flash attention multiplies at fp32's rate.

A short chunk, such as is computed beside decodes, would leave most of a tile empty: there the query heads that share a
KV head share the tiles, too.

Reference: tests/rigs/reference.py.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.core import cgutils
from torch import Tensor

from twostroke.model.backend import AttentionForm
from twostroke.model.cpu.kernels import amx, floats
from twostroke.model.cpu.kernels.floats import (
    FLOATS,
    INT,
    LANES,
    LINE_BYTES,
    BFloat,
    cached_bytes,
    call,
    exponential,
    in_all_lanes,
    in_bf16,
    interleave,
    store,
    transpose,
)
from twostroke.model.cpu.kernels.launch import (
    WIDE,
    Kernel,
    Kernels,
    as_floats,
    as_halves,
    as_short_integers,
    at,
    compiled,
    float_of_bits,
    taken,
    written_in_llvm,
)

QUERY_TILE = 32
KEY_TILE = 512
KEY_PADDING = 64


class _Scratch(threading.local):
    """Memory for one packed context, each thread's own. It stays: new pages from the system for every chunk and layer
    would cost more time than the packing."""

    def __init__(self) -> None:
        self._lanes = torch.empty(0, dtype=torch.int32)

    def lanes(self, count: int) -> Tensor:
        """Return uninitialised lanes of 32 bits."""
        if len(self._lanes) < count:
            self._lanes = torch.empty(count + count // 4, dtype=torch.int32)
        return self._lanes[:count]


_SCRATCH = _Scratch()


VECTORS_TOGETHER = KEY_PADDING // LANES  # their instructions don't wait for each other
_LOG2_E = 1.44269504088896341
_POWERS_OF_2 = (1.3276475e-3, 9.6755410e-3, 5.5507131e-2, 2.4022120e-1, 6.9314694e-1, 1.0000001)
"""2^x for |x| <= 1/2 to 8e-8 of it: a polynomial fitted by Lawson's method, the highest power first."""


def _reduced(builder: Any, name: str, combine: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    """Reduce all lanes of all `values` to one number with LLVM's reduction of that name."""
    while len(values) > 1:
        values = [combine(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    first = [ir.Constant(ir.FloatType(), 0.0)] if name == "fadd" else []
    return call(builder, f"llvm.vector.reduce.{name}.v16f32", ir.FloatType(), *first, values[0], fastmath=("reassoc",))


def _for_vectors(builder: Any, width: Any, step: Callable[[int, Any], None]) -> None:
    """Code that calls step(number, byte) for each vector of `width` numbers in fp32, VECTORS_TOGETHER in a row."""
    with cgutils.for_range(builder, builder.udiv(width, WIDE(KEY_PADDING))) as loop:
        first = builder.mul(loop.index, WIDE(4 * KEY_PADDING))
        for number in range(VECTORS_TOGETHER):
            step(number, builder.add(first, WIDE(LINE_BYTES * number)))


def _sums(builder: Any, start: float) -> list[Any]:
    places = [cgutils.alloca_once(builder, FLOATS) for _ in range(VECTORS_TOGETHER)]
    for place in places:
        builder.store(ir.Constant(FLOATS, [start] * LANES), place)
    return places


def _constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def _fused(builder: Any, left: Any, right: Any, more: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", FLOATS, left, right, more)


def _power_of_2(builder: Any, power: Any) -> Any:
    """2^power, of powers below -126 2^-126. Not by `maxnum`: a NaN must stay one, so that its row is told to be
    broken."""
    power = builder.select(builder.fcmp_ordered("<", power, _constant(-126.0)), _constant(-126.0), power)
    whole = call(builder, "llvm.roundeven.v16f32", FLOATS, power)
    part = builder.fsub(power, whole)
    value = _constant(_POWERS_OF_2[0])
    for coefficient in _POWERS_OF_2[1:]:
        value = _fused(builder, value, part, _constant(coefficient))
    masked = value, ir.Constant(ir.IntType(16), -1), INT(4)  # all lanes, rounded as usual
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, value, whole, *masked)


@written_in_llvm(types.int64, types.int64, types.int64, types.float32, types.float32)
def _cap(builder, scores, width, scale, cap):
    """scores[width] become cap tanh(scores scale / cap), as cap - 2 cap / (e^(2 x) + 1): to 2e-7 of the cap."""
    twice = builder.fmul(builder.fdiv(scale, cap), ir.Constant(ir.FloatType(), 2 * _LOG2_E))
    factor, most = in_all_lanes(builder, twice), in_all_lanes(builder, cap)
    double = builder.fmul(most, _constant(-2.0))

    def step(number: int, offset: Any) -> None:
        place = at(builder, scores, offset, FLOATS)
        value = _power_of_2(builder, builder.fmul(builder.load(place, align=4), factor))
        share = builder.fdiv(double, builder.fadd(value, _constant(1.0)))
        builder.store(builder.fadd(most, share), place, align=4)

    _for_vectors(builder, width, step)


@written_in_llvm(types.float32, types.int64, types.int64)
def _highest(builder, scores, width):
    """The largest of scores[width], an address and a multiple of KEY_PADDING; none is NaN."""
    best = _sums(builder, -math.inf)

    def larger(left: Any, right: Any) -> Any:
        return call(builder, "llvm.maxnum.v16f32", FLOATS, left, right, fastmath=("nnan", "nsz"))

    def step(number: int, offset: Any) -> None:
        values = builder.load(at(builder, scores, offset, FLOATS), align=4)
        builder.store(larger(builder.load(best[number]), values), best[number])

    _for_vectors(builder, width, step)
    return _reduced(builder, "fmax", larger, [builder.load(place) for place in best])


@written_in_llvm(types.float32, types.int64, types.int64, types.float32, types.float32, types.int64)
def _weigh(builder, scores, width, scale, highest, probabilities):
    """probabilities[width] = e^(scores scale - highest) in bf16; returns their sum before rounding.

    Below 2^-126 it is that. Loops that numba makes of such code have half as wide vectors and twice the instructions.
    """
    totals = _sums(builder, 0.0)
    halves = ir.VectorType(BFloat(), LANES)

    factor, most = (in_all_lanes(builder, value) for value in (scale, builder.fneg(highest)))

    def step(number: int, offset: Any) -> None:
        below = _fused(builder, builder.load(at(builder, scores, offset, FLOATS), align=4), factor, most)
        value = _power_of_2(builder, builder.fmul(below, _constant(_LOG2_E)))
        builder.store(builder.fadd(builder.load(totals[number]), value), totals[number])
        place = builder.add(probabilities, builder.udiv(offset, WIDE(2)))
        builder.store(builder.fptrunc(value, halves), at(builder, place, WIDE(0), halves), align=2)

    _for_vectors(builder, width, step)
    return _reduced(builder, "fadd", builder.fadd, [builder.load(place) for place in totals])


@compiled
def soften(scores, first, visible, width, scale, cap, best, weight_sum, mixed, dim, probabilities):
    """One row: scores [width] to bf16 probabilities, 0 before `first` and from `visible` on; rescales mixed [dim];
    returns new best and sum. `cap` is 0 where there is none.

    Arrays are given by address, since numba counts references to them. `width` is a multiple of KEY_PADDING.
    """
    values = carray(as_floats(scores), (width,))
    if cap > 0:
        _cap(scores, width, scale, cap)
        scale = np.float32(1)
    for i in range(first):
        values[i] = np.float32(-np.inf)
    for i in range(visible, width):
        values[i] = np.float32(-np.inf)
    highest = max(best, _highest(scores, width) * scale)
    if highest > best:
        shrink = exponential(best - highest)
        weight_sum *= shrink
        sums = carray(as_floats(mixed), (dim,))
        for i in range(dim):
            sums[i] *= shrink
    total = _weigh(scores, width, scale, highest, probabilities)
    nothing = carray(as_halves(probabilities), (width,))
    for i in range(first):
        nothing[i] = 0  # the 2^-126 of these adds nothing to the sum
    for i in range(visible, width):
        nothing[i] = 0
    return highest, weight_sum + total


@compiled
def first_seen(window, position):
    """Return the first position that a query attends to, as protocol.kv_layout.first_seen; here no window is 0."""
    if window < 0:
        return max(np.int64(0), position) // -window * -window
    return max(np.int64(0), position + 1 - window)


def _make_prefill(multiply: Any) -> Any:
    """`multiply`: as floats.multiply."""

    @compiled
    def prefill(words):
        """words: q, packed K, packed V, out, rows, heads, KV heads, head dim, tokens, padded tokens, scale, how many
        heads share tiles, window, cap or 0, sinks or 0, what values are multiplied by, and tokens before the first.

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
        window, cap, has_sinks = words[15], float_of_bits(np.uint32(words[16])), words[17] != 0
        sinks, factor = carray(as_floats(words[17]), (heads,)), float_of_bits(np.uint32(words[18]))
        before = words[19]
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
            if has_sinks:
                for row in range(used):
                    best[row], weight_sum[row] = sinks[head + row % together], np.float32(1)
            head_bytes = dim * padded_tokens * 2
            group = head * kv_heads // heads
            keys, values = words[4] + group * head_bytes, words[5] + group * head_bytes
            seen = tokens - rows + first  # keys before this tile's first query
            # Whole vectors before the first query's window; the others' begin within the first tile of keys, too.
            hidden = (first_seen(window, before + seen) - before) // KEY_PADDING * KEY_PADDING
            for start in range(hidden, seen + count, KEY_TILE):
                width = min(KEY_TILE, (seen + count - start + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING)
                place, stride = keys + 4 * start, 4 * padded_tokens
                target = scores.ctypes.data
                multiply(used, queries.ctypes.data, 2 * dim, place, stride, dim // 2, target, 4 * KEY_TILE, width, 0)
                for row in range(used):
                    behind = seen + row // together + 1 - start  # this row's own key
                    hidden_tokens = first_seen(window, before + start + behind - 1) - before
                    visible, outside = max(0, min(width, behind)), max(0, hidden_tokens - start)
                    if outside >= visible:  # the row's chunk begins behind these keys
                        probabilities[row, :width] = 0
                        continue
                    place = scores.ctypes.data + 4 * KEY_TILE * row
                    sums, weights = mixed.ctypes.data + 4 * dim * row, probabilities.ctypes.data + 2 * KEY_TILE * row
                    best[row], weight_sum[row] = soften(
                        place, outside, visible, width, scale, cap, best[row], weight_sum[row], sums, dim, weights
                    )
                place, stride = values + 2 * start * dim, 4 * dim
                source = probabilities.ctypes.data
                multiply(used, source, 2 * KEY_TILE, place, stride, width // 2, mixed.ctypes.data, 4 * dim, dim, 1)
            for row in range(used):
                for i in range(dim):
                    value = mixed[row, i] / weight_sum[row] * factor
                    store(out[first + row // together, head + row % together], i, value)

    return prefill


_prefill_in_registers, _prefill_in_matrices = _make_prefill(floats.multiply), _make_prefill(amx.multiply)


@Kernel
def _prefill_by_registers(words):
    _prefill_in_registers(words)


@Kernel
def _prefill_by_amx(words):
    _prefill_in_matrices(words)
    amx.release_tiles()


@Kernels
def _pack(words):
    """words: KV layer, block table, packed K and V, KV heads, head dim, block size, tokens, padded tokens, kinds.

    An item is one head's part of one block, 16 tokens at a time; what this packs beyond the context means nothing, but
    the last block's brings the zeros behind it.
    """
    items, kv_heads, dim, block_size = words[1], words[7], words[8], words[9]
    tokens, padded_tokens, kinds = words[10], words[11], words[12]
    blocks = items // kv_heads
    table = carray(as_short_integers(words[4]), (blocks,))
    packed_keys = carray(as_short_integers(words[5]), (kv_heads, dim // 2, padded_tokens))
    packed_values = carray(as_short_integers(words[6]), (kv_heads, padded_tokens // 2, dim))
    size = cached_bytes(words)
    head_bytes = block_size * dim * size
    unpacked = np.empty(LANES * dim, np.uint16)
    for item in taken(words, items):
        index, head = item // kv_heads, item % kv_heads
        keys = words[3] + (np.int64(table[index]) * kinds * kv_heads + head) * head_bytes
        values = keys + (kinds - 1) * kv_heads * head_bytes
        first = index * block_size
        count = min(block_size, tokens - first)
        for token in range(0, count, LANES):
            rows = in_bf16(words, keys + token * dim * size, LANES * dim, unpacked.ctypes.data)
            for pair in range(0, dim // 2, LANES):
                place = packed_keys[head, pair:, first + token :].ctypes.data
                transpose(rows + pair * 4, 2 * dim, place, 4 * padded_tokens)
        for token in range(0, count, 2):
            row = in_bf16(words, values + token * dim * size, 2 * dim, unpacked.ctypes.data)
            place = packed_values[head, (first + token) // 2].ctypes.data
            interleave(row, row + 2 * dim, dim // (2 * LANES), place)
        if index == blocks - 1:
            packed_keys[head, :, tokens:] = 0
            packed_values[head, (tokens + 1) // 2 :] = 0
            for i in range(dim if tokens % 2 else 0):
                packed_values[head, tokens // 2, i] &= np.int32(0xFFFF)  # the second of a pair is the upper half


def attend(
    q: Tensor, kv_layer: Tensor, table: Tensor, tokens: int, form: AttentionForm, out: Tensor, before: int = 0
) -> None:
    """Causal attention of the last rows of a context of `tokens`, in contiguous bf16, of a shape that `fits_tiles`.

    q and out [rows, H, D]; kv_layer [blocks, kinds, G, block_size, D], of bf16 or FP8; table int32, contiguous. All of
    the table is read. `before` tokens that no row attends to lie in front of the context.
    """
    rows, heads, dim = q.shape
    _, kinds, kv_heads, block_size, _ = kv_layer.shape
    # One vector more: rows of packed keys a power of two apart would share a few sets of the L1 cache.
    padded_tokens = -(-tokens // KEY_PADDING) * KEY_PADDING + LANES
    # Pairs along the inner dimension of each product go into one 32-bit lane.
    keys, values = _SCRATCH.lanes(kv_heads * dim * padded_tokens).chunk(2)
    items = kv_heads * -(-tokens // block_size)
    pack = _pack.of(q.dtype, kv_layer.dtype)
    pack.run(items, 8, kv_layer, table, keys, values, kv_heads, dim, block_size, tokens, padded_tokens, kinds)
    together = _heads_together(rows, heads // kv_heads)
    (_prefill_by_amx if amx.is_usable() else _prefill_by_registers).run(
        heads // together * _num_tiles(rows, together),
        1,
        *(q, keys, values, out),
        *(rows, heads, kv_heads, dim, tokens, padded_tokens, form.cached_scale, together),
        *(form.window or tokens, form.soft_cap, 0 if form.sinks is None else form.sinks, form.kv_scales.value),
        before,
    )


def _heads_together(rows: int, group: int) -> int:
    """Return how many of a group's heads share tiles: all, where that makes fewer tiles."""
    return group if group <= QUERY_TILE and _num_tiles(rows, group) < group * _num_tiles(rows, 1) else 1


def _num_tiles(rows: int, together: int) -> int:
    return -(-rows // (QUERY_TILE // together))
