"""RMSNorm, alone and with the residual addition before it.

The gated activation of a SwiGLU feed-forward layer: silu(gate) * up.

Rotary position embedding of Q and K, fused with the write of K and V into the paged cache.

Embedding rows out of one rank's slice of the vocabulary, in whatever form its weights are kept for the LM head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.checkpoint.quantization import INT4_GROUP
from twostroke.model.cuda.kernels.launch import power_of_two
from twostroke.model.cuda.kernels.quant_gemm import BYTE_ZERO, NIBBLE_ZERO, PackedWeight, unpack

# Warps by the padded row length: enough lanes for 16-byte accesses, few enough that the row's sum stays cheap.
_WARPS = ((512, 1), (1024, 2), (2048, 4), (8192, 8))
_MOST_WARPS = 16


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program a row. With ADD, x + residual replaces the residual and is what gets normalised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < HIDDEN
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual + row * residual_stride + columns
        total = (value + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual_at, total, mask=inside)
        value = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def _warps(padded: int) -> int:
    return next((warps for length, warps in _WARPS if padded <= length), _MOST_WARPS)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As in model/reference.py. x [T, hidden] with contiguous rows; a new tensor is returned."""
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    padded = power_of_two(hidden)
    if rows:
        rms_norm_kernel[(rows,)](
            x, x, weight, out, eps, x.stride(0), 0, hidden,
            HIDDEN=hidden, PADDED=padded, ADD=False, num_warps=_warps(padded),
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As in model/reference.py, in place: x becomes the norm and residual the sum; both are returned."""
    rows, hidden = x.shape
    padded = power_of_two(hidden)
    if rows:
        rms_norm_kernel[(rows,)](
            x, residual, weight, x, eps, x.stride(0), residual.stride(0), x.stride(0),
            HIDDEN=hidden, PADDED=padded, ADD=True, num_warps=_warps(padded),
        )  # fmt: skip
    return x, residual


_BLOCK = 1024  # columns a program: 8 an element lane at 4 warps, one 16-byte access of a 16-bit type
_SILU_MUL_WARPS = 4


@triton.jit
def silu_mul_kernel(gate_up, out, stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    # Of both signs the exponential that can't overflow.
    shrunk = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk)
    tl.store(out + row * out_stride + columns, (gate * sigmoid * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As in model/reference.py. gate_up [T, 2 I] with contiguous rows."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, gate_up.stride(0), width, WIDTH=width, BLOCK=_BLOCK, num_warps=_SILU_MUL_WARPS
        )
    return out


_ELEMENTS = 1024  # of one program's tile: 8 a lane at 4 warps
_ROPE_KV_WARPS = 4


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
            TILE_HEADS=tile_heads, num_warps=_ROPE_KV_WARPS,
        )  # fmt: skip
    return q_out


_VOCAB_EMBEDDING_WARPS = 4


def vocab_embedding_reference(
    token_ids: Tensor, table: Tensor | PackedWeight, first: int, out_dtype: torch.dtype
) -> Tensor:
    """token_ids int64 [T], table [rows, hidden] of the tokens from `first` on -> [T, hidden]; others' rows are zeros.

    So the sum over all ranks is the whole vocabulary's embedding (Shoeybi et al. 2019).
    """
    rows = table if isinstance(table, Tensor) else unpack(table)
    indices = token_ids - first
    inside = (indices >= 0) & (indices < rows.shape[0])
    return torch.where(inside[:, None], rows[indices.where(inside, 0)], 0).to(out_dtype)


@triton.jit(do_not_specialize=["first"])
def vocab_embedding_kernel(
    token_ids,
    table,
    scales,
    out,
    first,
    num_rows,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and BLOCK columns. BITS: 16 for any float type, or those of a PackedWeight."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token) - first
    inside = (columns < COLUMNS) & (row >= 0) & (row < num_rows)
    if BITS == 16:
        value = tl.load(table + row * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    elif BITS == 8:
        byte = tl.load(table + row * COLUMNS + columns, mask=inside, other=ZERO)
        scale = tl.load(scales + row, mask=(row >= 0) & (row < num_rows), other=0.0)
        value = (byte.to(tl.float32) - ZERO) * scale
    else:
        group = columns // GROUP
        row_bytes: tl.constexpr = (COLUMNS + 2 * GROUP - 1) // (2 * GROUP) * GROUP
        byte = tl.load(table + row * row_bytes + group // 2 * GROUP + columns % GROUP, mask=inside, other=0)
        scale = tl.load(scales + group * num_rows + row, mask=inside, other=0.0).to(tl.float32)
        high = group % 2 == 1
        # The high half stands for 16 times its value.
        value = tl.where(high, (byte & 0xF0).to(tl.float32) - 16 * ZERO, (byte & 0x0F).to(tl.float32) - ZERO) * scale
    tl.store(out + token * COLUMNS + columns, value.to(out.dtype.element_ty), mask=columns < COLUMNS)


def vocab_embedding(token_ids: Tensor, table: Tensor | PackedWeight, first: int, out_dtype: torch.dtype) -> Tensor:
    """`vocab_embedding_reference` on the GPU. token_ids int64 [T]; the table is contiguous. Returns a new tensor."""
    if isinstance(table, Tensor):
        bits, (rows, columns), weights, scales = 16, table.shape, table, table
    else:
        bits, rows, columns, weights, scales = table.bits, table.rows, table.columns, table.packed, table.scales
    out = torch.empty((token_ids.shape[0], columns), dtype=out_dtype, device=token_ids.device)
    if token_ids.shape[0]:
        vocab_embedding_kernel[(token_ids.shape[0], triton.cdiv(columns, _BLOCK))](
            token_ids, weights, scales, out, first, rows,
            COLUMNS=columns, BITS=bits, ZERO=BYTE_ZERO if bits == 8 else NIBBLE_ZERO, GROUP=INT4_GROUP, BLOCK=_BLOCK,
            num_warps=_VOCAB_EMBEDDING_WARPS,
        )  # fmt: skip
    return out
