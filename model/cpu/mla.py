"""MLA on CPUs (DeepSeek-AI 2024, section 2.1): what is written into the cache, and what heads make of
it.

Where few queries meet a context, what would make keys of its latents goes into the queries instead, and values are made
of the mixture of latents: one row a token, which all heads read, as in multi-query attention. A decode does so.
Where many do, as in a prompt, keys and values of all heads are made of the latents: their products are shorter. The
context comes in parts, whose results are merged by the logarithms of their sums of weights.

Reference: tests/rigs/reference.py.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from twostroke.model.architectures.context_index import gathered
from twostroke.model.backend import AttentionForm, MLAHeads
from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels import paged_attention
from twostroke.model.cpu.kernels.elementwise import turn_queries
from twostroke.model.cpu.kernels.launch import Launcher
from twostroke.model.cpu.kernels.projections import gemm
from twostroke.model.cpu.linears import is_supported
from twostroke.model.parallel.tensor_parallel import ContextParts

PART_TOKENS = 2048
"""Tokens of a context whose keys and values are in memory at a time, or whose latents came from other ranks."""


class HeadLinear(Protocol):
    """A projection of each head's own."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [T, H, in] -> out [T, H, out]; only their last dimensions need be contiguous."""


def make_head_linear(weight: Tensor, launcher: Launcher) -> HeadLinear:
    """weight [H, out, in], which is copied."""
    pairs = 4 // weight.element_size()
    if is_supported(weight.dtype) and weight.shape[2] % pairs == 0:
        return PackedHeadLinear(weight, launcher)
    return PlainHeadLinear(weight)


class PlainHeadLinear:
    """Implements HeadLinear with torch."""

    def __init__(self, weight: Tensor):
        self._weight = weight.clone()

    def __call__(self, x: Tensor, out: Tensor) -> None:
        out.copy_(torch.einsum("thi,hoi->tho", x, self._weight))


class PackedHeadLinear:
    """Each head's weights packed for gemm.py. Implements HeadLinear."""

    def __init__(self, weight: Tensor, launcher: Launcher):
        """weight [H, out, in], of a dtype that `is_supported`; a row of x is whole steps of 4 bytes."""
        self._launcher = launcher
        self._packed = gemm.pack_heads(weight)
        self._bias = gemm.bias_of_panels(None, weight.shape[1])

    def __call__(self, x: Tensor, out: Tensor) -> None:
        gemm.multiply_heads(self._launcher, x, self._packed, self._bias, out)


