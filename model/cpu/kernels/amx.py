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
import itertools
from collections.abc import Callable
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
    """Return True if this CPU has AMX for bf16 and the kernel grants it to this process, which must ask once."""
    return bool(torch.cpu._is_amx_tile_supported()) and bool(torch.cpu._init_amx())


@written_in_llvm()
def set_shapes(builder, upper, lower, depth):
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


class Tiles:
    """Generator of code with sums of 16 `num_a` rows and 16 `num_b` columns that stay in tiles; B's tiles alternate
    among `of_b`."""

    def __init__(self, builder: Any, num_a: int, num_b: int, of_b: tuple[int, ...]):
        self._builder = builder
        self._rows, self._columns = range(num_a), range(num_b)
        self._of_b = of_b

    def clear(self) -> None:
        for row, column in itertools.product(self._rows, self._columns):
            call(self._builder, "llvm.x86.tilezero", _VOID, self._sum(row, column))

    def load(self, c: Any, stride: Any) -> None:
        for row, column in itertools.product(self._rows, self._columns):
            self._move("tileloadd", self._sum(row, column), c, stride, row, column)

    def store(self, c: Any, stride: Any) -> None:
        for row, column in itertools.product(self._rows, self._columns):
            self._move("tilestored", self._sum(row, column), c, stride, row, column)

    def multiply(
        self, a: Any, a_stride: Any, b: Any, b_stride: Any, while_loading: Callable[[], None] = lambda: None
    ) -> None:
        """Add one depth of a and b. `while_loading()` writes what is to come between the loads of A and of B."""
        for row in self._rows:
            self._move("tileloadd", _BYTE(4 + row), a, a_stride, row, 0)
        while_loading()
        for column in self._columns:
            of_b = _BYTE(self._of_b[column % len(self._of_b)])
            self._move("tileloadd", of_b, b, b_stride, 0, column)
            for row in self._rows:
                call(self._builder, "llvm.x86.tdpbf16ps", _VOID, self._sum(row, column), _BYTE(4 + row), of_b)

    def _sum(self, row: int, column: int) -> Any:
        return _BYTE(row * len(self._columns) + column)

    def _move(self, what: str, tile: Any, base: Any, stride: Any, row: int, column: int) -> None:
        builder = self._builder
        offset = builder.add(builder.mul(stride, WIDE(ROWS * row)), WIDE(TILE_BYTES * column))
        call(builder, f"llvm.x86.{what}64", _VOID, tile, at(builder, base, offset, _BYTE), stride)


WIDE_TILES = (1, 4, (5, 6, 7))
"""Parameters of `Tiles` for up to 16 rows and for up to 32, with the shapes that `set_shapes` gives them."""
PAIRED_TILES = (2, 2, (6, 7))


def _make_product(num_a: int, num_b: int, of_b: tuple[int, ...]) -> Any:
    @written_in_llvm()
    def product(builder, a, a_stride, b, b_stride, depths, depth, c, c_stride, add, lines):
        """c (+)= a b over `depths` times `depth` pairs; `lines` cache lines of b are asked for ahead of each depth."""
        tiles = Tiles(builder, num_a, num_b, of_b)
        with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, fresh):
            with adding:
                tiles.load(c, c_stride)
            with fresh:
                tiles.clear()
        with cgutils.for_range(builder, depths) as loop:
            pairs = builder.mul(loop.index, depth)
            left = builder.add(a, builder.mul(pairs, WIDE(4)))
            right = builder.add(b, builder.mul(pairs, b_stride))

            def ask() -> None:
                with cgutils.for_range(builder, lines) as line:
                    ahead = builder.add(WIDE(AHEAD_BYTES), builder.mul(line.index, WIDE(TILE_BYTES)))
                    ask_for_line(builder, builder.add(right, ahead), 3)

            tiles.multiply(left, a_stride, right, b_stride, while_loading=ask)
        tiles.store(c, c_stride)

    return product


_wide, _narrow, _paired = _make_product(*WIDE_TILES), _make_product(1, 2, (5, 6)), _make_product(*PAIRED_TILES)


@written_in_llvm()
def release_tiles(builder):
    """Give the unit back: a thread that keeps it has 8 KiB of tiles saved at each of its switches."""
    call(builder, "llvm.x86.tilerelease", _VOID)


@compiled
def _multiply_depths(rows, a, a_stride, b, b_stride, depths, depth, c, c_stride, columns, add, lines):
    for row in range(0, rows, 2 * ROWS):
        upper, lower = min(ROWS, rows - row), max(0, min(ROWS, rows - row - ROWS))
        set_shapes(upper, lower, depth)
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
