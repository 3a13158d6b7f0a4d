"""Drawing tokens from logits: what exactly is drawn, and how with plain torch operations.

The filters do not depend on how equal logits happen to be sorted, so every implementation keeps the same tokens. With
l the logits, T the temperature and m the largest l, they apply one after the other:

    min_p    keeps l >= m + T ln(min_p), that is p >= min_p * max(p)
    top_k    keeps the k largest l; of equal ones those with the lower ids
    top_p    keeps the fewest of the largest l whose share of what is still kept reaches p; of equal ones as above

So top_k 1 or a tiny top_p is the same as greedy, which takes the lowest id of the largest l.

The draw is Gumbel-max (Gumbel 1954; Maddison, Tarlow & Minka 2014): argmax over kept tokens of (l - m) / T + g, in
float64, with g = -ln(-ln(u)) and u from a counter-based generator that knows only (seed, position, token id):

    mix(x):   x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    key     = mix(mix(seed + G) + position * G)             G = 0x9E3779B97F4A7C15, everything modulo 2^64
    bits    = mix(key + (token_id + 1) * G)
    u       = ((bits >> 12) + 0.5) * 2^-52                  exact in float64, never 0 or 1

`mix` is the finaliser of SplitMix64 (Steele, Lea & Flood 2014; constants by Stafford and Vigna), so token t's bits are
output t + 1 of the SplitMix64 generator that starts from the state `key`.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_FIRST_PASS = 1024  # largest logits looked at before top_p resorts to a full sort


@dataclass(frozen=True)
class DrawBatch:
    """Rows to draw from, with their parameters; arrays of one length R. `temperature` is positive."""

    rows: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]  # 0 is off
    top_p: NDArray[np.float64]  # 1 and more is off
    min_p: NDArray[np.float64]  # 0 is off
    keys: NDArray[np.uint64]  # of `row_keys`


class SamplingKernels(Protocol):
    """The operations over the vocabulary. All take fp32 logits [N, V], and all but `mask` leave them as they are."""

    def mask(self, logits: Tensor, rows: NDArray[np.int64], words: NDArray[np.int32]) -> None:
        """Set to -inf what may not be drawn: where `words` [len(rows), ceil(V / 32)] have a 0, as TokenMasks says."""

    def argmax(self, logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The first of the largest logits of each row, and its value; NaN counts as largest."""

    def log_sum_exp(self, logits: Tensor, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """ln(sum(exp(l))) of `rows`, without NaN or +inf in them; -inf for a row without finite logits."""

    def largest(self, logits: Tensor, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Token ids [R, min(count, V)] of the largest logits, the largest first, of equal ones the lower id."""

    def draw(self, logits: Tensor, best: NDArray[np.int64], batch: DrawBatch) -> NDArray[np.int64]:
        """Return one token id for each of `batch.rows`. `best` [R]: their argmax, whose logits are finite."""


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator's state before token 0, for each (seed, position)."""
    golden = np.uint64(GOLDEN)
    return _mix_numpy(_mix_numpy(seeds + golden) + positions * golden)


class TorchSampling:
    """SamplingKernels on any device; on CPUs it is the reference for model/cpu/kernels/sampling.py."""

    def mask(self, logits: Tensor, rows: NDArray[np.int64], words: NDArray[np.int32]) -> None:
        device, vocab_size = logits.device, logits.shape[1]
        bits = torch.from_numpy(words).to(device)[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)
        allowed = (bits & 1).bool().flatten(1)[:, :vocab_size]
        places = torch.from_numpy(rows).to(device)
        logits[places] = logits[places].masked_fill(~allowed, -math.inf)

    def argmax(self, logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        best = logits.argmax(-1, keepdim=True)
        both = torch.cat((best.double(), logits.gather(1, best).double()), 1).cpu().numpy()
        return both[:, 0].astype(np.int64), both[:, 1].astype(np.float32)

    def log_sum_exp(self, logits: Tensor, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = _select(logits, rows).double().logsumexp(-1).cpu().numpy()
        return sums

    def largest(self, logits: Tensor, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        chosen = _select(logits, rows)
        count = min(count, chosen.shape[1])
        smallest = chosen.topk(count).values[:, -1:]
        # topk breaks ties as it likes: keep every candidate, and let a stable sort of the ids in order decide.
        num_candidates = int((chosen >= smallest).sum(-1).max())
        ids = (chosen >= smallest).byte().sort(descending=True, stable=True).indices[:, :num_candidates]
        order = chosen.gather(1, ids).sort(descending=True, stable=True).indices[:, :count]
        largest: NDArray[np.int64] = ids.gather(1, order).cpu().numpy()
        return largest

    def draw(self, logits: Tensor, best: NDArray[np.int64], batch: DrawBatch) -> NDArray[np.int64]:
        chosen = _select(logits, batch.rows)
        device = logits.device
        maximum = chosen.gather(1, torch.from_numpy(best).to(device)[:, None]).double()
        temperature = torch.from_numpy(batch.temperature).to(device)[:, None]
        kept = chosen > -math.inf
        if np.any(batch.min_p > 0):
            min_p = torch.from_numpy(batch.min_p).to(device)[:, None]
            kept &= chosen.double() >= maximum + temperature * min_p.log()
        if np.any(batch.top_k > 0) or np.any(batch.top_p < 1):
            kept &= _in_top(chosen, kept, maximum, temperature, batch)
        scores = (chosen.double() - maximum) / temperature + _gumbel(batch.keys, chosen.shape[1], device)
        drawn: NDArray[np.int64] = scores.masked_fill_(~kept, -math.inf).argmax(-1).cpu().numpy()
        return drawn


def _in_top(logits: Tensor, kept: Tensor, maximum: Tensor, temperature: Tensor, batch: DrawBatch) -> Tensor:
    """Mask [R, V] of what top_k and top_p keep of `kept`; the latter is closed under larger logits."""
    vocab_size = logits.shape[1]
    top_k = torch.from_numpy(np.where(batch.top_k > 0, batch.top_k, vocab_size)).to(logits.device)[:, None]
    top_p = torch.from_numpy(batch.top_p).to(logits.device)[:, None]
    limits = batch.top_k[batch.top_k > 0]
    width = min(vocab_size, max(_FIRST_PASS, int(limits.max()) if limits.size else 0))
    # The mass before top_p, of rows without top_k: their sorted window may not hold all of it.
    whole = ((((logits.double() - maximum) / temperature).exp()) * kept).sum(-1, keepdim=True)
    while True:
        window = logits.topk(width).values
        columns = torch.arange(width, device=logits.device)
        alive = (columns < top_k) & (columns < kept.sum(-1, keepdim=True))
        masses = ((window.double() - maximum) / temperature).exp() * alive
        reached = masses.cumsum(-1)
        total = torch.where(top_k < vocab_size, reached[:, -1:], whole)
        below = (reached < top_p * total) & alive
        if width == vocab_size or not bool((below.all(-1, keepdim=True) & (top_k > width) & (top_p < 1)).any()):
            break
        width = vocab_size
    count = torch.where(top_p < 1, below.sum(-1, keepdim=True) + 1, width).minimum(alive.sum(-1, keepdim=True))
    unlimited = (top_p >= 1) & (top_k > width)
    cut = window.gather(1, count - 1)
    ties = count - (window > cut).sum(-1, keepdim=True)
    equal = logits == cut
    return unlimited | (logits > cut) | (equal & (equal.cumsum(-1) <= ties))


def _gumbel(keys: NDArray[np.uint64], vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise float64 [R, V]. torch has no logical shift of unsigned words: int64 wraps alike."""
    tokens = torch.arange(1, vocab_size + 1, device=device)
    x = torch.from_numpy(keys.view(np.int64)).to(device)[:, None] + tokens * _signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX_2)
    x = x ^ _shift_right(x, 31)
    uniform = (_shift_right(x, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


def _select(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return logits[torch.from_numpy(rows).to(logits.device)]


def _shift_right(x: Tensor, count: int) -> Tensor:
    return (x >> count) & (_MASK >> count)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mix_numpy(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))
