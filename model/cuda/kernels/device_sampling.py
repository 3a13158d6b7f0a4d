"""Drawing tokens wholly on a GPU, in launches whose grids depend on the shape alone: nothing waits for the host.

What is drawn is written down in model/sampling/sampler.py, whose TorchSampling is the reference. Probabilities are
summed as integers (2^-44 of the largest one), so that a sum does not depend on the order in which programs add: a row's
token is the same in every batch and at every split of the rows.

    extremes    grid (rows, parts)   largest logit of each group of 512, and whether it is sound
    prepare     grid (rows)          what a row's filters begin with, and the token that a greedy row takes
    weigh       grid (rows, parts)   three times for top_k, then three times for top_p: a digit of the cut
    cut         grid (rows)          after each three: the last logit that is kept, and which of its equals
    race        grid (rows, parts)   the best of the kept logits plus Gumbel noise, of each part
    settle      grid (rows)          the token

top_k and top_p keep the largest logits, down to where their number or mass reaches a target. That cut is a radix select
(as for GPUs in Alabi, Blanchard, Gordon & Steinbach 2012): the distance of a logit from the largest, in floats that lie
between, is a number of 32 bits. The first pass adds the weights of the logits to 2,048 bins of equal distance, the next
ones bin what lies in the bin where the sum crosses the target, until a bin is one float. Bins are a row's, in
global memory, and every program of the next pass finds the crossing by itself. What surely lies beyond the cut goes to
no bin: for top_k whatever is below as many groups' largest, for top_p what is too small to be missed. So of a
language model's logits few meet in an atomic addition; of flat ones all do, which is the slowest case.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.cuda.kernels.launch import power_of_two
from twostroke.model.sampling.sampler import GOLDEN, MIX_1, MIX_2

_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
_MIX_1: tl.constexpr = tl.constexpr(MIX_1)
_MIX_2: tl.constexpr = tl.constexpr(MIX_2)
_LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_UNIT: tl.constexpr = tl.constexpr(2.0**44)  # of the fixed-point masses: 2^18 tokens of mass 1 fit into 63 bits
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_DIGIT: tl.constexpr = tl.constexpr(11)  # bits of a distance that a pass settles
_BINS: tl.constexpr = tl.constexpr(1 << 11)
_PASSES: tl.constexpr = tl.constexpr(3)  # 11 bits each: all 32
_FIELDS: tl.constexpr = tl.constexpr(8)  # of a search, six of which are in use
_OFF: tl.constexpr = tl.constexpr(-1)  # the shift of a search that is over, or was none
_FEW: tl.constexpr = tl.constexpr(2)  # kept logits of a tile up to which bounds of all of them are not worth it
_SLACK: tl.constexpr = tl.constexpr(1e-4)  # more than the rounding of a bound above _HOPELESS
_HOPELESS: tl.constexpr = tl.constexpr(-50.0)  # the largest logit of a row scores -3.7 at least

TILE = 2048  # logits that a program looks at, at a time
GROUP = 512  # of them whose largest is kept
_PROGRAMS = 1024  # rows are split into parts of one tile up to this many programs, and then into larger parts
_LARGEST_PART = 4  # tiles


@dataclass(frozen=True)
class DrawParameters:
    """Sampling parameters of N rows, on the device. `temperature` 0 is greedy; the rest as in SamplingParams."""

    temperature: Tensor  # fp64 [N]
    top_k: Tensor  # int32 [N]: 0 is off
    top_p: Tensor  # fp64 [N]: 1 and more is off
    log_min_p: Tensor  # fp64 [N]: ln(min_p), -inf is off
    keys: Tensor  # int64 [N]: the bits of `row_keys`


class SamplingFeatures(NamedTuple):
    """Features that some row asks for, as far as the host knows: others are not launched. Tokens don't depend on it."""

    draws: bool = True  # any temperature above 0; the others matter to these rows alone
    top_k: bool = True
    top_p: bool = True


EVERYTHING = SamplingFeatures()


