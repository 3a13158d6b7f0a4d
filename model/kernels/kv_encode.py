"""Units of KV to one byte a value and back on a GPU, in the same pass that packs or unpacks them.

The format and its error bounds: kvtransfer/encodings.py. The arithmetic is that of model/kernels/cpu_kv_encode.py,
which is the reference: codes and scales are equal bit by bit. (The codes of broken rows may differ; they mean nothing.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.kernels.kv_pack import UnitPlaces
from twostroke.model.kernels.launch import power_of_two

LIMITS = {"int8": 127.0, "fp8": 448.0}
_STORED = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
_TILE_VALUES = 2048  # of one program
_WARPS = 4


@triton.jit
def _code(value, IS_FP8: tl.constexpr):
    """fp32 -> the code's bits, int32: to nearest, ties to even."""
    if IS_FP8:
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # exponents: 127 in fp32, 7 in e4m3
        small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2**-9
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    else:
        code = (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23 rounds to integers
    return code


@triton.jit
def _value(code, IS_FP8: tl.constexpr):
    """The code's bits, int32 in [0, 255] -> fp32."""
    if IS_FP8:
        size = code & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        magnitude = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        value = tl.where(code >= 0x80, -magnitude, magnitude)
    else:
        value = ((code ^ 0x80) - 0x80).to(tl.float32)
    return value


@triton.jit
def _tile(addresses, STORED, ALIGNMENT, HEAD, KIND, HEADS, TOKENS, DIM, TILE_ROWS, DIM_PADDED):
    """This program's rows of its unit: (row numbers, columns, which are real, where they are stored)."""
    unit = tl.program_id(0)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_PADDED)
    kind, head, token = rows // (HEADS * TOKENS), rows // TOKENS % HEADS, rows % TOKENS
    real = (rows < 2 * HEADS * TOKENS)[:, None] & (dims < DIM)[None, :]
    base = tl.multiple_of(tl.load(addresses + unit).to(tl.pointer_type(STORED)), ALIGNMENT)
    return rows, dims, real, base + (kind * KIND + head * HEAD + token * DIM)[:, None] + dims[None, :]


@triton.jit
def encode_units_kernel(
    sources,
    wire,
    LIMIT: tl.constexpr,
    STORED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """One program TILE_ROWS rows of one unit; strides in values."""
    ROWS: tl.constexpr = 2 * HEADS * TOKENS
    IS_FP8: tl.constexpr = LIMIT > 127.0
    rows, dims, real, stored = _tile(sources, STORED, ALIGNMENT, HEAD, KIND, HEADS, TOKENS, DIM, TILE_ROWS, DIM_PADDED)
    values = tl.load(stored, mask=real, other=0.0).to(tl.float32)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full((TILE_ROWS,), LIMIT, tl.float32))
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536  # up to bf16
    bits = tl.where(largest >= 0x7F000000, 0x7FC00000, tl.maximum(bits, 0x00800000))
    inverse = tl.div_rn(tl.full((TILE_ROWS,), 1.0, tl.float32), bits.to(tl.float32, bitcast=True))
    codes = _code(values * inverse[:, None], IS_FP8)
    start = wire + tl.program_id(0).to(tl.int64) * (ROWS * (DIM + 2))
    tl.store(start + rows[:, None] * DIM + dims[None, :], codes.to(tl.uint8), mask=real)
    scales = (start + ROWS * DIM + 2 * rows).to(tl.pointer_type(tl.int16))
    tl.store(scales, (bits >> 16).to(tl.int16), mask=rows < ROWS)


@triton.jit
def decode_units_kernel(
    wire,
    targets,
    LIMIT: tl.constexpr,
    STORED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """As `encode_units_kernel`, the other way round."""
    ROWS: tl.constexpr = 2 * HEADS * TOKENS
    IS_FP8: tl.constexpr = LIMIT > 127.0
    rows, dims, real, stored = _tile(targets, STORED, ALIGNMENT, HEAD, KIND, HEADS, TOKENS, DIM, TILE_ROWS, DIM_PADDED)
    start = wire + tl.program_id(0).to(tl.int64) * (ROWS * (DIM + 2))
    codes = tl.load(start + rows[:, None] * DIM + dims[None, :], mask=real, other=0).to(tl.int32)
    scales = (start + ROWS * DIM + 2 * rows).to(tl.pointer_type(tl.int16))
    bits = tl.load(scales, mask=rows < ROWS, other=0).to(tl.int32) << 16
    values = _value(codes, IS_FP8) * bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(stored, values.to(STORED), mask=real)


def encode_units(places: UnitPlaces, sources: Tensor, encoding: str, dtype: str, head_dim: int, wire: Tensor) -> None:
    """Units of `dtype` at `sources`, int64 [units] -> wire, uint8 [units * unit_bytes], at an even address."""
    _launch(encode_units_kernel, (sources, wire), sources.shape[0], places, encoding, dtype, head_dim)


def decode_units(places: UnitPlaces, targets: Tensor, encoding: str, dtype: str, head_dim: int, wire: Tensor) -> None:
    """wire -> units of `dtype` at `targets`; what `dtype` can't hold becomes infinite."""
    _launch(decode_units_kernel, (wire, targets), targets.shape[0], places, encoding, dtype, head_dim)


def _launch(
    kernel: "triton.JITFunction[None]", tensors: tuple[Tensor, Tensor], units: int, places: UnitPlaces, encoding: str,
    dtype: str, head_dim: int,
) -> None:  # fmt: skip
    value_bytes = getattr(torch, dtype).itemsize
    tokens = places.head_bytes // (head_dim * value_bytes)
    rows = 2 * places.num_heads * tokens
    dim_padded = power_of_two(head_dim)
    tile_rows = max(1, min(_TILE_VALUES // dim_padded, power_of_two(rows)))
    if units:
        kernel[(units, triton.cdiv(rows, tile_rows))](
            *tensors, LIMIT=LIMITS[encoding], STORED=_STORED[dtype],
            ALIGNMENT=places.alignment, HEAD=places.head_stride // value_bytes,
            KIND=places.kind_stride // value_bytes, HEADS=places.num_heads, TOKENS=tokens, DIM=head_dim,
            TILE_ROWS=tile_rows, DIM_PADDED=dim_padded, num_warps=_WARPS,
        )  # fmt: skip
