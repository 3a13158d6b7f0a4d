"""Projections with int8 and int4 weights on AVX512-BF16: y = x W^T + b, x and W's integers in bf16, sums in fp32.

Up to DIRECT_MOST_ROWS rows weights are unpacked in registers, once for every four rows; for more they are unpacked
once into a scratch of bf16 that stays in the L1 cache, and multiplied from there. Both ways add in the same order: a
row's result does not depend on the rows beside it. Scales multiply fp32 sums: of a whole row (int8) or of a group.

Weights quantised and packed for cpu_quant in one pass over them, a panel of 64 rows at a time.

The result is that of `model.quantization.quantize`, in the layout that cpu_quant_tile describes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from twostroke.model.cpu.kernels.floats import largest, store, widen
from twostroke.model.cpu.kernels.gemm import LINE_BYTES, PANEL_COLUMNS, STEP_BYTES, TILE_ROWS, zeros_on_huge_pages
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    as_floats,
    as_halves,
    as_integers,
    as_short_integers,
    compiled,
    float_of_bits,
    take_items,
)
from twostroke.model.cpu.kernels.quant_tile import (
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


@compiled
def _read(source, first, values, count):
    for i in range(count):
        values[i] = widen(source[first + i])


# Divisions as torch does them. With the fast mathematics of `compiled`, which what it calls inherits unless told
# otherwise, they become products with an inverse.
_divided = njit(nogil=True, fastmath={"nsz"}, error_model="numpy")


@_divided
def _share(value, count):
    return value / count


@_divided
def _round(values, count, step, lowest, highest, numbers):
    for i in range(count):
        numbers[i] = np.int32(min(max(np.rint(values[i] / step), lowest), highest))


@compiled
def _pack_int8(words, source):
    """words: weight, packed (zeros), scales fp32 [panels * 64], rows, columns."""
    items, grain, rows, columns = words[1], words[2], words[6], words[7]
    steps = columns // INT8_STEP_COLUMNS
    packed = carray(as_halves(words[4]), (items, steps, STEP_BYTES // 2))
    scales = carray(as_floats(words[5]), (items * PANEL_COLUMNS,))
    values, sizes = np.empty(columns, np.float32), np.empty(columns, np.float32)
    numbers = np.empty(columns, np.int32)
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for panel in range(begin, min(begin + grain, items)):
            for output in range(min(PANEL_COLUMNS, rows - panel * PANEL_COLUMNS)):
                row = panel * PANEL_COLUMNS + output
                _read(source, row * columns, values, columns)
                for i in range(columns):
                    sizes[i] = abs(values[i])
                step = _share(largest(sizes, columns), np.float32(127))
                if step == 0:
                    step = np.float32(1)
                scales[row] = step
                _round(values, columns, step, np.float32(-127), np.float32(127), numbers)
                for i in range(columns):
                    numbers[i] = abs(numbers[i]) | (numbers[i] >> 24 & 0x80)
                place = output // 16 * 32 + output % 16 // 4 * 8 + output % 4
                for i in range(steps):
                    packed[panel, i, place] = np.uint16(numbers[4 * i] | numbers[4 * i + 1] << 8)
                    packed[panel, i, place + 4] = np.uint16(numbers[4 * i + 2] | numbers[4 * i + 3] << 8)


@compiled
def _pack_int4(words, source):
    """words: weight, packed (zeros), scales bf16 [panels, groups, 64], rows, columns."""
    items, grain, rows, columns = words[1], words[2], words[6], words[7]
    steps, groups = columns // INT4_STEP_COLUMNS, (columns + GROUP - 1) // GROUP
    packed = carray(as_short_integers(words[4]), (items, steps, STEP_BYTES // 4))
    scales = carray(as_halves(words[5]), (items, groups, PANEL_COLUMNS))
    values, numbers = np.empty(GROUP, np.float32), np.empty(GROUP, np.int32)
    negative = np.empty(GROUP, np.float32)
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for panel in range(begin, min(begin + grain, items)):
            for output in range(min(PANEL_COLUMNS, rows - panel * PANEL_COLUMNS)):
                row = panel * PANEL_COLUMNS + output
                for group in range(groups):
                    count = min(GROUP, columns - group * GROUP)
                    _read(source, row * columns + group * GROUP, values, count)
                    for i in range(count):
                        negative[i] = -values[i]
                    high, low = largest(values, count), -largest(negative, count)
                    place = scales[panel, group]
                    store(place, output, _share(high if high > -low else low, np.float32(-8)))
                    step = float_of_bits(np.uint32(place[output]) << np.uint32(16))
                    if step == 0:
                        step = np.float32(1)
                        store(place, output, step)
                    _round(values, count, step, np.float32(-8), np.float32(7), numbers)
                    for i in range(count // INT4_STEP_COLUMNS):
                        word = np.int32(0)
                        for k in range(INT4_STEP_COLUMNS):
                            word |= (numbers[INT4_STEP_COLUMNS * i + k] + 8) << (16 * (k % 2) + k // 2 * 4)
                        packed[panel, group * (GROUP // INT4_STEP_COLUMNS) + i, output] = word


def _pack_int8_halves(words):
    _pack_int8(words, carray(as_halves(words[3]), (words[6] * words[7],)))


def _pack_int8_floats(words):
    _pack_int8(words, carray(as_floats(words[3]), (words[6] * words[7],)))


def _pack_int4_halves(words):
    _pack_int4(words, carray(as_halves(words[3]), (words[6] * words[7],)))


def _pack_int4_floats(words):
    _pack_int4(words, carray(as_floats(words[3]), (words[6] * words[7],)))


_FUNCTIONS: dict[tuple[int, torch.dtype], Callable[[Any], None]] = {
    (8, torch.bfloat16): _pack_int8_halves,
    (8, torch.float32): _pack_int8_floats,
    (4, torch.bfloat16): _pack_int4_halves,
    (4, torch.float32): _pack_int4_floats,
}


@functools.cache
def _kernel(bits: int, dtype: torch.dtype) -> Kernel:
    return Kernel(_FUNCTIONS[bits, dtype])


def quantize_and_pack(weight: Tensor, bits: Literal[8, 4]) -> tuple[Tensor, Tensor]:
    """weight bf16 or fp32 [out, in], contiguous, `in` a multiple of 8 -> packed bytes [panels, bytes], and scales.

    Scales are fp32 [out, rounded up to panels] of eight bits, bf16 [panels, groups, 64] of four.
    """
    rows, columns = weight.shape
    panels = -(-rows // PANEL_COLUMNS)
    packed = zeros_on_huge_pages((panels, PANEL_COLUMNS * columns * bits // 8), torch.uint8)
    if bits == 8:
        scales = torch.zeros(panels * PANEL_COLUMNS)
    else:
        scales = torch.zeros((panels, -(-columns // GROUP), PANEL_COLUMNS), dtype=torch.bfloat16)
    _kernel(bits, weight.dtype).run(panels, 1, weight.data_ptr(), packed.data_ptr(), scales.data_ptr(), rows, columns)
    return packed, scales
