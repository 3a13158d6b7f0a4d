"""Rotary position embedding of Q and K, fused with the write of K and V into the paged cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.kernels.launch import power_of_two

_ELEMENTS = 1024  # of one program's tile: 8 a lane at 4 warps
_WARPS = 4


def rope_reference(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D] rotated by its positions [T], in the half-split form of Llama checkpoints (Su et al. 2021).

    cos_sin fp32 [max_position, D]: cos of the D/2 frequencies, then sin. Computed in fp32, rounded once to x's dtype.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_and_write_kv_reference(
    qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """As `rope_and_write_kv`, in torch."""
    _, _, groups, block_size, dim = kv_layer.shape
    heads = qkv.shape[1] // dim - 2 * groups
    q, k, v = qkv.view(-1, heads + 2 * groups, dim).split((heads, groups, groups), dim=1)
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    kv_layer[blocks, 0, :, offsets] = rope_reference(k, positions, cos_sin)[kept]
    kv_layer[blocks, 1, :, offsets] = v[kept]
    return rope_reference(q, positions, cos_sin)


@triton.jit
def _rotate_tile(x, out, x_offsets, out_offsets, inside, cos, sin, HALF: tl.constexpr):
    """Rotate a [heads, D/2] pair of half tiles from x into out."""
    first = tl.load(x + x_offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + x_offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    element = out.dtype.element_ty
    tl.store(out + out_offsets, (first * cos - second * sin).to(element), mask=inside)
    tl.store(out + out_offsets + HALF, (second * cos + first * sin).to(element), mask=inside)


@triton.jit
def rope_kv_kernel(
    qkv,
    cos_sin,
    kv_layer,
    positions,
    slots,
    q_out,
    qkv_stride,
    block_stride,
    kind_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """One program a token and TILE_HEADS heads: those of Q first, then those of K with V's."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_TILES: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)
    real = dims < HALF
    angles = cos_sin + tl.load(positions + token) * HEAD_DIM + dims
    cos = tl.load(angles, mask=real, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=real, other=0.0)[None, :]
    row = qkv + token * qkv_stride
    if tile < Q_TILES:
        heads = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        inside = (heads < NUM_HEADS)[:, None] & real[None, :]
        offsets = heads[:, None] * HEAD_DIM + dims[None, :]
        _rotate_tile(row, q_out + token * (NUM_HEADS * HEAD_DIM), offsets, offsets, inside, cos, sin, HALF)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            groups = (tile - Q_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
            inside = (groups < NUM_GROUPS)[:, None] & real[None, :]
            k_from = (NUM_HEADS + groups)[:, None] * HEAD_DIM + dims[None, :]
            k_to = kv_layer + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
            to_offsets = groups[:, None] * head_stride + dims[None, :]
            _rotate_tile(row, k_to, k_from, to_offsets, inside, cos, sin, HALF)
            v_from = row + NUM_GROUPS * HEAD_DIM
            v_to = k_to + kind_stride
            tl.store(v_to + to_offsets, tl.load(v_from + k_from, mask=inside, other=0.0), mask=inside)
            tl.store(v_to + to_offsets + HALF, tl.load(v_from + k_from + HALF, mask=inside, other=0.0), mask=inside)


def rope_and_write_kv(qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    """Rotate Q and K, write K and V at `slots`; return Q, [T, H, D].

    qkv [T, (H + 2 G) D] with contiguous rows; cos_sin fp32 [max_position, D]; kv_layer contiguous,
    [num_blocks, 2, G, block_size, D]; positions and slots int64 [T]. A negative slot (a captured graph's padding row)
    writes nothing; its position must still be within cos_sin.
    """
    tokens, width = qkv.shape
    _, _, groups, block_size, dim = kv_layer.shape
    heads = width // dim - 2 * groups
    q_out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    half_padded = power_of_two(dim // 2)
    tile_heads = max(1, min(_ELEMENTS // (2 * half_padded), power_of_two(heads)))
    if tokens:
        rope_kv_kernel[(tokens, triton.cdiv(heads, tile_heads) + triton.cdiv(groups, tile_heads))](
            qkv, cos_sin, kv_layer, positions, slots, q_out,
            qkv.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
            NUM_HEADS=heads, NUM_GROUPS=groups, HEAD_DIM=dim, HALF_PADDED=half_padded, BLOCK_SIZE=block_size,
            TILE_HEADS=tile_heads, num_warps=_WARPS,
        )  # fmt: skip
    return q_out
