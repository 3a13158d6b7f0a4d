"""Blocks of bf16 projections on AMX, Intel's matrix unit since Sapphire Rapids: up to nine times AVX512-BF16's rate.

C[rows, 64] (+)= A[rows, steps] B[steps, 64], for the same packed weights as the register tiles of `gemm`: a step of B
is 256 bytes, a pair of bf16 for each of 64 columns, which is how AMX wants the right side of a product, too.

Eight tiles hold 16 rows of 64 bytes each. Up to 16 rows of A are multiplied with all 64 columns at a time, a tile of A
and three for B in turn, so that weights are read in the order in which they lie in memory. More rows go in pairs of
tiles, with half of the columns at a time: four products for four loads. `_tdpbf16ps` adds up 16 products of the even
and 16 of the odd places of a row by themselves, then their sum to C: the order is the same for any number of rows, but
another than AVX512-BF16's, so that machines with and without AMX differ in the last bits.

The instructions are described in Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from twostroke.model.cpu.kernels.launch import compiled

ROWS = 16  # of a tile
DEPTH = 16  # steps of B in a tile, as many pairs of bf16 in a row of A's
STEP_BYTES = 256
TILE_BYTES = 64  # of a row of a tile
AHEAD_BYTES = 8192  # of B that are asked for before they are needed, where B comes from memory

_BYTE, _HALF, _INT, _WIDE = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_POINTER = _BYTE.as_pointer()


@functools.cache
def is_usable() -> bool:
    """Whether this CPU has AMX for bf16 and the kernel lets this process use it, which has to be asked for once."""
    return bool(torch.cpu._is_amx_tile_supported()) and bool(torch.cpu._init_amx())


def _call(builder: Any, name: str, kinds: Any, *arguments: Any) -> None:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}")
    builder.call(function, arguments)


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _at(builder: Any, base: Any, offset: Any) -> Any:
    return builder.inttoptr(builder.add(base, offset), _POINTER)


@intrinsic
def _set_shapes(typingctx: Any, upper: Any, lower: Any, depth: Any) -> Any:
    """Have tiles for `upper` rows of A, `lower` more, and `depth` steps; all int64. Tiles lose what they held.

    Tiles 0 and 1 are sums of the upper rows, 2 and 3 of the lower; 4 and 5 hold A, 6 and 7 hold B. Without lower rows
    0 to 3 are all sums of the upper ones, 4 holds A, and 5 to 7 hold B. Returns 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        upper, lower, depth = (builder.trunc(value, _BYTE) for value in arguments)
        config = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(_BYTE, 64), None))
        base = builder.ptrtoint(config, _WIDE)

        def store(offset: int, value: Any) -> None:
            place = builder.add(base, ir.Constant(_WIDE, offset))
            builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=1)

        builder.store(ir.Constant(ir.ArrayType(_BYTE, 64), None), config)
        store(0, ir.Constant(_BYTE, 1))  # the palette
        single = builder.icmp_unsigned("==", lower, ir.Constant(_BYTE, 0))
        others = builder.select(single, upper, lower)
        a_bytes = builder.trunc(builder.mul(arguments[2], ir.Constant(_WIDE, 4)), _HALF)
        whole = ir.Constant(_HALF, TILE_BYTES)
        widths = [whole, whole, whole, whole, a_bytes, builder.select(single, whole, a_bytes), whole, whole]
        rows = [upper, upper, others, others, upper, builder.select(single, depth, lower), depth, depth]
        for number in range(8):
            store(16 + 2 * number, widths[number])
            store(48 + number, rows[number])
        _call(builder, "ldtilecfg", [_POINTER], builder.inttoptr(base, _POINTER))
        return ir.Constant(_WIDE, 0)

    return types.int64(*[types.int64] * 3), codegen


