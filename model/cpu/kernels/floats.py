"""Loads, stores and products of numbers in CPU kernels: fp32 in registers; bf16 in memory as its 16 bits, FP8 (e4m3, of
KV caches) as its 8.

Widening bf16 is a shift; on the way back a value is rounded to nearest even.

Register tiles: C[rows, 16 n] (+)= A[rows, steps] B[steps, 16 n]. One step is 4 bytes of a row of A and of each column
of B: a pair of bf16 along the inner dimension, of which AVX512-BF16's `vdpbf16ps` multiplies both and adds them to an
fp32 lane, or one fp32. A is row-major; B of bf16 is packed by pairs of its rows, [pairs, columns, 2]; C is row-major
fp32.
All sums stay in registers over the steps, and each is added up by itself, step after step, so it does not depend on how
many rows are computed together.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import overload

from twostroke.model.cpu.kernels.launch import WIDE, at, bits_of_float, compiled, float_of_bits, written_in_llvm

_FP8_LEAST_NORMAL = np.uint32(0x3C800000)  # 2**-6
_FP8_ROUND = np.float32(16384.0)  # 2**14: what is added to it is rounded to a multiple of 2**-9
_FP8_ROUND_BITS = np.uint32(0x46800000)
_FP8_REBIAS = np.uint32(120 << 3)  # exponents count from 127 in fp32, from 7 in e4m3
_FP8_LIMIT = np.uint32(0x43E00000)  # 448
_FP8_NAN = np.uint32(0x7F)
_INFINITY = np.uint32(0x7F800000)

_inline = njit(inline="always", error_model="numpy")


@_inline
def fp8_code(value):
    """Round to the nearest code, ties to even; no value is above 448 by more than rounding.

    All these conversions keep numba from computing in 64 bits, which halves the speed.
    """
    bits = bits_of_float(value)
    sign = np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    even = np.uint32(np.uint32(size >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(np.uint32(size + even) + np.uint32(0x7FFFF)) >> np.uint32(20)) - _FP8_REBIAS
    small = bits_of_float(float_of_bits(size) + _FP8_ROUND) - _FP8_ROUND_BITS
    return np.uint8(np.uint32(sign | np.uint32(small if size < _FP8_LEAST_NORMAL else normal)))


@_inline
def fp8_value(code):
    """Return the value of a code that is no NaN."""
    bits = np.uint32(code)
    size = bits & np.uint32(0x7F)
    normal = float_of_bits((size << np.uint32(20)) + np.uint32(120 << 23))
    small = np.float32(np.int32(size)) * np.float32(2.0**-9)
    value = small if size < np.uint32(8) else normal
    return -value if bits >= np.uint32(0x80) else value


@_inline
def _fp8_or_nan(code):
    return np.float32(np.nan) if np.uint32(code) & _FP8_NAN == _FP8_NAN else fp8_value(code)


@compiled
def _fp8_code_of_any(value):
    """Return the code of any value: above 448 it saturates, and NaN stays NaN."""
    bits = bits_of_float(value)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    limited = np.uint32(bits ^ size) | (size if size < _FP8_LIMIT else _FP8_LIMIT)
    return np.uint8(_FP8_NAN) if size > _INFINITY else fp8_code(float_of_bits(np.uint32(limited)))


def widen(value):
    """The float32 of a stored value (fp32, bf16 as uint16, or FP8 as uint8)."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint8:
        return lambda value: _fp8_or_nan(value)
    if value == types.uint16:
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


def store(array, index, value):
    """array[index] = value, rounded to the array's type."""
    raise NotImplementedError("compiled code only")


@overload(store, inline="always")
def _store(array, index, value):
    if array.dtype == types.uint8:

        def coded(array, index, value):
            array[index] = _fp8_code_of_any(value)

        return coded
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


@njit(nogil=True, fastmath={"contract"}, error_model="numpy", forceinline=True)
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
def sigmoid(x):
    """1 / (1 + e^-x) in fp32, without a call."""
    return np.float32(1) / (np.float32(1) + exponential(-x))


@njit(nogil=True, fastmath={"contract"}, error_model="numpy", forceinline=True)
def hyperbolic_tangent(x):
    """tanh x in fp32 to 3 ulp, without a call: small arguments by Cephes' polynomial, others by e^2x."""
    square = x * x
    series = np.float32(-5.70498872745e-3)
    series = series * square + np.float32(2.06390887954e-2)
    series = series * square + np.float32(-5.37397155531e-2)
    series = series * square + np.float32(1.33314422036e-1)
    series = series * square + np.float32(-3.33332819422e-1)
    near = series * square * x + x
    far = np.float32(1) - np.float32(2) / (exponential(np.float32(2) * x) + np.float32(1))
    return near if abs(x) < np.float32(0.625) else far


