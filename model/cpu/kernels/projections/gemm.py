"""y = x W^T + b on CPUs, over one packed copy of W, for any number of rows: after Goto & van de Geijn 2008.

W [out, in] is packed into panels of 64 rows, [panels, steps, 64] lanes of 4 bytes, each a pair of neighbouring bf16 of
a row of W or one fp32; what lies beyond `out` or `in` is zero. A thread takes a panel and a block of rows of x at a
time. It goes through the panel in blocks that stay in its L2 cache while all tiles of rows pass over them, so that each
weight comes from memory once; the tiles ask for the following block meanwhile. Sums between blocks stay in fp32.

Every sum is added up in the order of the inner dimension, whatever the number of rows: a row's result is the same to
the last bit in every batch.
"""

import contextlib
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.core import cgutils
from numba.extending import overload
from torch import Tensor

from twostroke.model.cpu.kernels import amx, floats
from twostroke.model.cpu.kernels.floats import (
    FLOATS,
    INTS,
    LANES,
    LINE_BYTES,
    BFloat,
    ask_for_line,
    dot_pairs,
    for_each_height,
    multiply_add,
    transpose,
    write_tile,
)
from twostroke.model.cpu.kernels.launch import (
    WIDE,
    Kernel,
    Kernels,
    Launcher,
    as_halves,
    as_integers,
    as_short_integers,
    as_stored,
    at,
    compiled,
    take_items,
    taken,
    written_in_llvm,
)
from twostroke.model.cpu.kernels.projections import short_tiles

TILE_ROWS = 6  # need 24 of AVX-512's 32 registers for their sums, which hides the latency of a multiplication
PANEL_COLUMNS = 64
STEP_BYTES = 256  # of B: 64 columns of 4 bytes
VECTORS = PANEL_COLUMNS // LANES
STEPS_TOGETHER = 4  # unrolled, with one portion of prefetches
USES_SHORT_TILES = short_tiles.is_usable() and not torch.cpu._is_avx512_supported()
"""True where fp32's tiles are those of short_tiles.py."""


def _make_tile(combine: Any, locality: int) -> Any:
    """`locality`: of the lines asked for, as floats.ask_for_line's."""

    @written_in_llvm()
    def tile(builder, rows, a, a_stride, b, steps, c, add, ahead, lines):
        groups = builder.udiv(steps, WIDE(STEPS_TOGETHER))
        asked = builder.mul(lines, WIDE(LINE_BYTES))

        def walk(step: Callable[[Any], None]) -> None:
            with cgutils.for_range(builder, groups) as group:
                start = builder.add(ahead, builder.mul(group.index, asked))
                with cgutils.for_range(builder, lines) as line:
                    ask_for_line(builder, builder.add(start, builder.mul(line.index, WIDE(LINE_BYTES))), locality)
                first = builder.mul(group.index, WIDE(STEPS_TOGETHER))
                for offset in range(STEPS_TOGETHER):
                    step(builder.add(first, WIDE(offset)))
            done = builder.mul(groups, WIDE(STEPS_TOGETHER))
            with cgutils.for_range(builder, builder.sub(steps, done)) as rest:
                step(builder.add(done, rest.index))

        def write(count: int) -> None:
            panel = b, WIDE(STEP_BYTES)
            write_tile(builder, (count, VECTORS), combine, (a, a_stride), panel, (c, WIDE(STEP_BYTES)), add, walk)

        for_each_height(builder, rows, TILE_ROWS, write)

    return tile


# Few rows wait for memory, from which more lines are on their way to the L2 cache at a time than to the L1 cache. With
# more rows there is time enough, and a weight is read by some tiles in a row and then not before the next step.
FEW_ROWS = 3 * TILE_ROWS
_tile_of_pairs, _tile_of_floats = _make_tile(dot_pairs, 0), _make_tile(multiply_add, 0)
_tile_of_pairs_for_few, _tile_of_floats_for_few = _make_tile(dot_pairs, 2), _make_tile(multiply_add, 2)


_short_tile = short_tiles.make_panel_tile(PANEL_COLUMNS, 2)


