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
from numba.core import cgutils

from twostroke.model.cpu.kernels.floats import ask_for_line, call
from twostroke.model.cpu.kernels.launch import WIDE, at, compiled, written_in_llvm

ROWS = 16  # of a tile
DEPTH = 16  # steps of B in a tile, as many pairs of bf16 in a row of A's
STEP_BYTES = 256
TILE_BYTES = 64  # of a row of a tile
AHEAD_BYTES = 8192  # of B that are asked for before they are needed, where B comes from memory

_BYTE, _HALF = ir.IntType(8), ir.IntType(16)


@functools.cache
def is_usable() -> bool:
    """Whether this CPU has AMX for bf16 and the kernel lets this process use it, which has to be asked for once."""
    return bool(torch.cpu._is_amx_tile_supported()) and bool(torch.cpu._init_amx())


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """One of AMX's instructions; numbers are those of tiles."""
    tiles = [_BYTE(argument) if isinstance(argument, int) else argument for argument in arguments]
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *tiles)


@written_in_llvm()
def _set_shapes(builder, upper, lower, depth):
    """Have tiles for `upper` rows of A, `lower` more, and `depth` steps. Tiles lose what they held.

    Tiles 0 and 1 are sums of the upper rows, 2 and 3 of the lower; 4 and 5 hold A, 6 and 7 hold B. Without lower rows
    0 to 3 are all sums of the upper ones, 4 holds A, and 5 to 7 hold B.
    """
    config = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(_BYTE, 64), None))
    base = builder.ptrtoint(config, WIDE)

    def store(offset: int, value: Any) -> None:
        builder.store(value, at(builder, base, WIDE(offset), value.type), align=1)

    builder.store(ir.Constant(ir.ArrayType(_BYTE, 64), None), config)
    store(0, _BYTE(1))  # the palette
    a_bytes = builder.trunc(builder.mul(depth, WIDE(4)), _HALF)
    upper, lower, depth = (builder.trunc(value, _BYTE) for value in (upper, lower, depth))
    single = builder.icmp_unsigned("==", lower, _BYTE(0))
    others, whole = builder.select(single, upper, lower), _HALF(TILE_BYTES)
    widths = [whole, whole, whole, whole, a_bytes, builder.select(single, whole, a_bytes), whole, whole]
    rows = [upper, upper, others, others, upper, builder.select(single, depth, lower), depth, depth]
    for number in range(8):
        store(16 + 2 * number, widths[number])
        store(48 + number, rows[number])
    _call(builder, "ldtilecfg", builder.inttoptr(base, _BYTE.as_pointer()))


def _make_product(num_a: int, num_b: int, sums: tuple[int, ...], of_a: tuple[int, ...], of_b: tuple[int, ...]) -> Any:
    """The product of `num_a` tiles of rows and `num_b` of columns, in the tiles that are named."""

    @written_in_llvm()
    def product(builder, a, a_stride, b, depths, steps, c, add, lines):
        """c (+)= a b. `depths` tiles of `steps` steps each; `lines` cache lines of b are asked for ahead of each."""
        places = [
            (sums[row * num_b + column], at(builder, c, WIDE(row * ROWS * STEP_BYTES + column * TILE_BYTES), _BYTE))
            for row in range(num_a)
            for column in range(num_b)
        ]
        with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
            with adding:
                for tile, place in places:
                    _call(builder, "tileloadd64", tile, place, WIDE(STEP_BYTES))
            with fresh:
                for tile, _ in places:
                    _call(builder, "tilezero", tile)
        lower_rows = builder.mul(a_stride, WIDE(ROWS))
        with cgutils.for_range(builder, depths) as loop:
            across = builder.mul(loop.index, builder.mul(steps, WIDE(4)))
            down = builder.add(b, builder.mul(loop.index, builder.mul(steps, WIDE(STEP_BYTES))))
            for row in range(num_a):
                offset = across if row == 0 else builder.add(across, lower_rows)
                _call(builder, "tileloadd64", of_a[row], at(builder, a, offset, _BYTE), a_stride)
            following = builder.add(down, WIDE(AHEAD_BYTES))
            with cgutils.for_range(builder, lines) as line:
                ask_for_line(builder, builder.add(following, builder.mul(line.index, WIDE(64))), 3)
            for column in range(num_b):
                tile = of_b[column % len(of_b)]
                start = at(builder, down, WIDE(column * TILE_BYTES), _BYTE)
                _call(builder, "tileloadd64", tile, start, WIDE(STEP_BYTES))
                for row in range(num_a):
                    _call(builder, "tdpbf16ps", sums[row * num_b + column], of_a[row], tile)
        for tile, place in places:
            _call(builder, "tilestored64", tile, place, WIDE(STEP_BYTES))

    return product


_upper_rows = _make_product(1, 4, sums=(0, 1, 2, 3), of_a=(4,), of_b=(5, 6, 7))
_both_rows = _make_product(2, 2, sums=(0, 1, 2, 3), of_a=(4, 5), of_b=(6, 7))


@written_in_llvm()
def release_tiles(builder):
    """Give the unit back: a thread that keeps tiles has them saved at each of its switches."""
    _call(builder, "tilerelease")


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
def multiply_block(words, rows, a, a_stride, b, steps, c, add, ahead):
    """As `gemm._make_multiply` wants it: c[rows, 64] (+)= a b, all by address; c's rows are 256 bytes apart."""
    depths, rest = steps // DEPTH, steps % DEPTH
    lines = np.int64(64) if rows <= ROWS else np.int64(0)
    if depths:
        multiply_depths(rows, a, a_stride, b, depths, DEPTH, c, add, lines)
    if rest:
        x, below = a + depths * DEPTH * 4, b + depths * DEPTH * STEP_BYTES
        multiply_depths(rows, x, a_stride, below, 1, rest, c, add or depths > 0, np.int64(0))