class _Search(NamedTuple):
    """State of the search for one filter's cut."""

    states: Tensor  # int64 [_PASSES, N, _FIELDS]: as `_narrow` gives them before each pass, then the sum of all weights
    bins: Tensor  # int64 [_PASSES, N, _BINS]: weights that each pass found


@triton.jit
def _sound(logits):
    """NaN is never drawn, and +inf is the largest number."""
    return tl.where(logits != logits, float("-inf"), tl.minimum(logits, _LARGEST))


@triton.jit
def _rank(logits):
    """uint32 that are ordered as the logits are; +0 and -0 are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _of_rank(rank):
    bits = rank.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ -0x80000000, ~bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(row_logits, ids, vocab_size):
    return _sound(tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf")))


@triton.jit
def _exponents(values, highest, least, rate):
    """(l - m) / T in fp32, of what is far below `highest` -200; no temperature makes it NaN."""
    return tl.maximum(values - highest, least) * rate


@triton.jit
def _masses(values, highest, least, rate):
    """exp((l - m) / T) as multiples of 2^-44."""
    return (tl.exp2(_exponents(values, highest, least, rate) * _LOG2_E) * _UNIT).to(tl.int64)


@triton.jit
def _weights(values, counts, highest, least, rate, MASSES: tl.constexpr):
    """int64: the masses, or the number, of the logits that count."""
    weights = counts.to(tl.int64)
    if MASSES:
        weights = tl.where(counts, _masses(values, highest, least, rate), 0)
    return weights


@triton.jit
def _is_kept(values, ids, cut, last):
    """Return which rows keep a logit: those above the cut, and of those that equal it the ids up to `last`."""
    return (values > cut) | ((values == cut) & (ids <= last))


@triton.jit
def extremes_kernel(
    logits, row_stride, vocab_size, part, group_values, group_ids, broken, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Writes fp32, int32 and int32 [N, groups], of whole tiles; of equal logits the lowest id counts."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * part
    GROUPS: tl.constexpr = TILE // GROUP
    row_logits = logits + row * row_stride
    row_groups = row * (tl.cdiv(vocab_size, TILE) * GROUPS)
    for start in range(first, tl.minimum(first + part, vocab_size), TILE):
        ids = start + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = ids < vocab_size
        raw = tl.load(row_logits + ids, mask=inside, other=0.0)
        values = tl.where(inside, _sound(raw), float("-inf"))
        highest = tl.max(values, axis=1)
        places = row_groups + start // GROUP + tl.arange(0, GROUPS)
        tl.store(group_values + places, highest)
        is_first = (values == highest[:, None]) & inside
        tl.store(group_ids + places, tl.min(tl.where(is_first, ids, vocab_size), axis=1))
        tl.store(broken + places, tl.max(((raw != raw) | (raw == float("inf"))).to(tl.int32), axis=1))


@triton.jit
def _begin(states, bins, row, distance, is_on, BINS: tl.constexpr):
    """A row's search for a cut that is at most `distance` below its largest logit; its bins are empty."""
    rows = tl.num_programs(0)
    bits = tl.sum(((distance >> tl.arange(0, 32).to(tl.uint32)) > 0).to(tl.int32), axis=0)
    shift = tl.where(is_on, tl.maximum(bits - _DIGIT, 0), _OFF)
    fields = tl.arange(0, _FIELDS)
    tl.store(states + row * _FIELDS + fields, tl.where(fields == 1, shift, 0).to(tl.int64))
    if is_on:
        for index in range(_PASSES):
            tl.store(bins + (index * rows + row) * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))


