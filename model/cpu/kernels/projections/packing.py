"""Memory layout of weights of 8 and 4 bits for quant.py, their packing, and their unpacking to bf16.

A panel of 64 output columns is a row of steps of 256 bytes, 64 bytes for each 16 output columns l. Of four bits such a
vector covers 8 input columns: 16-bit word 2 l + e holds, lowest bits first, columns e, 2 + e, 4 + e and 6 + e of output
l, each with 8 added. Of eight bits it covers 4: column 2 j + e of output l in byte 16 (l // 4) + 8 j + 2 (l % 4) + e, a
sign and seven bits, which are the magnitude of an integer, or the exponent and mantissa of an FP8 number. Looking codes
up in a table (`vpermw`; `vpermi2b` for the low and for the high bytes, which are then interleaved) makes bf16 of them,
exactly, in the pairs along the input that `vdpbf16ps` multiplies: integers and FP8 differ in nothing but the table.
FP4's (e2m1) are of four bits, as int4's.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils
from torch import Tensor
from torch.nn import functional

from twostroke.model.checkpoint.quantization import FP4_MAGNITUDES, QuantizedWeight, fp4_codes, two_byte_scales
from twostroke.model.costs.sizes import INT4_GROUP
from twostroke.model.cpu.kernels.floats import FLOATS, INTS, LANES, LINE_BYTES, call, largest, store, widen
from twostroke.model.cpu.kernels.launch import (
    WIDE,
    Kernel,
    as_bytes,
    as_floats,
    as_halves,
    at,
    compiled,
    taken,
    written_in_llvm,
)
from twostroke.model.cpu.kernels.projections.gemm import PANEL_COLUMNS, STEP_BYTES, VECTORS, zeros_on_huge_pages

CHUNK = 256  # input columns whose weights of a panel, 32 KiB as bf16, are unpacked at a time
MIN_GROUP = 16  # input columns
Kind = Literal["int8", "int8 + 1/2", "int4", "fp8", "fp4"]
"""Meaning of codes. A sign and seven bits don't count down to -128, but one half more than an integer they do."""


@functools.cache
def values_of_codes(kind: Kind) -> Tensor:
    """Return the value of each code, fp32 [256], or [16] for codes of four bits."""
    if kind == "int4":
        return torch.arange(16.0) - 8
    if kind == "fp4":
        magnitudes = torch.tensor(FP4_MAGNITUDES)
        return torch.cat((magnitudes, -magnitudes))
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    magnitudes = torch.arange(128.0) + (0.5 if kind == "int8 + 1/2" else 0.0)
    return torch.cat((magnitudes, -magnitudes))


