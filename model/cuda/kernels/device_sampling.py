"""Drawing tokens wholly on a GPU, in four launches whatever the requests ask for: nothing waits for the host.

What is drawn is written down in model/sampling/draws.py, whose TorchSampling is the reference. Probabilities are
summed as integers (2^-44 of the largest one), so that a sum does not depend on the order in which programs add: a row's
token is the same in every batch and at every split.

    extremes    grid (rows, parts)   largest logit of each part of a row, and whether it is sound
    cut         grid (rows)          which logits top_k and top_p keep: those above a value, and some that equal it
    race        grid (rows, parts)   the best of the kept logits plus Gumbel noise, of each part
    settle      grid (rows)          the token
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.cuda.kernels.launch import power_of_two
from twostroke.model.sampling.draws import GOLDEN, MIX_1, MIX_2

_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
_MIX_1: tl.constexpr = tl.constexpr(MIX_1)
_MIX_2: tl.constexpr = tl.constexpr(MIX_2)
_LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_UNIT: tl.constexpr = tl.constexpr(2.0**44)  # of the fixed-point masses: 2^18 tokens of mass 1 fit into 63 bits
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

PART = 8192  # logits of a row that one program of a split grid looks at
TILE = 2048  # of them at a time


@dataclass(frozen=True)
class DrawParameters:
    """Of N rows, on the device. `temperature` 0 is greedy; as in SamplingParams otherwise."""

    temperature: Tensor  # fp64 [N]
    top_k: Tensor  # int32 [N]: 0 is off
    top_p: Tensor  # fp64 [N]: 1 and more is off
    log_min_p: Tensor  # fp64 [N]: ln(min_p), -inf is off
    keys: Tensor  # int64 [N]: the bits of `row_keys`


@triton.jit
def _sound(logits):
    """NaN is never drawn, and +inf is the largest number."""
    return tl.where(logits != logits, float("-inf"), tl.minimum(logits, _LARGEST))


@triton.jit
def _rank(logits):
    """Integers that are ordered as the logits are; +0 and -0 are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _load(row_logits, ids, vocab_size):
    return _sound(tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf")))


@triton.jit
def extremes_kernel(
    logits, row_stride, vocab_size, best_values, best_ids, broken, PART: tl.constexpr, TILE: tl.constexpr
):
    """Writes fp32, int64 and int32 [N, parts]; of equal logits the lowest id counts."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_logits = logits + row * row_stride
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + part * PART
    is_broken = tl.full([], 0, tl.int32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), TILE):
        ids = start + tl.arange(0, TILE)
        raw = tl.load(row_logits + ids, mask=ids < vocab_size, other=0.0)
        is_broken = tl.maximum(is_broken, tl.max(((raw != raw) | (raw == float("inf"))).to(tl.int32), axis=0))
        values = tl.where(ids < vocab_size, _sound(raw), float("-inf"))
        highest = tl.max(values, axis=0)
        first = tl.min(tl.where((values == highest) & (ids < vocab_size), ids, vocab_size), axis=0)
        best_id = tl.where(highest > best, first, best_id)
        best = tl.maximum(best, highest)
    place = row * tl.num_programs(1) + part
    tl.store(best_values + place, best)
    tl.store(best_ids + place, best_id.to(tl.int64))
    tl.store(broken + place, is_broken)


@triton.jit
def _highest(best_values, row, num_parts, PARTS: tl.constexpr):
    """The largest logit of a row, out of those of its parts."""
    parts = tl.arange(0, PARTS)
    values = tl.load(best_values + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    return tl.max(values, axis=0)


@triton.jit
def _masses(values, highest, temperature):
    """exp((l - m) / T) as multiples of 2^-44."""
    return (tl.exp2((values - highest) / temperature.to(tl.float32) * _LOG2_E) * _UNIT).to(tl.int64)


@triton.jit
def _is_kept(values, ids, vocab_size, floor, cut, last_equal):
    """Whether min_p (`floor`) and a cut so far keep a logit."""
    above = (values > cut) | ((values == cut) & (ids <= last_equal))
    return (ids < vocab_size) & (values > float("-inf")) & (values.to(tl.float64) >= floor) & above


@triton.jit
def _weight_from(
    row_logits, vocab_size, highest, temperature, floor, cut, last_equal, least, MASSES: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """The number, or the mass, of the kept logits whose rank is at least `least`."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        values = _load(row_logits, ids, vocab_size)
        counts = _is_kept(values, ids, vocab_size, floor, cut, last_equal) & (_rank(values) >= least)
        weights = tl.where(counts, _masses(values, highest, temperature), 0) if MASSES else counts.to(tl.int64)
        total += tl.sum(weights, axis=0)
    return total


@triton.jit
def _find_cut(
    row_logits, vocab_size, highest, temperature, floor, cut, last_equal, target, MASSES: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """(value, id of the last of its equals) of the fewest largest kept logits that weigh at least `target`, fp64."""
    low = tl.full([], -(1 << 31), tl.int64)
    high = _rank(highest)
    # The largest rank from which on the weight reaches the target; that of all does.
    while low < high:
        middle = (low + high + 1) >> 1
        weight = _weight_from(
            row_logits, vocab_size, highest, temperature, floor, cut, last_equal, middle, MASSES, TILE
        )
        if weight.to(tl.float64) >= target:
            low = middle
        else:
            high = middle - 1
    above = _weight_from(
        row_logits, vocab_size, highest, temperature, floor, cut, last_equal, low + 1, MASSES, TILE
    ).to(tl.float64)
    bits = tl.where(low >= 0, low, low ^ 0x7FFFFFFF).to(tl.int32)
    value = bits.to(tl.float32, bitcast=True)
    one = tl.full([], 1.0, tl.float64)
    if MASSES:
        one = tl.maximum(_masses(value, highest, temperature).to(tl.float64), 1.0)
    # Of equal logits those with the lower ids: the id of the one that reaches the target.
    seen = tl.full([], 0, tl.int64)
    last = tl.full([], 0, tl.int64) + vocab_size
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        values = _load(row_logits, ids, vocab_size)
        equal = (_is_kept(values, ids, vocab_size, floor, cut, last_equal) & (values == value)).to(tl.int64)
        order = tl.cumsum(equal, axis=0) + seen
        reaches = (equal == 1) & (above + order.to(tl.float64) * one >= target)
        found = tl.where(reaches, ids, vocab_size).to(tl.int64)
        last = tl.minimum(last, tl.min(found, axis=0))
        seen += tl.sum(equal, axis=0)
    return value, last


@triton.jit(do_not_specialize=["num_parts"])
def cut_kernel(
    logits, row_stride, vocab_size, best_values, num_parts, temperatures, top_ks, top_ps, log_min_ps,
    floors, cuts, last_equals, PARTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Writes fp64 floors, fp32 cuts and int64 last_equals [N]: the terms of `_is_kept`."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    highest = _highest(best_values, row, num_parts, PARTS)
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    floor = tl.full([], float("-inf"), tl.float64)
    cut = tl.full([], float("-inf"), tl.float32)
    last_equal = tl.full([], 0, tl.int64) + vocab_size
    if (temperature > 0) & (highest > float("-inf")):
        floor = highest.to(tl.float64) + temperature * tl.load(log_min_ps + row)
        if (top_k > 0) & (top_k < vocab_size):
            kept = _weight_from(
                row_logits, vocab_size, highest, temperature, floor, cut, last_equal, -(1 << 31), False, TILE
            )
            if top_k < kept:
                cut, last_equal = _find_cut(
                    row_logits, vocab_size, highest, temperature, floor, cut, last_equal,
                    top_k.to(tl.float64), False, TILE,
                )  # fmt: skip
        if top_p < 1.0:
            mass = _weight_from(
                row_logits, vocab_size, highest, temperature, floor, cut, last_equal, -(1 << 31), True, TILE
            )
            cut, last_equal = _find_cut(
                row_logits, vocab_size, highest, temperature, floor, cut, last_equal,
                mass.to(tl.float64) * top_p, True, TILE,
            )  # fmt: skip
    tl.store(floors + row, floor)
    tl.store(cuts + row, cut)
    tl.store(last_equals + row, last_equal)


@triton.jit
def _gumbel(key, ids):
    """Standard Gumbel noise fp64, of SplitMix64's outputs: see model/sampling/draws.py."""
    x = key + (ids + 1).to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    uniform = ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["num_parts"])
def race_kernel(
    logits, row_stride, vocab_size, best_values, num_parts, temperatures, keys, floors, cuts, last_equals,
    scores, score_ids, PARTS: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Writes fp64 scores and int64 score_ids [N, parts]; nothing for rows where nothing is drawn."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    highest = _highest(best_values, row, num_parts, PARTS).to(tl.float64)
    if (temperature <= 0) | (highest == float("-inf")):
        return
    row_logits = logits + row * row_stride
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    floor, cut, last_equal = tl.load(floors + row), tl.load(cuts + row), tl.load(last_equals + row)
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], 0, tl.int64)
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), TILE):
        ids = (start + tl.arange(0, TILE)).to(tl.int64)
        values = _load(row_logits, ids, vocab_size)
        kept = _is_kept(values, ids, vocab_size, floor, cut, last_equal)
        noisy = (values.to(tl.float64) - highest) / temperature + _gumbel(key, ids)
        noisy = tl.where(kept, noisy, float("-inf"))
        leading = tl.max(noisy, axis=0)
        first = tl.min(tl.where(noisy == leading, ids, vocab_size), axis=0)
        best_id = tl.where(leading > best, first, best_id)
        best = tl.maximum(best, leading)
    place = row * num_parts + part
    tl.store(scores + place, best)
    tl.store(score_ids + place, best_id)


