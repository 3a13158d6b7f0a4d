"""Draws over logits of which each tensor-parallel rank has its part of the vocabulary.

A greedy token needs of each rank its largest logit alone: 24 bytes a row, where logits of 128k tokens are half a
megabyte. Everything else needs all logits on rank 0.
"""

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.parallel.tensor_parallel import TensorParallel


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
