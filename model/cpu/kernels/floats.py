"""How CPU kernels read and write numbers: fp32 in registers; bf16 in memory is handled as its 16 bits.

Widening is a shift; on the way back a value is rounded to nearest even.

bf16 matrix tiles with AVX512-BF16's `vdpbf16ps`: 4 rows by 16 to 64 columns, and 16 rows by one vector,
accumulated in fp32 registers.

C[4, 16 n] (+)= A[4, 2 pairs] B[2 pairs, 16 n]. A is row-major bf16. B is packed by pairs of its rows, [pairs, columns,
2], so that one 32-bit lane holds what one instruction multiplies and adds. C is row-major fp32.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from twostroke.model.cpu.kernels.launch import bits_of_float, compiled, float_of_bits


def widen(value):
    """The float32 of a stored value (fp32, or bf16 as uint16)."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


def store(array, index, value):
    """array[index] = value, rounded to the array's type."""
    raise NotImplementedError("compiled code only")


@overload(store, inline="always")
def _store(array, index, value):
    if array.dtype == types.uint16:

        def rounded(array, index, value):
            bits = bits_of_float(value)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            array[index] = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

        return rounded

    def plain(array, index, value):
        array[index] = value

    return plain


_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@njit(nogil=True, fastmath={"contract"}, error_model="numpy")
def exponential(x):
    """e^x in fp32 to 2 ulp, without a call: loops over it vectorise (Cody & Waite reduction, Cephes' polynomial).

    Clamped to [-87, 88]: below, the result is 1e-38 instead of 0.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = np.floor(x * _LOG2_E + np.float32(0.5))
    part = x - whole * _LN2_HIGH - whole * _LN2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * part + np.float32(1.3981999507e-3)
    series = series * part + np.float32(8.3334519073e-3)
    series = series * part + np.float32(4.1665795894e-2)
    series = series * part + np.float32(1.6666665459e-1)
    series = series * part + np.float32(5.0000001201e-1)
    value = series * part * part + part + np.float32(1.0)
    return value * float_of_bits(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@compiled
def largest(values, count):
    """The largest of the first `count` values, none of which may be NaN; -inf where there are none."""
    highest = np.float32(-np.inf)
    for i in range(count):
        highest = _larger(highest, values[i])
    return highest


@intrinsic
def _larger(typingctx: Any, left: Any, right: Any) -> Any:
    """The larger of two float32, neither NaN. Of `max` and of comparisons LLVM makes no vector loop."""
    del typingctx, left, right

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        real = ir.FloatType()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(real, (real, real)), "llvm.maxnum.f32"
        )
        return builder.call(function, arguments, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), codegen


TILE_ROWS = 4
LANES = 16

_INT = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_INT, LANES)
_ORDER = ir.VectorType(_INT, 2 * LANES)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bf16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


PAIRS = ir.VectorType(BFloat(), 2 * LANES)


def is_supported() -> bool:
    """Whether this CPU has the instruction."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def _make_tile(vectors: int) -> Any:
    """The tile of 16 * `vectors` columns: (a, a stride, b, b stride, pairs, c, c stride, whether to add to c) -> 0.

    Addresses and strides are int64, strides in bytes.
    """

    @intrinsic
    def tile(
        typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, pairs: Any, c: Any, c_stride: Any, add: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_stride, b, b_stride, pairs, c, c_stride, add = arguments
            dot = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(_FLOATS, (_FLOATS, PAIRS, PAIRS)),
                "llvm.x86.avx512bf16.dpbf16ps.512",
            )
            wide = a.type

            def at(base: Any, *offsets: Any, kind: Any) -> Any:
                for offset in offsets:
                    base = builder.add(base, offset)
                return builder.inttoptr(base, kind.as_pointer())

            def place(row: int, vector: int) -> Any:
                down = builder.mul(c_stride, ir.Constant(wide, row))
                return at(c, down, ir.Constant(wide, 64 * vector), kind=_FLOATS)

            sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(vectors)] for _ in range(TILE_ROWS)]
            with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
                with adding:
                    for row in range(TILE_ROWS):
                        for vector in range(vectors):
                            builder.store(builder.load(place(row, vector), align=4), sums[row][vector])
                with fresh:
                    for row in range(TILE_ROWS):
                        for vector in range(vectors):
                            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), sums[row][vector])
            with cgutils.for_range(builder, pairs) as loop:
                across = builder.mul(loop.index, ir.Constant(wide, 4))
                down = builder.mul(loop.index, b_stride)
                columns = [
                    builder.bitcast(
                        builder.load(at(b, down, ir.Constant(wide, 64 * vector), kind=_INTS), align=4), PAIRS
                    )
                    for vector in range(vectors)
                ]
                for row in range(TILE_ROWS):
                    start = builder.mul(a_stride, ir.Constant(wide, row))
                    pair = builder.load(at(a, start, across, kind=_INT), align=2)
                    lane = builder.insert_element(ir.Constant(_INTS, ir.Undefined), pair, ir.Constant(_INT, 0))
                    spread = builder.shuffle_vector(lane, lane, ir.Constant(_INTS, [0] * LANES))
                    for vector in range(vectors):
                        total = builder.load(sums[row][vector])
                        total = builder.call(dot, (total, builder.bitcast(spread, PAIRS), columns[vector]))
                        builder.store(total, sums[row][vector])
            for row in range(TILE_ROWS):
                for vector in range(vectors):
                    builder.store(builder.load(sums[row][vector]), place(row, vector), align=4)
            return ir.Constant(wide, 0)

        return types.int64(*[types.int64] * 8), codegen

    return tile


