"""The small kernels between the products of a layer: each reads its rows once and is bound by that.

- RMSNorm, alone and with the residual addition before it; of all queries of a token, and of all its keys;
- the cap of logits;
- the gated activation of a feed-forward layer, SwiGLU's or GeGLU's: activation(gate) * up;
- rotary position embedding of Q and K, fused with the write of K and V into the paged cache;
- embedding rows out of one rank's slice of the vocabulary, in whatever form its weights are kept for the LM head.

All tensors are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.backend import AS_THEY_ARE, HeadNorms, KVScales, RowNorms
from twostroke.model.config import Activation
from twostroke.model.cuda.kernels.fp8 import MIN_SIZE, rounded, size_of, token_scale
from twostroke.model.cuda.kernels.gemm import BYTE_ZERO, CudaPackedWeight, activate
from twostroke.model.cuda.kernels.launch import await_inputs, dependent_launch, power_of_two

# Warps by the padded row length: enough lanes for 16-byte accesses, few enough that the row's sum stays cheap.
_ROW_WARPS = ((512, 1), (1024, 2), (2048, 4), (8192, 8))
_MAX_ROW_WARPS = 16
_BLOCK = 1024  # elements a program: 8 a lane at 4 warps, one 16-byte access of a 16-bit type
_BLOCK_WARPS = 4
_BYTE_ZERO = tl.constexpr(BYTE_ZERO)


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per row. With ADD, x + residual replaces the residual and is what gets normalised."""
    await_inputs(DEPENDENT)
    columns = tl.arange(0, PADDED)
    inside = columns < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (value + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + at, total, mask=inside)
        value = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute tests/rigs/reference.py's rms_norm. x [T, hidden]; returns a new tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, x, weight, out, eps, adds=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute tests/rigs/reference.py's add_rms_norm in place: x becomes the norm, residual the sum; returns both."""
    _launch_norm(x, residual, weight, x, eps, adds=True)
    return x, residual


def _launch_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, adds: bool) -> None:
    rows, hidden = x.shape
    padded = power_of_two(hidden)
    if rows:
        rms_norm_kernel[(rows,)](
            x, residual, weight, out, eps, HIDDEN=hidden, PADDED=padded, ADD=adds, num_warps=_row_warps(padded),
            **dependent_launch(x),
        )  # fmt: skip


def _row_warps(padded: int) -> int:
    return next((warps for length, warps in _ROW_WARPS if padded <= length), _MAX_ROW_WARPS)


@triton.jit
def square_sums_kernel(
    qkv, sums, row_stride, Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, Q_PADDED: tl.constexpr, K_PADDED: tl.constexpr
):
    """One program per row: its queries' sum, and its keys'."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, Q_PADDED)
    queries = tl.load(qkv + row * row_stride + columns, mask=columns < Q_SIZE, other=0.0).to(tl.float32)
    tl.store(sums + 2 * row, tl.sum(queries * queries, axis=0))
    columns = tl.arange(0, K_PADDED)
    keys = tl.load(qkv + row * row_stride + Q_SIZE + columns, mask=columns < K_SIZE, other=0.0).to(tl.float32)
    tl.store(sums + 2 * row + 1, tl.sum(keys * keys, axis=0))


def square_sums(qkv: Tensor, norms: RowNorms) -> Tensor:
    """Compute tests/rigs/reference.py's square_sums."""
    rows, q_size, k_size = qkv.shape[0], norms.q.shape[0], norms.k.shape[0]
    sums = torch.empty((rows, 2), dtype=torch.float32, device=qkv.device)
    if rows:
        q_padded = power_of_two(q_size)
        square_sums_kernel[(rows,)](
            qkv, sums, qkv.stride(0), Q_SIZE=q_size, K_SIZE=k_size, Q_PADDED=q_padded, K_PADDED=power_of_two(k_size),
            num_warps=_row_warps(q_padded),
        )  # fmt: skip
    return sums