def tile(words, rows, a, a_stride, b, steps, c, add, ahead, lines, are_few):
    """c[rows, 64] (+)= a[rows, steps] b[steps, 64], of 1 to TILE_ROWS rows, stored as the kernel's numbers are.

    B and C are contiguous. While it computes, the tile asks for `lines` cache lines every 4 steps, one after the other
    from address `ahead` on: what will be read next can so come from memory meanwhile. `are_few`: x has FEW_ROWS at
    most. All other arguments are int64.
    """
    raise NotImplementedError("compiled code only")


@overload(tile)
def _tile(words, rows, a, a_stride, b, steps, c, add, ahead, lines, are_few):
    is_fp32 = words.stored == types.float32
    if is_fp32 and USES_SHORT_TILES:
        return lambda words, rows, a, a_stride, b, steps, c, add, ahead, lines, are_few: _short_tile(
            rows, a, a_stride, b, steps, c, add, ahead, lines
        )
    of_few = _tile_of_floats_for_few if is_fp32 else _tile_of_pairs_for_few
    of_many = _tile_of_floats if is_fp32 else _tile_of_pairs

    def chosen(words, rows, a, a_stride, b, steps, c, add, ahead, lines, are_few):
        if are_few:
            of_few(rows, a, a_stride, b, steps, c, add, ahead, lines)
        else:
            of_many(rows, a, a_stride, b, steps, c, add, ahead, lines)

    return chosen


def _in_bf16(builder: Any, total: Any, numbers: Any) -> Any:
    """fp32 rounded to nearest even; elsewhere than on AVX512-BF16 LLVM would call a function that nobody has."""
    if floats.is_supported():
        return builder.fptrunc(total, numbers)
    bits = builder.bitcast(total, INTS)
    half = ir.Constant(INTS, [16] * LANES)
    even = builder.and_(builder.lshr(bits, half), ir.Constant(INTS, [1] * LANES))
    raised = builder.add(builder.add(bits, ir.Constant(INTS, [0x7FFF] * LANES)), even)
    return builder.bitcast(builder.trunc(builder.lshr(raised, half), ir.VectorType(ir.IntType(16), LANES)), numbers)


def _make_finish(kind: Any) -> Any:
    """out[64] = c[64] + bias[64], rounded to `kind`, for addresses of contiguous numbers; `out` may be `c`."""
    size = 4 if isinstance(kind, ir.FloatType) else 2

    @written_in_llvm()
    def finish(builder, c, bias, out):
        for vector in range(VECTORS):
            left, right = (
                builder.load(at(builder, base, WIDE(LINE_BYTES * vector), FLOATS), align=4) for base in (c, bias)
            )
            total = builder.fadd(left, right)
            numbers = ir.VectorType(kind, LANES)
            rounded = total if size == 4 else _in_bf16(builder, total, numbers)
            builder.store(rounded, at(builder, out, WIDE(size * LANES * vector), numbers), align=size)

    return finish


_finish_floats, _finish_halves = _make_finish(ir.FloatType()), _make_finish(BFloat())

ROW_BLOCK, AMX_ROW_BLOCK = 192, 512
LINES_TOGETHER = 16  # cache lines of B in the steps that a tile unrolls


@compiled
def finish_row(sums, bias, out, is_bf16, columns, row, first_column):
    """One row's sums of a panel, with the bias, to `out` [rows, columns]. Addresses; the bias has whole panels."""
    width, bias = min(PANEL_COLUMNS, columns - first_column), bias + 4 * first_column
    size = 2 if is_bf16 else 4
    place = out + size * (row * columns + first_column)
    target = place if width == PANEL_COLUMNS else sums
    if is_bf16:
        _finish_halves(sums, bias, target)
    else:
        _finish_floats(sums, bias, target)
    if width < PANEL_COLUMNS:
        halves = size // 2 * width
        source, end_of_row = carray(as_halves(sums), (halves,)), carray(as_halves(place), (halves,))
        for i in range(halves):
            end_of_row[i] = source[i]


