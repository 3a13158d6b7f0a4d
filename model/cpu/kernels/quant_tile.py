"""Quantised weights in AVX512 registers: multiplied where they are unpacked, or written out as bf16.

A panel of 64 output columns is a row of steps of 256 bytes, 64 bytes for each 16 output columns l. Of four bits such a
vector covers 8 input columns: 16-bit word 2 l + e holds, lowest bits first, columns e, 2 + e, 4 + e and 6 + e of output
l, each with 8 added. Of eight bits it covers 4: a sign and seven bits of magnitude, column 2 j + e of output l in byte
16 (l // 4) + 8 j + 2 (l % 4) + e. A table look-up (`vpermw`; `vpermi2b` for the low and for the high bytes, which are
then interleaved) makes bf16 of them, exactly, in the pairs along the input that `vdpbf16ps` multiplies.

All arguments are int64: addresses, strides in bytes, counts. Reference: `QuantizedWeight.dequantized`.
"""

import itertools
import struct
from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from twostroke.model.cpu.kernels import floats as cpu_dot
from twostroke.model.cpu.kernels.floats import LANES, PAIRS
from twostroke.model.cpu.kernels.gemm import PANEL_COLUMNS, STEP_BYTES, TILE_ROWS
from twostroke.model.cpu.kernels.launch import compiled

DIRECT_ROWS = 4  # of activations; more need registers that the unpacking takes
INT4_STEP_COLUMNS, INT8_STEP_COLUMNS = 8, 4  # input columns of a step
_LINE_BYTES = 64
_VECTORS = PANEL_COLUMNS // LANES
_PREFETCH_BYTES = 4096  # from what is multiplied to what is asked for

_BYTE, _INT, _WIDE = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(_BYTE, 4 * LANES)
_ORDER = ir.VectorType(_INT, 4 * LANES)


def is_supported() -> bool:
    """Whether this CPU has `vdpbf16ps` and looks bytes up among 128."""
    return cpu_dot.is_supported() and bool(binding.get_host_cpu_features().get("avx512vbmi"))


def _unpacked(builder: Any, pairs: Any) -> list[Any]:
    return [pairs]


def _bf16_bits(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits) >> 16


def _constant(kind: Any, values: Sequence[float]) -> Any:
    return ir.Constant(kind, values)


def _look_up(builder: Any, name: str, kind: Any, *operands: Any) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, (kind,) * len(operands)), name)
    return builder.call(function, operands)


def _unpack_int4(builder: Any, packed: Any) -> list[Any]:
    """4 vectors of bf16 pairs, of input columns 2 j and 2 j + 1."""
    # Bit 4 of an index is the neighbour's: the table says the same for both.
    table = _constant(_WORDS, [_bf16_bits(i % 16 - 8) for i in range(32)])
    words = builder.bitcast(packed, _WORDS)
    shifted = [words] + [builder.lshr(words, _constant(_WORDS, [4 * j] * 32)) for j in range(1, 4)]
    return [_look_up(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, table, word) for word in shifted]