def _make_product(num_a: int, num_b: int, sums: tuple[int, ...], of_a: tuple[int, ...], of_b: tuple[int, ...]) -> Any:
    """The product of `num_a` tiles of rows and `num_b` of columns, in the tiles that are named."""

    @intrinsic
    def product(
        typingctx: Any, a: Any, a_stride: Any, b: Any, depths: Any, steps: Any, c: Any, add: Any, lines: Any
    ) -> Any:
        """c (+)= a b. `depths` tiles of `steps` steps each; `lines` cache lines of b are asked for ahead of each."""

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_stride, b, depths, steps, c, add, lines = arguments

            def number(value: int) -> Any:
                return ir.Constant(_WIDE, value)

            load, store = [_BYTE, _POINTER, _WIDE], [_BYTE, _POINTER, _WIDE]
            places = [
                (sums[row * num_b + column], number(row * ROWS * STEP_BYTES + column * TILE_BYTES))
                for row in range(num_a)
                for column in range(num_b)
            ]
            with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
                with adding:
                    for tile, offset in places:
                        _call(builder, "tileloadd64", load, _tile(tile), _at(builder, c, offset), number(STEP_BYTES))
                with fresh:
                    for tile, _ in places:
                        _call(builder, "tilezero", [_BYTE], _tile(tile))
            lower_rows = builder.mul(a_stride, number(ROWS))
            with cgutils.for_range(builder, depths) as loop:
                across = builder.mul(loop.index, builder.mul(steps, number(4)))
                down = builder.mul(loop.index, builder.mul(steps, number(STEP_BYTES)))
                for row in range(num_a):
                    offset = across if row == 0 else builder.add(across, lower_rows)
                    _call(builder, "tileloadd64", load, _tile(of_a[row]), _at(builder, a, offset), a_stride)
                following = builder.add(down, number(AHEAD_BYTES))
                with cgutils.for_range(builder, lines) as line:
                    place = builder.add(following, builder.mul(line.index, number(64)))
                    flags = [ir.Constant(_INT, flag) for flag in (0, 3, 1)]
                    function = cgutils.get_or_insert_function(
                        builder.module, ir.FunctionType(ir.VoidType(), (_POINTER, _INT, _INT, _INT)), "llvm.prefetch.p0"
                    )
                    builder.call(function, (_at(builder, b, place), *flags))
                for column in range(num_b):
                    tile = of_b[column % len(of_b)]
                    offset = builder.add(down, number(column * TILE_BYTES))
                    _call(builder, "tileloadd64", load, _tile(tile), _at(builder, b, offset), number(STEP_BYTES))
                    for row in range(num_a):
                        total = _tile(sums[row * num_b + column])
                        _call(builder, "tdpbf16ps", [_BYTE] * 3, total, _tile(of_a[row]), _tile(tile))
            for tile, offset in places:
                _call(builder, "tilestored64", store, _tile(tile), _at(builder, c, offset), number(STEP_BYTES))
            return number(0)

        return types.int64(*[types.int64] * 8), codegen

    return product


_upper_rows = _make_product(1, 4, sums=(0, 1, 2, 3), of_a=(4,), of_b=(5, 6, 7))
_both_rows = _make_product(2, 2, sums=(0, 1, 2, 3), of_a=(4, 5), of_b=(6, 7))


@intrinsic
def release_tiles(typingctx: Any) -> Any:
    """Give the unit back: a thread that keeps tiles has them saved at each of its switches. Returns 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "tilerelease", [])
        return ir.Constant(_WIDE, 0)

    return types.int64(), codegen


@compiled
def multiply_depths(rows, a, a_stride, b, depths, steps, c, add, lines):
    """`depths` tiles of `steps` steps each, for any number of rows."""
    pairs = rows // (2 * ROWS)
    if pairs:
        _set_shapes(ROWS, ROWS, steps)
    for pair in range(pairs):
        x, out = a + pair * 2 * ROWS * a_stride, c + pair * 2 * ROWS * STEP_BYTES
        _both_rows(x, a_stride, b, depths, steps, out, add, 0)
        _both_rows(x, a_stride, b + 2 * TILE_BYTES, depths, steps, out + 2 * TILE_BYTES, add, 0)
    done = pairs * 2 * ROWS
    left = rows - done
    x, out = a + done * a_stride, c + done * STEP_BYTES
    if left > ROWS:
        _set_shapes(ROWS, left - ROWS, steps)
        _both_rows(x, a_stride, b, depths, steps, out, add, 0)
        _both_rows(x, a_stride, b + 2 * TILE_BYTES, depths, steps, out + 2 * TILE_BYTES, add, 0)
    elif left > 0:
        _set_shapes(left, 0, steps)
        _upper_rows(x, a_stride, b, depths, steps, out, add, lines)


@compiled
def multiply_block(rows, a, a_stride, b, steps, c, add, ahead):
    """As `gemm._make_multiply` wants it: c[rows, 64] (+)= a b, all by address; c's rows are 256 bytes apart."""
    depths, rest = steps // DEPTH, steps % DEPTH
    lines = np.int64(64) if rows <= ROWS else np.int64(0)
    if depths:
        multiply_depths(rows, a, a_stride, b, depths, DEPTH, c, add, lines)
    if rest:
        x, below = a + depths * DEPTH * 4, b + depths * DEPTH * STEP_BYTES
        multiply_depths(rows, x, a_stride, below, 1, rest, c, add or depths > 0, np.int64(0))
