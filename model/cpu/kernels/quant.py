"""Projections with int8 and int4 weights on AVX512-BF16: y = x W^T + b, x and W's integers in bf16, sums in fp32.

Up to DIRECT_MOST_ROWS rows weights are unpacked in registers, once for every four rows; for more they are unpacked
once into a scratch of bf16 that stays in the L1 cache, and multiplied from there. Both ways add in the same order: a
row's result does not depend on the rows beside it. Scales multiply fp32 sums: of a whole row (int8) or of a group.

A panel of 64 output columns is a row of steps of 256 bytes, 64 bytes for each 16 output columns l. Of four bits such a
vector covers 8 input columns: 16-bit word 2 l + e holds, lowest bits first, columns e, 2 + e, 4 + e and 6 + e of output
l, each with 8 added. Of eight bits it covers 4: a sign and seven bits of magnitude, column 2 j + e of output l in byte
16 (l // 4) + 8 j + 2 (l % 4) + e. A table look-up (`vpermw`; `vpermi2b` for the low and for the high bytes, which are
then interleaved) makes bf16 of them, exactly, in the pairs along the input that `vdpbf16ps` multiplies.

Reference: `QuantizedWeight.dequantized`.
"""

import itertools
import struct
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import cgutils
from torch import Tensor

from twostroke.model.checkpoint.quantization import INT4_GROUP
from twostroke.model.cpu.kernels import floats
from twostroke.model.cpu.kernels.floats import (
    INTS,
    LANES,
    LINE_BYTES,
    RegisterTile,
    ask_for_line,
    call,
    dot_pairs,
    for_each_height,
    largest,
    multiply_add,
    spread,
    store,
    widen,
)
from twostroke.model.cpu.kernels.gemm import (
    PANEL_COLUMNS,
    STEP_BYTES,
    TILE_ROWS,
    VECTORS,
    finish_row,
    zeros_on_huge_pages,
)
from twostroke.model.cpu.kernels.launch import (
    WIDE,
    Kernel,
    as_floats,
    as_halves,
    as_integers,
    as_short_integers,
    at,
    compiled,
    taken,
    written_in_llvm,
)
from twostroke.model.cpu.kernels.program import Launcher

DIRECT_ROWS = 4  # of a tile that unpacks; more need registers that the unpacking takes
DIRECT_MOST_ROWS = 8
ROWS_AN_ITEM = 256
CHUNK = 256  # input columns whose weights of a panel, 32 KiB as bf16, are unpacked at a time
_PREFETCH_BYTES = 4096  # from what is multiplied to what is asked for