@triton.jit(do_not_specialize=["num_groups", "has_top_k", "has_top_p"])
def prepare_kernel(
    vocab_size, num_groups, has_top_k, has_top_p, group_values, group_ids, broken, temperatures, top_ks, top_ps,
    log_min_ps, highests, leasts, rates, cuts, lasts, drawn, k_states, k_bins, p_states, p_bins,
    GROUPS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Writes fp32 highests, leasts, rates and cuts and int32 lasts [N], int64 drawn [2, N], and how searches begin."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    places, is_group = row * num_groups + groups, groups < num_groups
    values = tl.load(group_values + places, mask=is_group, other=float("-inf"))
    ids = tl.load(group_ids + places, mask=is_group, other=vocab_size)
    highest = tl.max(values, axis=0)
    token = tl.min(tl.where(values == highest, ids, vocab_size), axis=0)
    is_broken = tl.max(tl.load(broken + places, mask=is_group, other=0), axis=0)
    tl.store(drawn + row, token.to(tl.int64))
    tl.store(drawn + tl.num_programs(0) + row, is_broken.to(tl.int64))
    tl.store(highests + row, highest)
    temperature = tl.load(temperatures + row)
    draws = (temperature > 0) & (highest > float("-inf"))
    if draws:
        rate = tl.minimum(1.0 / temperature, 1e30)
        tl.store(rates + row, rate.to(tl.float32))
        tl.store(leasts + row, -tl.minimum(200.0 / rate, _LARGEST).to(tl.float32))
        # min_p: the least fp32 that is not below the fp64 floor, and never -inf.
        floor = tl.maximum(highest.to(tl.float64) + temperature * tl.load(log_min_ps + row), -_LARGEST)
        cut = floor.to(tl.float32)
        cut = tl.where(cut.to(tl.float64) < floor, _of_rank(_rank(cut) + 1), cut)
        tl.store(cuts + row, cut)
        tl.store(lasts + row, vocab_size)
        if has_top_k:
            top_k = tl.load(top_ks + row)
            low = cut
            is_finite = values > float("-inf")
            if top_k <= tl.sum(is_finite.to(tl.int32), axis=0):
                # Each group has a logit as large as its largest: what k groups reach is a bound of the k-th largest.
                low = tl.min(tl.where(is_finite, values, highest), axis=0)
                high = highest
                for _ in range(10):
                    middle = low * 0.5 + high * 0.5
                    is_reached = tl.sum((values >= middle).to(tl.int32), axis=0) >= top_k
                    low = tl.where(is_reached, middle, low)
                    high = tl.where(is_reached, high, middle)
                low = tl.maximum(low, cut)
            is_on = (top_k > 0) & (top_k < vocab_size)
            _begin(k_states, k_bins, row, _rank(highest) - _rank(low), is_on, BINS)
        if has_top_p:
            top_p = tl.load(top_ps + row)
            # All V logits from here on have less than half of the 1 - p that top_p may lose; beyond 31 masses are 0.
            spread = tl.minimum(tl.log(2.0 * vocab_size / tl.maximum(1.0 - top_p, 1e-18)), 31.0)
            low = tl.maximum(highest.to(tl.float64) - temperature * spread, cut.to(tl.float64)).to(tl.float32)
            _begin(p_states, p_bins, row, _rank(highest) - _rank(low), top_p < 1.0, BINS)
    else:
        if has_top_k:
            _begin(k_states, k_bins, row, tl.zeros([], tl.uint32), False, BINS)
        if has_top_p:
            _begin(p_states, p_bins, row, tl.zeros([], tl.uint32), False, BINS)


@triton.jit
def _narrow(states, bins, row, top_ks, top_ps, MASSES: tl.constexpr, PASS: tl.constexpr, BINS: tl.constexpr):
    """A search before its pass number PASS, from 0 on: (base, shift, above, within, target), int64.

    The cut is one of the (BINS << shift) distances from `base` on, before which logits weigh `above`; it is `base`, of
    weight `within`, where `shift` is _OFF. `within` 0 cuts nothing off.
    """
    rows = tl.num_programs(0)
    EARLIER: tl.constexpr = PASS - 1 if PASS > 0 else 0
    state = states + (EARLIER * rows + row) * _FIELDS
    base, shift, above = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    within, target = tl.load(state + 3), tl.load(state + 4)
    if PASS > 0:  # noqa: SIM102 - Triton would ask both on the device
        if shift >= 0:
            if PASS == 1:
                total = tl.load(state + 5)
                if MASSES:
                    wanted = total.to(tl.float64) * tl.load(top_ps + row)
                    target = wanted.to(tl.int64)
                    target += (target.to(tl.float64) < wanted).to(tl.int64)
                    target = tl.minimum(tl.maximum(target, 1), total)
                else:
                    target = tl.load(top_ks + row).to(tl.int64)
                    target = tl.where(target < total, target, total + 1)  # reached nowhere: all are kept
            numbers = tl.arange(0, BINS)
            weights = tl.load(bins + (EARLIER * rows + row) * BINS + numbers)
            reached = above + tl.cumsum(weights, axis=0)
            crossing = tl.min(tl.where(reached >= target, numbers, BINS), axis=0)
            above += tl.sum(tl.where(numbers < crossing, weights, 0), axis=0)
            within = tl.sum(tl.where(numbers == crossing, weights, 0), axis=0)
            base += crossing.to(tl.int64) << shift
            shift = tl.where((shift > 0) & (crossing < BINS), tl.maximum(shift - _DIGIT, 0), _OFF)
    return base, shift, above, within, target


@triton.jit
def weigh_kernel(
    logits, row_stride, vocab_size, part, highests, leasts, rates, top_ks, top_ps, cuts, lasts, states, bins,
    MASSES: tl.constexpr, PASS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds the number, or the mass, of a row's kept logits to the bins of one pass; pass 0 sums all of them, too."""
    row, first, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * part, tl.num_programs(0)
    base, shift, above, within, target = _narrow(states, bins, row, top_ks, top_ps, MASSES, PASS, BINS)
    if PASS > 0 and first == 0:
        state = states + (PASS * rows + row) * _FIELDS
        tl.store(state, base)
        tl.store(state + 1, shift)
        tl.store(state + 2, above)
        tl.store(state + 3, within)
        tl.store(state + 4, target)
    if shift < 0:
        return
    row_logits = logits + row * row_stride
    row_bins = bins + (PASS * rows + row) * BINS
    highest, least, rate = tl.load(highests + row), tl.load(leasts + row), tl.load(rates + row)
    cut, last = tl.load(cuts + row), tl.load(lasts + row)
    high_rank, base, shift = _rank(highest), base.to(tl.uint32), shift.to(tl.uint32)
    total = tl.zeros([], tl.int64)
    for start in range(first, tl.minimum(first + part, vocab_size), TILE):
        ids = start + tl.arange(0, TILE)
        values = _load(row_logits, ids, vocab_size)
        is_kept = _is_kept(values, ids, cut, last)
        # Distances lie below 2^32 - 2^24: what comes before `base` wraps to far behind all bins.
        digits = (high_rank - _rank(values) - base) >> shift
        is_binned = is_kept & (digits < BINS)
        if PASS == 0:
            total += tl.sum(_weights(values, is_kept, highest, least, rate, MASSES), axis=0)
        if tl.max(is_binned.to(tl.int32), axis=0) > 0:
            weights = _weights(values, is_binned, highest, least, rate, MASSES)
            tl.atomic_add(row_bins + digits.to(tl.int32), weights, mask=weights > 0, sem="relaxed")
    if PASS == 0:
        tl.atomic_add(states + row * _FIELDS + 5, total, sem="relaxed")


@triton.jit
def cut_kernel(
    logits, row_stride, vocab_size, highests, leasts, rates, top_ks, top_ps, cuts, lasts, states, bins,
    MASSES: tl.constexpr, PASSES: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Moves the cuts and lasts of rows up to where a search has ended."""
    row = tl.program_id(0).to(tl.int64)
    base, _, above, within, target = _narrow(states, bins, row, top_ks, top_ps, MASSES, PASSES, BINS)
    if within == 0:
        return
    row_logits = logits + row * row_stride
    highest = tl.load(highests + row)
    value = _of_rank(_rank(highest) - base.to(tl.uint32))
    one = tl.full([], 1, tl.int64)
    if MASSES:
        one = _masses(value, highest, tl.load(leasts + row), tl.load(rates + row))
    last = tl.where(value == tl.load(cuts + row), tl.load(lasts + row), vocab_size)
    needed = (target - above + one - 1) // one
    if needed < within // one:
        # Of equal logits those with the lower ids: that of the last one needed.
        seen, found, start = tl.zeros([], tl.int64), last, tl.zeros([], tl.int32)
        while (seen < needed) & (start < vocab_size):
            ids = start + tl.arange(0, TILE)
            equal = (_load(row_logits, ids, vocab_size) == value).to(tl.int64)
            order = tl.cumsum(equal, axis=0) + seen
            found = tl.minimum(found, tl.min(tl.where((equal == 1) & (order == needed), ids, vocab_size), axis=0))
            seen += tl.sum(equal, axis=0)
            start += TILE
        last = found
    tl.store(cuts + row, value)
    tl.store(lasts + row, last)


@triton.jit
def _random(key, ids):
    """52 bits, of SplitMix64's outputs: see model/sampling/sampler.py."""
    x = key + (ids + 1).to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    return x >> 12


@triton.jit
def _gumbel(key, ids):
    """Standard Gumbel noise fp64."""
    uniform = (_random(key, ids).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _most_gumbel(key, ids):
    """Noise that `_gumbel`'s exceeds by less than 1e-5, fp32: -ln(-ln(u)) <= -ln(1 - u).

    For that logarithm log2(x) >= exponent + mantissa - 1 is enough; both read as one fixed-point number.
    """
    left = (1 << 52) - 1 - _random(key, ids)
    complement = (left.to(tl.int64).to(tl.float32) + 0.5) * 2.220446049250313e-16
    return (127.0 - complement.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07) * 0.6931472


@triton.jit
def race_kernel(
    logits, row_stride, vocab_size, part, highests, leasts, rates, temperatures, keys, cuts, lasts, scores, score_ids,
    TILE: tl.constexpr,
):  # fmt: skip
    """Writes fp64 scores and int32 score_ids [N, parts]; nothing for rows where nothing is drawn.

    A score's logarithms in fp64 would cost more than all else: it is computed for those alone, the most promising
    first, that a bound does not show to lose, one or two of a tile.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * part
    temperature, highest = tl.load(temperatures + row), tl.load(highests + row)
    if (temperature <= 0) | (highest == float("-inf")):
        return
    row_logits = logits + row * row_stride
    least, rate = tl.load(leasts + row), tl.load(rates + row)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    cut, last = tl.load(cuts + row), tl.load(lasts + row)
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.zeros([], tl.int32)
    for start in range(first, tl.minimum(first + part, vocab_size), TILE):
        ids = start + tl.arange(0, TILE)
        values = _load(row_logits, ids, vocab_size)
        is_kept = _is_kept(values, ids, cut, last)
        bounds = tl.where(is_kept, _LARGEST, float("-inf"))
        if tl.sum(is_kept.to(tl.int32), axis=0) > _FEW:
            bounds = _exponents(values, highest, least, rate) + _most_gumbel(key, ids) + _SLACK
            bounds = tl.where(is_kept, bounds, float("-inf"))
        leading = tl.max(bounds, axis=0)
        while (leading > _HOPELESS) & (leading.to(tl.float64) >= best):
            token = tl.min(tl.where(bounds == leading, ids, vocab_size), axis=0)
            one = token + tl.arange(0, 1)  # of one, for the interpreter warns where bare numbers wrap
            value = _sound(tl.load(row_logits + one)).to(tl.float64)
            score = tl.max((value - highest.to(tl.float64)) / temperature + _gumbel(key, one), axis=0)
            best_id = tl.where((score > best) | ((score == best) & (token < best_id)), token, best_id)
            best = tl.maximum(best, score)
            bounds = tl.where(ids == token, float("-inf"), bounds)
            leading = tl.max(bounds, axis=0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + place, best)
    tl.store(score_ids + place, best_id)


@triton.jit(do_not_specialize=["num_parts"])
def settle_kernel(highests, temperatures, scores, score_ids, num_parts, drawn, PARTS: tl.constexpr):
    """Writes the int64 drawn [N] of rows that draw."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperatures + row) <= 0) | (tl.load(highests + row) == float("-inf")):
        return
    parts = tl.arange(0, PARTS)
    places, inside = row * num_parts + parts, parts < num_parts
    noisy = tl.load(scores + places, mask=inside, other=float("-inf"))
    ids = tl.load(score_ids + places, mask=inside, other=0)
    leading = tl.max(noisy, axis=0)
    tl.store(drawn + row, tl.min(tl.where((noisy == leading) & inside, ids, 0x7FFFFFFF), axis=0).to(tl.int64))


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


def draw_on_device(logits: Tensor, parameters: DrawParameters, features: SamplingFeatures = EVERYTHING) -> Tensor:
    """One token for each row of logits fp32 [N, V]: int64 [2, N], tokens, and 1 where the row held NaN or +inf.

    A row of -inf alone gives token 0. Nothing synchronises with the host; may be captured in a CUDA graph.
    """
    rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, TILE)
    part = TILE * max(1, min(_LARGEST_PART, rows * tiles // _PROGRAMS))
    parts, groups = triton.cdiv(vocab_size, part), tiles * (TILE // GROUP)
    device = logits.device

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def search(is_asked: bool) -> _Search:
        count = rows if is_asked else 0
        return _Search(
            new(torch.int64, _PASSES.value, count, _FIELDS.value), new(torch.int64, _PASSES.value, count, _BINS.value)
        )

    values, ids, broken = (new(dtype, rows, groups) for dtype in (torch.float32, torch.int32, torch.int32))
    highests, leasts, rates, cuts = (new(torch.float32, rows) for _ in range(4))
    lasts = new(torch.int32, rows)
    drawn = new(torch.int64, 2, rows)
    has_top_k, has_top_p = features.draws and features.top_k, features.draws and features.top_p
    by_count, by_mass = search(has_top_k), search(has_top_p)
    row_logits = (logits, logits.stride(0), vocab_size)
    extremes_kernel[(rows, parts)](*row_logits, part, values, ids, broken, GROUP=GROUP, TILE=TILE, num_warps=8)
    prepare_kernel[(rows,)](
        vocab_size, groups, int(has_top_k), int(has_top_p), values, ids, broken, parameters.temperature,
        parameters.top_k, parameters.top_p, parameters.log_min_p, highests, leasts, rates, cuts, lasts, drawn,
        *by_count, *by_mass, GROUPS=power_of_two(groups), BINS=_BINS.value, num_warps=4,
    )  # fmt: skip
    for is_on, masses, (states, bins) in ((has_top_k, False, by_count), (has_top_p, True, by_mass)):
        if not is_on:
            continue
        filtered = (highests, leasts, rates, parameters.top_k, parameters.top_p, cuts, lasts, states, bins)
        for index in range(_PASSES.value):
            weigh_kernel[(rows, parts)](
                *row_logits, part, *filtered, MASSES=masses, PASS=index, BINS=_BINS.value, TILE=TILE, num_warps=4
            )
        cut_kernel[(rows,)](
            *row_logits, *filtered, MASSES=masses, PASSES=_PASSES.value, BINS=_BINS.value, TILE=TILE, num_warps=8
        )
    if features.draws:
        scores, score_ids = new(torch.float64, rows, parts), new(torch.int32, rows, parts)
        race_kernel[(rows, parts)](
            *row_logits, part, highests, leasts, rates, parameters.temperature, parameters.keys, cuts, lasts,
            scores, score_ids, TILE=TILE, num_warps=4,
        )  # fmt: skip
        settle_kernel[(rows,)](
            highests, parameters.temperature, scores, score_ids, parts, drawn, PARTS=power_of_two(tiles), num_warps=1
        )
    return drawn
