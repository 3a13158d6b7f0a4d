"""Register tiles of gemm.py for CPUs that have AVX2 and no AVX-512: 16 registers of 8 numbers in fp32.

A panel's 64 columns take several passes over the block, which stays in the L1 cache, with as many columns at a time as
the sums of all rows have registers for. Each sum is added up as on AVX-512, in the same order with the same rounding.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils

from twostroke.model.cpu.kernels.floats import ask_for_line, call, for_each_height
from twostroke.model.cpu.kernels.launch import WIDE, at, written_in_llvm

_LANES = 8
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_VECTOR_BYTES, _LINE_BYTES = 4 * _LANES, 64
_PANEL_VECTORS = 8
VECTORS_OF_ROWS = (8, 4, 4, 2, 2, 2)
"""Vectors of columns at a time, by rows. Eight sums hide the latency of a multiplication; twelve fit."""


def is_usable() -> bool:
    """Return True if this CPU has AVX2's registers and fused multiplication."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx2") and features.get("fma"))


def _spread(builder: Any, base: Any, offset: Any) -> Any:
    """Return the fp32 number that many bytes behind the address `base`, in each lane."""
    number = builder.load(at(builder, base, offset, ir.FloatType()), align=4)
    lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES))


class _Pass:
    """Generator of the code of one pass: sums [rows, 8 `vectors`] that stay in registers."""

    def __init__(self, builder: Any, rows: int, vectors: int):
        self._builder = builder
        self._sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(vectors)] for _ in range(rows)]

    def clear(self) -> None:
        for place in (place for row in self._sums for place in row):
            self._builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), place)

    def load(self, c: Any, stride: int) -> None:
        for place, source in self._places(c, stride):
            self._builder.store(self._builder.load(source, align=4), place)

    def store(self, c: Any, stride: int) -> None:
        for place, target in self._places(c, stride):
            self._builder.store(self._builder.load(place), target, align=4)

    def _places(self, c: Any, stride: int) -> list[tuple[Any, Any]]:
        return [
            (place, at(self._builder, c, WIDE(row * stride + vector * _VECTOR_BYTES), _FLOATS))
            for row, places in enumerate(self._sums)
            for vector, place in enumerate(places)
        ]

    def step(self, row_starts: list[Any], offset: Any, b: Any) -> None:
        """sums += the numbers `offset` bytes behind the rows' starts, times the columns at address b.

        The fewer of both stay in registers, and each of the others is read when it is needed.
        """
        builder, rows, vectors = self._builder, len(self._sums), len(self._sums[0])

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
        places = [self._sums[row][vector] for row, vector, _, _ in products]
        totals = [
            call(builder, "llvm.fma.v8f32", _FLOATS, left, right, builder.load(place))
            for place, (_, _, left, right) in zip(places, products, strict=True)
        ]
        several = _FLOATS if count == 1 else ir.LiteralStructType([_FLOATS] * count)
        kept = builder.asm(  # no instruction
            ir.FunctionType(several, [_FLOATS] * count),
            "",
            ",".join(["=x"] * count + [str(index) for index in range(count)] + ["~{memory}"]),
            totals,
            side_effect=True,
        )
        for index, place in enumerate(places):
            builder.store(kept if count == 1 else builder.extract_value(kept, index), place)


def make_tile(step_bytes: int, steps_together: int, locality: int) -> Any:
    """Make gemm.py's `tile` of fp32, without its first and last argument; `locality` as floats.ask_for_line's."""

    @written_in_llvm()
    def tile(builder, rows, a, a_stride, b, steps, c, add, ahead, lines):
        groups = builder.udiv(steps, WIDE(steps_together))

        def write(count: int) -> None:
            vectors = VECTORS_OF_ROWS[count - 1]
            passes = _PANEL_VECTORS // vectors
            row_starts = [builder.add(a, builder.mul(a_stride, WIDE(row))) for row in range(count)]
            share = builder.udiv(builder.add(lines, WIDE(passes - 1)), WIDE(passes))
            asked = builder.mul(share, WIDE(_LINE_BYTES))
            of_pass = builder.mul(asked, groups)
            sums = _Pass(builder, count, vectors)
            with cgutils.for_range(builder, WIDE(passes)) as turn:
                across = builder.mul(turn.index, WIDE(vectors * _VECTOR_BYTES))
                columns, target = builder.add(b, across), builder.add(c, across)
                first_line = builder.add(ahead, builder.mul(turn.index, of_pass))

                def step(index: Any, columns: Any = columns) -> None:
                    offset = builder.mul(index, WIDE(4))
                    sums.step(row_starts, offset, builder.add(columns, builder.mul(index, WIDE(step_bytes))))

                with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
                    with adding:
                        sums.load(target, step_bytes)
                    with fresh:
                        sums.clear()
                with cgutils.for_range(builder, groups) as group:
                    start = builder.add(first_line, builder.mul(group.index, asked))
                    with cgutils.for_range(builder, share) as line:
                        ask_for_line(builder, builder.add(start, builder.mul(line.index, WIDE(_LINE_BYTES))), locality)
                    first = builder.mul(group.index, WIDE(steps_together))
                    for number in range(steps_together):
                        step(builder.add(first, WIDE(number)))
                done = builder.mul(groups, WIDE(steps_together))
                with cgutils.for_range(builder, builder.sub(steps, done)) as rest:
                    step(builder.add(done, rest.index))
                sums.store(target, step_bytes)

        for_each_height(builder, rows, len(VECTORS_OF_ROWS), write)

    return tile
