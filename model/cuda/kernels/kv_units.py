"""Units of KV between paged caches and contiguous buffers, or from one cache into another: one launch a chunk.

A unit is [kinds (K and V, or latents), heads of the lane, unit_tokens, head_dim] and lies in one block of a cache.
Where it begins is an address, so that units of many layers, and of another process's cache, go in the same launch. A
packed buffer is just a cache whose blocks are the units: packing, unpacking and copying differ in their addresses and
strides alone.

On their way units may be digested, or go to one byte a value and back.

The digest of bytes is 128 bits that depend on every word, its place, the length and a seal. All arithmetic is on
unsigned 64-bit words, modulo 2**64. The bytes are words w_0 ... w_(n-1), little-endian, the last one filled up with
zeros. With the seal s, p_i = s + (i + 1) * G, and mix a bijection on words,

    h_i = mix(w_i ^ p_i)      A = sum of h_i      B = sum of rotate(h_i, 29) * (p_i | 1)
    digest = mix(A ^ (s + bytes)), mix(B + A * G + bytes)       two words

One changed word always changes A, since mix is a bijection; any other change escapes both sums by chance alone. It
finds damage, not malice. mix is the finalizer of splitmix64 (Steele, Lea, Flood 2014), G the odd number next to
2**64 / phi. Sums don't depend on the order of their terms, so the result is the same however the work is spread.

Of one byte a value, the format and its error bounds: kvtransfer/transports/host_units.py. The arithmetic is that of
model/cpu/kernels/kv_encode.py, which is the reference: codes and scales are equal bit by bit. (The codes of broken rows
may differ; they mean nothing.)
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twostroke.model.cuda.kernels.fp8 import fp8_code, fp8_value
from twostroke.model.cuda.kernels.launch import power_of_two

_TILE_BYTES = 8192  # of one program


@dataclass(frozen=True, slots=True)
class UnitPlaces:
    """Memory layout of one side's units, all sizes in bytes."""

    num_heads: int  # of the lane
    head_bytes: int  # contiguous: unit_tokens rows of one head, of K or of V
    head_stride: int  # from one head to the next
    kind_stride: int  # from K to V
    block_bytes: int  # from one block to the next
    units_per_block: int
    first_head: int  # of the lane, within the block
    kinds: int = 2  # of rows: 1 where they are latents

    @property
    def unit_bytes(self) -> int:
        return self.kinds * self.num_heads * self.head_bytes

    @property
    def run_bytes(self) -> int:
        """Contiguous bytes of a unit: all of it, K and V each, or each head."""
        if self.head_stride != self.head_bytes:
            return self.head_bytes
        if self.kinds > 1 and self.kind_stride != self.num_heads * self.head_bytes:
            return self.num_heads * self.head_bytes
        return self.unit_bytes

    @property
    def alignment(self) -> int:
        """Alignment of every run's address, up to 16: layers and buffers begin at multiples of it."""
        return math.gcd(16, self.head_bytes, self.head_stride, self.kind_stride, self.block_bytes)

    def addresses(self, bases: ArrayLike, unit_ids: ArrayLike) -> NDArray[np.int64]:
        """Return the address of each unit's first byte: int64 [units]. `bases` are those of each unit's layer, or of
        the one layer."""
        blocks, parts = np.divmod(np.asarray(unit_ids, np.int64), self.units_per_block)
        inside = parts * self.head_bytes + self.first_head * self.head_stride
        start: NDArray[np.int64] = np.asarray(bases, np.int64) + blocks * self.block_bytes + inside
        return start


def paged_places(
    *,
    row_bytes: int,
    heads_per_block: int,
    block_size: int,
    first_head: int,
    num_heads: int,
    unit_tokens: int,
    kinds: int = 2,
) -> UnitPlaces:
    """Units in a cache whose layers are [num_blocks, kinds, heads_per_block, block_size, row_bytes]."""
    head_stride = block_size * row_bytes
    kind_stride = heads_per_block * head_stride
    return UnitPlaces(
        num_heads, unit_tokens * row_bytes, head_stride, kind_stride, kinds * kind_stride, block_size // unit_tokens,
        first_head, kinds,
    )  # fmt: skip


def packed_places(places: UnitPlaces) -> UnitPlaces:
    """The same units one after the other in a buffer, unit i being block i."""
    heads, size, kinds = places.num_heads, places.head_bytes, places.kinds
    return UnitPlaces(
        heads, size, size, heads * size, kinds * heads * size, units_per_block=1, first_head=0, kinds=kinds
    )


def address_tensor(addresses: NDArray[np.int64], device: torch.device) -> Tensor:
    """The addresses on the device, int64; the copy is queued on the current stream and does not wait for it."""
    host = torch.from_numpy(addresses)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


