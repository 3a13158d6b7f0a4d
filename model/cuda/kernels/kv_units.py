"""Units of KV between paged caches and contiguous buffers, or from one cache into another: one launch a chunk.

A unit is [2 (K, V), heads of the lane, unit_tokens, head_dim] and lies in one block of a cache. Where it begins is an
address, so that units of many layers, and of another process's cache, go in the same launch. A packed buffer is just a
cache whose blocks are the units: packing, unpacking and copying differ in their addresses and strides alone.

Units of KV to one byte a value and back on a GPU, in the same pass that packs or unpacks them.

The format and its error bounds: kvtransfer/transports/host_units.py. The arithmetic is that of
model/cpu/kernels/kv_encode.py, which is the reference: codes and scales are equal bit by bit. (The codes of broken rows
may differ; they mean nothing.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twostroke.model.cuda.kernels.launch import power_of_two

_TILE_BYTES = 8192  # of one program


@dataclass(frozen=True, slots=True)
class UnitPlaces:
    """How one side's units lie in memory, all sizes in bytes."""

    num_heads: int  # of the lane
    head_bytes: int  # contiguous: unit_tokens rows of one head, of K or of V
    head_stride: int  # from one head to the next
    kind_stride: int  # from K to V
    block_bytes: int  # from one block to the next
    units_per_block: int
    first_head: int  # of the lane, within the block

    @property
    def unit_bytes(self) -> int:
        return 2 * self.num_heads * self.head_bytes

    @property
    def run_bytes(self) -> int:
        """What of a unit is contiguous: all of it, K and V each, or each head."""
        if self.head_stride != self.head_bytes:
            return self.head_bytes
        if self.kind_stride != self.num_heads * self.head_bytes:
            return self.num_heads * self.head_bytes
        return self.unit_bytes

    @property
    def alignment(self) -> int:
        """What the address of every run is a multiple of, up to 16: layers and buffers begin at multiples of it."""
        return math.gcd(16, self.head_bytes, self.head_stride, self.kind_stride, self.block_bytes)

    def addresses(self, bases: ArrayLike, unit_ids: ArrayLike) -> NDArray[np.int64]:
        """Where each unit's first byte is: int64 [units]. `bases`: of each unit's layer, or of the one layer."""
        blocks, parts = np.divmod(np.asarray(unit_ids, np.int64), self.units_per_block)
        inside = parts * self.head_bytes + self.first_head * self.head_stride
        start: NDArray[np.int64] = np.asarray(bases, np.int64) + blocks * self.block_bytes + inside
        return start


def paged_places(
    *, row_bytes: int, heads_per_block: int, block_size: int, first_head: int, num_heads: int, unit_tokens: int
) -> UnitPlaces:
    """Units in a cache whose layers are [num_blocks, 2, heads_per_block, block_size, row_bytes]."""
    head_stride = block_size * row_bytes
    kind_stride = heads_per_block * head_stride
    return UnitPlaces(
        num_heads, unit_tokens * row_bytes, head_stride, kind_stride, 2 * kind_stride, block_size // unit_tokens,
        first_head,
    )  # fmt: skip


def packed_places(places: UnitPlaces) -> UnitPlaces:
    """The same units one after the other in a buffer, unit i being block i."""
    heads, size = places.num_heads, places.head_bytes
    return UnitPlaces(heads, size, size, heads * size, 2 * heads * size, units_per_block=1, first_head=0)


def copy_units_reference(
    source: UnitPlaces, source_bytes: Tensor, source_ids: Sequence[int],
    target: UnitPlaces, target_bytes: Tensor, target_ids: Sequence[int],
) -> None:  # fmt: skip
    """As `copy_units` within one layer of each side, uint8 [bytes], in torch."""
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        for kind in range(2):
            for head in range(source.num_heads):
                spans = []
                for places, unit in ((source, source_id), (target, target_id)):
                    start = (
                        int(places.addresses([0], [unit])[0]) + kind * places.kind_stride + head * places.head_stride
                    )
                    spans.append(slice(start, start + places.head_bytes))
                target_bytes[spans[1]] = source_bytes[spans[0]]


@triton.jit
def copy_units_kernel(
    sources,
    targets,
    SOURCE_HEAD: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    TARGET_HEAD: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_RUN: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a run of one unit and TILE words of it; strides in words."""
    RUNS: tl.constexpr = 2 * HEADS // HEADS_PER_RUN
    unit, run = tl.program_id(0) // RUNS, tl.program_id(0) % RUNS
    kind, head = run * HEADS_PER_RUN // HEADS, run * HEADS_PER_RUN % HEADS
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = tl.multiple_of(tl.load(sources + unit).to(tl.pointer_type(WORD)), ALIGNMENT)
    target = tl.multiple_of(tl.load(targets + unit).to(tl.pointer_type(WORD)), ALIGNMENT)
    inside = words < RUN_WORDS
    value = tl.load(source + (kind * SOURCE_KIND + head * SOURCE_HEAD) + words, mask=inside)
    tl.store(target + (kind * TARGET_KIND + head * TARGET_HEAD) + words, value, mask=inside)


def copy_units(source: UnitPlaces, sources: Tensor, target: UnitPlaces, targets: Tensor) -> None:
    """Copy units from `sources` to `targets`, int64 [units] each: addresses of the same device as these tensors.

    The addresses' memory must not overlap, and nothing checks them. Raises ValueError for places whose units differ.
    """
    if (source.num_heads, source.head_bytes) != (target.num_heads, target.head_bytes):
        raise ValueError("source and target have units of different shapes")
    run_bytes = min(source.run_bytes, target.run_bytes)
    strides = (source.head_stride, source.kind_stride, target.head_stride, target.kind_stride)
    alignment = min(source.alignment, target.alignment)
    word_bytes = min(alignment, 8)
    word = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word_bytes]
    run_words = run_bytes // word_bytes
    tile = min(_TILE_BYTES // word_bytes, power_of_two(run_words))
    runs = source.unit_bytes // run_bytes
    units = sources.shape[0]
    if units:
        copy_units_kernel[(units * runs, triton.cdiv(run_words, tile))](
            sources, targets, *(stride // word_bytes for stride in strides), HEADS=source.num_heads,
            HEADS_PER_RUN=run_bytes // source.head_bytes, RUN_WORDS=run_words, WORD=word, ALIGNMENT=alignment,
            TILE=tile, num_warps=max(1, min(4, tile * word_bytes // 512)),
        )  # fmt: skip


def address_tensor(addresses: NDArray[np.int64], device: torch.device) -> Tensor:
    """The addresses on the device, int64; the copy is queued on the current stream and does not wait for it."""
    host = torch.from_numpy(addresses)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


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
