"""Products of bf16 on AMX, Intel's matrix unit since Sapphire Rapids: up to nine times AVX512-BF16's rate.

C[rows, columns] (+)= A[rows, pairs] B[pairs, columns]. A row of A has pairs of bf16 side by side, B has the two of each
column side by side in 32 bits, which is how packed weights and packed keys and values lie already; C is fp32.

Eight tiles hold 16 rows of 64 bytes each. Up to 16 rows of A are multiplied with up to 64 columns at a time, a tile of
A and three for B in turn, so that weights are read in the order in which they lie in memory. More rows go in pairs of
tiles, with 32 columns at a time: four products for four loads. `tdpbf16ps` adds up 16 products of the even and 16 of
the odd places of a row by themselves, then their sum to C: the order is the same for any number of rows, but another
than AVX512-BF16's, so that machines with and without AMX differ in the last bits.

The instructions are described in Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

import functools
from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from twostroke.model.cpu.kernels.floats import ask_for_line, call
from twostroke.model.cpu.kernels.launch import WIDE, at, compiled, written_in_llvm

ROWS = 16  # of a tile
DEPTH = 16  # pairs in a row of A's tile, and rows of B's
TILE_BYTES = 64  # of a row
AHEAD_BYTES = 4096  # of B that are asked for before they are needed, where B is read once

_BYTE, _HALF, _VOID = ir.IntType(8), ir.IntType(16), ir.VoidType()
_CONFIG = ir.ArrayType(_BYTE, 64)


@functools.cache
def is_usable() -> bool:
    """Whether this CPU has AMX for bf16 and the kernel lets this process use it, which has to be asked for once."""
    return bool(torch.cpu._is_amx_tile_supported()) and bool(torch.cpu._init_amx())


@written_in_llvm()
def _set_shapes(builder, upper, lower, depth):
    """Have tiles for `upper` rows of A, `lower` more, and `depth` pairs. Tiles lose what they held.

    Tiles 0 and 1 are sums of the upper rows, 2 and 3 of the lower; 4 and 5 hold A, 6 and 7 hold B. Without lower rows
    0 to 3 are all sums of the upper ones, 4 holds A, and 5 to 7 hold B.
    """
    config = cgutils.alloca_once(builder, _CONFIG)
    builder.store(ir.Constant(_CONFIG, None), config)
    base = builder.ptrtoint(config, WIDE)

    def store(offset: int, value: Any) -> None:
        builder.store(value, at(builder, base, WIDE(offset), value.type), align=1)

    is_single = builder.icmp_unsigned("==", lower, WIDE(0))
    others, fifth = builder.select(is_single, upper, lower), builder.select(is_single, depth, lower)
    of_a = builder.mul(depth, WIDE(4))
    widths = [WIDE(TILE_BYTES)] * 4 + [of_a, builder.select(is_single, WIDE(TILE_BYTES), of_a)] + [WIDE(TILE_BYTES)] * 2
    store(0, _BYTE(1))  # the palette
    heights = [upper, upper, others, others, upper, fifth, depth, depth]
    for tile, (width, rows) in enumerate(zip(widths, heights, strict=True)):
        store(16 + 2 * tile, builder.trunc(width, _HALF))
        store(48 + tile, builder.trunc(rows, _BYTE))
    call(builder, "llvm.x86.ldtilecfg", _VOID, builder.inttoptr(base, _BYTE.as_pointer()))


def _make_product(num_a: int, num_b: int, of_b: tuple[int, ...]) -> Any:
    """Of `num_a` tiles of rows, from 4 on, and `num_b` of columns, which take turns in the tiles `of_b`."""

    @written_in_llvm()
    def product(builder, a, a_stride, b, b_stride, depths, depth, c, c_stride, add, lines):
        """c (+)= a b over `depths` times `depth` pairs; `lines` cache lines of b are asked for ahead of each depth."""

        def move(what: str, tile: int, base: Any, stride: Any, rows: int, columns: int) -> None:
            offset = builder.add(builder.mul(stride, WIDE(rows)), WIDE(TILE_BYTES * columns))
            call(builder, f"llvm.x86.{what}64", _VOID, _BYTE(tile), at(builder, base, offset, _BYTE), stride)

        sums = [(row * num_b + column, ROWS * row, column) for row in range(num_a) for column in range(num_b)]
        with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
            with adding:
                for tile, row, column in sums:
                    move("tileloadd", tile, c, c_stride, row, column)
            with fresh:
                for tile, _, _ in sums:
                    call(builder, "llvm.x86.tilezero", _VOID, _BYTE(tile))
        with cgutils.for_range(builder, depths) as loop:
            pairs = builder.mul(loop.index, depth)
            left = builder.add(a, builder.mul(pairs, WIDE(4)))
            right = builder.add(b, builder.mul(pairs, b_stride))
            for row in range(num_a):
                move("tileloadd", 4 + row, left, a_stride, ROWS * row, 0)
            with cgutils.for_range(builder, lines) as line:
                ahead = builder.add(WIDE(AHEAD_BYTES), builder.mul(line.index, WIDE(TILE_BYTES)))
                ask_for_line(builder, builder.add(right, ahead), 3)
            for column in range(num_b):
                tile = of_b[column % len(of_b)]
                move("tileloadd", tile, right, b_stride, 0, column)
                for row in range(num_a):
                    operands = _BYTE(row * num_b + column), _BYTE(4 + row), _BYTE(tile)
                    call(builder, "llvm.x86.tdpbf16ps", _VOID, *operands)
        for tile, row, column in sums:
            move("tilestored", tile, c, c_stride, row, column)

    return product


_wide = _make_product(1, 4, of_b=(5, 6, 7))
_narrow = _make_product(1, 2, of_b=(5, 6))
_paired = _make_product(2, 2, of_b=(6, 7))


@written_in_llvm()
def release_tiles(builder):
    """Give the unit back: a thread that keeps it has 8 KiB of tiles saved at each of its switches."""
    call(builder, "llvm.x86.tilerelease", _VOID)


@compiled
def _multiply_depths(rows, a, a_stride, b, b_stride, depths, depth, c, c_stride, columns, add, lines):
    for row in range(0, rows, 2 * ROWS):
        upper, lower = min(ROWS, rows - row), max(0, min(ROWS, rows - row - ROWS))
        _set_shapes(upper, lower, depth)
        x, out = a + row * a_stride, c + row * c_stride
        column = 0
        while column < columns:
            right, target = b + 4 * column, out + 4 * column
            if lower:
                _paired(x, a_stride, right, b_stride, depths, depth, target, c_stride, add, 0)
            elif columns - column >= 64:
                _wide(x, a_stride, right, b_stride, depths, depth, target, c_stride, add, lines)
                column += 32
            else:
                _narrow(x, a_stride, right, b_stride, depths, depth, target, c_stride, add, 0)
            column += 32


@compiled
def multiply(rows, a, a_stride, b, b_stride, pairs, c, c_stride, columns, add):
    """c[rows, columns] (+)= a b. Addresses, and strides in bytes; `columns` is a multiple of 32."""
    depths, rest = pairs // DEPTH, pairs % DEPTH
    lines = DEPTH * 4 if rows <= ROWS and b_stride == 4 * columns else 0
    if depths:
        _multiply_depths(rows, a, a_stride, b, b_stride, depths, DEPTH, c, c_stride, columns, add, lines)
    if rest:
        x, below = a + depths * DEPTH * 4, b + depths * DEPTH * b_stride
        _multiply_depths(rows, x, a_stride, below, b_stride, 1, rest, c, c_stride, columns, add or depths > 0, 0)
