"""The index of a layer that attends to the best tokens alone (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).

Small heads score each token s before a query t, and the query attends to the `top_k` tokens with the highest scores

    I(t, s) = sum over heads h of w(t, h) relu(q(t, h) . k(s)).

A context of at most `top_k` tokens is attended to as a whole, and nothing is scored.
The factors that transformers multiplies scores by change no choice and are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import LayerNorm, Linear
from twostroke.model.batch import BatchLayout
from twostroke.model.config import IndexSizes
from twostroke.model.costs.sizes import GATHERED_BYTES, MAX_SCORES


@dataclass(frozen=True)
class IndexWeights:
    """Weights of an index, whole on each rank. Of a head's queries and of the key the rotary part is the last."""

    query: Linear  # the queries' latent -> heads * key
    key: Linear  # hidden -> key
    key_norm: LayerNorm
    weights: Linear  # hidden -> heads
    sizes: IndexSizes


@dataclass(frozen=True)
class IndexQueries:
    """Queries of an index."""

    heads: Tensor  # [T, heads, key], rotated
    weights: Tensor  # fp32 [T, heads]

    def of(self, rows: Tensor) -> "IndexQueries":
        """Return some rows of them."""
        return IndexQueries(self.heads[rows], self.weights[rows])


class ContextIndex:
    """The index of a layer over loaded weights, on any device."""

    def __init__(self, weights: IndexWeights):
        self.weights = weights

    def queries(self, x: Tensor, latents: Tensor, cos_sin: Tensor, layout: BatchLayout) -> IndexQueries | None:
        """Return the queries for a layer's input [T, hidden] and the queries' latents; None where no context is longer
        than what a query attends to."""
        weights, sizes = self.weights, self.weights.sizes
        if layout.max_context_len <= sizes.top_k:
            return None
        heads = weights.query(latents).view(len(x), sizes.heads, sizes.key)
        rotated = _with_rotated_ends(heads, layout.positions, cos_sin).to(heads.dtype)
        return IndexQueries(rotated, weights.weights(x, out_dtype=torch.float32))

    def choose(self, queries: IndexQueries, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """Return int32 [T, top_k]: the slots of the tokens that each query attends to.

        A query at position p attends to the first min(p + 1, top_k) of its row. Reads the lengths of contexts on the
        host.
        """
        sizes, count = self.weights.sizes, layout.num_decodes
        top_k, at_least = sizes.top_k, sizes.heads * kv_layer.shape[3]  # scores of a query at a time
        chosen = torch.empty((len(queries.weights), top_k), dtype=torch.int32, device=kv_layer.device)
        contexts, starts = layout.context_lens.tolist(), layout.query_starts.tolist()
        longest = max(contexts[:count], default=0)
        at_once = max(1, MAX_SCORES // max(longest, at_least))
        for first in range(0, count, at_once):
            rows = slice(first, min(first + at_once, count))
            tables = layout.block_tables[rows]
            chosen[rows] = self._choose(queries, rows, layout.positions[rows, None], kv_layer, tables, longest)[:, 0]
        for sequence in range(count, len(contexts)):
            context, tables = contexts[sequence], layout.block_tables[sequence : sequence + 1]
            at_once = max(1, MAX_SCORES // max(context, at_least))
            for first in range(starts[sequence], starts[sequence + 1], at_once):
                rows = slice(first, min(first + at_once, starts[sequence + 1]))
                positions = layout.positions[None, rows]
                chosen[rows] = self._choose(queries, rows, positions, kv_layer, tables, context)[0]
        return chosen

    def _choose(
        self,
        queries: IndexQueries,
        rows: slice,
        positions: Tensor,
        kv_layer: Tensor,
        tables: Tensor,
        context: int,
    ) -> Tensor:
        """Return slots [S, n, top_k] for queries of S sequences, as many of each, at positions [S, n]; the longest
        context has `context` tokens."""
        top_k, block_size = self.weights.sizes.top_k, kv_layer.shape[3]
        shape = (*positions.shape, top_k)
        if context <= top_k:
            tokens = torch.arange(top_k, device=tables.device).clamp_max_(context - 1).expand(shape)
        else:
            scores = self._scores(queries, rows, positions, kv_layer, tables, context)
            tokens = in_order_of_choice(scores).topk(top_k, dim=2).indices
        blocks = tables.gather(1, (tokens // block_size).flatten(1)).view(shape)
        return blocks * block_size + (tokens % block_size).int()

    def _scores(
        self, queries: IndexQueries, rows: slice, positions: Tensor, kv_layer: Tensor, tables: Tensor, context: int
    ) -> Tensor:
        """Return scores fp32 [S, n, context] with -inf behind each query; the arguments are `_choose`'s."""
        sizes, block_size = self.weights.sizes, kv_layer.shape[3]
        heads = queries.heads[rows].float().view(len(positions), -1, sizes.key)  # [S, n heads, key]
        weights = queries.weights[rows].view(*positions.shape, 1, sizes.heads)
        scores = torch.empty((*positions.shape, context), device=tables.device)
        blocks_at_once = max(1, MAX_SCORES // (len(heads) * max(heads.shape[1:]) * block_size))
        for first in range(0, -(-context // block_size), blocks_at_once):
            blocks = tables[:, first : first + blocks_at_once].long()
            keys = kv_layer[blocks, 0, 0, :, -sizes.key :].flatten(1, 2).float()
            of_heads = (heads @ keys.transpose(1, 2)).relu_().view(*positions.shape, sizes.heads, -1)
            part = scores[:, :, first * block_size : first * block_size + keys.shape[1]]
            part.copy_((weights @ of_heads)[:, :, 0, : part.shape[2]])
        unseen = torch.arange(context, device=tables.device) > positions[:, :, None]
        return scores.masked_fill_(unseen, -torch.inf)


def write_index_keys(keys: Tensor, norm: LayerNorm, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout) -> None:
    """Implement Backend.write_index_keys by torch's kernels."""
    width, row = keys.shape[1], kv_layer.shape[4]
    normed = functional.layer_norm(keys.float(), (width,), norm.weight, norm.bias, norm.eps)
    written = _with_rotated_ends(normed[:, None], layout.positions, cos_sin)[:, 0].to(kv_layer.dtype)
    kv_layer.view(-1, row)[:, row - width :].index_copy_(0, layout.slots, written)


def _with_rotated_ends(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """heads [T, H, D] -> fp32, the last P numbers of each rotated; cos_sin fp32 [max_position, P]."""
    still, rotary = heads.float().tensor_split((heads.shape[2] - cos_sin.shape[1],), dim=2)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=2)
    first, second = rotary.chunk(2, dim=2)
    return torch.cat((still, first * cos - second * sin, second * cos + first * sin), dim=2)


def in_order_of_choice(scores: Tensor) -> Tensor:
    """Return fp32 scores [..., tokens] as int64 that are all different: of equal scores the first token's is larger.

    Many scores can be exactly 0. Without an order a choice among them would depend on how prompts are cut into chunks.
    """
    bits = (scores + 0.0).view(torch.int32)  # no zero is negative
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    tokens = torch.arange(scores.shape[-1], 0, -1, device=scores.device)
    return (ordered.long() << 32) + tokens


def gathered(
    kv_layer: Tensor, layout: BatchLayout, chosen: Tensor, width: int
) -> Iterator[tuple[slice, Tensor, BatchLayout]]:
    """Yield queries of a step, some at a time, as decodes: their rows, and a cache and a layout of what they attend to.

    `chosen` as `ContextIndex.choose` returns; of the cache's rows the first `width` numbers are gathered.
    """
    block_size, top_k = kv_layer.shape[3], chosen.shape[1]
    blocks = -(-top_k // block_size)  # of a query
    rows = kv_layer.view(-1, kv_layer.shape[4])[:, :width]
    at_once = max(1, GATHERED_BYTES // (blocks * block_size * width * kv_layer.element_size()))
    for first in range(0, len(chosen), at_once):
        part = slice(first, min(first + at_once, len(chosen)))
        slots = torch.nn.functional.pad(chosen[part], (0, blocks * block_size - top_k))
        held = rows.index_select(0, slots.view(-1)).view(-1, 1, 1, block_size, width)
        positions = layout.positions[part]
        contexts = (positions + 1).clamp_max(top_k).int()
        tables = torch.arange(len(held), dtype=torch.int32, device=held.device).view(-1, blocks)
        yield part, held, BatchLayout.of_decodes(positions, layout.slots[part], contexts, tables, top_k)
