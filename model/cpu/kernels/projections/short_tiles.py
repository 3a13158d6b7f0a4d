"""Register tiles of fp32 in vectors of 8, for CPUs that have no AVX-512: AVX2's 16 registers hold the sums.

C[rows, columns] (+)= A[rows, steps] B[steps, columns]. The columns take several passes over B, with as many at a time
as the sums of all rows have registers for. Each sum is added up by itself, step after step: it depends neither on how
many rows are computed together nor on where the steps are cut, and has the same bits as gemm.py's on AVX-512.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils

from twostroke.model.cpu.kernels.floats import TileSums, ask_for_line, call, for_each_height
from twostroke.model.cpu.kernels.launch import WIDE, at, compiled, written_in_llvm

LANES = 8
_LANE = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_LANE_NUMBERS = ir.VectorType(_LANE, LANES)
_VECTOR_BYTES, _LINE_BYTES = 4 * LANES, 64
TILE_ROWS = 6
"""Most rows of a tile."""
_STEPS_TOGETHER = 4  # unrolled
_FEATURES = binding.get_host_cpu_features()
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def is_usable() -> bool:
    """Return True if this CPU has AVX2's registers and fused multiplication."""
    return bool(_FEATURES.get("avx2") and _FEATURES.get("fma"))


def vectors_together(rows: int, columns: int) -> int:
    """Return the vectors of columns of one pass. Eight sums hide the latency of a multiplication; twelve fit."""
    if rows == 1 and columns % (8 * LANES) == 0:
        return 8
    return 4 if rows <= 3 else 2


def _spread(builder: Any, base: Any, offset: Any) -> Any:
    """Return the fp32 number that many bytes behind the address `base`, in each lane."""
    number = builder.load(at(builder, base, offset, ir.FloatType()), align=4)
    lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, _LANE(0))
    return builder.shuffle_vector(lane, lane, ir.Constant(_LANE_NUMBERS, [0] * LANES))


def _multiply_add(builder: Any, left: Any, right: Any, total: Any) -> Any:
    if _IS_X86 and not is_usable():  # LLVM would call a function for each lane
        return builder.fadd(builder.fmul(left, right), total)
    return call(builder, "llvm.fma.v8f32", _FLOATS, left, right, total)


class _Pass(TileSums):
    """Generator of the code of one pass, with sums [rows, 8 `vectors`]."""

    numbers = _FLOATS

    def step(self, row_starts: list[Any], offset: Any, b: Any) -> None:
        """sums += the numbers `offset` bytes behind the rows' starts, times the columns at address b.

        The fewer of both stay in registers, and each of the others is read when it is needed.
        """
        builder, rows, vectors = self._builder, len(self.sums), len(self.sums[0])

        def factor(row: int) -> Any:
            return _spread(builder, row_starts[row], offset)

        def column(vector: int) -> Any:
            return builder.load(at(builder, b, WIDE(vector * _VECTOR_BYTES), _FLOATS), align=4)

        if rows < vectors:
            factors = [factor(row) for row in range(rows)]
            for vector in range(vectors):
                right = column(vector)
                self._add([(row, vector, factors[row], right) for row in range(rows)])
            return
        columns = [column(vector) for vector in range(vectors)]
        for row in range(rows):
            left = factor(row)
            self._add([(row, vector, left, columns[vector]) for vector in range(vectors)])

    def _add(self, products: list[tuple[int, int, Any, Any]]) -> None:
        """Add products to sums [row][vector], ready before whatever is loaded behind this (as RegisterTile.add)."""
        builder, count = self._builder, len(products)
        places = [self.sums[row][vector] for row, vector, _, _ in products]
        totals = [
            _multiply_add(builder, left, right, builder.load(place))
            for place, (_, _, left, right) in zip(places, products, strict=True)
        ]
        if _IS_X86:
            several = _FLOATS if count == 1 else ir.LiteralStructType([_FLOATS] * count)
            kept = builder.asm(  # no instruction
                ir.FunctionType(several, [_FLOATS] * count),
                "",
                ",".join(["=x"] * count + [str(index) for index in range(count)] + ["~{memory}"]),
                totals,
                side_effect=True,
            )
            totals = [kept] if count == 1 else [builder.extract_value(kept, index) for index in range(count)]
        for total, place in zip(totals, places, strict=True):
            builder.store(total, place)


def _write_tile(
    builder: Any,
    rows: int,
    vectors: int,
    passes: Any,
    a: tuple[Any, Any],
    b: tuple[Any, Any],
    c: tuple[Any, Any],
    add: Any,
    walk: Callable[[Callable[[Any], None], Any], None],
) -> None:
    """Code for one tile; a, b and c: addresses and strides in bytes. `add` of 0 starts from zero, 1 from what C holds.

    `walk(step, turn)` is to write the loop that calls step(index), of the pass `turn`.
    """
    row_starts = [builder.add(a[0], builder.mul(a[1], WIDE(row))) for row in range(rows)]
    sums = _Pass(builder, rows, vectors)
    with cgutils.for_range(builder, passes) as turn:
        across = builder.mul(turn.index, WIDE(vectors * _VECTOR_BYTES))
        columns, target = builder.add(b[0], across), builder.add(c[0], across)

        def step(index: Any) -> None:
            sums.step(row_starts, builder.mul(index, WIDE(4)), builder.add(columns, builder.mul(index, b[1])))

        with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
            with adding:
                sums.load(target, c[1])
            with fresh:
                sums.clear()
        walk(step, turn.index)
        sums.store(target, c[1])


