"""A panel of 8-bit or 4-bit weights on AMX: sums[rows, 64] = x[rows, in] times it, each group by its scales.

Up to FEW_ROWS rows, weights become bf16 one depth (32 input columns) ahead of the tiles that multiply it, in a ring
that stays in the L1 cache: the vectors' ports widen while the matrix unit multiplies. More rows are multiplied from a
chunk of the panel, widened once for all of them.

A group's sums begin at zero and go from tiles to memory, where their scales multiply them and they are added to the
row's in the order of the groups. All ways add in the same order: that of amx.py within a group, or, where there are no
scales but the outputs' factors, within the whole row.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from twostroke.model.cpu.kernels import amx
from twostroke.model.cpu.kernels.amx import DEPTH, PAIRED_TILES, ROWS, WIDE_TILES, Tiles
from twostroke.model.cpu.kernels.floats import FLOATS, LINE_BYTES, ask_for_line, multiply_add, spread
from twostroke.model.cpu.kernels.launch import WIDE, at, compiled, written_in_llvm
from twostroke.model.cpu.kernels.projections.gemm import PANEL_COLUMNS, STEP_BYTES
from twostroke.model.cpu.kernels.projections.packing import (
    CHUNK,
    EIGHT_BITS,
    FOUR_BITS,
    MIN_GROUP,
    Form,
    load_table,
    unpack,
    unpack_step,
    widened,
)

FEW_ROWS = 2 * ROWS
WIDE_CHUNK = 2048
"""Input columns that are widened at a time for more rows, of a panel without groups. Of 256 to 2048 the fastest for 512
rows: sums go to memory and back once a chunk."""
SCALED_CHUNK = CHUNK
"""Columns of a panel with groups that are multiplied at a time: their sums should stay in the L1 cache. The fastest of
128 to 1024 overall."""
SCALED_TOGETHER = 4  # groups: their scales and offsets of 32 outputs are 16 registers
_AHEAD_BYTES = 4096
"""Distance of the prefetch into the L2 cache from the bytes being widened; for half a panel it is twice as far."""

_DEPTH_BYTES = DEPTH * STEP_BYTES  # of a panel, as bf16
_GROUP_BYTES = 4 * ROWS * PANEL_COLUMNS  # sums in four tiles
_SUMS = 2 * _DEPTH_BYTES  # where they begin in the scratch, behind the ring
_WIDENED = _SUMS + SCALED_CHUNK // MIN_GROUP * _GROUP_BYTES  # and where a chunk does
SCRATCH_BYTES = _WIDENED + WIDE_CHUNK // 2 * STEP_BYTES


def _make_product(tiles_of: tuple[int, int, tuple[int, ...]], form: Form | None) -> Any:
    """c[group] (+)= a b, of each of some groups of `depths` times `pairs`. b is packed in a `form`, of a panel's first
    outputs from its address on, and goes through a `ring`; or b is bf16 of stride STEP_BYTES (None). What is asked for
    beyond `end` is what lies as far behind `following`."""
    num_a, num_b, of_b = tiles_of
    width, ahead = LINE_BYTES * num_b, _AHEAD_BYTES * STEP_BYTES // (LINE_BYTES * num_b)

    @written_in_llvm()
    def product(builder, a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following):
        found = load_table(builder, table, form) if form else []
        total = builder.mul(groups, depths)

        def slot(index: Any) -> Any:
            return builder.add(ring, builder.mul(builder.and_(index, WIDE(1)), WIDE(_DEPTH_BYTES)))

        def widen(index: Any) -> None:
            assert form is not None
            steps = builder.udiv(pairs, WIDE(form.columns // 2))
            first, into = builder.add(b, builder.mul(builder.mul(index, steps), WIDE(STEP_BYTES))), slot(index)
            with cgutils.for_range(builder, steps) as step:
                start = builder.add(first, builder.mul(step.index, WIDE(STEP_BYTES)))
                asked = builder.add(start, WIDE(ahead))
                beyond = builder.add(asked, builder.sub(following, end))
                asked = builder.select(builder.icmp_unsigned("<", asked, end), asked, beyond)
                for line in range(num_b):
                    ask_for_line(builder, builder.add(asked, WIDE(LINE_BYTES * line)), 2)
                place = builder.add(into, builder.mul(step.index, WIDE(width * form.columns // 2)))
                unpack_step(builder, start, form, found, place, num_b)

        tiles = Tiles(builder, num_a, num_b, of_b)
        if form:
            widen(WIDE(0))
        with cgutils.for_range(builder, groups) as group:
            target = builder.add(c, builder.mul(group.index, WIDE(_GROUP_BYTES)))
            with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
                with adding:
                    tiles.load(target, c_stride)
                with fresh:
                    tiles.clear()
            with cgutils.for_range(builder, depths) as depth:
                index = builder.add(builder.mul(group.index, depths), depth.index)
                left = builder.add(a, builder.mul(builder.mul(index, pairs), WIDE(4)))
                if form:
                    upcoming = builder.add(index, WIDE(1))
                    with builder.if_then(builder.icmp_unsigned("<", upcoming, total)):
                        widen(upcoming)
                    tiles.multiply(left, a_stride, slot(index), WIDE(width))
                else:
                    right = builder.add(b, builder.mul(builder.mul(index, pairs), WIDE(STEP_BYTES)))
                    tiles.multiply(left, a_stride, right, WIDE(STEP_BYTES))
            tiles.store(target, c_stride)

    return product


_wide_4, _wide_8, _wide = (_make_product(WIDE_TILES, form) for form in (FOUR_BITS, EIGHT_BITS, None))
_paired_4, _paired_8, _paired = (_make_product(PAIRED_TILES, form) for form in (FOUR_BITS, EIGHT_BITS, None))


def _make_scaling(groups: int) -> Any:
    """Add the sums of `groups` groups, [rows, 32] each, to c[rows, 32], with their scales and offsets."""

    @written_in_llvm()
    def scaling(builder, rows, sums, sums_stride, scales, offsets, x_sums, x_sums_stride, c):
        def write(has_offsets: bool) -> None:
            def of_groups(base: Any) -> list[list[Any]]:
                return [[widened(builder, base, WIDE(group), vector) for vector in range(2)] for group in range(groups)]

            factors, added = of_groups(scales), of_groups(offsets) if has_offsets else []
            with cgutils.for_range(builder, rows) as row:
                source = builder.add(sums, builder.mul(row.index, sums_stride))
                x_place = builder.add(x_sums, builder.mul(row.index, x_sums_stride))
                target = builder.add(c, builder.mul(row.index, WIDE(STEP_BYTES)))
                places = [at(builder, target, WIDE(LINE_BYTES * vector), FLOATS) for vector in range(2)]
                totals = [builder.load(place, align=4) for place in places]
                for group in range(groups):
                    x_sum = spread(builder, x_place, WIDE(4 * group)) if has_offsets else None
                    for vector in range(2):
                        place = at(builder, source, WIDE(_GROUP_BYTES * group + LINE_BYTES * vector), FLOATS)
                        whole = builder.load(place, align=4)
                        totals[vector] = multiply_add(builder, totals[vector], whole, factors[group][vector])
                        if has_offsets:
                            totals[vector] = multiply_add(builder, totals[vector], x_sum, added[group][vector])
                for vector in range(2):
                    builder.store(totals[vector], places[vector], align=4)

        with builder.if_else(builder.icmp_unsigned("!=", offsets, WIDE(0))) as (with_offsets, without):
            with with_offsets:
                write(True)
            with without:
                write(False)

    return scaling


_scale_some, _scale_one = _make_scaling(SCALED_TOGETHER), _make_scaling(1)


@compiled
def _scale(rows, sums, sums_stride, groups, scales, offsets, x_sums, x_sums_stride, c):
    """Scale the sums of any number of groups."""
    group = 0
    while group < groups:
        further = group * PANEL_COLUMNS * 2
        of_offsets = offsets + further if offsets else 0
        source, of_x = sums + group * _GROUP_BYTES, x_sums + 4 * group
        if groups - group >= SCALED_TOGETHER:
            _scale_some(rows, source, sums_stride, scales + further, of_offsets, of_x, x_sums_stride, c)
            group += SCALED_TOGETHER
        else:
            _scale_one(rows, source, sums_stride, scales + further, of_offsets, of_x, x_sums_stride, c)
            group += 1


@compiled
def _multiply_depths(rows, bits, a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following):
    """Up to FEW_ROWS rows; more than ROWS times a panel's first half alone. `bits`: 16 where b is widened already."""
    if rows <= ROWS:
        if bits == 8:
            _wide_8(a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following)
        elif bits == 4:
            _wide_4(a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following)
        else:
            _wide(a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following)
    elif bits == 8:
        _paired_8(a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following)
    elif bits == 4:
        _paired_4(a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following)
    else:
        _paired(a, a_stride, b, groups, depths, pairs, table, ring, c, c_stride, add, end, following)


