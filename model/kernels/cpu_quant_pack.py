"""Weights quantised and packed for cpu_quant in one pass over them, a panel of 64 rows at a time.

The result is that of `model.quantization.quantize`, in the layout that cpu_quant_tile describes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from twostroke.model.kernels.cpu_floats import largest, store, widen
from twostroke.model.kernels.cpu_gemm_pack import zeros_on_huge_pages
from twostroke.model.kernels.cpu_gemm_tile import PANEL_COLUMNS, STEP_BYTES
from twostroke.model.kernels.cpu_launch import (
    Kernel,
    as_floats,
    as_halves,
    as_short_integers,
    compiled,
    float_of_bits,
    take_items,
)
from twostroke.model.kernels.cpu_quant import GROUP
from twostroke.model.kernels.cpu_quant_tile import INT4_STEP_COLUMNS, INT8_STEP_COLUMNS


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
