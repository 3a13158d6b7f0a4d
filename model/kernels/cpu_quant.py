"""Projections with int8 and int4 weights on AVX512-BF16: y = x W^T + b, x and W's integers in bf16, sums in fp32.

Up to DIRECT_MOST_ROWS rows weights are unpacked in registers, once for every four rows; for more they are unpacked
once into a scratch of bf16 that stays in the L1 cache, and multiplied from there. Both ways add in the same order: a
row's result does not depend on the rows beside it. Scales multiply fp32 sums: of a whole row (int8) or of a group.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from twostroke.model.kernels.cpu_floats import store
from twostroke.model.kernels.cpu_gemm_tile import LINE_BYTES, PANEL_COLUMNS, STEP_BYTES, TILE_ROWS
from twostroke.model.kernels.cpu_launch import Kernel, as_floats, as_halves, as_integers, compiled, take_items
from twostroke.model.kernels.cpu_quant_tile import (
    DIRECT_ROWS,
    INT4_STEP_COLUMNS,
    INT8_STEP_COLUMNS,
    direct_int4,
    direct_int8,
    unpack_int4,
    unpack_int8,
    unpacked_int4,
    unpacked_int8,
)

GROUP = 64  # input columns that share int4 scales
CHUNK = 256  # input columns whose weights of a panel, 32 KiB as bf16, are unpacked at a time
DIRECT_MOST_ROWS = 8


@compiled
def _write(words, sums, first_row, rows, panel, scaled):
    """Round sums [rows, PANEL_COLUMNS], after scales and bias, into their place of the output."""
    out_features, bias, is_float = words[9], words[6], words[10]
    scales = carray(as_floats(words[5]), (words[11] * PANEL_COLUMNS,))
    first = panel * PANEL_COLUMNS
    count = min(PANEL_COLUMNS, out_features - first)
    for row in range(rows):
        start = (first_row + row) * out_features + first
        if scaled:
            for i in range(PANEL_COLUMNS):
                sums[row, i] *= scales[first + i]
        if bias:
            biases = carray(as_floats(bias), (out_features,))
            for i in range(count):
                sums[row, i] += biases[first + i]
        if is_float:
            floats = carray(as_floats(words[7] + 4 * start), (count,))
            for i in range(count):
                floats[i] = sums[row, i]
        else:
            halves = carray(as_halves(words[7] + 2 * start), (count,))
            for i in range(count):
                store(halves, i, sums[row, i])


def _make_direct(tile: Any, step_columns: int, group: int, panel_bytes: int, scaled: bool) -> Callable[[Any], None]:
    """`panel_bytes` are those of a panel's input column; `scaled` says whether the tile scales groups, or we rows."""

    def direct(words):
        """words: x, packed, scales, bias or 0, out, in, out, whether out is fp32, panels, rows."""
        items, grain, columns, rows = words[1], words[2], words[8], words[12]
        groups, rest = columns // group, columns % group
        sums = np.empty((DIRECT_ROWS, PANEL_COLUMNS), np.float32)
        c = sums.ctypes.data
        while True:
            begin = take_items(words)
            if begin >= items:
                return
            for panel in range(begin, min(begin + grain, items)):
                packed = words[4] + panel * columns * panel_bytes
                scales = words[5] + panel * ((columns + group - 1) // group) * PANEL_COLUMNS * 2
                for first_row in range(0, rows, DIRECT_ROWS):
                    count = min(DIRECT_ROWS, rows - first_row)
                    a = words[3] + first_row * 2 * columns
                    sums[:] = np.float32(0)
                    tile(count, a, 2 * columns, packed, group // step_columns, groups, scales, c)
                    if rest:
                        done = groups * group
                        end = packed + done * panel_bytes
                        end_scales = scales + groups * PANEL_COLUMNS * 2
                        tile(count, a + 2 * done, 2 * columns, end, rest // step_columns, 1, end_scales, c)
                    _write(words, sums, first_row, count, panel, not scaled)

    return direct


@compiled
def _tile_rows(rows):
    """As even as tiles can be."""
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    return (rows + tiles - 1) // tiles


def _make_unpacked(
    unpack: Any, tile: Any, step_columns: int, group: int, panel_bytes: int, scaled: bool
) -> Callable[[Any], None]:
    """As `_make_direct`."""

    def unpacked(words):
        """words: x, packed, scales, bias or 0, out, in, out, whether out is fp32, panels, rows, rows an item."""
        items, grain, columns, panels = words[1], words[2], words[8], words[11]
        groups = (columns + group - 1) // group
        sums = np.empty((words[13], PANEL_COLUMNS), np.float32)
        memory = np.empty((CHUNK // 2 + 1) * PANEL_COLUMNS, np.uint32)
        pairs = (memory.ctypes.data + 63) // 64 * 64
        while True:
            begin = take_items(words)
            if begin >= items:
                return
            for item in range(begin, min(begin + grain, items)):
                panel, first_row = item % panels, item // panels * words[13]
                rows = min(words[13], words[12] - first_row)
                height = _tile_rows(rows)
                packed = words[4] + panel * columns * panel_bytes
                sums[:] = np.float32(0)
                for column in range(0, columns, CHUNK):
                    width = min(CHUNK, columns - column)
                    unpack(packed + column * panel_bytes, width // step_columns, pairs)
                    scales = words[5] + (panel * groups + column // group) * PANEL_COLUMNS * 2
                    ahead = packed + (column + width) * panel_bytes
                    whole, rest = width // group, width % group
                    for row in range(0, rows, height):
                        count = min(height, rows - row)
                        a = words[3] + ((first_row + row) * columns + column) * 2
                        c = sums.ctypes.data + row * STEP_BYTES
                        asked = 0 if row else 2 * panel_bytes  # the first tile asks for all of the next chunk
                        tile(count, a, 2 * columns, pairs, group // 2, whole, scales, c, ahead, asked)
                        if rest:
                            done = whole * group
                            end = pairs + done // 2 * STEP_BYTES
                            end_scales = scales + whole * PANEL_COLUMNS * 2
                            tile(count, a + 2 * done, 2 * columns, end, rest // 2, 1, end_scales, c, ahead, 0)
                _write(words, sums, first_row, rows, panel, not scaled)

    return unpacked


_direct_int8 = _make_direct(direct_int8, INT8_STEP_COLUMNS, CHUNK, PANEL_COLUMNS, False)
_direct_int4 = _make_direct(direct_int4, INT4_STEP_COLUMNS, GROUP, PANEL_COLUMNS // 2, True)
_unpacked_int8 = _make_unpacked(unpack_int8, unpacked_int8, INT8_STEP_COLUMNS, CHUNK, PANEL_COLUMNS, False)
_unpacked_int4 = _make_unpacked(unpack_int4, unpacked_int4, INT4_STEP_COLUMNS, GROUP, PANEL_COLUMNS // 2, True)


def _look_up_int8(words):
    """words: token ids, packed, scales, out, first id, ids in the table, hidden, whether out is fp32."""
    rows, grain = words[1], words[2]
    first, count, hidden = words[7], words[8], words[9]
    ids, scales = carray(as_integers(words[3]), (rows,)), carray(as_floats(words[5]), (count,))
    found = np.empty(hidden, np.float32)
    while True:
        begin = take_items(words)
        if begin >= rows:
            return
        for row in range(begin, min(begin + grain, rows)):
            index = ids[row] - first
            found[:] = np.float32(0)
            if 0 <= index < count:
                output = index % PANEL_COLUMNS
                lane = output % 16
                place = words[4] + index // PANEL_COLUMNS * hidden * PANEL_COLUMNS
                place += output // 16 * LINE_BYTES + lane // 4 * 16 + lane % 4 * 2
                for column in range(0, hidden, INT8_STEP_COLUMNS):
                    pairs = carray(as_halves(place + column * PANEL_COLUMNS), (5,))
                    for j in range(2):
                        for e in range(2):
                            code = np.int32(pairs[4 * j]) >> (8 * e) & 0xFF
                            value = np.float32(code & 0x7F)
                            found[column + 2 * j + e] = (-value if code & 0x80 else value) * scales[index]
            if words[10]:
                floats = carray(as_floats(words[6]), (rows, hidden))
                for i in range(hidden):
                    floats[row, i] = found[i]
            else:
                halves = carray(as_halves(words[6]), (rows, hidden))
                for i in range(hidden):
                    store(halves[row], i, found[i])


@functools.cache
def look_up_int8_kernel() -> Kernel:
    return Kernel(_look_up_int8)


@functools.cache
def direct_kernel(bits: int) -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    return Kernel(_direct_int8 if bits == 8 else _direct_int4)


@functools.cache
def unpacked_kernel(bits: int) -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    return Kernel(_unpacked_int8 if bits == 8 else _unpacked_int4)
