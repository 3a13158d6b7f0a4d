"""bf16 matrix tiles with AVX512-BF16's `vdpbf16ps`: 4 rows by 16 to 64 columns, accumulated in fp32 registers.

C[4, 16 n] (+)= A[4, 2 pairs] B[2 pairs, 16 n]. A is row-major bf16. B is packed by pairs of its rows, [pairs, columns,
2], so that one 32-bit lane holds what one instruction multiplies and adds. C is row-major fp32.
"""

from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE_ROWS = 4
LANES = 16

_INT = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_INT, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bf16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


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
                ir.FunctionType(_FLOATS, (_FLOATS, _PAIRS, _PAIRS)),
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
                        builder.load(at(b, down, ir.Constant(wide, 64 * vector), kind=_INTS), align=4), _PAIRS
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
                        total = builder.call(dot, (total, builder.bitcast(spread, _PAIRS), columns[vector]))
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