@compiled
def largest(values, count):
    """The largest of the first `count` values, none of which may be NaN; -inf where there are none."""
    highest = np.float32(-np.inf)
    for i in range(count):
        highest = _larger(highest, values[i])
    return highest


@written_in_llvm(types.float32, types.float32, types.float32)
def _larger(builder, left, right):
    """The larger of two float32, neither NaN. Of `max` and of comparisons LLVM makes no vector loop."""
    return call(builder, "llvm.maxnum.f32", ir.FloatType(), left, right, fastmath=("nnan", "nsz"))


LANES = 16
LINE_BYTES = 64  # a cache line, and a vector
TILE_ROWS = 4  # of attention's tiles

INT = ir.IntType(32)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(INT, LANES)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bf16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


_PAIRS = ir.VectorType(BFloat(), 2 * LANES)


def is_supported() -> bool:
    """Return True if this CPU has `vdpbf16ps`."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def fits_tiles(dim: int, block_size: int) -> bool:
    """Return True if attention can use tiles: heads are whole vectors of bf16, blocks whole vectors of tokens."""
    return is_supported() and dim % (2 * LANES) == 0 and block_size % LANES == 0


def call(builder: Any, name: str, result: Any, *arguments: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """The result of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, fastmath=fastmath)


def dot_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right, of pairs of bf16."""
    pairs = builder.bitcast(left, _PAIRS), builder.bitcast(right, _PAIRS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)


def multiply_add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right, of fp32."""
    factors = builder.bitcast(left, FLOATS), builder.bitcast(right, FLOATS)
    return call(builder, "llvm.fma.v16f32", FLOATS, *factors, total)


def spread(builder: Any, base: Any, offset: Any) -> Any:
    """The 4 bytes that many bytes behind the address `base`, in each lane."""
    return in_all_lanes(builder, builder.load(at(builder, base, offset, INT), align=2))


def in_all_lanes(builder: Any, value: Any) -> Any:
    """16 times the same 4 bytes."""
    lane = builder.insert_element(ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, INT(0))
    return builder.shuffle_vector(lane, lane, ir.Constant(INTS, [0] * LANES))


def ask_for_line(builder: Any, address: Any, locality: int) -> None:
    """Prefetch a cache line to be read: 3 into all caches, 2 into all but the L1 cache, 0 into that one and on to no
    other."""
    byte = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), byte, INT(0), INT(locality), INT(1))


@written_in_llvm()
def prefetch(builder, address):
    """Ask for the cache line at an address, to be read soon, into the L2 cache. In bursts like attention's an EPYC
    drops most of what is asked for in the L1 cache, whose misses are few at a time."""
    ask_for_line(builder, address, 2)


class TileSums:
    """Generator of code with fp32 sums [rows, `vectors`] that stay in registers: vectors of the type `numbers`."""

    numbers: Any

    def __init__(self, builder: Any, rows: int, vectors: int):
        self._builder = builder
        self.sums = [[cgutils.alloca_once(builder, self.numbers) for _ in range(vectors)] for _ in range(rows)]

    def clear(self) -> None:
        for place in (place for row in self.sums for place in row):
            self._builder.store(ir.Constant(self.numbers, [0.0] * self.numbers.count), place)

    def load(self, c: Any, c_stride: Any) -> None:
        for place, source in self._places(c, c_stride):
            self._builder.store(self._builder.load(source, align=4), place)

    def store(self, c: Any, c_stride: Any) -> None:
        for place, target in self._places(c, c_stride):
            self._builder.store(self._builder.load(place), target, align=4)

    def _places(self, c: Any, c_stride: Any) -> list[tuple[Any, Any]]:
        """Return each sum with its address in memory."""
        builder = self._builder
        starts = [builder.add(c, builder.mul(c_stride, WIDE(row))) for row in range(len(self.sums))]
        return [
            (place, at(builder, start, WIDE(4 * self.numbers.count * vector), self.numbers))
            for row, start in zip(self.sums, starts, strict=True)
            for vector, place in enumerate(row)
        ]


class RegisterTile(TileSums):
    """Generator of code with sums [rows, 16 `vectors`]."""

    numbers = FLOATS

    def add(self, row: int, combine: Any, left: Any, columns: list[Any]) -> None:
        """sums[row] += left * columns, ready before whatever is loaded behind this.

        Else LLVM may load for many rows ahead, and then has no registers for the sums: it does so where a tile has been
        optimised more than once, that is in the kernel's machine code that comes from numba's cache, not in that of the
        process which compiled it.
        """
        builder, places = self._builder, self.sums[row]
        totals = [
            combine(builder, builder.load(place), left, column) for place, column in zip(places, columns, strict=True)
        ]
        count = len(totals)
        kept = builder.asm(  # no instruction
            ir.FunctionType(ir.LiteralStructType([FLOATS] * count), [FLOATS] * count),
            "",
            ",".join(["=v"] * count + [str(index) for index in range(count)] + ["~{memory}"]),
            totals,
            side_effect=True,
        )
        for index, place in enumerate(places):
            builder.store(builder.extract_value(kept, index), place)


