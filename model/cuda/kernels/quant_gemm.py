"""Projections with quantised weights: y = x W^T + b, W in eight or four bits, widened where it is multiplied.

The weight is the left operand of the matrix instruction, as for skinny products. There it may come from registers: a
program loads bytes, widens them in registers, and the matrix instruction takes them from there. One kernel a format
serves decode steps (a tile for all tokens, columns split) and prompts (many tiles of tokens).

Quantised weights as the GPU's kernels read them: bytes without a sign, and four bits two to a byte.

int8: the byte of a value v is v + 128. int4: columns go in blocks of 128, which are two groups that share a scale; byte
j of a block holds column j in its low half and column 64 + j in its high one, each as v + 8. So the low halves of a
tile of bytes are one group's columns in order, and the high ones the next group's: unpacking moves nothing between
threads, and each half has one scale a row. The high half is used where it stands, as 16 times its value: the scales of
those groups are a sixteenth.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from twostroke.model.checkpoint.quantization import INT4_GROUP, QuantizedWeight
from twostroke.model.cuda.kernels.launch import Architecture, Target, dot_precision
from twostroke.model.cuda.kernels.skinny_gemm import MOST_TOKENS, GemmConfig, SplitWorkspace, store_tile, with_splits

BYTE_ZERO = 128  # what stands for 0
NIBBLE_ZERO = 8


@dataclass(frozen=True)
class PackedWeight:
    """A QuantizedWeight in the kernels' form."""

    packed: Tensor  # uint8 [out, in] of eight bits; [out, 64 * blocks of 128 columns] of four
    # fp32 [out] of eight bits; bf16 [2 * blocks, out] of four, each odd one a sixteenth of its group's
    scales: Tensor
    rows: int
    columns: int
    bits: Literal[8, 4]


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Where int4 columns don't fill the last block, it ends with zeros of scale 0.

    Raises ValueError for other groups than a row of int8 and INT4_GROUP columns of int4, and for scales of int4 that
    are no bf16 numbers.
    """
    rows, columns = weight.values.shape
    if weight.bits == 8:
        if weight.scales.shape[1] != 1:
            raise ValueError(f"int8 kernels take one scale a row, not {weight.scales.shape[1]}")
        return PackedWeight(_unsigned(weight.values, BYTE_ZERO), weight.scales[:, 0].contiguous(), rows, columns, 8)
    if weight.group_size != INT4_GROUP and weight.scales.shape[1] > 1:
        raise ValueError(f"int4 kernels take groups of {INT4_GROUP} columns, not {weight.group_size}")
    if not torch.equal(weight.scales, weight.scales.bfloat16().float()):
        raise ValueError("int4 kernels take scales that bf16 can hold")
    nibbles = functional.pad(_unsigned(weight.values, NIBBLE_ZERO), (0, -columns % (2 * INT4_GROUP)), value=NIBBLE_ZERO)
    low, high = nibbles.view(rows, -1, 2, INT4_GROUP).unbind(2)
    packed = (low | (high << 4)).view(rows, -1)
    groups = 2 * packed.shape[1] // INT4_GROUP
    scales = functional.pad(weight.scales, (0, groups - weight.scales.shape[1])).T.contiguous()
    scales[1::2] /= 16
    return PackedWeight(packed, scales.bfloat16(), rows, columns, 4)


def unpack(weight: PackedWeight) -> Tensor:
    """The weights that are computed with, fp32 [out, in]: the reference of the kernels that read them."""
    if weight.bits == 8:
        return (weight.packed.float() - BYTE_ZERO) * weight.scales[:, None]
    blocks = weight.packed.view(weight.rows, -1, 1, INT4_GROUP)
    values = torch.cat((blocks & 15, blocks >> 4), dim=2).float() - NIBBLE_ZERO
    values[:, :, 1] *= 16
    return (values * weight.scales.T.float().view(weight.rows, -1, 2, 1)).view(weight.rows, -1)[:, : weight.columns]


def _unsigned(values: Tensor, zero: int) -> Tensor:
    return (values.to(torch.int16) + zero).to(torch.uint8).contiguous()


# For 16-bit types, by architecture and bits; the first row with room for the tokens wins, or the last. In flight on a
# Hopper multiprocessor, two steps fewer than there are stages: with up to 16 tokens 2 programs x 4 x 8 KiB of int8 = 64
# KiB, or 2 x 5 x 4 KiB of int4 = 40. Tiles of many tokens spread the widening, three to five instructions a weight,
# over as many tokens as the registers hold sums for.
_CONFIGS: dict[tuple[Architecture, int], tuple[GemmConfig, ...]] = {
    (Architecture.HOPPER, 8): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=6, seats=2),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=5, seats=2),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=4, seats=2),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
        GemmConfig(256, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.HOPPER, 4): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=7, seats=2),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=6, seats=2),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=4, seats=2),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
        GemmConfig(256, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.AMPERE, 8): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=6, seats=2),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=5, seats=2),
        GemmConfig(64, 64, 64, num_warps=4, num_stages=5, seats=2),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.AMPERE, 4): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=6, seats=2),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=5, seats=2),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=4, seats=2),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.SMALL, 8): (
        GemmConfig(16, 64, 64, num_warps=4, num_stages=6, seats=2),
        GemmConfig(32, 64, 64, num_warps=4, num_stages=5, seats=2),
        GemmConfig(64, 64, 64, num_warps=4, num_stages=4, seats=2),
        GemmConfig(128, 128, 32, num_warps=8, num_stages=4),
    ),
    (Architecture.SMALL, 4): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=5, seats=2),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=4, seats=2),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=3, seats=2),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=3),
    ),
}
# fp32 multiplies on the ordinary lanes, on any GPU.
_FP32_CONFIGS = (GemmConfig(16, 16, 128, num_warps=4, num_stages=3), GemmConfig(32, 16, 128, num_warps=4, num_stages=2))
_BYTE_ZERO = tl.constexpr(BYTE_ZERO)
_NIBBLE_ZERO = tl.constexpr(NIBBLE_ZERO)
_GROUP = 8  # tiles of tokens that run beside one another, so that they find a tile of the weight in the cache


def quant_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [T, in] -> [T, out]: summed in fp32, rounded once to out_dtype."""
    y = x.float() @ unpack(weight).T
    return (y if bias is None else y + bias.float()).to(out_dtype)