@triton.jit(do_not_specialize=["num_parts"])
def settle_kernel(
    best_values, best_ids, scores, score_ids, temperatures, broken, num_parts, tokens, row_broken,
    PARTS: tl.constexpr
):  # fmt: skip
    """Writes int64 tokens and int32 row_broken [N]."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    places, inside = row * num_parts + parts, parts < num_parts
    values = tl.load(best_values + places, mask=inside, other=float("-inf"))
    highest = tl.max(values, axis=0)
    if (tl.load(temperatures + row) > 0) & (highest > float("-inf")):
        noisy = tl.load(scores + places, mask=inside, other=float("-inf"))
        ids = tl.load(score_ids + places, mask=inside, other=0)
        leading = tl.max(noisy, axis=0)
        token = tl.min(tl.where((noisy == leading) & inside, ids, 1 << 62), axis=0)
    else:
        ids = tl.load(best_ids + places, mask=inside, other=0)
        token = tl.min(tl.where((values == highest) & inside, ids, 1 << 62), axis=0)
    tl.store(tokens + row, token)
    is_broken = tl.load(broken + places, mask=inside, other=0)
    tl.store(row_broken + row, tl.max(is_broken, axis=0))


@triton.jit
def mask_kernel(logits, row_stride, vocab_size, rows, words, num_words, TILE: tl.constexpr):
    """Sets fp32 logits to -inf where their bit of int32 words [R, num_words] is 0; rows int64 [R]."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    word = tl.load(words + place * num_words + ids // 32, mask=inside, other=-1)
    row_logits = logits + tl.load(rows + place) * row_stride
    tl.store(row_logits + ids, float("-inf"), mask=inside & (((word >> (ids % 32)) & 1) == 0))