DIGEST_BYTES = 16
PADDING = 16  # bytes: `digest` reads whole multiples of it
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
G = tl.constexpr(_GOLDEN)
M1 = tl.constexpr(_FIRST)
M2 = tl.constexpr(_SECOND)
_DIGEST_TILE = 2048  # words of one program's step
_MAX_PROGRAMS = 1024
_DIGEST_WARPS = 8


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * M1
    x = (x ^ (x >> 27)) * M2
    return x ^ (x >> 31)


@triton.jit
def _terms(word, index, seal):
    """Return the summands of A and B for the word at `index`."""
    place = seal.to(tl.uint64) + (index + 1).to(tl.uint64) * G
    mixed = _mix(word.to(tl.uint64) ^ place)
    return mixed, ((mixed << 29) | (mixed >> 35)) * (place | 1)


@triton.jit(do_not_specialize=["num_words", "num_pairs", "seal"])
def digest_parts_kernel(data, parts, num_words, num_pairs, seal, TILE: tl.constexpr):
    """Each program takes every num_programs-th tile; its sums A and B go to parts[program]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    a = tl.zeros((TILE,), tl.uint64)
    b = tl.zeros((TILE,), tl.uint64)
    at = program * TILE
    while at < num_words:
        index = at + tl.arange(0, TILE)
        inside = index < num_words
        word = tl.load(data + index, mask=index < 2 * num_pairs, other=0)  # an even number: 16 bytes a load
        to_a, to_b = _terms(word, index, seal)
        a += tl.where(inside, to_a, 0)
        b += tl.where(inside, to_b, 0)
        at += programs * TILE
    tl.store(parts + 2 * program, tl.sum(a, axis=0).to(tl.int64))
    tl.store(parts + 2 * program + 1, tl.sum(b, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["seal"])
def move_units_kernel(
    sources,
    targets,
    parts,
    seal,
    SOURCE_HEAD: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    TARGET_HEAD: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_RUN: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    COPY: tl.constexpr,
    DIGEST: tl.constexpr,
):
    """One program per run of one unit and TILE words of it; strides in words. With COPY they go to the targets.

    With DIGEST the words are of 8 bytes, and the program's sums A and B go to its place in parts.
    """
    RUNS: tl.constexpr = KINDS * HEADS // HEADS_PER_RUN
    unit, run = tl.program_id(0) // RUNS, tl.program_id(0) % RUNS
    kind, head = run * HEADS_PER_RUN // HEADS, run * HEADS_PER_RUN % HEADS
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = words < RUN_WORDS
    source = tl.multiple_of(tl.load(sources + unit).to(tl.pointer_type(WORD)), ALIGNMENT)
    value = tl.load(source + (kind * SOURCE_KIND + head * SOURCE_HEAD) + words, mask=inside, other=0)
    if COPY:
        target = tl.multiple_of(tl.load(targets + unit).to(tl.pointer_type(WORD)), ALIGNMENT)
        tl.store(target + (kind * TARGET_KIND + head * TARGET_HEAD) + words, value, mask=inside)
    if DIGEST:
        # The program's part of the place is multiplied once, and each lane's is a constant: fewer products a word.
        first = tl.program_id(0).to(tl.uint64) * RUN_WORDS + tl.program_id(1).to(tl.uint64) * TILE
        to_a, to_b = _terms(value, tl.arange(0, TILE), seal.to(tl.uint64) + first * G)
        part = parts + 2 * (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
        tl.store(part, tl.sum(tl.where(inside, to_a, 0), axis=0).to(tl.int64))
        tl.store(part + 1, tl.sum(tl.where(inside, to_b, 0), axis=0).to(tl.int64))


def copy_units(source: UnitPlaces, sources: Tensor, target: UnitPlaces, targets: Tensor) -> None:
    """Copy units from `sources` to `targets`, int64 [units]: addresses of the same device as these tensors.

    The addresses' memory must not overlap, and nothing checks them. Raises ValueError for places whose units differ.
    """
    _move(source, sources, target, targets)


def digest_units(places: UnitPlaces, sources: Tensor, seal: int, out: Tensor) -> None:
    """The digest of units where they lie, one after the other as if packed -> out, int64 [2].

    sources int64 [units]: addresses. Raises ValueError for units that are not made of words of 8 bytes.
    """
    parts = _move(places, sources, places, None, seal)
    _finish(parts, out, sources.shape[0] * places.unit_bytes, seal)


def copy_and_digest_units(
    source: UnitPlaces, sources: Tensor, target: UnitPlaces, targets: Tensor, seal: int, out: Tensor
) -> None:
    """`copy_units`, and the digest of what was copied -> out, in one pass. Raises ValueError as these two do."""
    parts = _move(source, sources, target, targets, seal)
    _finish(parts, out, sources.shape[0] * source.unit_bytes, seal)


def _move(
    source: UnitPlaces, sources: Tensor, target: UnitPlaces, targets: Tensor | None, seal: int | None = None
) -> Tensor:
    """Copies to `targets`, if given, and sums up what a digest with this seal is made of: int64 [parts, 2]."""
    if any(getattr(source, of) != getattr(target, of) for of in ("kinds", "num_heads", "head_bytes")):
        raise ValueError("source and target have units of different shapes")
    alignment = min(source.alignment, target.alignment)
    word_bytes = min(alignment, 8)
    if seal is not None and word_bytes < 8:
        raise ValueError(f"units at multiples of {alignment} bytes are not words of 8")
    run_bytes = min(source.run_bytes, target.run_bytes)
    run_words = run_bytes // word_bytes
    runs = sources.shape[0] * (source.unit_bytes // run_bytes)
    tile = min(_TILE_BYTES // word_bytes, power_of_two(run_words))
    tiles = triton.cdiv(run_words, tile)
    parts = torch.empty((0 if seal is None else runs * tiles, 2), dtype=torch.int64, device=sources.device)
    if runs:
        move_units_kernel[(runs, tiles)](
            sources, sources if targets is None else targets, parts, _signed(seal or 0),
            SOURCE_HEAD=source.head_stride // word_bytes, SOURCE_KIND=source.kind_stride // word_bytes,
            TARGET_HEAD=target.head_stride // word_bytes, TARGET_KIND=target.kind_stride // word_bytes,
            KINDS=source.kinds, HEADS=source.num_heads, HEADS_PER_RUN=run_bytes // source.head_bytes,
            RUN_WORDS=run_words,
            WORD={8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word_bytes], ALIGNMENT=alignment, TILE=tile,
            COPY=targets is not None, DIGEST=seal is not None,
            num_warps=max(1, min(4, tile * word_bytes // 512)),
        )  # fmt: skip
    return parts


@triton.jit(do_not_specialize=["num_parts", "num_bytes", "seal"])
def digest_kernel(parts, out, num_parts, num_bytes, seal, TILE: tl.constexpr):
    """One program: the parts' sums, and the end of the formula."""
    sums_a = tl.zeros((TILE,), tl.int64)
    sums_b = tl.zeros((TILE,), tl.int64)
    at = 0
    while at < num_parts:
        index = at + tl.arange(0, TILE)
        inside = index < num_parts
        sums_a += tl.load(parts + 2 * index, mask=inside, other=0)
        sums_b += tl.load(parts + 2 * index + 1, mask=inside, other=0)
        at += TILE
    a = tl.sum(sums_a, axis=0).to(tl.uint64)
    b = tl.sum(sums_b, axis=0).to(tl.uint64)
    size = num_bytes.to(tl.uint64)
    tl.store(out, _mix(a ^ (seal.to(tl.uint64) + size)).to(tl.int64))
    tl.store(out + 1, _mix(b + a * G + size).to(tl.int64))


