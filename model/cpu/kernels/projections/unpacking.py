"""Unpacking of weights that packing.py packed to bf16: a table look-up in registers, the same for integers and FP8."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from twostroke.model.cpu.kernels.floats import FLOATS, INTS, LANES, LINE_BYTES, call
from twostroke.model.cpu.kernels.launch import WIDE, at, compiled, written_in_llvm
from twostroke.model.cpu.kernels.projections.gemm import PANEL_COLUMNS, STEP_BYTES, VECTORS

_HALVES = ir.VectorType(ir.HalfType(), LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_ORDER = ir.VectorType(ir.IntType(32), 4 * LANES)


class Form(NamedTuple):
    """Way in which a step's vectors become pairs of bf16."""

    unpack: Callable[[Any, Any, list[Any]], list[Any]]
    """(builder, vector, table) -> pairs, of input columns 2 j and 2 j + 1."""
    table_vectors: int
    columns: int  # input columns of a step


def _constant(kind: Any, values: Sequence[float]) -> Any:
    return ir.Constant(kind, values)


def load_table(builder: Any, address: Any, form: Form) -> list[Any]:
    """A table of packing.table_of, in registers."""
    lines = [at(builder, address, WIDE(LINE_BYTES * vector), _BYTES) for vector in range(form.table_vectors)]
    return [builder.load(line, align=1) for line in lines]


def _unpack_4_bits(builder: Any, packed: Any, table: list[Any]) -> list[Any]:
    found = builder.bitcast(table[0], _WORDS)
    words = builder.bitcast(packed, _WORDS)
    shifted = [words] + [builder.lshr(words, _constant(_WORDS, [4 * j] * 32)) for j in range(1, 4)]
    return [call(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, found, word) for word in shifted]


def _unpack_8_bits(builder: Any, packed: Any, table: list[Any]) -> list[Any]:
    numbers = builder.bitcast(packed, _BYTES)

    def found(first: Any, second: Any) -> Any:
        return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, first, numbers, second)

    sign = _constant(_BYTES, [0x80] * 64)
    low, high = found(*table[:2]), builder.or_(found(*table[2:]), builder.and_(numbers, sign))
    orders = [
        [16 * lane + 8 * j + i // 2 + 64 * (i % 2) for lane in range(4) for i in range(16)] for j in range(2)
    ]  # as vpunpcklbw and vpunpckhbw
    return [builder.shuffle_vector(low, high, _constant(_ORDER, order)) for order in orders]


FOUR_BITS, EIGHT_BITS = Form(_unpack_4_bits, 1, 8), Form(_unpack_8_bits, 4, 4)
PAIRS = Form(lambda builder, pairs, table: [pairs], 0, 2)
"""Weights that are bf16 already."""


def load_step(builder: Any, start: Any, form: Form, table: list[Any], vectors: int = VECTORS) -> list[list[Any]]:
    """The weights of one step, as [vector][pair]."""
    lines = [at(builder, start, WIDE(LINE_BYTES * vector), INTS) for vector in range(vectors)]
    return [form.unpack(builder, builder.load(line, align=4), table) for line in lines]


def unpack_step(builder: Any, start: Any, form: Form, table: list[Any], into: Any, vectors: int = VECTORS) -> None:
    """A step's first 16 `vectors` outputs, as lines of pairs at `into`, one behind the other."""
    for vector, weights in enumerate(load_step(builder, start, form, table, vectors)):
        for pair, values in enumerate(weights):
            place = WIDE(LINE_BYTES * (vectors * pair + vector))
            builder.store(values, at(builder, into, place, values.type), align=4)


def widened(builder: Any, base: Any, group: Any, vector: int) -> Any:
    """A group's fp16 numbers of 16 outputs, of a panel's [groups, 64], as fp32."""
    start = builder.add(base, builder.mul(group, WIDE(2 * PANEL_COLUMNS)))
    halves = builder.load(at(builder, start, WIDE(2 * LANES * vector), _HALVES), align=2)
    return builder.fpext(halves, FLOATS)


def _make_unpacking(form: Form) -> Any:
    @written_in_llvm()
    def unpacking(builder, packed, steps, table, pairs):
        found = load_table(builder, table, form)
        with cgutils.for_range(builder, steps) as loop:
            start = builder.add(packed, builder.mul(loop.index, WIDE(STEP_BYTES)))
            into = builder.add(pairs, builder.mul(loop.index, WIDE(STEP_BYTES * form.columns // 2)))
            unpack_step(builder, start, form, found, into)

    return unpacking


_unpack_4, _unpack_8 = _make_unpacking(FOUR_BITS), _make_unpacking(EIGHT_BITS)


@compiled
def unpack(bits, packed, columns, table, pairs):
    """Make bf16 [columns / 2, 64, 2] at `pairs` of a panel's input columns. Addresses."""
    if bits == 8:
        _unpack_8(packed, columns // 4, table, pairs)
    else:
        _unpack_4(packed, columns // 8, table, pairs)