@compiled
def _multiply_groups(rows, bits, a, a_stride, b, groups, columns, table, ring, c, c_stride, add, asked, shape):
    """c[group] (+)= a b, of groups of `columns`: whole depths, or less than one, or it is a single group. `asked`:
    end and following. Returns the tiles' shape; `shape` is the one that they have."""
    depths, pairs = columns // (2 * DEPTH), DEPTH
    for last in range(2):  # one call, which is much code
        if last:
            a += depths * 4 * DEPTH
            b += depths * DEPTH * PANEL_COLUMNS * bits // 4
            add = add or depths > 0
            depths, pairs = 1, columns % (2 * DEPTH) // 2
        if depths * pairs:
            if shape != rows * DEPTH + pairs:
                shape = rows * DEPTH + pairs
                amx.set_shapes(min(rows, ROWS), max(0, rows - ROWS), pairs)
            where = table, ring, c, c_stride, int(add)
            _multiply_depths(rows, bits, a, a_stride, b, groups, depths, pairs, *where, *asked)
    return shape


@compiled
def multiply_panel(rows, a, packed, columns, bits, group, where, next_panel, sums, scratch):
    """sums[rows, 64] = a[rows, columns] times a panel, all by address; `scratch` is SCRATCH_BYTES of memory, on a
    cache line. Of a panel with scales the product is added to the sums. Meanwhile it asks for the next panel.

    `where`: the table of codes, the panel's scales (0: it has none), its offsets (0 likewise), the sums of groups of
    a's first row, and bytes from one row's to the next's.
    """
    table, scales, offsets, x_sums, x_sums_stride = where
    is_scaled, is_widened, a_stride = scales != 0, rows > FEW_ROWS, 2 * columns
    chunk = SCALED_CHUNK if is_scaled else (WIDE_CHUNK if is_widened else columns)
    of_b, end = 16 if is_widened else bits, packed + columns * PANEL_COLUMNS * bits // 8
    shape = np.int64(0)
    for column in range(0, columns, chunk):
        width = min(chunk, columns - column)
        b = packed + column * PANEL_COLUMNS * bits // 8
        if is_widened:
            unpack(bits, b, width, table, scratch + _WIDENED)
            b = scratch + _WIDENED
        whole = width // group * group if is_scaled else width
        for row in range(0, rows, FEW_ROWS):
            count, c_row = min(FEW_ROWS, rows - row), sums + row * STEP_BYTES
            in_halves = count > ROWS
            stride = STEP_BYTES // 2 if is_scaled and in_halves else STEP_BYTES
            for index in range(4):  # whole groups and what is left, each in halves
                is_rest, half = index >= 2, index % 2
                start, size = (whole, width - whole) if is_rest else (0, group if is_scaled else width)
                groups = 1 if is_rest else whole // size
                if size * groups == 0:
                    continue
                x, right = a + row * a_stride + 2 * (column + start), b + start * PANEL_COLUMNS * of_b // 8
                c = c_row + half * STEP_BYTES // 2
                if half == 0 or in_halves:
                    target = scratch + _SUMS if is_scaled else c
                    right += half * STEP_BYTES // 2
                    add = column > 0 and not is_scaled
                    asked = end, (packed + STEP_BYTES // 2 if in_halves and half == 0 else next_panel)
                    shape = _multiply_groups(
                        *(count, of_b, x, a_stride, right, groups, size, table, scratch, target, stride, add),
                        *(asked, shape),
                    )
                if is_scaled:
                    number = (column + start) // group
                    further = number * PANEL_COLUMNS * 2 + half * PANEL_COLUMNS
                    of_x = x_sums + row * x_sums_stride + 4 * number
                    source = scratch + _SUMS + (0 if in_halves else half * STEP_BYTES // 2)
                    of_offsets = offsets + further if offsets else 0
                    _scale(count, source, stride, groups, scales + further, of_offsets, of_x, x_sums_stride, c)