dot_tile_16 = _make_tile(1)
dot_tile_32 = _make_tile(2)
dot_tile_48 = _make_tile(3)
dot_tile_64 = _make_tile(4)


@intrinsic
def dot_rows(typingctx: Any, a: Any, b: Any, b_stride: Any, vectors: Any, c: Any) -> Any:
    """c[16] = b[16, 32 `vectors`] a[32 `vectors`], both row-major bf16, c fp32: (a, b, b stride, vectors, c) -> 0.

    Addresses and strides are int64, strides in bytes.
    """
    del typingctx, a, b, b_stride, vectors, c

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        a, b, b_stride, vectors, c = arguments
        dot = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, (_FLOATS, PAIRS, PAIRS)), "llvm.x86.avx512bf16.dpbf16ps.512"
        )
        wide = a.type

        def pairs_at(address: Any) -> Any:
            return builder.bitcast(builder.load(builder.inttoptr(address, _INTS.as_pointer()), align=2), PAIRS)

        sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(LANES)]
        for total in sums:
            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), total)
        with cgutils.for_range(builder, vectors) as loop:
            across = builder.mul(loop.index, ir.Constant(wide, 64))
            right = pairs_at(builder.add(a, across))
            for row, total in enumerate(sums):
                start = builder.add(builder.add(b, builder.mul(b_stride, ir.Constant(wide, row))), across)
                builder.store(builder.call(dot, (builder.load(total), pairs_at(start), right)), total)
        # Neighbouring lanes of two vectors are added into one vector, until lane i holds the sum of vector i.
        parts = [builder.load(total) for total in sums]
        even = ir.Constant(_INTS, list(range(0, 2 * LANES, 2)))
        odd = ir.Constant(_INTS, list(range(1, 2 * LANES, 2)))
        while len(parts) > 1:
            parts = [
                builder.fadd(builder.shuffle_vector(left, right, even), builder.shuffle_vector(left, right, odd))
                for left, right in zip(parts[::2], parts[1::2], strict=True)
            ]
        builder.store(parts[0], builder.inttoptr(c, _FLOATS.as_pointer()), align=4)
        return ir.Constant(wide, 0)

    return types.int64(*[types.int64] * 5), codegen


@intrinsic
def interleave(typingctx: Any, first: Any, second: Any, vectors: Any, packed: Any) -> Any:
    """packed[32 `vectors`, 2] of two rows of 2-byte numbers, as B's pairs of rows are; addresses; returns 0."""
    del typingctx, first, second, vectors, packed

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        first, second, vectors, packed = arguments
        wide = first.type
        numbers = ir.VectorType(ir.IntType(16), 2 * LANES)
        with cgutils.for_range(builder, vectors) as loop:
            across = builder.mul(loop.index, ir.Constant(wide, 64))
            rows = [
                builder.load(builder.inttoptr(builder.add(row, across), numbers.as_pointer()), align=2)
                for row in (first, second)
            ]
            for half in range(2):
                order = [lane + 2 * LANES * row for lane in range(half * LANES, (half + 1) * LANES) for row in range(2)]
                pairs = builder.shuffle_vector(*rows, ir.Constant(_ORDER, order))
                place = builder.add(packed, builder.add(across, builder.add(across, ir.Constant(wide, 64 * half))))
                builder.store(pairs, builder.inttoptr(place, numbers.as_pointer()), align=4)
        return ir.Constant(wide, 0)

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def transpose(typingctx: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """16 rows of 16 numbers of 4 bytes, as columns: (source, its stride, target, its stride) -> 0.

    Addresses and strides are int64, strides in bytes.
    """
    del typingctx, source, source_stride, target, target_stride

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        source, source_stride, target, target_stride = arguments
        wide = source.type

        def at(base: Any, stride: Any, row: int) -> Any:
            return builder.inttoptr(builder.add(base, builder.mul(stride, ir.Constant(wide, row))), _INTS.as_pointer())

        rows = [builder.load(at(source, source_stride, row), align=2) for row in range(LANES)]
        # Bit by bit of the indices: what lies off the diagonal of each square of 2 x 2 blocks changes places.
        for bit in (1, 2, 4, 8):
            upper = [lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)]
            lower = [lane | bit if not lane & bit else LANES + lane for lane in range(LANES)]
            for row in range(LANES):
                if not row & bit:
                    pair = rows[row], rows[row | bit]
                    rows[row] = builder.shuffle_vector(*pair, ir.Constant(_INTS, upper))
                    rows[row | bit] = builder.shuffle_vector(*pair, ir.Constant(_INTS, lower))
        for row, value in enumerate(rows):
            builder.store(value, at(target, target_stride, row), align=4)
        return ir.Constant(wide, 0)

    return types.int64(*[types.int64] * 4), codegen
