"""The register tiles of CPU projections: 1 to 6 rows of x times one panel of 64 output columns, in bf16 or fp32.

C[rows, 64] (+)= A[rows, steps] B[steps, 64]. One step is 4 bytes of a row of A and 256 bytes of B: a pair of bf16 along
the inner dimension in each 32-bit lane (AVX512-BF16's `vdpbf16ps` multiplies both and adds them to an fp32 lane), or
one fp32 (fused multiply-add). All sums stay in registers over the steps: 6 rows need 24 of AVX-512's 32, which hides
the latency of either instruction. Each sum is added up by itself, step after step, so it does not depend on how many
rows are computed together.

`tile(rows, a, a stride, b, steps, c, add, ahead, lines)`: A is row-major with its stride in bytes; B is contiguous; C
is fp32 with a stride of 256 bytes. `add` of 0 starts from zero, 1 from what C holds. While it computes, the tile asks
for `lines` cache lines every 4 steps, one after the other from address `ahead` on: what will be read next can so come
from memory meanwhile. All arguments are int64.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from twostroke.model.kernels.cpu_dot import LANES, PAIRS, BFloat
from twostroke.model.kernels.cpu_launch import compiled

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
