"""Attention to latents in plain torch, as the kernels of both devices must compute it; shapes of model/backend.py."""

import math

import torch
from torch import Tensor

from twostroke.model.backend import LatentHeads
from twostroke.model.batch import BatchLayout
from twostroke.model.reference import rms_norm, rope


def write_latents(
    rows: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, kv_layer: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """rows [T, R + P] with the latents normalised and the rest rotated go to the beginnings of rows of `kv_layer`
    [num_blocks, 1, 1, block_size, R + P or more] at `slots`, but for negative ones."""
    rank, block_size = len(norm), kv_layer.shape[3]
    turned = rope(rows[:, None, rank:], positions, cos_sin)[:, 0]
    kept = slots >= 0
    written = torch.cat((rms_norm(rows[:, :rank], norm, eps), turned), dim=1)[kept]
    kv_layer[slots[kept] // block_size, 0, 0, slots[kept] % block_size, : written.shape[1]] = written


def attend_to_latents(
    q: Tensor,
    heads: LatentHeads,
    cos_sin: Tensor,
    kv_layer: Tensor,
    layout: BatchLayout,
    chosen: Tensor | None = None,
) -> Tensor:
    """q [T, H (N + P)] -> [T, H V]: attention to keys and values that are made of the context's latents (DeepSeek-AI
    2024, equations 9 to 19), all in fp32, rounded once; where slots are `chosen`, to those alone."""
    still, turning = _parts_of_queries(q, heads)
    queries = torch.cat((still.float(), rope(turning.float(), layout.positions, cos_sin)), dim=2)
    rank, block_size = heads.keys.shape[2], kv_layer.shape[3]
    count, _, width = len(q), *heads.values.shape[1:]
    out = torch.zeros(count, heads.keys.shape[0], width, dtype=q.dtype, device=q.device)
    starts = layout.query_starts.tolist()
    for sequence, context in enumerate(layout.context_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        tokens = torch.arange(context, device=q.device)
        blocks = layout.block_tables[sequence, tokens // block_size].long()
        rows = kv_layer[blocks, 0, 0, tokens % block_size].float()
        k = torch.einsum("kr,hnr->khn", rows[:, :rank], heads.keys.float())
        v = torch.einsum("kr,hrv->khv", rows[:, :rank], heads.values.float())
        turned = rows[:, None, rank : rank + cos_sin.shape[1]]
        k = torch.cat((k, turned.expand(-1, k.shape[1], -1)), dim=2)
        scores = torch.einsum("qhd,khd->hqk", queries[start:end], k) * heads.scale
        hidden = tokens > torch.arange(context - (end - start), context, device=q.device).unsqueeze(1)
        if chosen is not None:
            slots = blocks * block_size + tokens % block_size
            hidden |= ~(slots[None, :, None] == chosen[start:end, None]).any(2)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khv->qhv", weights, v).to(q.dtype)
    return out.flatten(1)


def _parts_of_queries(q: Tensor, heads: LatentHeads) -> tuple[Tensor, Tensor]:
    """[T, H, N] and [T, H, P]."""
    count, still, _ = heads.keys.shape
    whole = q.view(len(q), count, -1)
    return whole[..., :still], whole[..., still:]