def write_tile(
    builder: Any,
    shape: tuple[int, int],
    combine: Any,
    a: tuple[Any, Any],
    b: tuple[Any, Any],
    c: tuple[Any, Any],
    add: Any,
    walk: Callable[[Callable[[Any], None]], None],
) -> None:
    """Code for one tile of `shape`, rows and vectors. a, b and c: addresses and strides in bytes.

    `add` of 0 starts from zero, 1 from what C holds. `walk(step)` is to write the loop that calls step(index).
    """
    rows, vectors = shape
    tile = RegisterTile(builder, rows, vectors)
    row_starts = [builder.add(a[0], builder.mul(a[1], WIDE(row))) for row in range(rows)]

    def step(index: Any) -> None:
        down = builder.add(b[0], builder.mul(index, b[1]))
        columns = [
            builder.load(at(builder, down, WIDE(LINE_BYTES * vector), INTS), align=4) for vector in range(vectors)
        ]
        across = builder.mul(index, WIDE(4))
        for row in range(rows):
            tile.add(row, combine, spread(builder, row_starts[row], across), columns)

    with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
        with adding:
            tile.load(*c)
        with fresh:
            tile.clear()
    walk(step)
    tile.store(*c)


def for_each_height(builder: Any, rows: Any, most: int, write: Callable[[int], None]) -> None:
    """Code for 1 to `most` rows, of which `rows` says when it runs."""
    end = builder.append_basic_block()
    choice = builder.switch(rows, end)
    for count in range(1, most + 1):
        block = builder.append_basic_block()
        choice.add_case(WIDE(count), block)
        builder.position_at_end(block)
        write(count)
        builder.branch(end)
    builder.position_at_end(end)


def _make_attention_tile(vectors: int) -> Any:
    @written_in_llvm()
    def tile(builder, a, a_stride, b, b_stride, pairs, c, c_stride, add):
        def walk(step: Callable[[Any], None]) -> None:
            with cgutils.for_range(builder, pairs) as loop:
                step(loop.index)

        write_tile(builder, (TILE_ROWS, vectors), dot_pairs, (a, a_stride), (b, b_stride), (c, c_stride), add, walk)

    return tile


_tile_32 = _make_attention_tile(2)
_tile_64 = _make_attention_tile(4)


@compiled
def multiply(rows, a, a_stride, b, b_stride, pairs, c, c_stride, columns, add):
    """c[rows, columns] (+)= a b, of bf16, in tiles of TILE_ROWS rows, the last of which may reach beyond `rows`.

    Addresses, and strides in bytes; `columns` is a multiple of 32.
    """
    for row in range(0, rows, TILE_ROWS):
        left, result = a + row * a_stride, c + row * c_stride
        for column in range(0, columns // 64 * 64, 64):
            _tile_64(left, a_stride, b + 4 * column, b_stride, pairs, result + 4 * column, c_stride, add)
        if columns % 64:
            column = columns - 32
            _tile_32(left, a_stride, b + 4 * column, b_stride, pairs, result + 4 * column, c_stride, add)


@written_in_llvm()
def dot_rows(builder, a, b, b_stride, vectors, c):
    """c[16] = b[16, 32 `vectors`] a[32 `vectors`], both row-major bf16, c fp32. Addresses, and a stride in bytes."""

    def pairs_at(address: Any, offset: Any) -> Any:
        return builder.load(at(builder, address, offset, INTS), align=2)

    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(LANES)]
    for total in sums:
        builder.store(ir.Constant(FLOATS, [0.0] * LANES), total)
    with cgutils.for_range(builder, vectors) as loop:
        across = builder.mul(loop.index, WIDE(64))
        right = pairs_at(a, across)
        for row, total in enumerate(sums):
            left = pairs_at(builder.add(b, builder.mul(b_stride, WIDE(row))), across)
            builder.store(dot_pairs(builder, builder.load(total), left, right), total)
    # Neighbouring lanes of two vectors are added into one vector, until lane i holds the sum of vector i.
    parts = [builder.load(total) for total in sums]
    even = ir.Constant(INTS, list(range(0, 2 * LANES, 2)))
    odd = ir.Constant(INTS, list(range(1, 2 * LANES, 2)))
    while len(parts) > 1:
        parts = [
            builder.fadd(builder.shuffle_vector(left, right, even), builder.shuffle_vector(left, right, odd))
            for left, right in zip(parts[::2], parts[1::2], strict=True)
        ]
    builder.store(parts[0], builder.inttoptr(c, FLOATS.as_pointer()), align=4)


