"""y = x W^T + b on CPUs, over one packed copy of W, for any number of rows: after Goto & van de Geijn 2008.

W is packed into panels of 64 output columns, [panels, steps, 64] lanes of 4 bytes, zero where `out` and `in` end
before them. A thread takes a panel and a block of rows at a time. It goes through the panel in
blocks that stay in its L2 cache while all tiles of rows pass over them, so that each weight comes from memory once; the
tiles ask for the following block meanwhile. Sums between blocks stay in fp32.

Every sum is added up in the order of the inner dimension, whatever the number of rows: a row's result is the same to
the last bit in every batch.

The register tiles of CPU projections: 1 to 6 rows of x times one panel of 64 output columns, in bf16 or fp32.

C[rows, 64] (+)= A[rows, steps] B[steps, 64]. One step is 4 bytes of a row of A and 256 bytes of B: a pair of bf16 along
the inner dimension in each 32-bit lane (AVX512-BF16's `vdpbf16ps` multiplies both and adds them to an fp32 lane), or
one fp32 (fused multiply-add). All sums stay in registers over the steps: 6 rows need 24 of AVX-512's 32, which hides
the latency of either instruction. Each sum is added up by itself, step after step, so it does not depend on how many
rows are computed together.

`tile(rows, a, a stride, b, steps, c, add, ahead, lines)`: A is row-major with its stride in bytes; B is contiguous; C
is fp32 with a stride of 256 bytes. `add` of 0 starts from zero, 1 from what C holds. While it computes, the tile asks
for `lines` cache lines every 4 steps, one after the other from address `ahead` on: what will be read next can so come
from memory meanwhile. All arguments are int64.

The packed layout of CPU projections: how weights get into it, and how rows are read from it or from plain tables.

W [out, in] becomes [panels, steps, 64] lanes of 4 bytes, each a pair of neighbouring bf16 of a row of W or one fp32.
Panel p holds rows 64 p to 64 p + 63; what lies beyond `out` or `in` is zero.
"""

import contextlib
import functools
import math
import mmap
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from twostroke.model.cpu.kernels import amx
from twostroke.model.cpu.kernels.floats import LANES, PAIRS, BFloat, store, transpose, widen
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    as_floats,
    as_halves,
    as_integers,
    as_short_integers,
    compiled,
    take_items,
)
from twostroke.model.cpu.kernels.program import Launcher

TILE_ROWS = 6
PANEL_COLUMNS = 64
STEP_BYTES = 256  # of B: 64 columns of 4 bytes
STEPS_TOGETHER = 4  # unrolled, with one portion of prefetches

_INT = ir.IntType(32)
_WIDE = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_INT, LANES)
_VECTORS = PANEL_COLUMNS // LANES
LINE_BYTES = 64


def _dot_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, (_FLOATS, PAIRS, PAIRS)), "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    return builder.call(function, (total, builder.bitcast(left, PAIRS), builder.bitcast(right, PAIRS)))


def _multiply_add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, (_FLOATS, _FLOATS, _FLOATS)), "llvm.fma.v16f32"
    )
    return builder.call(function, (builder.bitcast(left, _FLOATS), builder.bitcast(right, _FLOATS), total))


def _in_place(builder: Any, totals: list[Any]) -> list[Any]:
    """The same totals, which are ready before whatever is loaded behind this. No instruction.

    Else LLVM may load for many rows ahead, and then has no registers for the sums: it does so where a tile has been
    optimised more than once, that is in the kernel's machine code that comes from numba's cache, not in that of the
    process which compiled it.
    """
    count = len(totals)
    kept = builder.asm(
        ir.FunctionType(ir.LiteralStructType([_FLOATS] * count), [_FLOATS] * count),
        "",
        ",".join(["=v"] * count + [str(index) for index in range(count)] + ["~{memory}"]),
        totals,
        side_effect=True,
    )
    return [builder.extract_value(kept, index) for index in range(count)]