@triton.jit
def norm_rows_kernel(
    qkv, sums, q_gains, k_gains, row_stride, ranks, eps, Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row and BLOCK columns, in place."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_queries, inside = columns < Q_SIZE, columns < Q_SIZE + K_SIZE
    q_scale = 1.0 / tl.sqrt(tl.load(sums + 2 * row) / (ranks * Q_SIZE) + eps)
    k_scale = 1.0 / tl.sqrt(tl.load(sums + 2 * row + 1) / (ranks * K_SIZE) + eps)
    gains = tl.load(q_gains + columns, mask=of_queries, other=0.0)
    gains += tl.load(k_gains + columns - Q_SIZE, mask=inside & (columns >= Q_SIZE), other=0.0)
    at = qkv + row * row_stride + columns
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (value * tl.where(of_queries, q_scale, k_scale) * gains).to(qkv.dtype.element_ty), mask=inside)


def norm_rows(qkv: Tensor, square_sums: Tensor, norms: RowNorms) -> Tensor:
    """Compute tests/rigs/reference.py's norm_rows in place."""
    rows, q_size, k_size = qkv.shape[0], norms.q.shape[0], norms.k.shape[0]
    if rows:
        norm_rows_kernel[(rows, triton.cdiv(q_size + k_size, _BLOCK))](
            qkv, square_sums, norms.q, norms.k, qkv.stride(0), norms.ranks, norms.eps,
            Q_SIZE=q_size, K_SIZE=k_size, BLOCK=_BLOCK, num_warps=_BLOCK_WARPS,
        )  # fmt: skip
    return qkv