@written_in_llvm()
def interleave(builder, first, second, vectors, packed):
    """packed[32 `vectors`, 2] of two rows of 2-byte numbers, as B's pairs of rows are. Addresses."""
    numbers = ir.VectorType(ir.IntType(16), 2 * LANES)
    with cgutils.for_range(builder, vectors) as loop:
        across = builder.mul(loop.index, WIDE(64))
        rows = [builder.load(at(builder, row, across, numbers), align=2) for row in (first, second)]
        for half in range(2):
            order = [lane + 2 * LANES * row for lane in range(half * LANES, (half + 1) * LANES) for row in range(2)]
            pairs = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(INT, 2 * LANES), order))
            place = builder.add(packed, builder.add(across, across))
            builder.store(pairs, at(builder, place, WIDE(64 * half), numbers), align=4)


def in_bf16(words, address, count, scratch):
    """The address of `count` numbers of the cache in bf16, which are a multiple of 32: theirs, or where the cache is in
    FP8 that of `scratch`, to which they are unpacked."""
    raise NotImplementedError("compiled code only")


@overload(in_bf16, inline="always")
def _in_bf16(words, address, count, scratch):
    if words.cached == types.uint8:

        def unpacked(words, address, count, scratch):
            _unpack_fp8(address, count // (2 * LANES), scratch)
            return scratch

        return unpacked
    return lambda words, address, count, scratch: address


def cached_bytes(words):
    """Return the bytes of one number of the KV cache."""
    raise NotImplementedError("compiled code only")


@overload(cached_bytes, inline="always")
def _cached_bytes(words):
    size = words.cached.bitwidth // 8
    return lambda words: size


@written_in_llvm()
def _unpack_fp8(builder, codes, vectors, numbers):
    """codes[32 `vectors`] of e4m3 -> as many of bf16, exactly. Addresses.

    An exponent and mantissa move to their places, and the exponent counts from another number; the eight magnitudes
    that have no leading one, and NaN, are looked up. Reading bits as a number 2**-120 times as large would need no
    table, but `vdpbf16ps` takes bf16's own such magnitudes for 0.
    """
    words = ir.VectorType(ir.IntType(16), 2 * LANES)

    def all_of(value: int) -> Any:
        return ir.Constant(words, [value] * (2 * LANES))

    looked_up = torch.arange(8.0).mul(2.0**-9).to(torch.bfloat16).view(torch.int16).tolist()
    table = ir.Constant(words, [*looked_up, *(0 for _ in range(23)), 0x7FC0])
    with cgutils.for_range(builder, vectors) as loop:
        start = builder.mul(loop.index, WIDE(2 * LANES))
        loaded = builder.load(at(builder, codes, start, ir.VectorType(ir.IntType(8), 2 * LANES)), align=1)
        code = builder.zext(loaded, words)
        size = builder.and_(code, all_of(0x7F))
        normal = builder.add(builder.shl(size, all_of(4)), all_of(120 << 7))
        other = call(builder, "llvm.x86.avx512.permvar.hi.512", words, table, size)
        # Of 0 to 7, less 8, what wraps around, and 0x7F: one comparison.
        is_other = builder.icmp_unsigned(">", builder.sub(size, all_of(8)), all_of(0x7F - 9))
        sign = builder.and_(builder.shl(code, all_of(8)), all_of(0x8000))
        number = builder.or_(builder.select(is_other, other, normal), sign)
        builder.store(number, at(builder, numbers, builder.add(start, start), words), align=2)


@written_in_llvm()
def transpose(builder, source, source_stride, target, target_stride):
    """16 rows of 16 numbers of 4 bytes, as columns. Addresses, and strides in bytes."""

    def row_at(base: Any, stride: Any, row: int) -> Any:
        return at(builder, base, builder.mul(stride, WIDE(row)), INTS)

    rows = [builder.load(row_at(source, source_stride, row), align=2) for row in range(LANES)]
    # Bit by bit of the indices: what lies off the diagonal of each square of 2 x 2 blocks changes places.
    for bit in (1, 2, 4, 8):
        upper = [lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)]
        lower = [lane | bit if not lane & bit else LANES + lane for lane in range(LANES)]
        for row in range(LANES):
            if not row & bit:
                pair = rows[row], rows[row | bit]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(INTS, upper))
                rows[row | bit] = builder.shuffle_vector(*pair, ir.Constant(INTS, lower))
    for row, value in enumerate(rows):
        builder.store(value, row_at(target, target_stride, row), align=4)
