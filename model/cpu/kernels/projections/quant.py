"""Projections with 8-bit and 4-bit weights on AVX512-BF16: y = x W^T + b, x and W's values in bf16, sums in fp32.

Up to DIRECT_MOST_ROWS rows weights are unpacked in registers, once for every four rows; for more they are unpacked
once into a scratch of bf16 that stays in the L1 cache, and multiplied from there. Both ways add in the same order: a
row's result does not depend on the rows beside it. Scales multiply fp32 sums: those of groups of input columns each
group's, and one factor the sum of all. A group's offset multiplies the sum of its activations, which is made before.

CPUs with AMX multiply any number of rows there (quant_amx.py), single ones too: sums are added in another order, so a
row's result would depend on its batch if some went one way and some the other.

How weights lie says packing.py. Reference: `QuantizedWeight.dequantized`.
"""

import itertools
from typing import Any

import numpy as np
import torch
from llvmlite import binding  # type: ignore[import-untyped]
from numba import carray
from numba.core import cgutils
from torch import Tensor

from twostroke.model.cpu.kernels import amx, floats
from twostroke.model.cpu.kernels.elementwise import reorder, sum_groups
from twostroke.model.cpu.kernels.floats import (
    LINE_BYTES,
    RegisterTile,
    ask_for_line,
    dot_pairs,
    for_each_height,
    multiply_add,
    spread,
    store,
)
from twostroke.model.cpu.kernels.launch import (
    WIDE,
    Kernel,
    Launcher,
    as_bytes,
    as_floats,
    as_halves,
    as_integers,
    compiled,
    float_of_half,
    take_items,
    taken,
    written_in_llvm,
)
from twostroke.model.cpu.kernels.projections.gemm import (
    PANEL_COLUMNS,
    STEP_BYTES,
    TILE_ROWS,
    VECTORS,
    finish_row,
)
from twostroke.model.cpu.kernels.projections.packing import (
    CHUNK,
    EIGHT_BITS,
    FOUR_BITS,
    PAIRS,
    Form,
    PackedWeight,
    code_table,
    load_step,
    load_table,
    unpack,
    values_of_codes,
    widened,
)
from twostroke.model.cpu.kernels.projections.quant_amx import SCRATCH_BYTES, multiply_panel

DIRECT_ROWS = 4  # of a tile that unpacks; more need registers that the unpacking takes
DIRECT_MOST_ROWS = 8
ROWS_AN_ITEM, AMX_ROWS_AN_ITEM = 256, 512
_PREFETCH_BYTES = 4096  # from what is multiplied to what is asked for


def is_supported() -> bool:
    """Return True if this CPU has `vdpbf16ps` and looks bytes up among 128."""
    return floats.is_supported() and bool(binding.get_host_cpu_features().get("avx512vbmi"))