@triton.jit
def soft_cap_kernel(logits, cap, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and BLOCK columns, in place."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + tl.program_id(0).to(tl.int64) * WIDTH + columns
    value = tl.load(at, mask=columns < WIDTH, other=0.0)
    # tanh by the exponential of a sign that can't overflow.
    shrunk = tl.exp(-2.0 / cap * tl.abs(value))
    capped = cap * (1.0 - shrunk) / (1.0 + shrunk)
    tl.store(at, tl.where(value < 0, -capped, capped), mask=columns < WIDTH)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Compute tests/rigs/reference.py's soft_cap in place."""
    rows, width = logits.shape
    if rows:
        soft_cap_kernel[(rows, triton.cdiv(width, _BLOCK))](
            logits, cap, WIDTH=width, BLOCK=_BLOCK, num_warps=_BLOCK_WARPS
        )
    return logits


@triton.jit
def _gated(gate_at, columns, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """The gated activation of a row's columns, rounded to the row's dtype."""
    inside = columns < WIDTH
    gate = tl.load(gate_at + columns, mask=inside, other=0.0)
    up = tl.load(gate_at + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    return activate(gate.to(tl.float32), up, ACTIVATION).to(gate.dtype)


@triton.jit
def gate_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _gated(gate_up + row * (2 * WIDTH), columns, WIDTH, ACTIVATION)
    tl.store(out + row * WIDTH + columns, value, mask=columns < WIDTH)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute tests/rigs/reference.py's gate. gate_up [T, 2 I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gate_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, WIDTH=width, BLOCK=_BLOCK, ACTIVATION=activation, num_warps=_BLOCK_WARPS
        )
    return out


@triton.jit
def gate_codes_kernel(
    gate_up,
    codes,
    scales,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MIN_SIZE: tl.constexpr,
):
    """One program per row, which it reads twice: from memory for its scale, and from the second-level cache."""
    row = tl.program_id(0).to(tl.int64)
    gate_at, lanes = gate_up + row * (2 * WIDTH), tl.arange(0, BLOCK)
    sizes = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        sizes = tl.maximum(sizes, size_of(_gated(gate_at, first + lanes, WIDTH, ACTIVATION).to(tl.float32)))
    scale, inverse = token_scale(tl.max(sizes, axis=0), MIN_SIZE)
    for first in range(0, WIDTH, BLOCK):
        columns = first + lanes
        values = _gated(gate_at, columns, WIDTH, ACTIVATION).to(tl.float32)
        tl.store(codes + row * WIDTH + columns, rounded(values * inverse, tl.uint8), mask=columns < WIDTH)
    tl.store(scales + row, scale)


def gate_codes(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return `fp8.quantize_tokens` of `gate`, in one launch."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = torch.empty((rows, width), dtype=torch.uint8, device=gate_up.device)
    scales = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    if rows:
        gate_codes_kernel[(rows,)](
            gate_up,
            codes,
            scales,
            WIDTH=width,
            BLOCK=2 * _BLOCK,
            ACTIVATION=activation,
            MIN_SIZE=MIN_SIZE,
            num_warps=8,
        )
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _normalised(first, second, gains, eps, dtype: tl.constexpr, HALF: tl.constexpr):
    """RMSNorms of heads, given as a pair of half tiles [heads, D/2] in fp32, rounded to `dtype`. gains: [D]."""
    dims = tl.arange(0, first.shape[1])
    real = dims < HALF
    scale = 1.0 / tl.sqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF) + eps)
    gain = tl.load(gains + dims, mask=real, other=0.0).to(tl.float32)[None, :]
    more = tl.load(gains + HALF + dims, mask=real, other=0.0).to(tl.float32)[None, :]
    return (
        (first * scale[:, None] * gain).to(dtype).to(tl.float32),
        (second * scale[:, None] * more).to(dtype).to(tl.float32),
    )


@triton.jit
def _rotate_tile(
    x, out, x_offsets, out_offsets, inside, cos, sin, gains, eps, factor, HALF: tl.constexpr, NORMALISE: tl.constexpr
):
    """Rotate a [heads, D/2] pair of half tiles from x into out, normalised where asked for, times a factor.

    gains: the norm's [D].
    """
    first = tl.load(x + x_offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + x_offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMALISE:
        first, second = _normalised(first, second, gains, eps, x.dtype.element_ty, HALF)
    tl.store(out + out_offsets, rounded((first * cos - second * sin) * factor, out.dtype.element_ty), mask=inside)
    tl.store(
        out + out_offsets + HALF, rounded((second * cos + first * sin) * factor, out.dtype.element_ty), mask=inside
    )


# Slots of a second group of layers begin anywhere: specialised on that, the kernel would be compiled while serving.
@triton.jit(do_not_specialize=["positions", "slots"])
def rope_kv_kernel(
    qkv,
    cos_sin,
    kv_layer,
    positions,
    slots,
    q_out,
    q_norm,
    k_norm,
    eps,
    of_keys,
    of_values,
    query_scales,
    v_norm,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    NORMALISE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per token and TILE_HEADS heads: those of Q first, then those of K with V's."""
    await_inputs(DEPENDENT)
    HALF: tl.constexpr = HEAD_DIM // 2
    KIND: tl.constexpr = NUM_GROUPS * BLOCK_SIZE * HEAD_DIM  # of a block, from keys to values
    Q_TILES: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)
    real = dims < HALF
    position = tl.load(positions + token)
    angles = cos_sin + position * HEAD_DIM + dims
    cos = tl.load(angles, mask=real, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=real, other=0.0)[None, :]
    row = qkv + token * ((NUM_HEADS + 2 * NUM_GROUPS) * HEAD_DIM)
    if tile < Q_TILES:
        heads = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        inside = (heads < NUM_HEADS)[:, None] & real[None, :]
        offsets = heads[:, None] * HEAD_DIM + dims[None, :]
        q_to = q_out + token * (NUM_HEADS * HEAD_DIM)
        of_queries = 1.0
        if query_scales is not None:
            of_queries = tl.load(query_scales + position)
        _rotate_tile(row, q_to, offsets, offsets, inside, cos, sin, q_norm, eps, of_queries, HALF, NORMALISE)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            groups = (tile - Q_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
            inside = (groups < NUM_GROUPS)[:, None] & real[None, :]
            k_from = (NUM_HEADS + groups)[:, None] * HEAD_DIM + dims[None, :]
            k_to = kv_layer + (slot // BLOCK_SIZE) * (2 * KIND) + (slot % BLOCK_SIZE) * HEAD_DIM
            to_offsets = groups[:, None] * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
            _rotate_tile(row, k_to, k_from, to_offsets, inside, cos, sin, k_norm, eps, of_keys, HALF, NORMALISE)
            v_from = row + NUM_GROUPS * HEAD_DIM
            v_to = k_to + KIND
            element = kv_layer.dtype.element_ty
            first = tl.load(v_from + k_from, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(v_from + k_from + HALF, mask=inside, other=0.0).to(tl.float32)
            if v_norm is not None:
                first, second = _normalised(first, second, v_norm, eps, qkv.dtype.element_ty, HALF)
            tl.store(v_to + to_offsets, rounded(first * of_values, element), mask=inside)
            tl.store(v_to + to_offsets + HALF, rounded(second * of_values, element), mask=inside)


def rope_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    positions: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
    kv_scales: KVScales = AS_THEY_ARE,
    query_scales: Tensor | None = None,
) -> Tensor:
    """Rotate Q and K, normalised where there are norms, write K and V at `slots`; return Q, [T, H, D], times
    `query_scales`, fp32 [max_position], of its positions.

    qkv [T, (H + 2 G) D]; cos_sin fp32 [max_position, D]; kv_layer [num_blocks, 2, G, block_size, D], of qkv's dtype or
    float8_e4m3fn; positions and slots int64 [T]. A negative slot writes nothing; its position must still be within
    cos_sin.
    """
    tokens, width = qkv.shape
    _, _, groups, block_size, dim = kv_layer.shape
    heads = width // dim - 2 * groups
    q_out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if kv_layer.dtype == torch.float8_e4m3fn:
        kv_layer = kv_layer.view(torch.uint8)
    half_padded = power_of_two(dim // 2)
    tile_heads = max(1, min(_BLOCK // (2 * half_padded), power_of_two(heads)))
    if tokens:
        rope_kv_kernel[(tokens, triton.cdiv(heads, tile_heads) + triton.cdiv(groups, tile_heads))](
            qkv, cos_sin, kv_layer, positions, slots, q_out,
            *((qkv, qkv, 0.0) if norms is None else (norms.q, norms.k, norms.eps)),
            1 / kv_scales.key, 1 / kv_scales.value, query_scales, None if norms is None else norms.v,
            NUM_HEADS=heads, NUM_GROUPS=groups, HEAD_DIM=dim, HALF_PADDED=half_padded, BLOCK_SIZE=block_size,
            TILE_HEADS=tile_heads, NORMALISE=norms is not None, num_warps=_BLOCK_WARPS, **dependent_launch(qkv),
        )  # fmt: skip
    return q_out


@triton.jit(do_not_specialize=["token_ids", "first"])
def vocab_embedding_kernel(
    token_ids,
    table,
    scales,
    out,
    first,
    num_rows,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token) - first
    inside = (columns < COLUMNS) & (row >= 0) & (row < num_rows)
    value = tl.load(table + row * COLUMNS + columns, mask=inside, other=0).to(tl.float32)
    if BITS == 8:
        value = (value - _BYTE_ZERO) * tl.load(scales + row, mask=(row >= 0) & (row < num_rows), other=0.0)
    tl.store(out + token * COLUMNS + columns, value.to(out.dtype.element_ty), mask=columns < COLUMNS)


def vocab_embedding(token_ids: Tensor, table: CudaPackedWeight, first: int, out_dtype: torch.dtype) -> Tensor:
    """Implement Backend.embed: token_ids int64 [T] -> a new tensor [T, hidden]; other ranks' tokens have rows of zeros.

    So the sum over all ranks is the whole vocabulary's embedding (Shoeybi et al. 2019). Raises ValueError for int4, of
    which no embedding is made.
    """
    if table.bits == 4:
        raise ValueError("an embedding is held in 8 bits, not in 4")
    columns = table.columns
    out = torch.empty((token_ids.shape[0], columns), dtype=out_dtype, device=token_ids.device)
    if token_ids.shape[0]:
        vocab_embedding_kernel[(token_ids.shape[0], triton.cdiv(columns, _BLOCK))](
            token_ids, table.packed, table.scales, out, first, table.rows,
            COLUMNS=columns, BITS=table.bits, BLOCK=_BLOCK, num_warps=_BLOCK_WARPS,
        )  # fmt: skip
    return out