@compiled
def _multiply_block(words, rows, a, a_stride, b, steps, c, add, ahead):
    """c[rows, 64] (+)= a b, in tiles of about equal height; they ask for the block at `ahead` meanwhile."""
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    # A single pass reads straight on, which the cores' own prefetching follows better than ours leads.
    share = (LINES_TOGETHER + tiles - 1) // tiles if tiles > 1 or (USES_SHORT_TILES and rows > 1) else 0
    first, asked = np.int64(0), np.int64(0)
    for index in range(tiles):
        height = (rows - first + tiles - index - 1) // (tiles - index)
        lines = min(share, LINES_TOGETHER - asked)
        place = ahead + asked * LINE_BYTES * (steps // STEPS_TOGETHER)
        c_place = c + first * STEP_BYTES
        tile(words, height, a + first * a_stride, a_stride, b, steps, c_place, add, place, lines, rows <= FEW_ROWS)
        first += height
        asked += lines


@compiled
def _multiply_block_by_amx(words, rows, a, a_stride, b, steps, c, add, ahead):
    amx.multiply(rows, a, a_stride, b, STEP_BYTES, steps, c, STEP_BYTES, PANEL_COLUMNS, add)


def _make_panel(multiply_block: Any) -> Any:
    """`multiply_block(words, rows, a, a_stride, b, steps, c, add, ahead)`: c[rows, 64] (+)= a b, all by address."""

    @compiled
    def multiply_panel(words, count, x, x_stride, inner, panel, steps, block_steps, next_panel, sums, last_halves):
        """sums[count, 64] = x[count, inner] times a panel; asks for the next one meanwhile. Addresses; `last_halves` is
        memory for a pair of each row."""
        whole_steps = x_stride // 4
        for start in range(0, whole_steps, block_steps):
            block = min(block_steps, whole_steps - start)
            b = panel + start * STEP_BYTES
            ahead = b + block * STEP_BYTES if start + block < whole_steps else next_panel
            multiply_block(words, count, x + 4 * start, x_stride, b, block, sums, start > 0, ahead)
        if whole_steps < steps:  # an odd number of bf16: the last has no partner in x
            pairs = carray(as_halves(last_halves), (count, 2))
            for row in range(count):
                end_of_row = as_halves(x + row * x_stride)
                pairs[row, 0], pairs[row, 1] = end_of_row[inner - 1], 0
            b = panel + whole_steps * STEP_BYTES
            multiply_block(words, count, last_halves, 4, b, 1, sums, whole_steps > 0, b)

    return multiply_panel


def _make_multiply(multiply_panel: Any) -> Any:
    @compiled
    def multiply(words):
        """words: x, packed W, bias, out, rows, in, bytes of a row of x, out, steps, block steps, row block, whether
        out is bf16."""
        items, grain = words[1], words[2]
        rows, inner, x_stride, columns, steps = words[7], words[8], words[9], words[10], words[11]
        block_steps, row_block = words[12], words[13]
        panels = (columns + PANEL_COLUMNS - 1) // PANEL_COLUMNS
        memory = np.empty(row_block * PANEL_COLUMNS + 16, np.float32)
        skipped = -memory.ctypes.data % LINE_BYTES
        last_halves = np.empty((row_block, 2), np.uint16)
        begin = take_items(words)
        while begin < items:
            following = take_items(words)
            end = min(begin + grain, items)
            for item in range(begin, end):
                upcoming = item + 1 if item + 1 < end else min(following, items - 1)
                panel = words[4] + item % panels * steps * STEP_BYTES
                next_panel = words[4] + upcoming % panels * steps * STEP_BYTES
                first_row, first_column = item // panels * row_block, item % panels * PANEL_COLUMNS
                count = min(row_block, rows - first_row)
                x, last = words[3] + first_row * x_stride, last_halves.ctypes.data
                sums = memory.ctypes.data + skipped  # of the array, which so lives as long as the loop
                multiply_panel(words, count, x, x_stride, inner, panel, steps, block_steps, next_panel, sums, last)
                for row in range(count):
                    place = sums + row * STEP_BYTES
                    finish_row(place, words[5], words[6], words[14], columns, first_row + row, first_column)
            begin = following

    return multiply


def _make_multiply_tasks(multiply_panel: Any, by_amx: bool) -> Any:
    most_rows = AMX_ROW_BLOCK if by_amx else ROW_BLOCK

    @compiled
    def multiply_tasks(words):
        """words: x, packed W of all experts, bias, out, tasks, in, bytes of a row of x, out, steps, whether out is
        bf16."""
        inner, x_stride, columns, steps = words[8], words[9], words[10], words[11]
        tasks, panels = as_integers(words[7]), (columns + PANEL_COLUMNS - 1) // PANEL_COLUMNS
        items = tasks[0] * panels
        memory = np.empty(most_rows * PANEL_COLUMNS + 16, np.float32)
        skipped = -memory.ctypes.data % LINE_BYTES
        last_halves = np.empty((most_rows, 2), np.uint16)
        item = take_items(words)
        while item < items:
            following = take_items(words)
            upcoming = min(following, items - 1)
            task, next_task = item // panels * 3, upcoming // panels * 3
            number, next_number = tasks[task + 1] * panels + item % panels, tasks[next_task + 1] * panels
            panel = words[4] + number * steps * STEP_BYTES
            next_panel = words[4] + (next_number + upcoming % panels) * steps * STEP_BYTES
            first_row, count, first_column = tasks[task + 2], tasks[task + 3], item % panels * PANEL_COLUMNS
            block_steps = steps if by_amx else block_steps_of(count)
            bias = words[5] + 4 * (number * PANEL_COLUMNS - first_column)
            x, last, sums = words[3] + first_row * x_stride, last_halves.ctypes.data, memory.ctypes.data + skipped
            multiply_panel(words, count, x, x_stride, inner, panel, steps, block_steps, next_panel, sums, last)
            for row in range(count):
                place = sums + row * STEP_BYTES
                finish_row(place, bias, words[6], words[12], columns, first_row + row, first_column)
            item = following

    return multiply_tasks


@compiled
def block_steps_of(rows):
    """Return the block's steps for register tiles. The block's 256 bytes a step and the next block's should fit the L1
    cache, and the tiles' sums, which are written and read once a block, cost little beside it. Best of 24 to 1024 as
    measured."""
    if USES_SHORT_TILES and rows > 1:
        return 32 if rows <= FEW_ROWS else 64
    if rows <= TILE_ROWS:
        return 512
    return 48 if rows <= 2 * TILE_ROWS else 128


_panel_in_registers, _panel_in_matrices = _make_panel(_multiply_block), _make_panel(_multiply_block_by_amx)
_multiply_in_registers, _multiply_in_matrices = _make_multiply(_panel_in_registers), _make_multiply(_panel_in_matrices)
_tasks_in_registers = _make_multiply_tasks(_panel_in_registers, by_amx=False)
_tasks_in_matrices = _make_multiply_tasks(_panel_in_matrices, by_amx=True)


@Kernels
def _multiply_by_registers(words):
    _multiply_in_registers(words)


@Kernel
def _multiply_by_amx(words):
    _multiply_in_matrices(words)
    amx.release_tiles()


@Kernels
def _multiply_tasks_by_registers(words):
    _tasks_in_registers(words)


@Kernel
def _multiply_tasks_by_amx(words):
    _tasks_in_matrices(words)
    amx.release_tiles()


def _blocks(rows: int, steps: int, by_amx: bool) -> tuple[int, int]:
    """Steps of a block, and most rows of one.

    On AMX sums cost more to write and read than a panel to come from the L2 cache: it is a single block, which passes
    over more rows for each time that it comes from memory.
    """
    return (steps, AMX_ROW_BLOCK) if by_amx else (block_steps_of.py_func(rows), ROW_BLOCK)


def is_by_amx(dtype: torch.dtype) -> bool:
    """Return True if AMX multiplies activations of this dtype."""
    return dtype == torch.bfloat16 and amx.is_usable()


def most_task_rows(dtype: torch.dtype) -> int:
    """Return the maximum rows of one task."""
    return AMX_ROW_BLOCK if is_by_amx(dtype) else ROW_BLOCK


def multiply(
    launcher: Launcher, x: Tensor, packed: Tensor, bias: Tensor, columns: int, out_dtype: torch.dtype
) -> Tensor:
    """x bf16 or fp32 [T, in], contiguous; packed by `pack`; bias by `bias_of_panels`. Returns [T, columns]."""
    rows, inner = x.shape
    panels, steps, _ = packed.shape
    by_amx = is_by_amx(x.dtype)
    block_steps, row_block = _blocks(rows, steps, by_amx)
    out = launcher.empty((rows, columns), out_dtype)
    launcher.run(
        _multiply_by_amx if by_amx else _multiply_by_registers.of(x.dtype),
        panels * -(-rows // row_block),
        1,
        *(x, packed, bias, out),
        *(rows, inner, inner * x.itemsize, columns, steps),
        *(block_steps, min(rows, row_block), out_dtype == torch.bfloat16),
    )
    return out


def _make_multiply_heads(multiply_block: Any) -> Any:
    """`multiply_block`: as of `_make_multiply`."""

    @compiled
    def multiply(words):
        """words: x, packed weights, bias, out, rows, columns, panels, steps, row block, bytes from row to row and from
        head to head of x, then of out, whether out is bf16. An item is one head's panel and a block of rows."""
        rows, columns, panels, steps, row_block = words[7], words[8], words[9], words[10], words[11]
        blocks = (rows + row_block - 1) // row_block
        memory = np.empty(row_block * PANEL_COLUMNS + 16, np.float32)
        skipped = -memory.ctypes.data % LINE_BYTES // 4
        sums = memory[skipped : skipped + row_block * PANEL_COLUMNS].reshape(row_block, PANEL_COLUMNS)
        for item in taken(words, words[1]):
            panel, first = item // blocks, item % blocks * row_block  # of all heads' panels
            head, count = panel // panels, min(row_block, rows - first)
            x = words[3] + first * words[12] + head * words[13]
            b = words[4] + panel * steps * STEP_BYTES
            multiply_block(words, count, x, words[12], b, steps, sums.ctypes.data, 0, b + steps * STEP_BYTES)
            for row in range(count):
                out = words[6] + (first + row) * words[14] + head * words[15]
                place = sums[row].ctypes.data
                finish_row(place, words[5], out, words[16], columns, 0, panel % panels * PANEL_COLUMNS)

    return multiply


_multiply_heads_in_registers = _make_multiply_heads(_multiply_block)
_multiply_heads_in_matrices = _make_multiply_heads(_multiply_block_by_amx)


@Kernels
def _multiply_heads_by_registers(words):
    _multiply_heads_in_registers(words)


@Kernel
def _multiply_heads_by_amx(words):
    _multiply_heads_in_matrices(words)
    amx.release_tiles()


def multiply_heads(launcher: Launcher, x: Tensor, packed: Tensor, bias: Tensor, out: Tensor) -> None:
    """A product of each head's own: x [T, H, in] to out [T, H, out], which have any strides but for their last
    dimensions. packed by `pack_heads`, of x's dtype, of which an `in` is whole steps; bias of zeros."""
    count, heads, _ = x.shape
    _, panels, steps, _ = packed.shape
    row_block = min(count, ROW_BLOCK)
    by_amx = x.dtype == torch.bfloat16 and amx.is_usable()
    launcher.run(
        _multiply_heads_by_amx if by_amx else _multiply_heads_by_registers.of(x.dtype),
        heads * panels * -(-count // row_block),
        1,
        *(x, packed, bias, out),
        *(count, out.shape[2], panels, steps, row_block),
        *(size * step for size, of in ((x.itemsize, x), (out.itemsize, out)) for step in of.stride()[:2]),
        int(out.dtype == torch.bfloat16),
    )


def pack_heads(weight: Tensor) -> Tensor:
    """weight [H, out, in] -> int32 [H, panels, steps, 64], each head's as `pack` does it."""
    packed = [pack(of_head.contiguous()) for of_head in weight]
    return torch.stack(packed, out=zeros_on_huge_pages((len(packed), *packed[0].shape), torch.int32))


def multiply_tasks(
    launcher: Launcher, x: Tensor, tasks: Tensor, packed: Tensor, bias: Tensor, columns: int, out_dtype: torch.dtype
) -> Tensor:
    """Each expert's rows of x times its weight; returns [rows, columns].

    x [rows, in] contiguous, an expert's rows one behind the other. tasks int64: how many there are, then of each the
    expert, its first row and its rows, ROWS_AN_ITEM of quant.py and `most_task_rows` at most; all are read as the
    kernel runs. packed by `pack` and bias of all experts, each with whole panels of its own.
    """
    rows, inner = x.shape
    _, steps, _ = packed.shape
    out = launcher.empty((rows, columns), out_dtype)
    launcher.run(
        _multiply_tasks_by_amx if is_by_amx(x.dtype) else _multiply_tasks_by_registers.of(x.dtype),
        len(packed),
        1,
        *(x, packed, bias, out, tasks),
        *(inner, inner * x.itemsize, columns, steps, out_dtype == torch.bfloat16),
    )
    return out


def bias_of_panels(bias: Tensor | None, columns: int) -> Tensor:
    """fp32, with zeros up to whole panels."""
    padded = torch.zeros(-(-columns // PANEL_COLUMNS) * PANEL_COLUMNS)
    if bias is not None:
        padded[:columns] = bias
    return padded


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
    _pack.run(panels, 1, weight, packed, columns, halves, steps)
    return packed


@Kernel
def _pack(words):
    """words: W, packed (all zero), out, 16-bit halves of a row, steps."""
    panels, columns, halves, steps = words[1], words[5], words[6], words[7]
    row_bytes, whole = 2 * halves, halves // 2
    packed = carray(as_short_integers(words[4]), (panels, steps, PANEL_COLUMNS))
    for panel in taken(words, panels):
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


@Kernels
def _look_up(words):
    """words: token ids, table, out, first id, ids in the table, hidden, rows and elements of a panel, elements of a run
    and from one run of a row to its next."""
    rows, first, count, hidden = words[1], words[6], words[7], words[8]
    panel_rows, panel_elements, run, stride = words[9], words[10], words[11], words[12]
    panels = (count + panel_rows - 1) // panel_rows
    ids = carray(as_integers(words[3]), (rows,))
    table = carray(as_stored(words, words[4]), (panels * panel_elements,))
    out = carray(as_stored(words, words[5]), (rows, hidden))
    for row in taken(words, rows):
        index = ids[row] - first
        if index < 0 or index >= count:
            out[row, :] = 0
            continue
        place = index // panel_rows * panel_elements + index % panel_rows * run
        for start in range(0, hidden, run):
            for i in range(min(run, hidden - start)):
                out[row, start + i] = table[place + i]
            place += stride


def look_up(launcher: Launcher, token_ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Implement Backend.embed for a plain table: bf16 or fp32 [rows, hidden], contiguous."""
    count, hidden = table.shape
    return _run_look_up(launcher, token_ids, table, table.dtype, first, (count, hidden, 1, hidden, hidden, hidden))


def look_up_packed(
    launcher: Launcher, token_ids: Tensor, packed: Tensor, dtype: torch.dtype, shape: tuple[int, int], first: int
) -> Tensor:
    """Implement Backend.embed for weights that `pack` made of a table of `shape` and `dtype`."""
    lane = 4 // dtype.itemsize
    panel = packed.shape[1] * PANEL_COLUMNS * lane
    layout = (*shape, PANEL_COLUMNS, panel, lane, PANEL_COLUMNS * lane)
    return _run_look_up(launcher, token_ids, packed, dtype, first, layout)


def _run_look_up(
    launcher: Launcher, token_ids: Tensor, table: Tensor, dtype: torch.dtype, first: int, layout: tuple[int, ...]
) -> Tensor:
    rows = token_ids.numel()
    out = launcher.empty((rows, layout[1]), dtype)
    launcher.run(_look_up.of(dtype), rows, 1, token_ids, table, out, first, *layout)
    return out
