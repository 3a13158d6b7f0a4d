"""MLA on CUDA: products by cuBLAS, what is between them by Triton (kernels/mla.py)."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.architectures.context_index import gathered
from twostroke.model.backend import MLAHeads
from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.launch import GpuTarget
from twostroke.model.cuda.kernels.mla import (
    latent_decode,
    latent_decode_config,
    latent_part,
    latent_part_config,
    turn_queries,
)
from twostroke.model.cuda.kernels.paged_attention import prompt_chunks
from twostroke.model.parallel.tensor_parallel import ContextParts

PART_TOKENS = 8192
"""Tokens of all chunks' contexts together, about, whose keys and values are in memory at a time."""
_SPLIT = 1 << 10  # enough tokens that a context may be split


class CudaMLA:
    """Implements model.backend.MLAAttention.

    Decodes absorb; prompts' queries meet keys and values made of the context, part after part.
    """

    def __init__(self, heads: MLAHeads, target: GpuTarget, parts: ContextParts | None = None):
        self._target = target
        self._parts = parts
        self._keys = heads.keys.contiguous()  # [H, N, R]
        self._values = heads.values.transpose(1, 2).contiguous()  # [H, V, R]
        self._scale = heads.scale
        self._compiled = False

    def __call__(
        self, q: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout, chosen: Tensor | None = None
    ) -> Tensor:
        """Implement MLAAttention; writes into q. The first call compiles what any later one could need.

        Where tokens are chosen, each query is a decode over these.
        """
        heads, key, rank = self._keys.shape
        q, whole, width = q.view(len(q), heads, -1), kv_layer, rank + cos_sin.shape[1]
        kv_layer = whole[..., :width]
        if not self._compiled:
            self._compiled = True
            self._compile(q, kv_layer)
            if not kv_layer.is_contiguous():
                self._compile(q, kv_layer[:1].contiguous())
        turn_queries(q, key, cos_sin, layout.positions)
        out = torch.empty((len(q), heads, self._values.shape[1]), dtype=q.dtype, device=q.device)
        if chosen is not None:
            for rows, held, alone in gathered(whole, layout, chosen, width):
                self._attend_decodes(q[rows], held, alone, out[rows])
            return out.view(len(q), -1)
        if layout.num_decodes:
            self._attend_decodes(q, kv_layer, layout, out)
        if len(q) > layout.num_decodes:
            self._attend_chunks(q, kv_layer, layout, out)
        return out.view(len(q), -1)

    def _attend_decodes(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
        count, (_, key, _) = layout.num_decodes, self._keys.shape
        absorbed = torch.bmm(q[:count, :, :key].transpose(0, 1), self._keys)
        if self._parts is None:
            mixed = self._mixed(absorbed, q, kv_layer, layout)
        else:
            mixed = self._mixed_over_parts(self._parts, absorbed, q[:count, :, key:], kv_layer, layout)
        out[:count] = torch.bmm(mixed.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)

    def _mixed(
        self, absorbed: Tensor, q: Tensor, kv_layer: Tensor, layout: BatchLayout, log_sums: Tensor | None = None
    ) -> Tensor:
        """Mixtures of latents [B, H, R], of absorbed queries [H, B, R] whose rotated part is q's."""
        heads, count, rank = absorbed.shape
        mixed = torch.empty((count, heads, rank), dtype=q.dtype, device=q.device)
        config = latent_decode_config(self._target, heads, q.dtype, layout.max_context_len)
        latent_decode(absorbed, q, kv_layer, layout, self._scale, mixed, config, log_sums)
        return mixed

    def _mixed_over_parts(
        self, parts: ContextParts, absorbed: Tensor, rotated: Tensor, kv_layer: Tensor, layout: BatchLayout
    ) -> Tensor:
        """The same of this rank's heads, with all ranks: absorbed [H, B, R], rotated [B, H, P]."""
        assert layout.local_lens is not None
        rank = absorbed.shape[2]
        q = parts.of_all_heads(torch.cat((absorbed.transpose(0, 1), rotated), dim=2))
        log_sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        held = replace(layout, context_lens=layout.local_lens)
        mixed = self._mixed(q[..., :rank].transpose(0, 1), q, kv_layer, held, log_sums)
        return parts.merged(mixed, log_sums)

    def _attend_chunks(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
        heads, key, rank = self._keys.shape
        value, held, width = self._values.shape[1], kv_layer.shape[3], kv_layer.shape[4]
        block_size = held if self._parts is None else held * self._parts.ranks
        _, context_lens, tables = prompt_chunks(layout)
        chunks = len(context_lens)
        blocks = max(1, PART_TOKENS // (chunks * block_size))  # of a part of each
        mixed = torch.empty((len(q), heads, value), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((len(q), heads), dtype=torch.float32, device=q.device)
        config = latent_part_config(self._target.architecture, q.dtype)
        for first in range(0, -(-layout.max_context_len // block_size), blocks):
            rows = kv_layer.view(-1, held, width)[tables[:, first : first + blocks].long()]
            if self._parts is not None:
                rows = self._parts.whole_blocks(rows.view(-1, held, width))
            rows = rows.view(chunks, -1, width)
            latents = rows[..., :rank]
            keys = functional.linear(latents, self._keys.view(-1, rank)).view(chunks, -1, heads, key)
            values = functional.linear(latents, self._values.view(-1, rank)).view(chunks, -1, heads, value)
            state = mixed, log_sums
            latent_part(q, (keys, values), rows, layout, first * block_size, self._scale, state, config)
        out[layout.num_decodes :] = mixed[layout.num_decodes :]

    def _compile(self, q: Tensor, kv_layer: Tensor) -> None:
        """Launch every variant on an empty sequence, so that no later step waits for a compiler."""
        q = torch.zeros_like(q[:1])
        out = torch.empty((1, q.shape[1], self._values.shape[1]), dtype=q.dtype, device=q.device)
        self._attend_decodes(q, kv_layer, BatchLayout.of_nothing(q.device, _SPLIT), out)
        self._attend_chunks(q, kv_layer, replace(BatchLayout.of_nothing(q.device), num_decodes=0), out)
