"""The backend's operations in plain torch: what the fast kernels are tested against. Shapes as in model/backend.py."""

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import BatchLayout


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden], statistics in fp32, one rounding at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rope_and_write_kv(qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
    """Rotated Q [T, H, D]; rotated K and V go into `kv_layer`."""
    _, _, kv_heads, block_size, head_dim = kv_layer.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    turned, values = heads[:, :-kv_heads], heads[:, -kv_heads:]
    cos, sin = cos_sin[layout.positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = turned.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    blocks, offsets = layout.slots // block_size, layout.slots % block_size
    kv_layer[blocks, 0, :, offsets] = turned[:, -kv_heads:]
    kv_layer[blocks, 1, :, offsets] = values
    return turned[:, :-kv_heads].contiguous()


def attention(q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
    """Sequence by sequence, scores in fp32: [T, H * D]."""
    _, _, kv_heads, block_size, head_dim = kv_layer.shape
    outputs: list[Tensor] = []
    for index, context in enumerate(layout.context_lens.tolist()):
        begin, end = int(layout.query_starts[index]), int(layout.query_starts[index + 1])
        blocks = layout.block_tables[index, : -(-context // block_size)].long()
        # [blocks, 2, G, block_size, D] -> [2, G, context, D]
        kv = kv_layer[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :context].float()
        queries = q[begin:end].float().view(end - begin, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = queries @ kv[0].unsqueeze(1).transpose(-1, -2) * head_dim**-0.5
        visible = torch.arange(context) <= torch.arange(context - (end - begin), context).unsqueeze(1)
        mixed = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ kv[1].unsqueeze(1)
        outputs.append(mixed.permute(2, 0, 1, 3).reshape(end - begin, -1).to(q.dtype))
    return torch.cat(outputs)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