@triton.jit
def widen(unsigned, MASK: tl.constexpr, ZERO: tl.constexpr):
    """uint8 -> fp32 `(unsigned & MASK) - ZERO`, exact: as the low bits of 2^23 it is a float already.

    Conversion instructions run at a fraction of an addition's rate, and would bound a decode step.
    """
    return ((unsigned.to(tl.uint32) & MASK) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def tile_of(num_rows, num_tokens, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile of tokens and tile of rows, in an order in which neighbours share."""
    row_tiles = tl.cdiv(num_rows, BLOCK_N)
    token_tiles = tl.cdiv(num_tokens, BLOCK_T)
    program = tl.program_id(1)
    return tl.swizzle2d(program // row_tiles, program % row_tiles, token_tiles, row_tiles, GROUP)


@triton.jit
def load_x(x_rows, real, columns, num_columns, WHOLE_STEPS: tl.constexpr):
    """x^T at `columns` [columns, tokens], zeros for tokens that are not real and columns past the end."""
    if WHOLE_STEPS:
        return tl.load(x_rows + columns[:, None], mask=real, other=0.0)
    else:
        return tl.load(x_rows + columns[:, None], mask=real & (columns < num_columns)[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def int8_gemm_kernel(
    x,
    packed,
    scales,
    bias,
    y,
    sums,
    arrived,
    num_tokens,
    num_rows,
    num_columns,
    x_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a split of the columns, BLOCK_N rows and BLOCK_T tokens; a row's scale is applied to its sums."""
    split = tl.program_id(0)
    token_tile, tile = tile_of(num_rows, num_tokens, BLOCK_T, BLOCK_N, GROUP)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    steps = tl.cdiv(tl.cdiv(num_columns, BLOCK_K), SPLITS)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, num_columns)
    real_rows = tl.minimum(rows, num_rows - 1)
    packed_at = packed + real_rows.to(tl.int64)[:, None] * num_columns
    x_rows = x + tokens.to(tl.int64)[None, :] * x_stride
    real = (tokens < num_tokens)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(begin, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        if WHOLE_STEPS:
            bits = tl.load(packed_at + columns[None, :])
        else:
            bits = tl.load(packed_at + columns[None, :], mask=(columns < num_columns)[None, :], other=0)
        x_tile = load_x(x_rows, real, columns, num_columns, WHOLE_STEPS)
        acc = tl.dot(widen(bits, 0xFF, _BYTE_ZERO).to(x_tile.dtype), x_tile, acc=acc, input_precision=PRECISION)
    acc *= tl.load(scales + real_rows)[:, None]
    store_tile(acc, bias, y, sums, arrived, tile, split, rows, tokens, num_rows, num_tokens, SPLITS, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens"])
def int4_gemm_kernel(
    x,
    packed,
    scales,
    bias,
    y,
    sums,
    arrived,
    num_tokens,
    num_rows,
    num_columns,
    x_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
):
    """As int8_gemm_kernel; a step is BLOCK_K / 2 bytes, half of its columns of each of a block's two scale groups.

    With SCALE_SUMS each half is multiplied for itself, and its sums by the row's scale: less work than to scale its
    weights, where tokens are few. Without, the scaled weights of both halves are multiplied at once.
    """
    BYTES: tl.constexpr = BLOCK_K // 2
    STEPS: tl.constexpr = SCALE_GROUP // BYTES  # a block's
    split = tl.program_id(0)
    token_tile, tile = tile_of(num_rows, num_tokens, BLOCK_T, BLOCK_N, GROUP)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes = tl.arange(0, BYTES)
    blocks = tl.cdiv(num_columns, 2 * SCALE_GROUP)
    steps = tl.cdiv(blocks * STEPS, SPLITS)
    begin = split * steps
    end = tl.minimum(begin + steps, blocks * STEPS)
    real_rows = tl.minimum(rows, num_rows - 1)
    packed_at = packed + real_rows.to(tl.int64)[:, None] * (blocks * SCALE_GROUP) + lanes[None, :]
    x_rows = x + tokens.to(tl.int64)[None, :] * x_stride
    real = (tokens < num_tokens)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    following = scales + 2 * tl.minimum(begin // STEPS, blocks - 1) * num_rows + real_rows
    next_low = tl.load(following)
    next_high = tl.load(following + num_rows)
    for step in range(begin, end):
        both = tl.load(packed_at + step * BYTES)
        # The compiler reads weights and x steps ahead, but not what is two bytes wide.
        low_scale, high_scale = next_low[:, None].to(tl.float32), next_high[:, None].to(tl.float32)
        following = scales + 2 * tl.minimum((step + 1) // STEPS, blocks - 1) * num_rows + real_rows
        next_low = tl.load(following)
        next_high = tl.load(following + num_rows)
        low, high = widen(both, 0x0F, _NIBBLE_ZERO), widen(both, 0xF0, 16 * _NIBBLE_ZERO)
        first = step // STEPS * 2 * SCALE_GROUP + step % STEPS * BYTES
        if SCALE_SUMS:
            low_x = load_x(x_rows, real, first + lanes, num_columns, WHOLE_STEPS)
            acc += tl.dot(low.to(low_x.dtype), low_x, input_precision=PRECISION) * low_scale
            high_x = load_x(x_rows, real, first + SCALE_GROUP + lanes, num_columns, WHOLE_STEPS)
            acc += tl.dot(high.to(high_x.dtype), high_x, input_precision=PRECISION) * high_scale
        else:
            both_lanes = tl.arange(0, BLOCK_K)
            columns = first + both_lanes // BYTES * SCALE_GROUP + both_lanes % BYTES
            x_tile = load_x(x_rows, real, columns, num_columns, WHOLE_STEPS)
            # [rows, BYTES, 2] -> [rows, BLOCK_K], one half after the other: no more than other names for registers.
            w = tl.join((low * low_scale).to(x_tile.dtype), (high * high_scale).to(x_tile.dtype))
            w = w.permute(0, 2, 1).reshape(BLOCK_N, BLOCK_K)
            acc = tl.dot(w, x_tile, acc=acc, input_precision=PRECISION)
    store_tile(acc, bias, y, sums, arrived, tile, split, rows, tokens, num_rows, num_tokens, SPLITS, HAS_BIAS)


def quant_config(
    target: Target, dtype: torch.dtype, bits: Literal[8, 4], num_tokens: int, rows: int, columns: int
) -> GemmConfig:
    """The table's row for any number of tokens, and the splits for a weight [rows, columns]."""
    table = _FP32_CONFIGS if dtype == torch.float32 else _CONFIGS[target.architecture, bits]
    config = next((config for config in table if num_tokens <= config.block_t), table[-1])
    return config if num_tokens > MOST_TOKENS else with_splits(config, target, rows, columns, columns * bits // 8)


def quant_gemm(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    workspace: SplitWorkspace,
    config: GemmConfig,
) -> Tensor:
    """`quant_reference` on the GPU; with splits for no more tokens than MOST_TOKENS. Returns a new tensor.

    x [T, in] with contiguous rows, bias [out] contiguous.
    """
    tokens = x.shape[0]
    rows, columns = weight.rows, weight.columns
    y = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
    if tokens == 0 or rows == 0:
        return y
    grid = (config.splits, triton.cdiv(rows, config.block_n) * triton.cdiv(tokens, config.block_t))
    arguments = (x, weight.packed, weight.scales, x if bias is None else bias, y, workspace.sums, workspace.arrived,
                 tokens, rows, columns, x.stride(0))  # fmt: skip
    options = {"BLOCK_T": config.block_t, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
               "SPLITS": config.splits, "HAS_BIAS": bias is not None, "PRECISION": dot_precision(x.dtype),
               "GROUP": _GROUP, "num_warps": config.num_warps, "num_stages": config.num_stages}  # fmt: skip
    if weight.bits == 8:
        int8_gemm_kernel[grid](*arguments, WHOLE_STEPS=columns % config.block_k == 0, **options)
    else:
        int4_gemm_kernel[grid](
            *arguments, WHOLE_STEPS=columns % (2 * INT4_GROUP) == 0, SCALE_GROUP=INT4_GROUP,
            SCALE_SUMS=config.block_t <= MOST_TOKENS, **options,
        )  # fmt: skip
    return y