def _make_tile(rows: int, combine: Any) -> Any:
    @intrinsic
    def tile(
        typingctx: Any, a: Any, a_stride: Any, b: Any, steps: Any, c: Any, add: Any, ahead: Any, lines: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_stride, b, steps, c, add, ahead, lines = arguments

            def number(value: int) -> Any:
                return ir.Constant(_WIDE, value)

            def at(base: Any, offset: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

            def place(row: int, vector: int) -> Any:
                return at(c, number(STEP_BYTES * row + LINE_BYTES * vector), _FLOATS)

            sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(_VECTORS)] for _ in range(rows)]
            row_starts = [builder.add(a, builder.mul(a_stride, number(row))) for row in range(rows)]

            def step(index: Any) -> None:
                down = builder.mul(index, number(STEP_BYTES))
                columns = [
                    builder.load(at(b, builder.add(down, number(LINE_BYTES * vector)), _INTS), align=4)
                    for vector in range(_VECTORS)
                ]
                across = builder.mul(index, number(4))
                for row in range(rows):
                    value = builder.load(at(row_starts[row], across, _INT), align=2)
                    lane = builder.insert_element(ir.Constant(_INTS, ir.Undefined), value, ir.Constant(_INT, 0))
                    spread = builder.shuffle_vector(lane, lane, ir.Constant(_INTS, [0] * LANES))
                    totals = [
                        combine(builder, builder.load(total), spread, column)
                        for total, column in zip(sums[row], columns, strict=True)
                    ]
                    for total, kept in zip(sums[row], _in_place(builder, totals), strict=True):
                        builder.store(kept, total)

            with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
                with adding:
                    for row in range(rows):
                        for vector in range(_VECTORS):
                            builder.store(builder.load(place(row, vector), align=4), sums[row][vector])
                with fresh:
                    for row in range(rows):
                        for vector in range(_VECTORS):
                            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), sums[row][vector])
            groups = builder.udiv(steps, number(STEPS_TOGETHER))
            asked = builder.mul(lines, number(LINE_BYTES))
            with cgutils.for_range(builder, groups) as group:
                start = builder.add(ahead, builder.mul(group.index, asked))
                with cgutils.for_range(builder, lines) as line:
                    _prefetch(builder, at(start, builder.mul(line.index, number(LINE_BYTES)), ir.IntType(8)))
                first = builder.mul(group.index, number(STEPS_TOGETHER))
                for offset in range(STEPS_TOGETHER):
                    step(builder.add(first, number(offset)))
            done = builder.mul(groups, number(STEPS_TOGETHER))
            with cgutils.for_range(builder, builder.sub(steps, done)) as rest:
                step(builder.add(done, rest.index))
            for row in range(rows):
                for vector in range(_VECTORS):
                    builder.store(builder.load(sums[row][vector]), place(row, vector), align=4)
            return number(0)

        return types.int64(*[types.int64] * 8), codegen

    return tile


def _prefetch(builder: Any, pointer: Any) -> None:
    flag = ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), (ir.IntType(8).as_pointer(), flag, flag, flag)),
        "llvm.prefetch.p0",
    )
    # Into the L1 cache, and on to no other: a weight is read by a few tiles in a row and then not before the next step.
    read, locality, data = ir.Constant(flag, 0), ir.Constant(flag, 0), ir.Constant(flag, 1)
    builder.call(function, (pointer, read, locality, data))


def _make_dispatch(combine: Any) -> Any:
    one, two, three, four, five, six = (_make_tile(rows, combine) for rows in range(1, TILE_ROWS + 1))

    @compiled
    def tile(rows, a, a_stride, b, steps, c, add, ahead, lines):
        if rows == 6:
            six(a, a_stride, b, steps, c, add, ahead, lines)
        elif rows == 5:
            five(a, a_stride, b, steps, c, add, ahead, lines)
        elif rows == 4:
            four(a, a_stride, b, steps, c, add, ahead, lines)
        elif rows == 3:
            three(a, a_stride, b, steps, c, add, ahead, lines)
        elif rows == 2:
            two(a, a_stride, b, steps, c, add, ahead, lines)
        else:
            one(a, a_stride, b, steps, c, add, ahead, lines)

    return tile


