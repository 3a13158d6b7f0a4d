"""Sampling on the host: log-probabilities, adjustments, greedy choice or seeded draw.

Logits lie in parts of the vocabulary on tensor-parallel ranks. A greedy token needs of each rank its largest logit
alone: 24 bytes a row, where logits of 128k tokens are half a megabyte. Everything else needs all logits on rank 0.

A token depends on its own row of logits, its Draw and its position: never on the batch around it. What is drawn, to the
bit, stands below.

Before the draw a request may change its logits, in this order, which is that of vLLM and transformers. With c(t) the
times t occurs among the output tokens:

    bias          l(t) += logit_bias(t)
    repetition    l(t) /= r where l(t) > 0, l(t) *= r elsewhere, for each t in prompt or output (Keskar et al. 2019)
    frequency     l(t) -= frequency_penalty * c(t)          (OpenAI's formula)
    presence      l(t) -= presence_penalty * [c(t) > 0]
    forbidden     l(t) = -inf, also where `allowed_token_ids` lack t, or where it ends a bad word
                  (where all of `allowed_token_ids` are forbidden otherwise, they may be drawn all the same)
    grammar       l(t) = -inf where it lets no t follow (and no `forbidden`, which is in the mask as far as it can be)

All in fp32, with one scatter for each kind, whatever the number of rows. Ids outside the vocabulary have no effect.

**What is drawn.** The filters do not depend on how equal logits happen to be sorted, so every implementation keeps
the same tokens. With l the logits, T the temperature and m the largest l, they apply one after the other:

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from twostroke.model.batch import place
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.model.sampling.token_masks import TokenMasks
from twostroke.model.step import Draw, ScoredRows, TokenCounts, is_penalised, note_broken
from twostroke.protocol.requests import SampledToken

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


def gather_logits(logits: Tensor, vocab_size: int, parallel: TensorParallel) -> Tensor:
    """Each rank's part fp32 [N, its vocabulary] -> [N, vocab_size] on rank 0; others get their own part back."""
    if parallel.shard.size == 1:
        return logits
    width = -(-vocab_size // parallel.shard.size)
    parts = parallel.gather(functional.pad(logits, (0, width - logits.shape[1])).contiguous())
    return torch.cat(parts, dim=1)[:, :vocab_size].contiguous() if parts else logits


def largest_of_ranks(logits: Tensor, vocab_size: int, parallel: TensorParallel) -> Tensor | None:
    """Return, on rank 0, int64 [2, N]: the token of each row's largest logit, from each rank's part fp32 [N, its
    vocabulary], and a flag for rows that held NaN, which is never drawn, or +inf, which counts as the largest number.
    None on other ranks.

    Of equal logits the first token is drawn; token 0 where there is nothing but NaN and -inf.
    """
    first, count = parallel.shard.vocabulary(vocab_size).start, len(logits)
    found = torch.zeros((3, count), dtype=torch.float64, device=logits.device)  # logit, token, whether it is broken
    found[0] = -torch.inf
    if logits.shape[1]:
        sound = logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
        values, tokens = sound.max(1)
        found[0], found[1], found[2] = values, tokens + first, (logits != sound).any(1)
    parts = parallel.gather(found)
    if not parts:
        return None
    values, tokens, broken = torch.stack(parts).unbind(1)  # each [ranks, N]
    is_largest = values == values.amax(0)
    token = torch.where(is_largest, tokens, torch.inf).amin(0)  # a double holds any token exactly
    return torch.stack((token, broken.amax(0))).long()


MIN_LOGPROB = -9999.0
"""Stands for the log-probability of an impossible token: JSON has no infinity, and OpenAI's API uses this number."""

_WORD = (1 << 64) - 1
_Entry = tuple[int, NDArray[np.int64], NDArray[np.float32]]  # row, token ids, one value each


class Sampler:
    """Draws tokens for batches of rows over a vocabulary of `vocab_size`. Belongs to one thread."""

    def __init__(self, vocab_size: int, kernels: SamplingKernels | None = None):
        """`kernels` are those of the logits' device; None: torch's."""
        self.vocab_size = vocab_size
        self.num_broken_rows = 0
        """Rows so far that tokens were drawn from, and that held NaN (never drawn) or +inf (clamped): 0 with a sound
        model and cache. Rows of scored prompts are not counted: a step may have many beside few draws."""
        self._kernels = TorchSampling() if kernels is None else kernels

    def sample(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], masks: TokenMasks | None = None
    ) -> list[SampledToken]:
        """One token per row of `logits` (fp32 [N, V], modified in place), drawn for its absolute position.

        `masks` are those of the draws with a constraint.
        Where no token is left that may be drawn, token 0 is returned: a request may forbid everything, and must not
        end its neighbours with it. Raises ValueError where the arguments' shapes or types do not fit.
        """
        if logits.shape != (len(draws), self.vocab_size) or logits.dtype != torch.float32:
            raise ValueError(f"logits of {len(draws)} draws can't be {logits.dtype} {tuple(logits.shape)}")
        if len(positions) != len(draws):
            raise ValueError(f"{len(draws)} draws at {len(positions)} positions")
        if not draws:
            return []
        logits = logits.detach().contiguous()
        tokens, maxima = self._kernels.argmax(logits)
        self._mend(logits, tokens, maxima, draws)

        reported = np.array([i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None], np.int64)
        adjusted = [i for i, draw in enumerate(draws) if draw.is_adjusted]
        raw = logits
        if reported.size and adjusted:
            raw = logits.clone()
        if adjusted:
            adjust(logits, adjusted, [draws[i] for i in adjusted])
            if masks is not None:
                self._kernels.mask(logits, masks.rows, masks.words)
            tokens[adjusted], maxima[adjusted] = self._kernels.argmax(logits[adjusted])

        drawn = np.array([i for i, draw in enumerate(draws) if not draw.is_greedy and np.isfinite(maxima[i])], np.int64)
        if drawn.size:
            batch = _draw_batch(drawn, draws, positions)
            tokens[drawn] = self._kernels.draw(logits, tokens[drawn], batch)
        if reported.size:
            return self._with_logprobs(raw, tokens, reported, draws)
        return [SampledToken(token) for token in tokens.tolist()]

    def score(self, logits: Tensor, targets: NDArray[np.int64], num_alternatives: int) -> ScoredRows:
        """Score `targets` [N] by `logits` (fp32 [N, V], may be modified), and return the likeliest tokens too."""
        logits = logits.detach().contiguous()
        self._mend(logits, *self._kernels.argmax(logits))
        rows, ids = np.arange(len(targets)), targets[:, None]
        if num_alternatives:
            ids = np.concatenate((ids, self._kernels.largest(logits, rows, num_alternatives)), axis=1)
        own = logits.gather(1, torch.from_numpy(targets).to(logits.device)[:, None])
        ranks = (logits > own).sum(-1, dtype=torch.int32) + 1
        return ScoredRows(
            ids[:, 1:].astype("<i4"), self._logprobs(logits, rows, ids).astype("<f4"), ranks.cpu().numpy().astype("<i4")
        )

    def take(self, drawn: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
        """Return the tokens that `largest_of_ranks` found for these draws."""
        tokens, are_broken = drawn.tolist()
        self.num_broken_rows += sum(are_broken)
        note_broken(draws, unsound_rows(tokens, are_broken))
        return [SampledToken(token) for token in tokens]

    def _logprobs(self, logits: Tensor, rows: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the log-probabilities of `ids` [R, K] in `rows` [R]."""
        row_index = torch.from_numpy(rows).to(logits.device)[:, None]
        values = logits[row_index, torch.from_numpy(ids).to(logits.device)].double().cpu().numpy()
        logprobs = np.full(values.shape, MIN_LOGPROB)
        np.subtract(values, self._kernels.log_sum_exp(logits, rows)[:, None], out=logprobs, where=values > -np.inf)
        np.maximum(logprobs, MIN_LOGPROB, out=logprobs)
        return logprobs

    def _mend(
        self, logits: Tensor, tokens: NDArray[np.int64], maxima: NDArray[np.float32], draws: Sequence[Draw] = ()
    ) -> None:
        """Take NaN and +inf out of rows that hold any, which shows in their largest logit. A row of nothing else is the
        fault of its draw."""
        broken = np.flatnonzero(np.isnan(maxima) | (maxima == np.inf))
        if broken.size == 0:
            return
        rows = torch.from_numpy(broken).to(logits.device)
        largest = torch.finfo(torch.float32).max
        logits[rows] = logits[rows].nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
        tokens[broken], maxima[broken] = self._kernels.argmax(logits[rows])
        if draws:
            self.num_broken_rows += broken.size
            note_broken(draws, [int(row) for row in broken if maxima[row] == -np.inf])

    def _with_logprobs(
        self, raw: Tensor, tokens: NDArray[np.int64], reported: NDArray[np.int64], draws: Sequence[Draw]
    ) -> list[SampledToken]:
        """Return all rows' tokens, with log-probabilities of the raw distribution for the `reported` rows."""
        results = [SampledToken(token) for token in tokens.tolist()]
        counts = [draws[i].sampling.logprobs or 0 for i in reported]
        ids = tokens[reported, None]
        if max(counts) > 0:
            ids = np.concatenate((ids, self._kernels.largest(raw, reported, max(counts))), axis=1)
        logprobs = self._logprobs(raw, reported, ids)
        for i, row_ids, row_logprobs, count in zip(
            reported.tolist(), ids.tolist(), logprobs.tolist(), counts, strict=True
        ):
            top = tuple(zip(row_ids[1 : count + 1], row_logprobs[1 : count + 1], strict=True))
            results[i] = SampledToken(row_ids[0], row_logprobs[0], top)
        return results


def unsound_rows(tokens: Sequence[int], are_broken: Sequence[int]) -> list[int]:
    """Return the rows of broken logits without any token left: token 0 stands for them."""
    return [row for row, (token, broken) in enumerate(zip(tokens, are_broken, strict=True)) if broken and token == 0]


def _draw_batch(rows: NDArray[np.int64], draws: Sequence[Draw], positions: Sequence[int]) -> DrawBatch:
    chosen = [draws[i].sampling for i in rows]
    return DrawBatch(
        rows=rows,
        temperature=np.array([sampling.temperature for sampling in chosen], np.float64),
        top_k=np.array([sampling.top_k for sampling in chosen], np.int64),
        top_p=np.array([sampling.top_p for sampling in chosen], np.float64),
        min_p=np.array([min(sampling.min_p, 1.0) for sampling in chosen], np.float64),
        keys=row_keys(
            np.array([sampling.seed & _WORD for sampling in chosen], np.uint64),
            np.array([positions[i] for i in rows], np.uint64),
        ),
    )


def adjust(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    """Change `rows` of `logits` (fp32 [N, V]) in place, each by its draw, but for masks."""
    bias: list[_Entry] = []
    repetition: list[_Entry] = []
    occurrence: list[_Entry] = []
    forbidden: list[_Entry] = []
    allowed: dict[int, NDArray[np.int64]] = {}

    def take(row: int, draw: Draw) -> None:
        sampling = draw.sampling
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            bias.append((row, np.array(ids, np.int64), np.array(values, np.float32)))
        if is_penalised(sampling):
            counts = TokenCounts(draw.history, draw.num_prompt_tokens) if draw.counts is None else draw.counts
            if sampling.repetition_penalty != 1.0:
                seen = counts.ids
                repetition.append((row, seen, np.full(len(seen), sampling.repetition_penalty, np.float32)))
            if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
                has_occurred = counts.output_counts > 0
                times = counts.output_counts[has_occurred]
                penalty = -(sampling.frequency_penalty * times + sampling.presence_penalty)
                occurrence.append((row, counts.ids[has_occurred], penalty.astype(np.float32)))
        if sampling.allowed_token_ids:
            ids_allowed = np.array(sampling.allowed_token_ids, np.int64)
            allowed[row] = ids_allowed[(ids_allowed >= 0) & (ids_allowed < logits.shape[1])]
        banned_ids = (*draw.forbidden, *_ends_of_bad_words(draw))
        if sampling.allowed_token_ids and set(sampling.allowed_token_ids) <= set(banned_ids):
            banned_ids = ()  # the list says what may be drawn at all: nothing outside of it is
        if banned_ids and draw.constraint is None:
            banned = np.array(banned_ids, np.int64)
            forbidden.append((row, banned, np.full(len(banned), -math.inf, np.float32)))

    for row, draw in zip(rows, draws, strict=True):
        try:
            take(row, draw)
        except Exception as error:
            if draw.fault is None:
                raise
            draw.fault.note(error)

    if bias:
        where, values_t = _on_device(bias, logits)
        logits.index_put_(where, values_t, accumulate=True)
    if repetition:
        where, values_t = _on_device(repetition, logits)
        current = logits[where]
        logits.index_put_(where, torch.where(current > 0, current / values_t, current * values_t))
    if occurrence:
        where, values_t = _on_device(occurrence, logits)
        logits.index_put_(where, values_t, accumulate=True)
    for row, allowed_ids in allowed.items():
        places = place(allowed_ids, logits.device)
        kept = logits[row, places]
        logits[row] = -math.inf
        logits[row, places] = kept
    if forbidden:
        where, values_t = _on_device(forbidden, logits)
        logits.index_put_(where, values_t)


def _ends_of_bad_words(draw: Draw) -> list[int]:
    """The last tokens of those whose other tokens the output ends with."""
    bad_words = draw.sampling.bad_words
    longest = max(map(len, bad_words), default=0) - 1
    begin = max(draw.num_prompt_tokens, len(draw.history) - longest)
    outputs = tuple(draw.history[begin:]) if longest > 0 else ()
    return [word[-1] for word in bad_words if outputs[len(outputs) - len(word) + 1 :] == word[:-1]]


def _on_device(entries: Sequence[_Entry], logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row and column indices, and values, of all entries inside the vocabulary."""
    rows = np.repeat(np.array([row for row, _, _ in entries]), [len(ids) for _, ids, _ in entries])
    ids = np.concatenate([ids for _, ids, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    inside = (ids >= 0) & (ids < logits.shape[1])
    device = logits.device
    return (place(rows[inside], device), place(ids[inside], device)), place(values[inside], device)