class CpuMLA:
    """Implements model.backend.MLAAttention.

    What makes keys of latents is held twice: as it is, and turned round, as it goes into queries.
    """

    def __init__(self, heads: MLAHeads, launcher: Launcher, parts: ContextParts | None = None):
        self._launcher = launcher
        self._parts = parts
        self._num_heads, self._key, self._rank = heads.keys.shape
        self._value = heads.values.shape[2]
        self._form = AttentionForm(heads.scale)
        self._keys = make_head_linear(heads.keys, launcher)  # of latents
        self._values = make_head_linear(heads.values.transpose(1, 2), launcher)
        self._absorbed = make_head_linear(heads.keys.transpose(1, 2), launcher)  # of queries

    def __call__(
        self, q: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout, chosen: Tensor | None = None
    ) -> Tensor:
        """Implement MLAAttention. Where tokens are chosen, each query is a decode over these."""
        count, decodes = len(q), layout.num_decodes
        q = q.view(count, self._num_heads, -1)
        out = self._launcher.empty((count, self._num_heads, self._value), q.dtype)
        if chosen is not None:
            for rows, held, alone in gathered(kv_layer, layout, chosen, self._rank + cos_sin.shape[1]):
                self._attend_decodes(q[rows], cos_sin, held, alone, out[rows])
            return out.view(count, -1)
        if decodes:
            self._attend_decodes(q[:decodes], cos_sin, kv_layer, layout, out[:decodes])
        if decodes < count:
            starts = layout.query_starts[decodes:].tolist()
            contexts, tables = layout.context_lens[decodes:].tolist(), layout.block_tables[decodes:]
            kv_layer = kv_layer[..., : self._rank + cos_sin.shape[1]]
            for begin, end, context, table in zip(starts[:-1], starts[1:], contexts, tables, strict=True):
                positions = layout.positions[begin:end]
                self._attend_chunk(q[begin:end], positions, cos_sin, kv_layer, table, context, out[begin:end])
        return out.view(count, -1)

    def _attend_decodes(self, q: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
        absorbed = self._absorb(q, layout.positions[: len(q)], cos_sin)
        self._values(self._mixed(absorbed, kv_layer, layout), out)

    def _mixed(self, absorbed: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """Mixtures of latents [decodes, H, R] for absorbed queries [decodes, H, R + P]."""
        launcher, parts = self._launcher, self._parts
        if parts is None:
            mixed = launcher.empty((*absorbed.shape[:2], self._rank), absorbed.dtype)
            paged_attention.decode_attention(launcher, absorbed, kv_layer, layout, self._form, mixed)
            return mixed
        assert layout.local_lens is not None
        absorbed = parts.of_all_heads(absorbed)
        mixed = launcher.empty((*absorbed.shape[:2], self._rank), absorbed.dtype)
        log_sums = launcher.empty(absorbed.shape[:2], torch.float32)
        held = replace(layout, context_lens=layout.local_lens)
        paged_attention.decode_attention(launcher, absorbed, kv_layer, held, self._form, mixed, log_sums)
        return parts.merged(mixed, log_sums)

    def _block_size(self, kv_layer: Tensor) -> int:
        """Return the block size with all ranks' tokens."""
        return int(kv_layer.shape[3]) * (1 if self._parts is None else self._parts.ranks)

    def _whole_blocks(self, kv_layer: Tensor, blocks: Tensor) -> Tensor:
        """Return these blocks with all ranks' tokens, [blocks, block_size, R + P]."""
        held = kv_layer[blocks.long(), 0, 0]
        return held if self._parts is None else self._parts.whole_blocks(held)

    def _turned(self, q: Tensor, positions: Tensor, cos_sin: Tensor, width: int) -> Tensor:
        """[T, H, width], of which the last numbers are those of queries [T, H, N + P], rotated."""
        out = self._launcher.empty((*q.shape[:2], width), q.dtype)
        turn_queries(self._launcher, q, out, cos_sin, positions)
        return out

    def _absorb(self, q: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Queries [T, H, N + P] -> [T, H, R + P], ready for latents as the cache stores them."""
        out = self._turned(q, positions, cos_sin, self._rank + q.shape[2] - self._key)
        self._absorbed(q[..., : self._key], out[..., : self._rank])
        return out

    def _attend_chunk(
        self, q: Tensor, positions: Tensor, cos_sin: Tensor, kv_layer: Tensor, table: Tensor, context: int, out: Tensor
    ) -> None:
        """The last rows of one sequence's context."""
        rows, row, query = len(q), kv_layer.shape[4], q.shape[2]
        # Multiplications for each token of the context and each head.
        is_shorter = 2 * rows * (row - max(query, self._value)) <= self._rank * (self._key + self._value)
        if is_shorter and (self._parts is None or context <= PART_TOKENS):
            if self._parts is not None or not kv_layer.is_contiguous():
                used = table[: -(-context // self._block_size(kv_layer))]
                kv_layer = self._whole_blocks(kv_layer, used)[:, None, None]
                table = torch.arange(len(used), dtype=table.dtype)
            absorbed = self._absorb(q, positions, cos_sin)
            mixed = torch.empty_like(absorbed)
            paged_attention.attend_chunk(absorbed, kv_layer, table, context, self._form, mixed)
            self._values(mixed[..., : self._rank], out)
            return
        queries = self._turned(q, positions, cos_sin, query)
        queries[..., : self._key] = q[..., : self._key]
        self._attend_expanded(queries, kv_layer, table, context, out)

    def _attend_expanded(self, q: Tensor, kv_layer: Tensor, table: Tensor, context: int, out: Tensor) -> None:
        """Turned queries [rows, H, N + P], over keys and values of each head, part after part of the context."""
        rows, heads, query = q.shape
        block_size = self._block_size(kv_layer)
        width = max(query, self._value)
        q = torch.nn.functional.pad(q, (0, width - query)).transpose(0, 1).unsqueeze(0)  # [1, H, rows, width]
        merged = torch.zeros((1, heads, rows, width))
        log_sums = torch.full((1, heads, rows, 1), -torch.inf)
        part_tokens = -(-PART_TOKENS // block_size) * block_size
        before = context - rows  # tokens before the first query
        for start in range(0, context, part_tokens):
            end = min(start + part_tokens, context)
            blocks = self._whole_blocks(kv_layer, table[start // block_size : -(-end // block_size)])
            latents = blocks.view(-1, kv_layer.shape[4])[: end - start]
            keys, values = self._expanded(latents, width)
            first = max(0, start - before)  # of the rows that see any of it
            mask = None
            if end > before + first + 1:
                mask = torch.ones((rows - first, end - start), dtype=torch.bool).tril_(before + first - start)
            mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, first:],
                keys,
                values,
                attn_mask=None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf).to(q.dtype),
                scale=self._form.scale,
            )
            known, seen = log_sums[:, :, first:], log_sum.float().unsqueeze(-1)
            total = torch.logaddexp(known, seen)
            part = merged[:, :, first:]
            part.mul_((known - total).exp_()).add_(mixed.float() * (seen - total).exp_())
            known.copy_(total)
        out.copy_(merged[0, :, :, : self._value].transpose(0, 1))

    def _expanded(self, latents: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of latents [tokens, R + P]: [1, H, tokens, width] each, with zeros where they are
        narrower."""
        tokens, heads = len(latents), self._num_heads
        kinds = latents.new_zeros((2, heads, tokens, width))
        shared = latents[:, None].expand(-1, heads, -1)
        keys, values = kinds.transpose(1, 2)
        self._keys(shared[..., : self._rank], keys[..., : self._key])
        keys[..., self._key : self._key + latents.shape[1] - self._rank] = shared[..., self._rank :]
        self._values(shared[..., : self._rank], values[..., : self._value])
        return kinds[0:1], kinds[1:2]