def digest(data: Tensor, num_bytes: int, seal: int, out: Tensor) -> None:
    """The digest of the first `num_bytes` of `data` -> out.

    data uint8, contiguous, at a multiple of 8 bytes, and zero from `num_bytes` to the next multiple of PADDING,
    which it must have; out int64 [2]. `seal` is below 2**64. Two launches; nothing waits for them.
    """
    num_pairs = -(-num_bytes // PADDING)
    words = data[: num_pairs * PADDING].view(torch.int64)
    num_words = -(-num_bytes // 8)
    programs = max(1, min(_MAX_PROGRAMS, triton.cdiv(num_words, _DIGEST_TILE)))
    parts = torch.empty((programs, 2), dtype=torch.int64, device=data.device)
    digest_parts_kernel[(programs,)](
        words, parts, num_words, num_pairs, _signed(seal), TILE=_DIGEST_TILE, num_warps=_DIGEST_WARPS
    )
    _finish(parts, out, num_bytes, seal)


def _finish(parts: Tensor, out: Tensor, num_bytes: int, seal: int) -> None:
    digest_kernel[(1,)](parts, out, parts.shape[0], num_bytes, _signed(seal), TILE=_MAX_PROGRAMS, num_warps=4)


def _signed(seal: int) -> int:
    """The same 64 bits as an int64."""
    return seal - (1 << 64) if seal >> 63 else seal


LIMITS = {"int8": 127.0, "fp8": 448.0}
_STORED = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
_CODED_TILE = 2048  # values of one program


@triton.jit
def _code(value, IS_FP8: tl.constexpr):
    """fp32 -> the code's bits, int32: to nearest, ties to even."""
    if IS_FP8:
        return fp8_code(value)
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23 rounds to integers


@triton.jit
def _value(code, IS_FP8: tl.constexpr):
    """The code's bits, int32 in [0, 255] -> fp32."""
    if IS_FP8:
        return fp8_value(code)
    return ((code ^ 0x80) - 0x80).to(tl.float32)


@triton.jit
def code_units_kernel(
    paged,
    wire,
    ENCODE: tl.constexpr,
    LIMIT: tl.constexpr,
    STORED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD: tl.constexpr,
    KIND: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """One program per TILE_ROWS rows of one unit, from `paged` to the wire with ENCODE, else back; strides are
    values."""
    ROWS: tl.constexpr = KINDS * HEADS * TOKENS
    IS_FP8: tl.constexpr = LIMIT > 127.0
    unit = tl.program_id(0)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_PADDED)
    kind, head, token = rows // (HEADS * TOKENS), rows // TOKENS % HEADS, rows % TOKENS
    real = (rows < ROWS)[:, None] & (dims < DIM)[None, :]
    base = tl.multiple_of(tl.load(paged + unit).to(tl.pointer_type(STORED)), ALIGNMENT)
    stored = base + (kind * KIND + head * HEAD + token * DIM)[:, None] + dims[None, :]
    start = wire + unit.to(tl.int64) * (ROWS * (DIM + 2))
    coded = start + rows[:, None] * DIM + dims[None, :]
    scales = (start + ROWS * DIM + 2 * rows).to(tl.pointer_type(tl.int16))
    if ENCODE:
        values = tl.load(stored, mask=real, other=0.0).to(tl.float32)
        largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full((TILE_ROWS,), LIMIT, tl.float32))
        bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536  # up to bf16
        bits = tl.where(largest >= 0x7F000000, 0x7FC00000, tl.maximum(bits, 0x00800000))
        inverse = tl.div_rn(tl.full((TILE_ROWS,), 1.0, tl.float32), bits.to(tl.float32, bitcast=True))
        codes = _code(values * inverse[:, None], IS_FP8)
        tl.store(coded, codes.to(tl.uint8), mask=real)
        tl.store(scales, (bits >> 16).to(tl.int16), mask=rows < ROWS)
    else:
        codes = tl.load(coded, mask=real, other=0).to(tl.int32)
        bits = tl.load(scales, mask=rows < ROWS, other=0).to(tl.int32) << 16
        values = _value(codes, IS_FP8) * bits.to(tl.float32, bitcast=True)[:, None]
        tl.store(stored, values.to(STORED), mask=real)


def encode_units(places: UnitPlaces, sources: Tensor, encoding: str, dtype: str, head_dim: int, wire: Tensor) -> None:
    """Units of `dtype` at `sources`, int64 [units] -> wire, uint8 [units * unit_bytes], at an even address."""
    _code_units(places, sources, encoding, dtype, head_dim, wire, encode=True)


def decode_units(places: UnitPlaces, targets: Tensor, encoding: str, dtype: str, head_dim: int, wire: Tensor) -> None:
    """wire -> units of `dtype` at `targets`; what `dtype` can't hold becomes infinite."""
    _code_units(places, targets, encoding, dtype, head_dim, wire, encode=False)


def _code_units(
    places: UnitPlaces, paged: Tensor, encoding: str, dtype: str, head_dim: int, wire: Tensor, *, encode: bool
) -> None:
    value_bytes, units = getattr(torch, dtype).itemsize, paged.shape[0]
    tokens = places.head_bytes // (head_dim * value_bytes)
    rows = places.kinds * places.num_heads * tokens
    dim_padded = power_of_two(head_dim)
    tile_rows = max(1, min(_CODED_TILE // dim_padded, power_of_two(rows)))
    if units:
        code_units_kernel[(units, triton.cdiv(rows, tile_rows))](
            paged, wire, ENCODE=encode, LIMIT=LIMITS[encoding], STORED=_STORED[dtype],
            ALIGNMENT=places.alignment, HEAD=places.head_stride // value_bytes,
            KIND=places.kind_stride // value_bytes, KINDS=places.kinds, HEADS=places.num_heads, TOKENS=tokens,
            DIM=head_dim, TILE_ROWS=tile_rows, DIM_PADDED=dim_padded, num_warps=4,
            enable_fp_fusion=False,  # or a product and the sum that rounds it to an integer are rounded once, together
        )  # fmt: skip