def mask_on_device(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set to -inf, in place, what may not be drawn: `words` int32 [R, ceil(V / 32)] are TokenMasks' of `rows` int64 [R]
    of logits fp32 [N, V]. Nothing synchronises with the host."""
    vocab_size, num_words = logits.shape[1], words.shape[1]
    mask_kernel[(len(rows), triton.cdiv(vocab_size, TILE))](
        logits, logits.stride(0), vocab_size, rows, words, num_words, TILE=TILE, num_warps=8
    )


def draw_on_device(logits: Tensor, parameters: DrawParameters) -> tuple[Tensor, Tensor]:
    """One token for each row of logits fp32 [N, V]: (int64 [N] tokens, int32 [N] whether the row held NaN or +inf).

    A row of -inf alone gives token 0. Nothing synchronises with the host; may be captured in a CUDA graph.
    """
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, PART)
    device = logits.device

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    values, ids, broken = new(torch.float32, rows, parts), new(torch.int64, rows, parts), new(torch.int32, rows, parts)
    scores, score_ids = new(torch.float64, rows, parts), new(torch.int64, rows, parts)
    floors, cuts, last_equals = new(torch.float64, rows), new(torch.float32, rows), new(torch.int64, rows)
    tokens, row_broken = new(torch.int64, rows), new(torch.int32, rows)
    parts_extent = power_of_two(parts)
    row_logits = (logits, logits.stride(0), vocab_size)
    extremes_kernel[(rows, parts)](*row_logits, values, ids, broken, PART=PART, TILE=TILE, num_warps=8)
    cut_kernel[(rows,)](
        *row_logits, values, parts, parameters.temperature, parameters.top_k, parameters.top_p, parameters.log_min_p,
        floors, cuts, last_equals, TILE=TILE, PARTS=parts_extent, num_warps=8,
    )  # fmt: skip
    race_kernel[(rows, parts)](
        *row_logits, values, parts, parameters.temperature, parameters.keys, floors, cuts, last_equals,
        scores, score_ids, PARTS=parts_extent, PART=PART, TILE=TILE, num_warps=8,
    )  # fmt: skip
    settle_kernel[(rows,)](
        values, ids, scores, score_ids, parameters.temperature, broken, parts, tokens, row_broken,
        PARTS=parts_extent, num_warps=1,
    )  # fmt: skip
    return tokens, row_broken