def _make_finish(kind: Any) -> Any:
    """out[64] = c[64] + bias[64], rounded to `kind`, for addresses of contiguous numbers; returns 0."""

    @intrinsic
    def finish(typingctx: Any, c: Any, bias: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            c, bias, out = arguments
            for vector in range(_VECTORS):
                offset = ir.Constant(_WIDE, LINE_BYTES * vector)
                left, right = (
                    builder.load(builder.inttoptr(builder.add(base, offset), _FLOATS.as_pointer()), align=4)
                    for base in (c, bias)
                )
                total = builder.fadd(left, right)
                if isinstance(kind, ir.FloatType):
                    place = builder.inttoptr(builder.add(out, offset), _FLOATS.as_pointer())
                    builder.store(total, place, align=4)
                else:
                    offset = ir.Constant(_WIDE, LINE_BYTES // 2 * vector)
                    halves = ir.VectorType(kind, LANES)
                    place = builder.inttoptr(builder.add(out, offset), halves.as_pointer())
                    builder.store(builder.fptrunc(total, halves), place, align=2)
            return ir.Constant(_WIDE, 0)

        return types.int64(*[types.int64] * 3), codegen

    return finish


finish_floats = _make_finish(ir.FloatType())
finish_halves = _make_finish(BFloat())

tile_of_pairs = _make_dispatch(_dot_pairs)
tile_of_floats = _make_dispatch(_multiply_add)


ROW_BLOCK, AMX_ROW_BLOCK = 192, 512
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


def _make_multiply_block(tile: Any) -> Any:
    @compiled
    def multiply_block(rows, a, a_stride, b, steps, c, add, ahead):
        """c[rows, 64] (+)= a b, in register tiles of about equal height that ask for the block at `ahead`."""
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        # A single tile reads straight on, which the cores' own prefetching follows better than ours leads.
        share = (LINES_TOGETHER + tiles - 1) // tiles if tiles > 1 else 0
        first, asked = np.int64(0), np.int64(0)
        for index in range(tiles):
            height = (rows - first + tiles - index - 1) // (tiles - index)
            lines = min(share, LINES_TOGETHER - asked)
            place = ahead + asked * LINE_BYTES * (steps // STEPS_TOGETHER)
            x, out = a + first * a_stride, c + first * STEP_BYTES
            tile(height, x, a_stride, b, steps, out, add, place, lines)
            first += height
            asked += lines

    return multiply_block


def _make_multiply(multiply_block: Any, is_floats: bool) -> Any:
    """`multiply_block(rows, a, a_stride, b, steps, c, add, ahead)`: c[rows, 64] (+)= a b, all by address."""

    @compiled
    def multiply(words):
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
                    multiply_block(count, x + 4 * start, x_stride, b, block, sums_at, start > 0, ahead)
                if whole_steps < steps:  # an odd number of bf16: the last has no partner in x
                    for row in range(count):
                        end_of_row = as_halves(x + row * x_stride)
                        last_halves[row, 0] = end_of_row[inner - 1]
                    b = panel + whole_steps * STEP_BYTES
                    multiply_block(count, last_halves.ctypes.data, 4, b, 1, sums_at, whole_steps > 0, b)
                for row in range(first_row, first_row + count):
                    finish_row(words, row, first_column, width, sums[row - first_row])
            begin = following

    return multiply


_multiply_by_pairs = _make_multiply(_make_multiply_block(tile_of_pairs), is_floats=False)
_multiply_by_floats = _make_multiply(_make_multiply_block(tile_of_floats), is_floats=True)
_multiply_by_matrices = _make_multiply(amx.multiply_block, is_floats=False)


# These are no closures over their tile: numba's cache never finds a closure again, so every start compiled it anew.


def _multiply_pairs(words):
    _multiply_by_pairs(words)


def _multiply_floats(words):
    _multiply_by_floats(words)


def _multiply_matrices(words):
    _multiply_by_matrices(words)
    amx.release_tiles()


@functools.cache
def _kernel(dtype: torch.dtype) -> Kernel:
    """Compiled at first use: other CPUs can't compile it."""
    if dtype == torch.float32:
        return Kernel(_multiply_floats)
    return Kernel(_multiply_matrices if amx.is_usable() else _multiply_pairs)


def _blocks(rows: int, steps: int, dtype: torch.dtype) -> tuple[int, int]:
    """Steps of a block, and most rows of one.

    For register tiles the block's 256 bytes a step and the next block's should fit the L1 cache, and the tiles' sums,
    which are written and read once a block, cost little beside it: these were the best of 24 to 1024 steps, measured.
    On AMX sums cost more to write and read than a panel to come from the L2 cache: it is a single block, which passes
    over more rows for each time that it comes from memory.
    """
    if dtype == torch.bfloat16 and amx.is_usable():
        return steps, AMX_ROW_BLOCK
    if rows <= TILE_ROWS:
        return 512, ROW_BLOCK
    return 48 if rows <= 2 * TILE_ROWS else 128, ROW_BLOCK


def multiply(launcher: Launcher, x: Tensor, packed: Tensor, bias: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x bf16 or fp32 [T, in], contiguous; packed by cpu_gemm_pack; bias fp32 [out]. Returns `out_dtype` [T, out]."""
    rows, inner = x.shape
    panels, steps, _ = packed.shape
    block_steps, row_block = _blocks(rows, steps, x.dtype)
    out = launcher.empty((rows, bias.shape[0]), out_dtype)
    launcher.run(
        _kernel(x.dtype),
        panels * -(-rows // row_block),
        1,
        x.data_ptr(),
        packed.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        rows,
        inner,
        bias.shape[0],
        steps,
        block_steps,
        min(rows, row_block),
        int(out_dtype == torch.bfloat16),
    )
    return out


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
