"""y = x W^T + b on CPUs, over one packed copy of W, for any number of rows: after Goto & van de Geijn 2008.

W is packed into panels of 64 output columns, [panels, steps, 64] lanes of 4 bytes (see cpu_gemm_tile), zero where
`out` and `in` end before them. A thread takes a panel and a block of rows at a time. It goes through the panel in
blocks that stay in its L2 cache while all tiles of rows pass over them, so that each weight comes from memory once; the
tiles ask for the following block meanwhile. Sums between blocks stay in fp32.

Every sum is added up in the order of the inner dimension, whatever the number of rows: a row's result is the same to
the last bit in every batch.
"""

import functools

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.kernels.cpu_floats import store
from twostroke.model.kernels.cpu_gemm_tile import (
    LINE_BYTES,
    PANEL_COLUMNS,
    STEP_BYTES,
    STEPS_TOGETHER,
    TILE_ROWS,
    finish_floats,
    finish_halves,
    tile_of_floats,
    tile_of_pairs,
)
from twostroke.model.kernels.cpu_launch import Kernel, as_floats, as_halves, compiled, take_items
from twostroke.model.kernels.cpu_launcher import Launcher

ROW_BLOCK = 192
LINES_TOGETHER = 16  # cache lines of B in the steps that a tile unrolls


@compiled
def finish_row(words, row, first_column, width, sums):
    """One row's sums of a panel, with the bias, to `out`."""
    columns, is_bf16 = words[9], words[13]
    bias = words[5] + 4 * first_column
    place = row * columns + first_column
    if width == PANEL_COLUMNS:
        if is_bf16:
            finish_halves(sums.ctypes.data, bias, words[6] + 2 * place)
        else:
            finish_floats(sums.ctypes.data, bias, words[6] + 4 * place)
        return
    bias, end = carray(as_floats(bias), (width,)), place + width
    out_floats, out_halves = carray(as_floats(words[6]), (end,)), carray(as_halves(words[6]), (end,))
    for i in range(width):
        if is_bf16:
            store(out_halves, place + i, sums[i] + bias[i])
        else:
            store(out_floats, place + i, sums[i] + bias[i])


@compiled
def _multiply_block(is_floats, rows, a, a_stride, b, steps, c, add, ahead):
    """c[rows, 64] (+)= a b, in tiles of about equal height; they ask for the block at `ahead` meanwhile."""
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    # A single tile reads straight on, which the cores' own prefetching follows better than ours leads.
    share = (LINES_TOGETHER + tiles - 1) // tiles if tiles > 1 else 0
    first, asked = np.int64(0), np.int64(0)
    for index in range(tiles):
        height = (rows - first + tiles - index - 1) // (tiles - index)
        lines = min(share, LINES_TOGETHER - asked)
        place = ahead + asked * LINE_BYTES * (steps // STEPS_TOGETHER)
        x, out = a + first * a_stride, c + first * STEP_BYTES
        if is_floats:
            tile_of_floats(height, x, a_stride, b, steps, out, add, place, lines)
        else:
            tile_of_pairs(height, x, a_stride, b, steps, out, add, place, lines)
        first += height
        asked += lines


@compiled
def _multiply(words, is_floats):
    """words: x, packed W, bias, out, rows, in, out, steps, block steps, row block, whether out is bf16."""
    items, grain = words[1], words[2]
    rows, inner, columns, steps = words[7], words[8], words[9], words[10]
    block_steps, row_block = words[11], words[12]
    panels = (columns + PANEL_COLUMNS - 1) // PANEL_COLUMNS
    memory = np.empty(row_block * PANEL_COLUMNS + 16, np.float32)
    skipped = -memory.ctypes.data % LINE_BYTES // 4
    sums = memory[skipped : skipped + row_block * PANEL_COLUMNS].reshape(row_block, PANEL_COLUMNS)
    sums_at = sums.ctypes.data
    x_stride = inner * (4 if is_floats else 2)
    whole_steps = x_stride // 4
    last_halves = np.zeros((row_block, 2), np.uint16)
    begin = take_items(words)
    while begin < items:
        following = take_items(words)
        end = min(begin + grain, items)
        for item in range(begin, end):
            upcoming = item + 1 if item + 1 < end else min(following, items - 1)
            panel = words[4] + item % panels * steps * STEP_BYTES
            next_panel = words[4] + upcoming % panels * steps * STEP_BYTES
            first_row, first_column = item // panels * row_block, item % panels * PANEL_COLUMNS
            count, width = min(row_block, rows - first_row), min(PANEL_COLUMNS, columns - first_column)
            x = words[3] + first_row * x_stride
            for start in range(0, whole_steps, block_steps):
                block = min(block_steps, whole_steps - start)
                b = panel + start * STEP_BYTES
                ahead = b + block * STEP_BYTES if start + block < whole_steps else next_panel
                _multiply_block(is_floats, count, x + 4 * start, x_stride, b, block, sums_at, start > 0, ahead)
            if whole_steps < steps:  # an odd number of bf16: the last has no partner in x
                for row in range(count):
                    end_of_row = as_halves(x + row * x_stride)
                    last_halves[row, 0] = end_of_row[inner - 1]
                b = panel + whole_steps * STEP_BYTES
                _multiply_block(is_floats, count, last_halves.ctypes.data, 4, b, 1, sums_at, whole_steps > 0, b)
            for row in range(first_row, first_row + count):
                finish_row(words, row, first_column, width, sums[row - first_row])
        begin = following


# These two are no closures over their tile: numba's cache never finds a closure again, so every start compiled it anew.


def _multiply_pairs(words):
    _multiply(words, False)


def _multiply_floats(words):
    _multiply(words, True)


@functools.cache
def _kernel(dtype: torch.dtype) -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    return Kernel({torch.bfloat16: _multiply_pairs, torch.float32: _multiply_floats}[dtype])


def _block_steps(rows: int) -> int:
    """Steps of a block: its 256 bytes a step and the next block's should fit the L1 cache, and the tiles' sums, which
    are written and read once a block, cost little beside it. These were the best of 24 to 1024, measured."""
    if rows <= TILE_ROWS:
        return 512
    return 48 if rows <= 2 * TILE_ROWS else 128


def multiply(launcher: Launcher, x: Tensor, packed: Tensor, bias: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x bf16 or fp32 [T, in], contiguous; packed by cpu_gemm_pack; bias fp32 [out]. Returns `out_dtype` [T, out]."""
    rows, inner = x.shape
    panels, steps, _ = packed.shape
    out = launcher.empty((rows, bias.shape[0]), out_dtype)
    launcher.run(
        _kernel(x.dtype),
        panels * -(-rows // ROW_BLOCK),
        1,
        x.data_ptr(),
        packed.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        rows,
        inner,
        bias.shape[0],
        steps,
        _block_steps(rows),
        min(rows, ROW_BLOCK),
        int(out_dtype == torch.bfloat16),
    )
    return out