_HALVES = ir.VectorType(ir.IntType(16), LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_ORDER = ir.VectorType(ir.IntType(32), 4 * LANES)


def is_supported() -> bool:
    """Whether this CPU has `vdpbf16ps` and looks bytes up among 128."""
    return floats.is_supported() and bool(binding.get_host_cpu_features().get("avx512vbmi"))


def _bf16_bits(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits) >> 16


def _constant(kind: Any, values: Sequence[float]) -> Any:
    return ir.Constant(kind, values)


def _unpacked(builder: Any, pairs: Any) -> list[Any]:
    return [pairs]


def _unpack_int4(builder: Any, packed: Any) -> list[Any]:
    """4 vectors of bf16 pairs, of input columns 2 j and 2 j + 1."""
    # Bit 4 of an index is the neighbour's: the table says the same for both.
    table = _constant(_WORDS, [_bf16_bits(i % 16 - 8) for i in range(32)])
    words = builder.bitcast(packed, _WORDS)
    shifted = [words] + [builder.lshr(words, _constant(_WORDS, [4 * j] * 32)) for j in range(1, 4)]
    return [call(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, table, word) for word in shifted]


def _unpack_int8(builder: Any, packed: Any) -> list[Any]:
    """2 vectors of bf16 pairs, of input columns 2 j and 2 j + 1."""
    magnitudes = [_bf16_bits(i) for i in range(128)]
    low, high = ([bits >> shift & 0xFF for bits in magnitudes] for shift in (0, 8))
    numbers = builder.bitcast(packed, _BYTES)

    def found(table: list[int]) -> Any:
        halves = _constant(_BYTES, table[:64]), _constant(_BYTES, table[64:])
        return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, halves[0], numbers, halves[1])

    signs = builder.and_(numbers, _constant(_BYTES, [0x80] * 64))
    parts = found(low), builder.or_(found(high), signs)
    orders = [
        [16 * lane + 8 * j + i // 2 + 64 * (i % 2) for lane in range(4) for i in range(16)] for j in range(2)
    ]  # as vpunpcklbw and vpunpckhbw
    return [builder.shuffle_vector(*parts, _constant(_ORDER, order)) for order in orders]


def _load_step(builder: Any, start: Any, unpack: Any) -> list[list[Any]]:
    """The weights of one step, as [vector][pair]."""
    lines = [at(builder, start, WIDE(LINE_BYTES * vector), INTS) for vector in range(VECTORS)]
    return [unpack(builder, builder.load(line, align=4)) for line in lines]


def _make_tile(most_rows: int, unpack: Any, columns: int, lines: int, scaled: bool) -> Any:
    """c[rows, 64] += a[rows, in] times one panel of `groups` groups of `steps` steps, scaled by its own if `scaled`.

    `unpack` makes pairs of `columns` input columns of a step's vectors. Asks for `lines` cache lines every step,
    `ahead_stride` bytes further each time, starting at `ahead`. Arguments are addresses, strides in bytes, and counts.
    """

    @written_in_llvm()
    def tile(builder, rows, a, a_stride, packed, steps, groups, scales, c, ahead, ahead_stride):
        def write(count: int) -> None:
            totals, group_sums = RegisterTile(builder, count, VECTORS), RegisterTile(builder, count, VECTORS)
            row_starts = [builder.add(a, builder.mul(a_stride, WIDE(row))) for row in range(count)]
            totals.load(c, WIDE(STEP_BYTES))
            with cgutils.for_range(builder, groups) as group:
                group_sums.clear()
                first = builder.mul(group.index, steps)
                with cgutils.for_range(builder, steps) as loop:
                    index = builder.add(first, loop.index)
                    asked = builder.add(ahead, builder.mul(index, ahead_stride))
                    for line in range(lines):
                        ask_for_line(builder, builder.add(asked, WIDE(LINE_BYTES * line)), 3)
                    weights = _load_step(builder, builder.add(packed, builder.mul(index, WIDE(STEP_BYTES))), unpack)
                    across = builder.mul(index, WIDE(2 * columns))
                    for pair, row in itertools.product(range(columns // 2), range(count)):
                        value = spread(builder, row_starts[row], builder.add(across, WIDE(4 * pair)))
                        group_sums.add(row, dot_pairs, value, [vector[pair] for vector in weights])
                scale_start = builder.add(scales, builder.mul(group.index, WIDE(2 * PANEL_COLUMNS)))
                for row, vector in itertools.product(range(count), range(VECTORS)):
                    place = totals.sums[row][vector]
                    whole, total = builder.load(group_sums.sums[row][vector]), builder.load(place)
                    if scaled:
                        halves = builder.load(at(builder, scale_start, WIDE(2 * LANES * vector), _HALVES), align=2)
                        wide = builder.shl(builder.zext(halves, INTS), _constant(INTS, [16] * LANES))
                        total = multiply_add(builder, total, whole, wide)
                    else:
                        total = builder.fadd(total, whole)
                    builder.store(total, place)
            totals.store(c, WIDE(STEP_BYTES))

        for_each_height(builder, rows, most_rows, write)

    return tile


_direct_int4 = _make_tile(DIRECT_ROWS, _unpack_int4, 8, VECTORS, True)
_direct_int8 = _make_tile(DIRECT_ROWS, _unpack_int8, 4, VECTORS, False)
_unpacked_int4 = _make_tile(TILE_ROWS, _unpacked, 2, 1, True)
_unpacked_int8 = _make_tile(TILE_ROWS, _unpacked, 2, 2, False)


def _make_unpacking(unpack: Any, columns: int) -> Any:
    @written_in_llvm()
    def unpacking(builder, packed, steps, pairs):
        with cgutils.for_range(builder, steps) as loop:
            start = builder.add(packed, builder.mul(loop.index, WIDE(STEP_BYTES)))
            into = builder.add(pairs, builder.mul(loop.index, WIDE(STEP_BYTES * columns // 2)))
            for vector, weights in enumerate(_load_step(builder, start, unpack)):
                for pair, values in enumerate(weights):
                    place = WIDE(STEP_BYTES * pair + LINE_BYTES * vector)
                    builder.store(values, at(builder, into, place, values.type), align=4)

    return unpacking


_unpack_steps_int4 = _make_unpacking(_unpack_int4, 8)
_unpack_steps_int8 = _make_unpacking(_unpack_int8, 4)


@compiled
def _direct(bits, rows, a, a_stride, packed, steps, groups, scales, c):
    ahead = packed + _PREFETCH_BYTES
    if bits == 8:
        _direct_int8(rows, a, a_stride, packed, steps, groups, scales, c, ahead, STEP_BYTES)
    else:
        _direct_int4(rows, a, a_stride, packed, steps, groups, scales, c, ahead, STEP_BYTES)


@compiled
def _from_pairs(bits, rows, a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride):
    if bits == 8:
        _unpacked_int8(rows, a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)
    else:
        _unpacked_int4(rows, a, a_stride, pairs, steps, groups, scales, c, ahead, ahead_stride)


@compiled
def _unpack(bits, packed, columns, pairs):
    if bits == 8:
        _unpack_steps_int8(packed, columns // 4, pairs)
    else:
        _unpack_steps_int4(packed, columns // 8, pairs)


@compiled
def _write(words, sums, first_row, rows, panel):
    """Round sums [rows, PANEL_COLUMNS], after what scaling is left and the bias, into their place of the output."""
    scales, first = carray(as_floats(words[5]), (words[11] * PANEL_COLUMNS,)), panel * PANEL_COLUMNS
    for row in range(rows):
        if words[13] == 8:
            for i in range(PANEL_COLUMNS):
                sums[row, i] *= scales[first + i]
        finish_row(sums[row].ctypes.data, words[6], words[7], words[10], words[9], first_row + row, first)


@compiled
def _group(bits):
    """Input columns whose sum is scaled, of int8 added up, at once."""
    return CHUNK if bits == 8 else INT4_GROUP


@Kernel
def _multiply_direct(words):
    """words: x, packed, scales, bias, out, in, out, whether out is bf16, panels, rows, bits."""
    columns, rows, bits = words[8], words[12], words[13]
    group, step_columns, panel_bytes = _group(bits), 32 // bits, PANEL_COLUMNS * bits // 8
    groups, rest = columns // group, columns % group
    sums = np.empty((DIRECT_ROWS, PANEL_COLUMNS), np.float32)
    for panel in taken(words, words[1]):
        packed = words[4] + panel * columns * panel_bytes
        scales = words[5] + panel * ((columns + group - 1) // group) * PANEL_COLUMNS * 2
        for first_row in range(0, rows, DIRECT_ROWS):
            count = min(DIRECT_ROWS, rows - first_row)
            a, c = words[3] + first_row * 2 * columns, sums.ctypes.data
            sums[:] = np.float32(0)
            _direct(bits, count, a, 2 * columns, packed, group // step_columns, groups, scales, c)
            if rest:
                done = groups * group
                end, end_scales = packed + done * panel_bytes, scales + groups * PANEL_COLUMNS * 2
                _direct(bits, count, a + 2 * done, 2 * columns, end, rest // step_columns, 1, end_scales, c)
            _write(words, sums, first_row, count, panel)


@Kernel
def _multiply_unpacked(words):
    """words: as those of _multiply_direct."""
    columns, panels, bits = words[8], words[11], words[13]
    group, panel_bytes = _group(bits), PANEL_COLUMNS * bits // 8
    groups = (columns + group - 1) // group
    sums = np.empty((ROWS_AN_ITEM, PANEL_COLUMNS), np.float32)
    memory = np.empty((CHUNK // 2 + 1) * PANEL_COLUMNS, np.uint32)
    aligned = memory[-memory.ctypes.data % LINE_BYTES // 4 :]
    for item in taken(words, words[1]):
        panel, first_row = item % panels, item // panels * ROWS_AN_ITEM
        rows = min(ROWS_AN_ITEM, words[12] - first_row)
        height = (rows + TILE_ROWS - 1) // TILE_ROWS  # as even as tiles can be
        height = (rows + height - 1) // height
        packed = words[4] + panel * columns * panel_bytes
        sums[:] = np.float32(0)
        for column in range(0, columns, CHUNK):
            width, pairs = min(CHUNK, columns - column), aligned.ctypes.data
            _unpack(bits, packed + column * panel_bytes, width, pairs)
            scales = words[5] + (panel * groups + column // group) * PANEL_COLUMNS * 2
            ahead = packed + (column + width) * panel_bytes
            whole, rest = width // group, width % group
            for row in range(0, rows, height):
                count = min(height, rows - row)
                a = words[3] + ((first_row + row) * columns + column) * 2
                c = sums.ctypes.data + row * STEP_BYTES
                asked = 0 if row else 2 * panel_bytes  # the first tile asks for all of the next chunk
                _from_pairs(bits, count, a, 2 * columns, pairs, group // 2, whole, scales, c, ahead, asked)
                if rest:
                    done = whole * group
                    end, end_scales = pairs + done // 2 * STEP_BYTES, scales + whole * PANEL_COLUMNS * 2
                    _from_pairs(bits, count, a + 2 * done, 2 * columns, end, rest // 2, 1, end_scales, c, ahead, 0)
        _write(words, sums, first_row, rows, panel)


def multiply(
    launcher: Launcher,
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    bias: Tensor,
    bits: Literal[8, 4],
    columns: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """x bf16 [T, in], contiguous; values and scales by `quantize_and_pack`; bias by `bias_of_panels`. Returns
    `out_dtype` [T, columns]."""
    (rows, inner), panels = x.shape, len(values)
    out = launcher.empty((rows, columns), out_dtype)
    direct = rows <= DIRECT_MOST_ROWS
    launcher.run(
        _multiply_direct if direct else _multiply_unpacked,
        panels if direct else panels * -(-rows // ROWS_AN_ITEM),
        1,
        *(x, values, scales, bias, out),
        *(inner, columns, out_dtype == torch.bfloat16, panels, rows, bits),
    )
    return out


@Kernel
def _look_up_int8(words):
    """words: token ids, packed, scales, out, first id, ids in the table, hidden."""
    rows, first, count, hidden = words[1], words[7], words[8], words[9]
    ids, scales = carray(as_integers(words[3]), (rows,)), carray(as_floats(words[5]), (count,))
    out = carray(as_halves(words[6]), (rows, hidden))
    for row in taken(words, rows):
        index = ids[row] - first
        if index < 0 or index >= count:
            out[row, :] = 0
            continue
        output = index % PANEL_COLUMNS
        lane = output % 16
        place = words[4] + index // PANEL_COLUMNS * hidden * PANEL_COLUMNS
        place += output // 16 * LINE_BYTES + lane // 4 * 16 + lane % 4 * 2
        for column in range(0, hidden, 4):
            pairs = carray(as_halves(place + column * PANEL_COLUMNS), (5,))
            for j in range(2):
                for e in range(2):
                    code = np.int32(pairs[4 * j]) >> (8 * e) & 0xFF
                    value = np.float32(code & 0x7F) * scales[index]
                    store(out[row], column + 2 * j + e, -value if code & 0x80 else value)


def look_up_int8(
    launcher: Launcher, token_ids: Tensor, values: Tensor, scales: Tensor, shape: tuple[int, int], first: int
) -> Tensor:
    """As Backend.embed, in bf16, of a table of `shape` that `quantize_and_pack` packed in eight bits."""
    rows = token_ids.numel()
    out = launcher.empty((rows, shape[1]), torch.bfloat16)
    launcher.run(_look_up_int8, rows, 1, token_ids, values, scales, out, first, *shape)
    return out


# Divisions as torch does them. With the fast mathematics of kernels, which what they call inherits unless told
# otherwise, they become products with an inverse.
_divided = njit(nogil=True, fastmath={"nsz"}, error_model="numpy")


@_divided
def _share(value, count):
    return value / count


@_divided
def _round(values, count, step, lowest, highest, numbers):
    for i in range(count):
        numbers[i] = np.int32(min(max(np.rint(values[i] / step), lowest), highest))


@Kernel
def _pack_int8(words):
    """words: weight, packed (zeros), scales fp32 [panels * 64], rows, columns."""
    panels, rows, columns = words[1], words[6], words[7]
    weight = carray(as_halves(words[3]), (rows, columns))
    packed = carray(as_halves(words[4]), (panels, columns // 4, STEP_BYTES // 2))
    scales = carray(as_floats(words[5]), (panels * PANEL_COLUMNS,))
    values, sizes = np.empty(columns, np.float32), np.empty(columns, np.float32)
    numbers = np.empty(columns, np.int32)
    for panel in taken(words, panels):
        for output in range(min(PANEL_COLUMNS, rows - panel * PANEL_COLUMNS)):
            row = panel * PANEL_COLUMNS + output
            for i in range(columns):
                values[i] = widen(weight[row, i])
                sizes[i] = abs(values[i])
            step = _share(largest(sizes, columns), np.float32(127))
            if step == 0:
                step = np.float32(1)
            scales[row] = step
            _round(values, columns, step, np.float32(-127), np.float32(127), numbers)
            for i in range(columns):
                numbers[i] = abs(numbers[i]) | (numbers[i] >> 24 & 0x80)
            place = output // 16 * 32 + output % 16 // 4 * 8 + output % 4
            for i in range(columns // 4):
                packed[panel, i, place] = np.uint16(numbers[4 * i] | numbers[4 * i + 1] << 8)
                packed[panel, i, place + 4] = np.uint16(numbers[4 * i + 2] | numbers[4 * i + 3] << 8)


@Kernel
def _pack_int4(words):
    """words: weight, packed (zeros), scales bf16 [panels, groups, 64], rows, columns."""
    panels, rows, columns = words[1], words[6], words[7]
    groups = (columns + INT4_GROUP - 1) // INT4_GROUP
    weight = carray(as_halves(words[3]), (rows, columns))
    packed = carray(as_short_integers(words[4]), (panels, columns // 8, STEP_BYTES // 4))
    scales = carray(as_halves(words[5]), (panels, groups, PANEL_COLUMNS))
    values, numbers = np.empty(INT4_GROUP, np.float32), np.empty(INT4_GROUP, np.int32)
    negative = np.empty(INT4_GROUP, np.float32)
    for panel in taken(words, panels):
        for output in range(min(PANEL_COLUMNS, rows - panel * PANEL_COLUMNS)):
            for group in range(groups):
                first = group * INT4_GROUP
                count = min(INT4_GROUP, columns - first)
                for i in range(count):
                    values[i] = widen(weight[panel * PANEL_COLUMNS + output, first + i])
                    negative[i] = -values[i]
                high, low = largest(values, count), -largest(negative, count)
                place = scales[panel, group]
                store(place, output, _share(high if high > -low else low, np.float32(-8)))
                step = widen(place[output])
                if step == 0:
                    step = np.float32(1)
                    store(place, output, step)
                _round(values, count, step, np.float32(-8), np.float32(7), numbers)
                for i in range(count // 8):
                    word = np.int32(0)
                    for k in range(8):
                        word |= (numbers[8 * i + k] + 8) << (16 * (k % 2) + k // 2 * 4)
                    packed[panel, first // 8 + i, output] = word


def quantize_and_pack(weight: Tensor, bits: Literal[8, 4]) -> tuple[Tensor, Tensor]:
    """weight bf16 [out, in], contiguous, `in` a multiple of 8 -> packed bytes [panels, bytes], and scales.

    What `quantize` makes of it. Scales are fp32 [out, rounded up to panels] of eight bits, bf16 [panels, groups, 64] of
    four.
    """
    rows, columns = weight.shape
    panels = -(-rows // PANEL_COLUMNS)
    packed = zeros_on_huge_pages((panels, PANEL_COLUMNS * columns * bits // 8), torch.uint8)
    if bits == 8:
        scales = torch.zeros(panels * PANEL_COLUMNS)
    else:
        scales = torch.zeros((panels, -(-columns // INT4_GROUP), PANEL_COLUMNS), dtype=torch.bfloat16)
    (_pack_int8 if bits == 8 else _pack_int4).run(panels, 1, weight, packed, scales, rows, columns)
    return packed, scales
