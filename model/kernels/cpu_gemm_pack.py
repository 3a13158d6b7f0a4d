"""The packed layout of CPU projections: how weights get into it, and how rows are read from it or from plain tables.

W [out, in] becomes [panels, steps, 64] lanes of 4 bytes, each a pair of neighbouring bf16 of a row of W or one fp32.
Panel p holds rows 64 p to 64 p + 63; what lies beyond `out` or `in` is zero.
"""

import contextlib
import functools
import math
import mmap

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.kernels.cpu_dot import LANES, transpose
from twostroke.model.kernels.cpu_floats import store, widen
from twostroke.model.kernels.cpu_gemm_tile import PANEL_COLUMNS
from twostroke.model.kernels.cpu_launch import (
    Kernel,
    as_floats,
    as_halves,
    as_integers,
    as_short_integers,
    compiled,
    take_items,
)
from twostroke.model.kernels.cpu_launcher import Launcher


def zeros_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for weights, on pages of 2 MiB where the kernel has them: streams then read about 8 % faster than over
    pages of 4 KiB, and there are fewer faults while it is filled."""
    # Private: shared anonymous memory is a file to the kernel, which by default has small pages.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def pack(weight: Tensor) -> Tensor:
    """weight bf16 or fp32 [out, in], contiguous -> int32 [panels, steps, 64], the bits of its lanes."""
    columns, inner = weight.shape
    halves = inner * weight.element_size() // 2
    panels, steps = -(-columns // PANEL_COLUMNS), -(-halves // 2)
    packed = zeros_on_huge_pages((panels, steps, PANEL_COLUMNS), torch.int32)
    _pack_kernel().run(panels, 1, weight.data_ptr(), packed.data_ptr(), columns, halves, steps)
    return packed


def _pack(words):
    """words: W, packed (all zero), out, 16-bit halves of a row, steps."""
    items, grain = words[1], words[2]
    columns, halves, steps = words[5], words[6], words[7]
    row_bytes, whole = 2 * halves, halves // 2
    packed = carray(as_short_integers(words[4]), (items, steps, PANEL_COLUMNS))
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for panel in range(begin, min(begin + grain, items)):
            width = min(PANEL_COLUMNS, columns - panel * PANEL_COLUMNS)
            first_row = words[3] + panel * PANEL_COLUMNS * row_bytes
            width_of_tiles, steps_of_tiles = width // LANES * LANES, whole // LANES * LANES
            for step in range(0, steps_of_tiles, LANES):
                for column in range(0, width_of_tiles, LANES):
                    source = first_row + column * row_bytes + 4 * step
                    transpose(source, row_bytes, packed[panel, step:, column:].ctypes.data, 4 * PANEL_COLUMNS)
            for column in range(width):
                row = first_row + column * row_bytes
                lanes = carray(as_short_integers(row), (whole,))
                for step in range(steps_of_tiles if column < width_of_tiles else 0, whole):
                    packed[panel, step, column] = lanes[step]
                if halves % 2:
                    packed[panel, whole, column] = carray(as_halves(row), (halves,))[halves - 1]


@functools.cache
def _pack_kernel() -> Kernel:
    return Kernel(_pack)


@compiled
def _look_up(words, table, out):
    """words: token ids, table, out, first id, ids in the table, hidden, rows and elements of a panel, elements of a run
    and from one run of a row to its next."""
    rows, grain = words[1], words[2]
    first, count, hidden = words[6], words[7], words[8]
    panel_rows, panel_elements, run, stride = words[9], words[10], words[11], words[12]
    panels = (count + panel_rows - 1) // panel_rows
    ids = carray(as_integers(words[3]), (rows,))
    table, out = carray(table, (panels * panel_elements,)), carray(out, (rows, hidden))
    while True:
        begin = take_items(words)
        if begin >= rows:
            return
        for row in range(begin, min(begin + grain, rows)):
            index = ids[row] - first
            if index < 0 or index >= count:
                for i in range(hidden):
                    store(out[row], i, np.float32(0))
                continue
            place = index // panel_rows * panel_elements + index % panel_rows * run
            for start in range(0, hidden, run):
                for i in range(min(run, hidden - start)):
                    store(out[row], start + i, widen(table[place + i]))
                place += stride


def _look_up_halves(words):
    _look_up(words, as_halves(words[4]), as_halves(words[5]))


def _look_up_floats(words):
    _look_up(words, as_floats(words[4]), as_floats(words[5]))


def _look_up_halves_as_floats(words):
    _look_up(words, as_halves(words[4]), as_floats(words[5]))


def _look_up_floats_as_halves(words):
    _look_up(words, as_floats(words[4]), as_halves(words[5]))


@functools.cache
def _look_up_kernel(table_dtype: torch.dtype, dtype: torch.dtype) -> Kernel:
    half, whole = torch.bfloat16, torch.float32
    return Kernel(
        {
            (half, half): _look_up_halves,
            (half, whole): _look_up_halves_as_floats,
            (whole, half): _look_up_floats_as_halves,
            (whole, whole): _look_up_floats,
        }[table_dtype, dtype]
    )


def look_up(launcher: Launcher, token_ids: Tensor, table: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """As Backend.embed, of a plain table: bf16 or fp32 [rows, hidden], contiguous."""
    count, hidden = table.shape
    shape = (count, hidden, 1, hidden, hidden, hidden)
    return _run_look_up(launcher, token_ids, table.data_ptr(), table.dtype, first, dtype, shape)


def look_up_packed(
    launcher: Launcher,
    token_ids: Tensor,
    packed: Tensor,
    table_dtype: torch.dtype,
    shape: tuple[int, int],
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    """As Backend.embed, of weights that `pack` made of a table of `shape` and `table_dtype`."""
    lane = 4 // table_dtype.itemsize
    steps = packed.shape[1]
    layout = (*shape, PANEL_COLUMNS, steps * PANEL_COLUMNS * lane, lane, PANEL_COLUMNS * lane)
    return _run_look_up(launcher, token_ids, packed.data_ptr(), table_dtype, first, dtype, layout)


def _run_look_up(
    launcher: Launcher,
    token_ids: Tensor,
    table: int,
    table_dtype: torch.dtype,
    first: int,
    dtype: torch.dtype,
    layout: tuple[int, ...],
) -> Tensor:
    rows, hidden = token_ids.numel(), layout[1]
    out = launcher.empty((rows, hidden), dtype)
    kernel = _look_up_kernel(table_dtype, dtype)
    launcher.run(kernel, rows, 1, token_ids.data_ptr(), table, out.data_ptr(), first, *layout)
    return out
