"""Attention to latents whose tokens a stage's ranks have divided among them: decode context parallelism.

Each rank has some heads of a layer's projections, as ever, and of each block of the cache some tokens (protocol/
kv_layout.py). For a decode every rank attends with the queries of all heads to the tokens that it has, and each head's
results go to the rank that has the head, which merges them by the logarithms of their sums of weights, as segments of a
context are merged (Dao et al. 2023). For a prompt's chunk, whose rows are many, latents go about instead: they are one
row a token, which all heads share.
"""

import torch
from torch import Tensor

from twostroke.model.parallel.tensor_parallel import TensorParallel


class ContextParts:
    """Exchange of queries, results and latents among the ranks of a stage. Used on the engine's thread."""

    def __init__(self, parallel: TensorParallel):
        self._parallel = parallel
        self.ranks = parallel.shard.size

    def of_all_heads(self, queries: Tensor) -> Tensor:
        """[T, heads of this rank, W] -> [T, all heads, W], both contiguous."""
        tokens, heads, width = queries.shape
        found = self._parallel.gather_rows(queries.view(tokens, -1)).view(self.ranks, tokens, heads, width)
        return found.transpose(0, 1).contiguous().view(tokens, self.ranks * heads, width)

    def merged(self, mixed: Tensor, log_sums: Tensor) -> Tensor:
        """Merge all ranks' results for the heads of this rank.

        mixed [T, all heads, R] are averages over this rank's tokens, and log_sums, fp32 [T, all heads], natural
        logarithms of their sums of weights, -inf where it has none. Returns [T, heads, R].
        """
        tokens, all_heads, rank = mixed.shape
        heads = all_heads // self.ranks
        # The logarithms go along, bit by bit, as more numbers of mixed's dtype.
        rows = torch.cat((mixed, log_sums.unsqueeze(-1).view(mixed.dtype)), dim=2).view(tokens, self.ranks, -1)
        rows = rows.transpose(0, 1).contiguous().view(self.ranks * tokens, -1)
        each = [tokens] * self.ranks
        found = self._parallel.exchange_rows(rows, each, each).view(self.ranks, tokens, heads, -1)
        logs = found[..., rank:].contiguous().view(torch.float32)
        weights = logs.softmax(0)
        return (found[..., :rank] * weights).sum(0).to(mixed.dtype)

    def whole_blocks(self, parts: Tensor) -> Tensor:
        """[blocks, tokens of this rank, W] -> [blocks, block_size, W], both contiguous."""
        blocks, tokens, width = parts.shape
        found = self._parallel.gather_rows(parts.view(blocks, -1)).view(self.ranks, blocks, tokens, width)
        return found.transpose(0, 1).contiguous().view(blocks, self.ranks * tokens, width)