@functools.cache
def code_table(kind: Kind) -> Tensor:
    """The registers to look up in, bytes [vectors, 64]: of eight bits low bytes, then high bytes."""
    bits = values_of_codes(kind).bfloat16().view(torch.int16)
    if kind in ("int4", "fp4"):  # bit 4 of an index is the neighbour's: the table says the same for both
        return bits.repeat(2).view(torch.uint8).view(1, 64)
    low, high = bits.view(torch.uint8).view(256, 2).unbind(1)
    return torch.cat((low[:128], high[:128])).view(4, 64)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the kernels' form."""

    codes: Tensor  # bytes [panels, bytes of a panel]
    kind: Kind
    factors: Tensor  # fp32 [panels * 64], of outputs
    scales: Tensor | None  # fp16 [panels, groups, 64]; None: only factors
    offsets: Tensor | None  # as scales
    group_size: int  # columns; CHUNK where there are no scales
    order: Tensor | None  # int64 [in]: which input comes where
    out_features: int
    in_features: int

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "fp4") else 8

    @property
    def num_groups(self) -> int:
        return -(-self.in_features // self.group_size)


# Divisions as torch does them. With the fast mathematics of kernels, which what they call inherits unless told
# otherwise, they become products with an inverse.
_divided = njit(nogil=True, fastmath={"nsz"}, error_model="numpy", forceinline=True)


@_divided
def _share(value, count):
    return value / count


@_divided
def _round(values, count, step, lowest, highest, numbers):
    for i in range(count):
        numbers[i] = np.int32(min(max(np.rint(values[i] / step), lowest), highest))


@Kernel
def _quantize_int8(words):
    """words: weight, codes bytes [rows, columns], scales fp32 [rows], columns."""
    rows, columns = words[1], words[6]
    weight, codes = carray(as_halves(words[3]), (rows, columns)), carray(as_bytes(words[4]), (rows, columns))
    scales = carray(as_floats(words[5]), (rows,))
    values, sizes = np.empty(columns, np.float32), np.empty(columns, np.float32)
    numbers = np.empty(columns, np.int32)
    for row in taken(words, rows):
        for i in range(columns):
            values[i] = widen(weight[row, i])
            sizes[i] = abs(values[i])
        step = _share(largest(sizes, columns), np.float32(127))
        if step == 0:
            step = np.float32(1)
        scales[row] = step
        _round(values, columns, step, np.float32(-127), np.float32(127), numbers)
        for i in range(columns):
            codes[row, i] = np.uint8(abs(numbers[i]) | (numbers[i] >> 24 & 0x80))


@Kernel
def _quantize_int4(words):
    """words: weight, codes bytes [rows, columns], scales bf16 [rows, groups], columns."""
    rows, columns = words[1], words[6]
    groups = (columns + INT4_GROUP - 1) // INT4_GROUP
    weight, codes = carray(as_halves(words[3]), (rows, columns)), carray(as_bytes(words[4]), (rows, columns))
    scales = carray(as_halves(words[5]), (rows, groups))
    values, numbers = np.empty(INT4_GROUP, np.float32), np.empty(INT4_GROUP, np.int32)
    negative = np.empty(INT4_GROUP, np.float32)
    for row in taken(words, rows):
        for group in range(groups):
            first = group * INT4_GROUP
            count = min(INT4_GROUP, columns - first)
            for i in range(count):
                values[i] = widen(weight[row, first + i])
                negative[i] = -values[i]
            high, low = largest(values, count), -largest(negative, count)
            store(scales[row], group, _share(high if high > -low else low, np.float32(-8)))
            step = widen(scales[row, group])
            if step == 0:
                step = np.float32(1)
                store(scales[row], group, step)
            _round(values, count, step, np.float32(-8), np.float32(7), numbers)
            for i in range(count):
                codes[row, first + i] = np.uint8(numbers[i] + 8)


@Kernel
def _pack(words):
    """words: codes bytes [rows, columns], packed (zeros), rows, columns, bits."""
    panels, rows, columns, bits = words[1], words[5], words[6], words[7]
    codes = carray(as_bytes(words[3]), (rows, columns))
    steps = columns * bits // 32
    packed = carray(as_halves(words[4]), (panels, steps, STEP_BYTES // 2))
    for panel in taken(words, panels):
        for output in range(min(PANEL_COLUMNS, rows - panel * PANEL_COLUMNS)):
            row = codes[panel * PANEL_COLUMNS + output]
            place = output // 16 * 32 + output % 16 // 4 * 8 + output % 4
            for i in range(steps):
                if bits == 8:
                    packed[panel, i, place] = np.uint16(row[4 * i] | row[4 * i + 1] << 8)
                    packed[panel, i, place + 4] = np.uint16(row[4 * i + 2] | row[4 * i + 3] << 8)
                else:
                    for e in range(2):
                        word = np.int32(0)
                        for k in range(4):
                            word |= np.int32(row[8 * i + 2 * k + e]) << 4 * k
                        packed[panel, i, 2 * output + e] = np.uint16(word)


def can_pack(weight: QuantizedWeight) -> bool:
    """Return True if there are kernels for the weight's columns and groups."""
    columns = weight.values.shape[1]
    return columns % 8 == 0 and (weight.num_groups == 1 or math.gcd(weight.group_size, CHUNK) >= MIN_GROUP)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Pack a weight that passes `can_pack`."""
    if weight.is_fp4:
        return _packed("fp4", fp4_codes(weight.values), weight)
    if weight.values.dtype == torch.float8_e4m3fn:
        return _packed("fp8", weight.values.view(torch.uint8), weight)
    if weight.bits == 4:
        return _packed("int4", (weight.values + 8).view(torch.uint8), weight)
    signs = (weight.values < 0).byte() << 7
    if not weight.values.numel() or int(weight.values.min()) > -128:
        return _packed("int8", weight.values.abs().view(torch.uint8) | signs, weight)
    less = weight.scales / -2  # what the half is too much
    offsets = less if weight.offsets is None else weight.offsets + less
    magnitudes = torch.where(weight.values < 0, ~weight.values, weight.values)
    return _packed("int8 + 1/2", magnitudes.view(torch.uint8) | signs, replace(weight, offsets=offsets))


def quantize_and_pack(weight: Tensor, bits: Literal[8, 4]) -> PackedWeight:
    """weight bf16 [out, in], contiguous, `in` a multiple of 8: `pack` of what `quantize` makes of it."""
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.uint8)
    if bits == 8:
        steps = torch.empty((rows, 1))
        _quantize_int8.run(rows, 16, weight, codes, steps, columns)
        return _packed("int8", codes, QuantizedWeight(codes, steps, columns, 8))
    steps = torch.empty((rows, -(-columns // INT4_GROUP)), dtype=torch.bfloat16)
    _quantize_int4.run(rows, 16, weight, codes, steps, columns)
    return _packed("int4", codes, QuantizedWeight(codes, steps.float(), min(INT4_GROUP, columns), 4))


def _packed(kind: Kind, codes: Tensor, weight: QuantizedWeight) -> PackedWeight:
    """`codes` [out, in] with the weight's scales."""
    code_table(kind)  # made before any step: recorded ones may not have torch compute
    rows, columns = codes.shape
    panels, bits = -(-rows // PANEL_COLUMNS), weight.bits
    packed = zeros_on_huge_pages((panels, PANEL_COLUMNS * columns * bits // 8), torch.uint8)
    _pack.run(panels, 1, codes.contiguous(), packed, rows, columns, bits)
    beyond = panels * PANEL_COLUMNS - rows
    if bits == 8 and weight.num_groups == 1 and weight.offsets is None:
        factors = functional.pad(weight.scales[:, 0], (0, beyond))
        return PackedWeight(packed, kind, factors, None, None, CHUNK, weight.order, rows, columns)
    weight = weight.with_groups_within(CHUNK)
    factors, *numbers = two_byte_scales(weight)

    def of_panels(scales: Tensor | None) -> Tensor | None:
        if scales is None:
            return None
        return functional.pad(scales, (0, 0, 0, beyond)).view(panels, PANEL_COLUMNS, -1).transpose(1, 2).contiguous()

    scales, offsets = map(of_panels, numbers)
    factors = functional.pad(factors, (0, beyond))
    return PackedWeight(packed, kind, factors, scales, offsets, weight.group_size, weight.order, rows, columns)


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
    """A table of packing.code_table, in registers."""
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
