"""A digest of bytes on a GPU: 128 bits that depend on every word, its place, the length and a seal.

All arithmetic is on unsigned 64-bit words, modulo 2**64. The bytes are words w_0 ... w_(n-1), little-endian, the last
one filled up with zeros. With the seal s, p_i = s + (i + 1) * G, and mix a bijection on words,

    h_i = mix(w_i ^ p_i)      A = sum of h_i      B = sum of rotate(h_i, 29) * (p_i | 1)
    digest = mix(A ^ (s + bytes)), mix(B + A * G + bytes)       two words

One changed word always changes A, since mix is a bijection; any other change escapes both sums by chance alone. It
finds damage, not malice. mix is the finalizer of splitmix64 (Steele, Lea, Flood 2014), G the odd number next to
2**64 / phi. Sums don't depend on the order of their terms, so the result is the same however the work is spread.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.cuda.kernels.kv_units import UnitPlaces
from twostroke.model.cuda.kernels.launch import power_of_two

DIGEST_BYTES = 16
PADDING = 16  # bytes: `digest` reads whole multiples of it
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
G = tl.constexpr(_GOLDEN)
M1 = tl.constexpr(_FIRST)
M2 = tl.constexpr(_SECOND)
_TILE = 2048  # words of one program's step
_MAX_PROGRAMS = 1024
_WARPS = 8
_UNIT_TILE = 1024  # words of one program that digests units
_UNIT_WARPS = 4


def digest_reference(data: NDArray[np.uint8], seal: int) -> bytes:
    """The digest of uint8 [bytes], in numpy."""
    words = np.zeros(-(-data.size // 8), np.uint64)
    words.view(np.uint8)[: data.size] = data
    golden, start = np.uint64(_GOLDEN), np.uint64(seal)
    with np.errstate(over="ignore"):
        places = start + np.arange(1, words.size + 1, dtype=np.uint64) * golden
        mixed = _mix_reference(words ^ places)
        turned = (mixed << np.uint64(29)) | (mixed >> np.uint64(35))
        a = mixed.sum(dtype=np.uint64)
        b = (turned * (places | np.uint64(1))).sum(dtype=np.uint64)
        size = np.uint64(data.size)
        return _mix_reference(np.array([a ^ (start + size), b + a * golden + size], np.uint64)).tobytes()


def _mix_reference(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * M1
    x = (x ^ (x >> 27)) * M2
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["num_words", "num_pairs", "seal"])
def digest_parts_kernel(data, parts, num_words, num_pairs, seal, TILE: tl.constexpr):
    """Each program takes every num_programs-th tile; its sums A and B go to parts[program]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    start = seal.to(tl.uint64)
    a = tl.zeros((TILE,), tl.uint64)
    b = tl.zeros((TILE,), tl.uint64)
    at = program * TILE
    while at < num_words:
        index = at + tl.arange(0, TILE)
        inside = index < num_words
        word = tl.load(data + index, mask=index < 2 * num_pairs, other=0).to(
            tl.uint64
        )  # an even number: 16 bytes a load
        place = start + (index + 1).to(tl.uint64) * G
        mixed = _mix(word ^ place)
        turned = (mixed << 29) | (mixed >> 35)
        a += tl.where(inside, mixed, 0)
        b += tl.where(inside, turned * (place | 1), 0)
        at += programs * TILE
    tl.store(parts + 2 * program, tl.sum(a, axis=0).to(tl.int64))
    tl.store(parts + 2 * program + 1, tl.sum(b, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["seal"])
def digest_units_kernel(
    sources,
    targets,
    parts,
    seal,
    SOURCE_HEAD: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    TARGET_HEAD: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_RUN: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    COPY: tl.constexpr,
):
    """`copy_units_kernel` of kv_pack on words of 8 bytes, and its program's sums; without COPY it only reads."""
    RUNS: tl.constexpr = 2 * HEADS // HEADS_PER_RUN
    unit, run = tl.program_id(0) // RUNS, tl.program_id(0) % RUNS
    kind, head = run * HEADS_PER_RUN // HEADS, run * HEADS_PER_RUN % HEADS
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = words < RUN_WORDS
    source = tl.multiple_of(tl.load(sources + unit).to(tl.pointer_type(tl.int64)), ALIGNMENT)
    value = tl.load(source + (kind * SOURCE_KIND + head * SOURCE_HEAD) + words, mask=inside, other=0)
    if COPY:
        target = tl.multiple_of(tl.load(targets + unit).to(tl.pointer_type(tl.int64)), ALIGNMENT)
        tl.store(target + (kind * TARGET_KIND + head * TARGET_HEAD) + words, value, mask=inside)
    index = tl.program_id(0).to(tl.int64) * RUN_WORDS + words
    place = seal.to(tl.uint64) + (index + 1).to(tl.uint64) * G
    mixed = _mix(value.to(tl.uint64) ^ place)
    turned = (mixed << 29) | (mixed >> 35)
    part = parts + 2 * (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
    tl.store(part, tl.sum(tl.where(inside, mixed, 0), axis=0).to(tl.int64))
    tl.store(part + 1, tl.sum(tl.where(inside, turned * (place | 1), 0), axis=0).to(tl.int64))


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
    programs = max(1, min(_MAX_PROGRAMS, triton.cdiv(num_words, _TILE)))
    parts = torch.empty((programs, 2), dtype=torch.int64, device=data.device)
    digest_parts_kernel[(programs,)](words, parts, num_words, num_pairs, _signed(seal), TILE=_TILE, num_warps=_WARPS)
    _finish(parts, out, num_bytes, seal)


def digest_units(places: UnitPlaces, sources: Tensor, seal: int, out: Tensor) -> None:
    """The digest of units where they lie, one after the other as if packed -> out, int64 [2].

    sources int64 [units]: addresses. Raises ValueError for units that are not made of words of 8 bytes.
    """
    _digest_units(places, sources, places, sources, seal, out, copies=False)


def copy_and_digest_units(
    source: UnitPlaces, sources: Tensor, target: UnitPlaces, targets: Tensor, seal: int, out: Tensor
) -> None:
    """`copy_units`, and the digest of what was copied -> out, in one pass. Raises ValueError as these two do."""
    if (source.num_heads, source.head_bytes) != (target.num_heads, target.head_bytes):
        raise ValueError("source and target have units of different shapes")
    _digest_units(source, sources, target, targets, seal, out, copies=True)


def _digest_units(
    source: UnitPlaces, sources: Tensor, target: UnitPlaces, targets: Tensor, seal: int, out: Tensor, *, copies: bool
) -> None:
    alignment = min(source.alignment, target.alignment)
    if alignment < 8:
        raise ValueError(f"units at multiples of {alignment} bytes are not words of 8")
    run_bytes = min(source.run_bytes, target.run_bytes)
    run_words = run_bytes // 8
    units, runs = sources.shape[0], source.unit_bytes // run_bytes
    tile = min(_UNIT_TILE, power_of_two(run_words))
    tiles = triton.cdiv(run_words, tile)
    parts = torch.empty((units * runs * tiles, 2), dtype=torch.int64, device=sources.device)
    if units:
        digest_units_kernel[(units * runs, tiles)](
            sources, targets, parts, _signed(seal), SOURCE_HEAD=source.head_stride // 8,
            SOURCE_KIND=source.kind_stride // 8, TARGET_HEAD=target.head_stride // 8,
            TARGET_KIND=target.kind_stride // 8, HEADS=source.num_heads, HEADS_PER_RUN=run_bytes // source.head_bytes,
            RUN_WORDS=run_words, ALIGNMENT=alignment, TILE=tile, COPY=copies,
            num_warps=max(1, min(_UNIT_WARPS, tile // 64)),
        )  # fmt: skip
    _finish(parts, out, units * source.unit_bytes, seal)


def _finish(parts: Tensor, out: Tensor, num_bytes: int, seal: int) -> None:
    digest_kernel[(1,)](parts, out, parts.shape[0], num_bytes, _signed(seal), TILE=_MAX_PROGRAMS, num_warps=4)


def _signed(seal: int) -> int:
    """The same 64 bits as an int64."""
    return seal - (1 << 64) if seal >> 63 else seal