def _write_steps(builder: Any, steps: Any, step: Callable[[Any], None], before: Callable[[Any], None]) -> None:
    """Code for all steps, some of which are unrolled; before(group) is for what comes before each of these groups."""
    groups = builder.udiv(steps, WIDE(_STEPS_TOGETHER))
    with cgutils.for_range(builder, groups) as group:
        before(group.index)
        first = builder.mul(group.index, WIDE(_STEPS_TOGETHER))
        for number in range(_STEPS_TOGETHER):
            step(builder.add(first, WIDE(number)))
    done = builder.mul(groups, WIDE(_STEPS_TOGETHER))
    with cgutils.for_range(builder, builder.sub(steps, done)) as rest:
        step(builder.add(done, rest.index))


def make_panel_tile(columns: int, locality: int) -> Any:
    """Make gemm.py's `tile` of fp32 and panels of `columns`, without its first and last argument; `locality` as
    floats.ask_for_line's."""
    stride = WIDE(4 * columns)

    @written_in_llvm()
    def tile(builder, rows, a, a_stride, b, steps, c, add, ahead, lines):
        def write(count: int) -> None:
            vectors = vectors_together(count, columns)
            passes = columns // LANES // vectors
            share = builder.udiv(builder.add(lines, WIDE(passes - 1)), WIDE(passes))
            asked = builder.mul(share, WIDE(_LINE_BYTES))
            of_pass = builder.mul(asked, builder.udiv(steps, WIDE(_STEPS_TOGETHER)))

            def walk(step: Callable[[Any], None], turn: Any) -> None:
                first = builder.add(ahead, builder.mul(turn, of_pass))

                def ask(group: Any) -> None:
                    start = builder.add(first, builder.mul(group, asked))
                    with cgutils.for_range(builder, share) as line:
                        ask_for_line(builder, builder.add(start, builder.mul(line.index, WIDE(_LINE_BYTES))), locality)

                _write_steps(builder, steps, step, ask)

            _write_tile(builder, count, vectors, WIDE(passes), (a, a_stride), (b, stride), (c, stride), add, walk)

        for_each_height(builder, rows, TILE_ROWS, write)

    return tile


COLUMNS_TOGETHER = 4 * LANES
"""`multiply` takes whole multiples of these columns."""


@written_in_llvm()
def _multiply_tile(builder, rows, a, a_stride, b, b_stride, steps, c, c_stride, columns, add):
    def write(count: int) -> None:
        vectors = vectors_together(count, COLUMNS_TOGETHER)
        passes = builder.udiv(columns, WIDE(LANES * vectors))

        def walk(step: Callable[[Any], None], turn: Any) -> None:
            _write_steps(builder, steps, step, lambda group: None)

        _write_tile(builder, count, vectors, passes, (a, a_stride), (b, b_stride), (c, c_stride), add, walk)

    for_each_height(builder, rows, TILE_ROWS, write)


@compiled
def multiply(rows, a, a_stride, b, b_stride, steps, c, c_stride, columns, add):
    """c[rows, columns] (+)= a[rows, steps] b[steps, columns] in tiles of about equal height. Addresses, and strides in
    bytes."""
    tiles, first = (rows + TILE_ROWS - 1) // TILE_ROWS, np.int64(0)
    for index in range(tiles):
        height = (rows - first + tiles - index - 1) // (tiles - index)
        left, target = a + first * a_stride, c + first * c_stride
        _multiply_tile(height, left, a_stride, b, b_stride, steps, target, c_stride, columns, add)
        first += height


@written_in_llvm()
def transpose(builder, source, source_stride, target, target_stride):
    """8 rows of 8 numbers of 4 bytes, as columns. Addresses, and strides in bytes."""

    def row_at(base: Any, stride: Any, row: int) -> Any:
        return at(builder, base, builder.mul(stride, WIDE(row)), _LANE_NUMBERS)

    rows = [builder.load(row_at(source, source_stride, row), align=4) for row in range(LANES)]
    # Bit by bit of the indices: what lies off the diagonal of each square of 2 x 2 blocks changes places.
    for bit in (1, 2, 4):
        upper = [lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)]
        lower = [lane | bit if not lane & bit else LANES + lane for lane in range(LANES)]
        for row in range(LANES):
            if not row & bit:
                pair = rows[row], rows[row | bit]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(_LANE_NUMBERS, upper))
                rows[row | bit] = builder.shuffle_vector(*pair, ir.Constant(_LANE_NUMBERS, lower))
    for row, value in enumerate(rows):
        builder.store(value, row_at(target, target_stride, row), align=4)