def _unpack_int8(builder: Any, packed: Any) -> list[Any]:
    """2 vectors of bf16 pairs, of input columns 2 j and 2 j + 1."""
    magnitudes = [_bf16_bits(i) for i in range(128)]
    low, high = ([bits >> shift & 0xFF for bits in magnitudes] for shift in (0, 8))
    numbers = builder.bitcast(packed, _BYTES)

    def found(table: list[int]) -> Any:
        halves = _constant(_BYTES, table[:64]), _constant(_BYTES, table[64:])
        return _look_up(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, halves[0], numbers, halves[1])

    signs = builder.and_(numbers, _constant(_BYTES, [0x80] * 64))
    parts = found(low), builder.or_(found(high), signs)
    orders = [
        [16 * lane + 8 * j + i // 2 + 64 * (i % 2) for lane in range(4) for i in range(16)] for j in range(2)
    ]  # as vpunpcklbw and vpunpckhbw
    return [builder.shuffle_vector(*parts, _constant(_ORDER, order)) for order in orders]


def _make_tile(rows: int, unpack: Any, columns: int, lines: int, scaled: bool) -> Any:
    """c[rows, 64] += a[rows, in] times one panel of `groups` groups of `steps` steps, each scaled by its own.

    Asks for `lines` cache lines every step, `ahead_stride` bytes further each time, starting at `ahead`.
    """

    @intrinsic
    def tile(
        typingctx: Any,
        a: Any,
        a_stride: Any,
        packed: Any,
        steps: Any,
        groups: Any,
        scales: Any,
        c: Any,
        ahead: Any,
        ahead_stride: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_stride, packed, steps, groups, scales, c, ahead, ahead_stride = arguments
            places = [(row, vector) for row in range(rows) for vector in range(_VECTORS)]
            totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
            sums = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
            results = {
                (row, vector): _at(builder, c, _WIDE(STEP_BYTES * row + _LINE_BYTES * vector), _FLOATS)
                for row, vector in places
            }
            row_starts = [builder.add(a, builder.mul(a_stride, _WIDE(row))) for row in range(rows)]
            for place in places:
                builder.store(builder.load(results[place], align=4), totals[place])
            with cgutils.for_range(builder, groups) as group:
                for place in places:
                    builder.store(_constant(_FLOATS, [0.0] * LANES), sums[place])
                first = builder.mul(group.index, steps)
                with cgutils.for_range(builder, steps) as loop:
                    index = builder.add(first, loop.index)
                    asked = builder.add(ahead, builder.mul(index, ahead_stride))
                    for line in range(lines):
                        _prefetch(builder, _at(builder, asked, _WIDE(_LINE_BYTES * line), _BYTE))
                    start = builder.add(packed, builder.mul(index, _WIDE(STEP_BYTES)))
                    weights = _load_step(builder, start, unpack)
                    across = builder.mul(index, _WIDE(2 * columns))
                    for pair, row in itertools.product(range(columns // 2), range(rows)):
                        offset = builder.add(across, _WIDE(4 * pair))
                        value = builder.load(_at(builder, row_starts[row], offset, _INT), align=2)
                        lane = builder.insert_element(ir.Constant(_INTS, ir.Undefined), value, _INT(0))
                        spread = builder.shuffle_vector(lane, lane, _constant(_INTS, [0] * LANES))
                        for vector in range(_VECTORS):
                            total = builder.load(sums[row, vector])
                            total = _dot_pairs(builder, total, spread, weights[vector][pair])
                            builder.store(total, sums[row, vector])
                scale_start = builder.add(scales, builder.mul(group.index, _WIDE(2 * PANEL_COLUMNS)))
                for row, vector in places:
                    whole, total = builder.load(sums[row, vector]), builder.load(totals[row, vector])
                    if scaled:
                        halves = builder.load(_at(builder, scale_start, _WIDE(2 * LANES * vector), _HALVES), align=2)
                        wide = builder.shl(builder.zext(halves, _INTS), _constant(_INTS, [16] * LANES))
                        total = _multiply_add(builder, whole, builder.bitcast(wide, _FLOATS), total)
                    else:
                        total = builder.fadd(total, whole)
                    builder.store(total, totals[row, vector])
            for place in places:
                builder.store(builder.load(totals[place]), results[place], align=4)
            return _WIDE(0)

        return types.int64(*[types.int64] * 9), codegen

    return tile


def _at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def _load_step(builder: Any, start: Any, unpack: Any) -> list[list[Any]]:
    """The weights of one step, as [vector][pair]."""
    lines = [_at(builder, start, _WIDE(_LINE_BYTES * vector), _INTS) for vector in range(_VECTORS)]
    return [unpack(builder, builder.load(line, align=4)) for line in lines]


def _dot_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, (_FLOATS, PAIRS, PAIRS)), "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    return builder.call(function, (total, builder.bitcast(left, PAIRS), builder.bitcast(right, PAIRS)))


def _multiply_add(builder: Any, left: Any, right: Any, total: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, (_FLOATS,) * 3), "llvm.fma.v16f32"
    )
    return builder.call(function, (left, right, total))


def _prefetch(builder: Any, pointer: Any) -> None:
    flag = ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), (pointer.type, flag, flag, flag)), "llvm.prefetch.p0"
    )
    builder.call(function, (pointer, flag(0), flag(3), flag(1)))


def _make_direct(unpack: Any, columns: int, scaled: bool) -> Any:
    one, two, three, four = (_make_tile(rows, unpack, columns, _VECTORS, scaled) for rows in range(1, DIRECT_ROWS + 1))

    @compiled
    def direct(rows, a, a_stride, packed, steps, groups, scales, c):
        ahead = packed + _PREFETCH_BYTES
        if rows == 4:
            four(a, a_stride, packed, steps, groups, scales, c, ahead, STEP_BYTES)
        elif rows == 3:
            three(a, a_stride, packed, steps, groups, scales, c, ahead, STEP_BYTES)
        elif rows == 2:
            two(a, a_stride, packed, steps, groups, scales, c, ahead, STEP_BYTES)
        else:
            one(a, a_stride, packed, steps, groups, scales, c, ahead, STEP_BYTES)

    return direct


direct_int4 = _make_direct(_unpack_int4, INT4_STEP_COLUMNS, True)
direct_int8 = _make_direct(_unpack_int8, INT8_STEP_COLUMNS, False)


def _make_unpacked(lines: int, scaled: bool) -> Any:
    one, two, three, four, five, six = (
        _make_tile(rows, _unpacked, 2, lines, scaled) for rows in range(1, TILE_ROWS + 1)
    )

    @compiled
    def unpacked(rows, a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride):
        if rows == 6:
            six(a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)
        elif rows == 5:
            five(a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)
        elif rows == 4:
            four(a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)
        elif rows == 3:
            three(a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)
        elif rows == 2:
            two(a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)
        else:
            one(a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)

    return unpacked


# As `direct`, of weights that are unpacked: a pair of input columns a step, asking for the next packed ones meanwhile.
unpacked_int4 = _make_unpacked(1, True)
unpacked_int8 = _make_unpacked(2, False)


def _make_unpacking(unpack: Any, columns: int) -> Any:
    @intrinsic
    def unpacking(typingctx: Any, packed: Any, steps: Any, pairs: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            packed, steps, pairs = arguments
            with cgutils.for_range(builder, steps) as loop:
                start = builder.add(packed, builder.mul(loop.index, _WIDE(STEP_BYTES)))
                into = builder.add(pairs, builder.mul(loop.index, _WIDE(STEP_BYTES * columns // 2)))
                for vector, weights in enumerate(_load_step(builder, start, unpack)):
                    for pair, values in enumerate(weights):
                        place = _WIDE(STEP_BYTES * pair + _LINE_BYTES * vector)
                        builder.store(values, _at(builder, into, place, values.type), align=4)
            return _WIDE(0)

        return types.int64(*[types.int64] * 3), codegen

    return unpacking


unpack_int4 = _make_unpacking(_unpack_int4, INT4_STEP_COLUMNS)
unpack_int8 = _make_unpacking(_unpack_int8, INT8_STEP_COLUMNS)
