"""SamplingKernels for CPUs: numba over rows, linear in the vocabulary, no full sort.

Each row is done alone, in a fixed order of operations, on one thread without the GIL: a row's result can't depend on
the batch. The reference, and what exactly is drawn, is model/sampling/sampler.py; both are tested to agree.
"""

import math

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.sampling.sampler import GOLDEN, MIX_1, MIX_2, DrawBatch

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_12, _27, _30, _31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)
_ONE_BITS = np.uint64(0x3FF0000000000000)  # of 1.0; or-ed with 52 random bits it is uniform in [1, 2)
_LN2 = math.log(2.0)
_LOG2_E = 1.0 / _LN2
_LN2_HIGH = float.fromhex("0x1.62e42fefa3800p-1")  # the leading bits of ln 2: n * _LN2_HIGH is exact for small n
_LN2_LOW = float.fromhex("0x1.ef35793c76730p-45")
_ROUND = float.fromhex("0x1.8p52")  # adding it rounds to an integer, which then stands in the low bits
_NUM_BINS = 1024
_CHUNK = 256
_SCANNED = 256  # up to this top_k one scan with a short list is quicker than bins
_COUNTING = 1e300  # the temperature at which each finite logit has a mass of exactly 1, and -inf next to nothing


class CpuSampling:
    """SamplingKernels over a vocabulary of `vocab_size`; its scratch memory makes it belong to one thread."""

    def __init__(self, vocab_size: int):
        """Compiles the kernels, or loads them from numba's cache, so that no request waits for that."""
        self._ids = np.arange(vocab_size, dtype=np.int32)
        self._values = np.empty(vocab_size, np.float32)
        self._kept_ids = np.empty(vocab_size, np.int32)
        self._masses = np.empty(vocab_size, np.float64)
        logits, row = torch.zeros(1, vocab_size), np.zeros(1, np.int64)
        one = np.ones(1)
        self.log_sum_exp(logits, row)
        self.largest(logits, row, 1)
        self.draw(logits, row, DrawBatch(row, one, row, one, one, np.zeros(1, np.uint64)))
        self.mask(logits, row, np.zeros((1, -(-vocab_size // 32)), np.int32))

    def mask(self, logits: Tensor, rows: NDArray[np.int64], words: NDArray[np.int32]) -> None:
        _mask(logits.numpy(), rows, words)

    def argmax(self, logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        array = logits.numpy()  # numpy's argmax is vectorised; torch's takes ten times as long
        best: NDArray[np.int64] = array.argmax(axis=1)
        return best, array[np.arange(len(best)), best]

    def log_sum_exp(self, logits: Tensor, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        sums = np.empty(len(rows))
        _log_sum_exp(logits.numpy(), rows, self._masses, sums)
        return sums

    def largest(self, logits: Tensor, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        array = logits.numpy()
        ids = np.empty((len(rows), min(count, logits.shape[1])), np.int64)
        _largest(array, rows, self._ids, self._values, self._kept_ids, ids)
        # Stable, and the ids ascend: of equal logits the lower id comes first.
        order = np.argsort(-array[rows[:, None], ids], axis=1, kind="stable")
        return np.take_along_axis(ids, order, axis=1)

    def draw(self, logits: Tensor, best: NDArray[np.int64], batch: DrawBatch) -> NDArray[np.int64]:
        drawn = np.empty(len(batch.rows), np.int64)
        _draw(
            logits.numpy(),
            batch.rows,
            best,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.keys,
            self._ids,
            self._values,
            self._kept_ids,
            self._masses,
            drawn,
        )
        return drawn


@njit(cache=True, nogil=True)
def _mask(logits, rows, words):
    for r in range(len(rows)):
        values = logits[rows[r]]
        count = len(values)
        for w in range(words.shape[1]):
            word, first = words[r, w], 32 * w
            size = min(32, count - first)
            if word == 0:  # most are
                values[first : first + size] = -np.inf
            elif word != -1:
                for bit in range(size):
                    if not (word >> bit) & 1:
                        values[first + bit] = -np.inf


@njit(cache=True, nogil=True)
def _draw(
    logits, rows, best, temperature, top_k, top_p, min_p, keys, all_ids, values_buffer, ids_buffer, masses, drawn
):
    """Draw for each of `rows`; the three buffers have room for the vocabulary and hold nothing between rows."""
    for r in range(len(rows)):
        values, ids = logits[rows[r]], all_ids
        count = len(values)
        maximum = np.float64(values[best[r]])
        if min_p[r] > 0.0:
            cut = maximum + temperature[r] * math.log(min_p[r])
            count = _keep(values, ids, count, cut, count, values_buffer, ids_buffer)
            values, ids = values_buffer, ids_buffer
        if 0 < top_k[r] < count:
            if top_k[r] <= _SCANNED:
                cut, ties = _kth_largest(values, count, top_k[r])
            else:
                _exponentials(values, count, maximum, _COUNTING, masses)
                cut, ties = _crossing(values, count, maximum, _COUNTING, top_k[r] - 0.5, masses)
            count = _keep(values, ids, count, cut, ties, values_buffer, ids_buffer)
            values, ids = values_buffer, ids_buffer
        if top_p[r] < 1.0:
            _exponentials(values, count, maximum, temperature[r], masses)
            target = top_p[r] * _sum(masses, count)
            cut, ties = _crossing(values, count, maximum, temperature[r], target, masses)
            count = _keep(values, ids, count, cut, ties, values_buffer, ids_buffer)
            values, ids = values_buffer, ids_buffer
        drawn[r] = _race(values, ids, count, maximum, temperature[r], best[r], keys[r])


@njit(cache=True, nogil=True)
def _race(values, ids, count, maximum, temperature, best, key):
    """argmax of (value - maximum) / temperature + Gumbel noise, beginning with token `best`, whose value is `maximum`.

    A cheap upper bound of the noise, -ln(1 - u) with a piecewise linear logarithm, spares all but a few tokens the
    two exact logarithms; the loop that computes it is vectorised.
    """
    bounds = np.empty(_CHUNK)
    score = -math.log(-math.log(_uniform(key, best)))
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        for j in range(size):
            # log2(x) >= exponent + mantissa - 1, with equality at powers of two; both read as one fixed-point number.
            complement = 1.0 - _uniform(key, ids[start + j])
            log2 = np.float64(np.float64(complement).view(np.int64)) * 2.0**-52 - 1023.0
            bounds[j] = (np.float64(values[start + j]) - maximum) / temperature - _LN2 * log2
        for j in range(size):
            if bounds[j] + 1e-6 < score:
                continue
            token = np.int64(ids[start + j])
            noise = -math.log(-math.log(_uniform(key, token)))
            rival = (np.float64(values[start + j]) - maximum) / temperature + noise
            if rival > score or (rival == score and token < best):
                best, score = token, rival
    return best


@njit(cache=True, nogil=True)
def _uniform(key, token):
    """Return an exact number in (0, 1): see model/sampling/sampler.py."""
    x = key + (np.uint64(token) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    x = x ^ (x >> _31)
    return np.uint64((x >> _12) | _ONE_BITS).view(np.float64) - (1.0 - 2.0**-53)


@njit(cache=True, nogil=True)
def _keep(values, ids, count, cut, ties, out_values, out_ids):
    """Move what is above `cut`, and the first `ties` that equal it, to the front of the outputs; returns how many.

    The outputs may be the inputs.
    """
    kept = 0
    for i in range(count):
        value, token = values[i], ids[i]
        out_values[kept] = value
        out_ids[kept] = token
        if value > cut:
            kept += 1
        elif value == cut and ties > 0:
            ties -= 1
            kept += 1
    return kept


@njit(cache=True, nogil=True)
def _kth_largest(values, count, k):
    """The k-th largest value, and how many of its equals are among the k largest. k <= count.

    -inf where fewer than k values are finite.
    """
    capacity = min(max(2 * k, 256), count)
    best = np.empty(capacity, np.float32)
    filled = 0
    threshold = np.float32(-np.inf)
    for i in range(count):
        if values[i] > threshold:
            best[filled] = values[i]
            filled += 1
            if filled == capacity and k < capacity:
                best[:k] = np.sort(best)[capacity - k :]  # numba compiles np.partition four times as long
                threshold = best[0]
                filled = k
    if filled < k:
        return np.float64(-np.inf), k - filled
    ordered = np.sort(best[:filled])[filled - k :]
    ties = 1
    while ties < k and ordered[ties] == ordered[0]:
        ties += 1
    return np.float64(ordered[0]), ties


@njit(cache=True, nogil=True)
def _crossing(values, count, maximum, temperature, target, masses):
    """The value at which the mass of the largest reaches `target`, and how many of its equals that takes.

    `masses` are the values' `_exponentials`. They are summed in bins of equal width; only the bin where the sum crosses
    is sorted.
    """
    # Beyond 64 natural units there is nothing to weigh; those share the last bin.
    span = min(maximum - _smallest_finite(values, count), 64.0 * temperature)
    bins_per_unit = _NUM_BINS / span if span > 0.0 else 0.0
    bins = np.zeros(_NUM_BINS)
    for i in range(count):
        bins[_bin(values[i], maximum, bins_per_unit)] += masses[i]
    reached = 0.0
    crossing = 0
    while crossing < _NUM_BINS and reached + bins[crossing] < target:
        reached += bins[crossing]
        crossing += 1
    if crossing == _NUM_BINS:  # by rounding; everything is needed
        return np.float64(-np.inf), 0
    within = np.empty(count, np.float32)
    size = 0
    for i in range(count):
        if _bin(values[i], maximum, bins_per_unit) == crossing:
            within[size] = values[i]
            size += 1
    within = np.sort(within[:size])[::-1].copy()
    _exponentials(within, size, maximum, temperature, masses)
    ties = 0
    for i in range(size):
        ties = ties + 1 if i > 0 and within[i] == within[i - 1] else 1
        reached += masses[i]
        if reached >= target:
            return np.float64(within[i]), ties
    return np.float64(within[size - 1]), ties


@njit(cache=True, nogil=True)
def _bin(value, maximum, bins_per_unit):
    return int(min((maximum - max(np.float64(value), -1e300)) * bins_per_unit, _NUM_BINS - 1.0))


@njit(cache=True, nogil=True)
def _exponentials(values, count, maximum, temperature, out):
    """exp((value - maximum) / temperature), for values up to `maximum`; relative error below 1e-15.

    Cody and Waite's reduction to |r| <= ln(2) / 2 and a Taylor polynomial, written so that the loop is vectorised,
    which calls of the C library's exp are not.
    """
    for i in range(count):
        x = max((np.float64(values[i]) - maximum) / temperature, -700.0)
        shifted = x * _LOG2_E + _ROUND
        n = shifted - _ROUND
        r = (x - n * _LN2_HIGH) - n * _LN2_LOW
        y = 1.0 / 479001600.0
        y = y * r + 1.0 / 39916800.0
        y = y * r + 1.0 / 3628800.0
        y = y * r + 1.0 / 362880.0
        y = y * r + 1.0 / 40320.0
        y = y * r + 1.0 / 5040.0
        y = y * r + 1.0 / 720.0
        y = y * r + 1.0 / 120.0
        y = y * r + 1.0 / 24.0
        y = y * r + 1.0 / 6.0
        y = y * r + 0.5
        y = y * r + 1.0
        y = y * r + 1.0
        power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
        out[i] = y * power


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum(values, count):
    total = 0.0
    for i in range(count):
        total += values[i]
    return total


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
def _smallest_finite(values, count):
    smallest = np.float32(np.inf)
    for i in range(count):
        value = values[i] if values[i] > -np.inf else np.float32(np.inf)
        smallest = min(smallest, value)
    return np.float64(smallest)


@njit(cache=True, nogil=True)
def _log_sum_exp(logits, rows, masses, sums):
    for r in range(len(rows)):
        values = logits[rows[r]]
        maximum = np.float64(values[np.argmax(values)])
        if maximum == -np.inf:
            sums[r] = -np.inf
            continue
        _exponentials(values, len(values), maximum, 1.0, masses)
        sums[r] = maximum + math.log(_sum(masses, len(values)))


@njit(cache=True, nogil=True)
def _largest(logits, rows, all_ids, values_buffer, ids_buffer, largest):
    """The ids of the largest of each row, in ascending order of ids."""
    count = largest.shape[1]
    for r in range(len(rows)):
        values = logits[rows[r]]
        cut, ties = _kth_largest(values, len(values), count)
        _keep(values, all_ids, len(values), cut, ties, values_buffer, ids_buffer)
        for i in range(count):
            largest[r, i] = ids_buffer[i]