def _make_tile(most_rows: int, form: Form, lines: int, scaled: bool) -> Any:
    """c[rows, 64] += a[rows, in] times one panel of `groups` groups of `steps` steps; scaled by its own if `scaled`,
    and with its own offsets times the activations' sums, where `offsets` is no 0.

    Asks for `lines` cache lines every step, `ahead_stride` bytes further each time, starting at `ahead`. Arguments are
    addresses, strides in bytes, and counts.
    """

    @written_in_llvm()
    def tile(
        builder, rows, a, a_stride, packed, steps, groups, table, scales, offsets, x_sums, x_sums_stride, c, ahead,
        ahead_stride,
    ):  # fmt: skip
        has_offsets = builder.icmp_unsigned("!=", offsets, WIDE(0))

        def scale(group: Any, totals: RegisterTile, group_sums: RegisterTile) -> None:
            count = len(totals.sums)
            factors = [widened(builder, scales, group, vector) for vector in range(VECTORS)]
            for row, vector in itertools.product(range(count), range(VECTORS)):
                place = totals.sums[row][vector]
                whole = builder.load(group_sums.sums[row][vector])
                builder.store(multiply_add(builder, builder.load(place), whole, factors[vector]), place)
            with builder.if_then(has_offsets):
                added = [widened(builder, offsets, group, vector) for vector in range(VECTORS)]
                for row in range(count):
                    start = builder.add(x_sums, builder.mul(x_sums_stride, WIDE(row)))
                    x_sum = spread(builder, start, builder.mul(group, WIDE(4)))
                    for vector in range(VECTORS):
                        place = totals.sums[row][vector]
                        builder.store(multiply_add(builder, builder.load(place), x_sum, added[vector]), place)

        def write(count: int) -> None:
            totals, group_sums = RegisterTile(builder, count, VECTORS), RegisterTile(builder, count, VECTORS)
            row_starts = [builder.add(a, builder.mul(a_stride, WIDE(row))) for row in range(count)]
            found = load_table(builder, table, form)
            totals.load(c, WIDE(STEP_BYTES))
            with cgutils.for_range(builder, groups) as group:
                group_sums.clear()
                first = builder.mul(group.index, steps)
                with cgutils.for_range(builder, steps) as loop:
                    index = builder.add(first, loop.index)
                    asked = builder.add(ahead, builder.mul(index, ahead_stride))
                    for line in range(lines):
                        ask_for_line(builder, builder.add(asked, WIDE(LINE_BYTES * line)), 3)
                    start = builder.add(packed, builder.mul(index, WIDE(STEP_BYTES)))
                    weights = load_step(builder, start, form, found)
                    across = builder.mul(index, WIDE(2 * form.columns))
                    for pair, row in itertools.product(range(form.columns // 2), range(count)):
                        value = spread(builder, row_starts[row], builder.add(across, WIDE(4 * pair)))
                        group_sums.add(row, dot_pairs, value, [vector[pair] for vector in weights])
                if scaled:
                    scale(group.index, totals, group_sums)
                else:
                    for row, vector in itertools.product(range(count), range(VECTORS)):
                        place = totals.sums[row][vector]
                        whole = builder.load(group_sums.sums[row][vector])
                        builder.store(builder.fadd(builder.load(place), whole), place)
            totals.store(c, WIDE(STEP_BYTES))

        for_each_height(builder, rows, most_rows, write)

    return tile


_direct_4_bits = _make_tile(DIRECT_ROWS, FOUR_BITS, VECTORS, True)
_direct_8_bits = _make_tile(DIRECT_ROWS, EIGHT_BITS, VECTORS, False)
_direct_8_bits_scaled = _make_tile(DIRECT_ROWS, EIGHT_BITS, VECTORS, True)
_pairs_4_bits = _make_tile(TILE_ROWS, PAIRS, 1, True)
_pairs_8_bits = _make_tile(TILE_ROWS, PAIRS, 2, False)
_pairs_8_bits_scaled = _make_tile(TILE_ROWS, PAIRS, 2, True)


@compiled
def _place(words, panel, first_row, column):
    """Return the addresses of a panel's scales for the group at `column`, of its offsets, and of its activations' sums
    from `first_row` on; 0 for what does not exist."""
    group = column // words[18]
    scales, offsets, x_sums = np.int64(0), np.int64(0), np.int64(0)
    if words[6]:
        scales = words[6] + (panel * words[19] + group) * PANEL_COLUMNS * 2
    if words[7]:
        offsets = words[7] + (panel * words[19] + group) * PANEL_COLUMNS * 2
        x_sums = words[8] + (first_row * words[19] + group) * 4
    return scales, offsets, x_sums


@compiled
def _direct(words, panel, first_row, rows, column, width, group, c):
    """Groups of a panel, which its columns from `column` on, `width` of them, are made of."""
    bits, a_stride, x_sums_stride = words[17], 2 * words[12], 4 * words[19]
    a = words[3] + first_row * a_stride + 2 * column
    packed = words[4] + (panel * words[12] + column) * PANEL_COLUMNS * bits // 8
    steps, groups, ahead = group * bits // 32, width // group, packed + _PREFETCH_BYTES
    scales, offsets, x_sums = _place(words, panel, first_row, column)
    where = (rows, a, a_stride, packed, steps, groups, words[5], scales, offsets, x_sums, x_sums_stride, c)
    if bits == 4:
        _direct_4_bits(*where, ahead, STEP_BYTES)
    elif scales:
        _direct_8_bits_scaled(*where, ahead, STEP_BYTES)
    else:
        _direct_8_bits(*where, ahead, STEP_BYTES)


@compiled
def _from_pairs(words, panel, first_row, rows, column, width, group, pairs, c, ahead, ahead_stride):
    """Multiply as _direct does, with columns whose weights are unpacked at `pairs`."""
    a_stride, x_sums_stride = 2 * words[12], 4 * words[19]
    a = words[3] + first_row * a_stride + 2 * column
    scales, offsets, x_sums = _place(words, panel, first_row, column)
    where = (rows, a, a_stride, pairs, group // 2, width // group, 0, scales, offsets, x_sums, x_sums_stride, c)
    if words[17] == 4:
        _pairs_4_bits(*where, ahead, ahead_stride)
    elif scales:
        _pairs_8_bits_scaled(*where, ahead, ahead_stride)
    else:
        _pairs_8_bits(*where, ahead, ahead_stride)


@compiled
def _write(words, sums, first_row, rows, panel, first_column):
    """Round sums [rows, PANEL_COLUMNS], times their outputs' factors and with the bias, into their place."""
    factors, first = carray(as_floats(words[9]), (words[15] * PANEL_COLUMNS,)), panel * PANEL_COLUMNS
    bias = words[10] + 4 * (first - first_column)
    for row in range(rows):
        for i in range(PANEL_COLUMNS):
            sums[row, i] *= factors[first + i]
        finish_row(sums[row].ctypes.data, bias, words[11], words[14], words[13], first_row + row, first_column)


@compiled
def _rows_direct(words, panel, first_column, first_row, rows, sums):
    """Rows from `first_row` on times a panel, whose weights are unpacked for every few of them; into the columns from
    `first_column` on."""
    columns, group = words[12], words[18]
    whole = columns // group * group
    for row in range(first_row, first_row + rows, DIRECT_ROWS):
        count, c = min(DIRECT_ROWS, first_row + rows - row), sums.ctypes.data
        sums[:DIRECT_ROWS] = np.float32(0)
        _direct(words, panel, row, count, 0, whole, group, c)
        if whole < columns:
            _direct(words, panel, row, count, whole, columns - whole, columns - whole, c)
        _write(words, sums, row, count, panel, first_column)


@compiled
def _rows_from_pairs(words, panel, first_column, first_row, rows, sums, pairs):
    """Multiply as _rows_direct does, up to ROWS_AN_ITEM rows, with weights unpacked once at the address `pairs`."""
    columns, group = words[12], words[18]
    panel_bytes = PANEL_COLUMNS * words[17] // 8
    height = (rows + TILE_ROWS - 1) // TILE_ROWS  # as even as tiles can be
    height = (rows + height - 1) // height
    packed = words[4] + panel * columns * panel_bytes
    sums[:] = np.float32(0)
    for column in range(0, columns, CHUNK):
        width = min(CHUNK, columns - column)
        unpack(words[17], packed + column * panel_bytes, width, words[5], pairs)
        ahead, whole = packed + (column + width) * panel_bytes, width // group * group
        for row in range(0, rows, height):
            count, c = min(height, rows - row), sums.ctypes.data + row * STEP_BYTES
            asked = 0 if row else 2 * panel_bytes  # the first tile asks for all of the next chunk
            of_x = first_row + row
            _from_pairs(words, panel, of_x, count, column, whole, group, pairs, c, ahead, asked)
            if whole < width:
                end, rest = pairs + whole // 2 * STEP_BYTES, width - whole
                _from_pairs(words, panel, of_x, count, column + whole, rest, rest, end, c, ahead, 0)
    _write(words, sums, first_row, rows, panel, first_column)


@Kernel
def _multiply_direct(words):
    """words: x, packed, table, scales, offsets, x's sums, factors, bias, out, in, out, whether out is bf16, panels,
    rows, bits, columns of a group, groups."""
    sums = np.empty((DIRECT_ROWS, PANEL_COLUMNS), np.float32)
    for panel in taken(words, words[1]):
        _rows_direct(words, panel, panel * PANEL_COLUMNS, 0, words[16], sums)


@Kernel
def _multiply_unpacked(words):
    """words: as those of _multiply_direct."""
    panels = words[15]
    sums = np.empty((ROWS_AN_ITEM, PANEL_COLUMNS), np.float32)
    memory = np.empty((CHUNK // 2 + 1) * PANEL_COLUMNS, np.uint32)
    aligned = memory[-memory.ctypes.data % LINE_BYTES // 4 :]
    for item in taken(words, words[1]):
        panel, first_row = item % panels, item // panels * ROWS_AN_ITEM
        rows = min(ROWS_AN_ITEM, words[16] - first_row)
        _rows_from_pairs(words, panel, panel * PANEL_COLUMNS, first_row, rows, sums, aligned.ctypes.data)


@Kernel
def _multiply_tasks(words):
    """words: as those of _multiply_direct, of all experts' panels; tasks, panels of an expert."""
    tasks, panels = as_integers(words[20]), words[21]
    sums = np.empty((ROWS_AN_ITEM, PANEL_COLUMNS), np.float32)
    memory = np.empty((CHUNK // 2 + 1) * PANEL_COLUMNS, np.uint32)
    aligned = memory[-memory.ctypes.data % LINE_BYTES // 4 :]
    for item in taken(words, tasks[0] * panels):
        task, first_column = item // panels * 3, item % panels * PANEL_COLUMNS
        panel, first_row, rows = tasks[task + 1] * panels + item % panels, tasks[task + 2], tasks[task + 3]
        if rows <= DIRECT_MOST_ROWS:
            _rows_direct(words, panel, first_column, first_row, rows, sums)
        else:
            _rows_from_pairs(words, panel, first_column, first_row, rows, sums, aligned.ctypes.data)


@compiled
def _rows_by_amx(words, panel, next_panel, first_column, first_row, rows, sums, scratch):
    """Multiply as _rows_from_pairs does, up to AMX_ROWS_AN_ITEM rows, and prefetch the next panel."""
    columns, bits, group = words[12], words[17], words[18]
    a, panel_bytes = words[3] + 2 * first_row * columns, columns * PANEL_COLUMNS * bits // 8
    packed, following = words[4] + panel * panel_bytes, words[4] + next_panel * panel_bytes
    scales, offsets, x_sums = _place(words, panel, first_row, 0)
    where = words[5], scales, offsets, x_sums, 4 * words[19]
    if scales:
        sums[:rows] = np.float32(0)
    multiply_panel(rows, a, packed, columns, bits, group, where, following, sums.ctypes.data, scratch)
    _write(words, sums, first_row, rows, panel, first_column)


@Kernel
def _multiply_by_amx(words):
    """words: as those of _multiply_direct."""
    panels = words[15]
    sums = np.empty((min(AMX_ROWS_AN_ITEM, words[16]), PANEL_COLUMNS), np.float32)
    memory = np.empty(SCRATCH_BYTES + LINE_BYTES, np.uint8)
    scratch = memory[-memory.ctypes.data % LINE_BYTES :]
    item = take_items(words)
    while item < words[1]:
        following = take_items(words)
        panel, first_row = item % panels, item // panels * AMX_ROWS_AN_ITEM
        rows, next_panel = min(AMX_ROWS_AN_ITEM, words[16] - first_row), min(following, words[1] - 1) % panels
        _rows_by_amx(words, panel, next_panel, panel * PANEL_COLUMNS, first_row, rows, sums, scratch.ctypes.data)
        item = following
    amx.release_tiles()


@Kernel
def _multiply_tasks_by_amx(words):
    """words: as those of _multiply_tasks."""
    tasks, panels = as_integers(words[20]), words[21]
    sums = np.empty((ROWS_AN_ITEM, PANEL_COLUMNS), np.float32)
    memory = np.empty(SCRATCH_BYTES + LINE_BYTES, np.uint8)
    scratch = memory[-memory.ctypes.data % LINE_BYTES :]
    items, item = tasks[0] * panels, take_items(words)
    while item < items:
        following = take_items(words)
        upcoming = min(following, items - 1)
        task, next_task = item // panels * 3, upcoming // panels * 3
        panel = tasks[task + 1] * panels + item % panels
        next_panel = tasks[next_task + 1] * panels + upcoming % panels
        first_column, first_row, rows = item % panels * PANEL_COLUMNS, tasks[task + 2], tasks[task + 3]
        _rows_by_amx(words, panel, next_panel, first_column, first_row, rows, sums, scratch.ctypes.data)
        item = following
    amx.release_tiles()


def _step_kernel(rows: int) -> tuple[Kernel, int]:
    """Return the kernel that multiplies `rows` rows, and the most rows of an item. With AMX one kernel serves all."""
    if amx.is_usable():
        return _multiply_by_amx, AMX_ROWS_AN_ITEM
    return (_multiply_direct, DIRECT_MOST_ROWS) if rows <= DIRECT_MOST_ROWS else (_multiply_unpacked, ROWS_AN_ITEM)


def multiply(launcher: Launcher, x: Tensor, weight: PackedWeight, bias: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x bf16 [T, in], contiguous; bias by `bias_of_panels`. Returns `out_dtype` [T, out]."""
    (rows, inner), panels, groups = x.shape, len(weight.codes), weight.num_groups
    if weight.order is not None:
        x = reorder(launcher, x, weight.order)
    x_sums = 0 if weight.offsets is None else sum_groups(launcher, x, weight.group_size)
    out = launcher.empty((rows, weight.out_features), out_dtype)
    kernel, block = _step_kernel(rows)
    scales, offsets = (0 if each is None else each for each in (weight.scales, weight.offsets))
    launcher.run(
        kernel,
        panels * -(-rows // block),
        1,
        *(x, weight.codes, code_table(weight.kind), scales, offsets, x_sums, weight.factors, bias, out),
        *(inner, weight.out_features, out_dtype == torch.bfloat16, panels, rows),
        *(weight.bits, weight.group_size, groups),
    )
    return out


def multiply_tasks(
    launcher: Launcher, x: Tensor, tasks: Tensor, weight: PackedWeight, bias: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """Multiply as gemm.multiply_tasks does, bf16 x with a weight whose inputs are in order."""
    rows, inner = x.shape
    x_sums = 0 if weight.offsets is None else sum_groups(launcher, x, weight.group_size)
    out = launcher.empty((rows, columns), dtype)
    scales, offsets = (0 if each is None else each for each in (weight.scales, weight.offsets))
    launcher.run(
        _multiply_tasks_by_amx if amx.is_usable() else _multiply_tasks,
        len(weight.codes),
        1,
        *(x, weight.codes, code_table(weight.kind), scales, offsets, x_sums, weight.factors, bias, out),
        *(inner, columns, dtype == torch.bfloat16, len(weight.codes), rows),
        *(weight.bits, weight.group_size, weight.num_groups, tasks, -(-columns // PANEL_COLUMNS)),
    )
    return out


@Kernel
def _look_up(words):
    """words: token ids, packed, values of codes, scales, offsets, factors, out, first id, ids in the table, hidden,
    bits, columns of a group, groups."""
    rows, first, count, hidden, bits = words[1], words[10], words[11], words[12], words[13]
    ids, values = carray(as_integers(words[3]), (rows,)), carray(as_floats(words[5]), (256,))
    factors, out = carray(as_floats(words[8]), (count,)), carray(as_halves(words[9]), (rows, hidden))
    for row in taken(words, rows):
        index = ids[row] - first
        if index < 0 or index >= count:
            out[row, :] = 0
            continue
        panel, output = index // PANEL_COLUMNS, index % PANEL_COLUMNS
        lane, vector = output % 16, output // 16
        place = words[4] + panel * hidden * PANEL_COLUMNS * bits // 8 + vector * LINE_BYTES
        for column in range(hidden):
            step = place + column * bits // 32 * STEP_BYTES
            if bits == 8:
                within = lane // 4 * 16 + lane % 4 * 2 + column % 4 // 2 * 8 + column % 2
                code = np.int64(carray(as_bytes(step), (LINE_BYTES,))[within])
            else:
                word = np.int64(carray(as_halves(step), (32,))[2 * lane + column % 2])
                code = word >> column % 8 // 2 * 4 & 15
            value = values[code]
            if words[6]:
                at_group = ((panel * words[15] + column // words[14]) * PANEL_COLUMNS + output) * 2
                value *= float_of_half(carray(as_halves(words[6] + at_group), (1,))[0])
                if words[7]:
                    value += float_of_half(carray(as_halves(words[7] + at_group), (1,))[0])
            store(out[row], column, value * factors[index])


def look_up(launcher: Launcher, token_ids: Tensor, weight: PackedWeight, first: int) -> Tensor:
    """Implement Backend.embed in bf16, for a table whose inputs are in order."""
    rows = token_ids.numel()
    out = launcher.empty((rows, weight.in_features), torch.bfloat16)
    scales, offsets = (0 if each is None else each for each in (weight.scales, weight.offsets))
    launcher.run(
        *(_look_up, rows, 1),
        *(token_ids, weight.codes, values_of_codes(weight.kind), scales, offsets, weight.factors, out),
        *(first, weight.out_features, weight.in_features, weight.bits, weight.group_size, weight.num_groups),
    )
    return out
