"""What a request does to its logits before they are drawn from: bias, penalties, forbidden tokens.

In this order, which is that of vLLM and transformers. With c(t) the times t occurs among the output tokens:

    bias          l(t) += logit_bias(t)
    repetition    l(t) /= r where l(t) > 0, l(t) *= r elsewhere, for each t in prompt or output (Keskar et al. 2019)
    frequency     l(t) -= frequency_penalty * c(t)          (OpenAI's formula)
    presence      l(t) -= presence_penalty * [c(t) > 0]
    forbidden     l(t) = -inf

All in fp32, with one scatter for each kind, whatever the number of rows. Ids outside the vocabulary have no effect.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.host_tensors import place
from twostroke.model.step import Draw
from twostroke.model.token_counts import TokenCounts, is_penalised

_Entry = tuple[int, NDArray[np.int64], NDArray[np.float32]]  # row, token ids, one value each


def is_adjusted(draw: Draw) -> bool:
    """Whether `adjust` would change the draw's logits."""
    return bool(draw.sampling.logit_bias or is_penalised(draw.sampling) or draw.forbidden)


def adjust(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    """Change `rows` of `logits` (fp32 [N, V]) in place, each by its draw."""
    bias: list[_Entry] = []
    repetition: list[_Entry] = []
    occurrence: list[_Entry] = []
    forbidden: list[_Entry] = []
    for row, draw in zip(rows, draws, strict=True):
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
        if draw.forbidden:
            banned = np.array(draw.forbidden, np.int64)
            forbidden.append((row, banned, np.full(len(banned), -math.inf, np.float32)))

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
    if forbidden:
        where, values_t = _on_device(forbidden, logits)
        logits.index_put_(where, values_t)


def _on_device(entries: Sequence[_Entry], logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row and column indices, and values, of all entries inside the vocabulary."""
    rows = np.repeat(np.array([row for row, _, _ in entries]), [len(ids) for _, ids, _ in entries])
    ids = np.concatenate([ids for _, ids, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    inside = (ids >= 0) & (ids < logits.shape[1])
    device = logits.device
    return (place(rows[inside], device), place(ids[inside], device)), place(values[inside], device)
