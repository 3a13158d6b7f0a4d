"""Projections y = x W^T + b whose weights are read at the speed of the memory, or widened where they are multiplied.

The weight is the left operand of the matrix instruction, whose 16 or 64 rows it fills; the tokens are its columns, of
which as few as 8 are allowed. So one token costs no more instructions than eight. A weight in eight or four bits may
come from registers there: a program loads bytes, widens them in registers, and multiplies them from there.

One kernel serves decode steps (a tile for all tokens, columns split) and, with quantised weights, prompts (many tiles
of tokens). Weights that are not quantised are for 64 tokens at most: of more, cuBLAS is hard to beat.

Split-K with one result: several programs share the columns of a tile, and the last to arrive adds up their sums.

A decode step's projections are bound by memory: each weight is read once and multiplied by a few tokens. What counts is
that nearly every multiprocessor reads, and keeps enough bytes on their way. By Little's law those are bandwidth x
latency: about 3.35 TB/s x 0.7 us / 132 = 18 KB a multiprocessor on an H100, 4.8 x 0.7 / 132 = 26 KB on an H200, 2.0 x
0.6 / 108 = 11 KB on an A100; the launch tables keep 1.5 to 4 times that.

A projection with few rows has too few tiles for that, so its columns are split. Which program comes last differs from
run to run, but it adds the sums of all from memory in the order of the columns: the result does not depend on it, and
no second kernel is launched.

Quantised weights as the kernel reads them: bytes without a sign, and four bits two to a byte.

int8: the byte of a value v is v + 128. int4: columns go in blocks of 128, which are two groups that share a scale; byte
j of a block holds column j in its low half and column 64 + j in its high one, each as v + 8. So the low halves of a
tile of bytes are one group's columns in order, and the high ones the next group's: unpacking moves nothing between
threads, and each half has one scale a row. The high half is used where it stands, as 16 times its value: the scales of
those groups are a sixteenth.

FP8 (e4m3; GPUs from sm_89 on) is multiplied as it is, and so are activations, which each token's own scale makes FP8
just before (Micikevicius et al. 2022): twice the rate of 16 bits, and no widening. A weight has a scale a row, or one
for each FP8_GROUP columns of it, which multiplies that step's sums. Steps are added up in fp32: Hopper's matrix unit
itself keeps some 14 bits of sums of FP8 (DeepSeek-AI 2024, V3, 3.3.2).
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import GLU_ALPHA, GLU_LIMIT, Activation
from twostroke.model.costs.sizes import INT4_GROUP
from twostroke.model.cuda.kernels.launch import Architecture, GpuTarget, await_inputs, dependent_launch, dot_precision

Bits = Literal[16, 8, 4]
"""Bits of a weight's number: 16 for any float type, fp32 too."""

BYTE_ZERO = 128  # the code of 0
NIBBLE_ZERO = 8
FP8_GROUP = 128  # columns of a weight in FP8 that share a scale, where not all of a row do


@dataclass(frozen=True)
class CudaPackedWeight:
    """A weight in the kernels' form."""

    packed: (
        Tensor  # [out, in] as it was, FP8 too; uint8 [out, in] of eight bits; [out, 64 * blocks of 128 columns] of four
    )
    # fp32 [out] of eight bits, [groups, out] of FP8; bf16 [2 * blocks, out] of four, each odd one a sixteenth of its
    # group's; else not read
    scales: Tensor
    rows: int
    columns: int
    bits: Bits

    @property
    def is_fp8(self) -> bool:
        return self.packed.dtype == torch.float8_e4m3fn


def pack(weight: Tensor | QuantizedWeight) -> CudaPackedWeight:
    """Pack a weight. A plain one is kept, and not copied if contiguous. The last block of int4 ends with zeros of scale
    0.

    Raises ValueError for other groups than a row of int8 and INT4_GROUP columns of int4, and for scales of int4 that
    are no bf16 numbers.
    """
    if isinstance(weight, Tensor):
        weight = weight.contiguous()
        return CudaPackedWeight(weight, weight, weight.shape[0], weight.shape[1], 16)
    rows, columns = weight.values.shape
    if weight.bits == 8:
        if weight.scales.shape[1] != 1:
            raise ValueError(f"int8 kernels take one scale a row, not {weight.scales.shape[1]}")
        return CudaPackedWeight(_unsigned(weight.values, BYTE_ZERO), weight.scales[:, 0].contiguous(), rows, columns, 8)
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
    return CudaPackedWeight(packed, scales.bfloat16(), rows, columns, 4)


def can_pack(weight: QuantizedWeight) -> bool:
    """Return True if the weight has a form that `pack` takes, as `quantize` makes them; grouped_gemm.py takes the
    others."""
    if weight.values.dtype != torch.int8 or weight.offsets is not None or weight.order is not None:
        return False
    if weight.bits == 8:
        return weight.num_groups == 1
    is_bf16 = torch.equal(weight.scales, weight.scales.bfloat16().float())
    return is_bf16 and (weight.group_size == INT4_GROUP or weight.num_groups == 1)


def can_multiply_fp8(weight: QuantizedWeight) -> bool:
    """Return True if `pack_fp8` takes the weight: FP8 with a scale per row or per FP8_GROUP columns, in rows of whole
    vectors."""
    if weight.values.dtype != torch.float8_e4m3fn or weight.is_fp4:
        return False
    if weight.offsets is not None or weight.order is not None or weight.values.shape[1] % 16:
        return False
    return weight.num_groups == 1 or weight.group_size == FP8_GROUP


def pack_fp8(weight: QuantizedWeight) -> CudaPackedWeight:
    """Pack a weight that passes `can_multiply_fp8`."""
    rows, columns = weight.values.shape
    return CudaPackedWeight(weight.values.contiguous(), weight.scales.T.contiguous(), rows, columns, 8)


def _unsigned(values: Tensor, zero: int) -> Tensor:
    return (values.to(torch.int16) + zero).to(torch.uint8).contiguous()


MAX_TOKENS = 64  # of a launch that splits
_SPLITS = (1, 2, 4, 8)
_CAPACITY = 1 << 22  # fp32 sums that the workspace holds, 16 MiB
_MIN_ROWS = 16  # of a tile


class SplitWorkspace:
    """Memory in which programs of one launch leave sums for each other, and count arrivals. For one stream at a time.

    It is never resized, so that a captured graph can go on using it; and counters are zero again after each launch.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.empty(_CAPACITY, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(_CAPACITY // (2 * MAX_TOKENS * _MIN_ROWS), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tiling of one launch. A program computes y^T [block_n, block_t] in steps of block_k columns of the weight."""

    block_t: int  # tokens
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int  # steps in shared memory, the one in use included
    fill: float = 1.0  # programs a multiprocessor that splits aim at
    splits: int = 1  # programs that share a tile's columns


@cache
def with_splits(config: GemmConfig, target: GpuTarget, rows: int, columns: int) -> GemmConfig:
    """Return the config with the fewest splits that give each multiprocessor `fill` programs on average.

    The weight is [rows, columns]. The number of tokens does not count, only the tile's: a launch serves any that fit.
    """
    # Every program gets a step, and all sums fit into the workspace.
    most = max(1, min(-(-columns // config.block_k), _CAPACITY // (MAX_TOKENS * rows)))
    possible = [splits for splits in _SPLITS if splits <= most]
    wanted = config.fill * target.multiprocessors / -(-rows // config.block_n)
    return replace(config, splits=next((splits for splits in possible if splits >= wanted), possible[-1]))


# The tables are for 16-bit types, by architecture and the weight's bits; the first row with room for the tokens wins,
# or the last.
#
# Hopper's rows of 16 bits, and of 8 and 4 bits up to 16 tokens, were measured on an H200 (2026-11-26, Triton 3.6) over
# tiles of 16 to 128 rows, steps of 64 to 256 columns, 1 to 8 warps and 1 to 8 splits, with an 8B model's weights read
# from memory (docs/results/index.md). Tiles of 64 rows are the least that warpgroup instructions take; of 16 bits they
# reach 0.85 of the memory's bandwidth, where tiles of 16 rows, one warp each, reached 0.62. A weight of 16 bits needs
# no more than three programs for four multiprocessors; one that is widened in registers waits for its arithmetic, and
# needs two to four programs a multiprocessor.
#
# All other rows are predicted. Tiles of many tokens spread the widening, three to five instructions a weight, over as
# many tokens as the registers hold sums for.
_CONFIGS: dict[tuple[Architecture, Bits], tuple[GemmConfig, ...]] = {
    (Architecture.HOPPER, 16): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=6, fill=0.7),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=6, fill=0.7),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=6, fill=0.7),
    ),
    (Architecture.HOPPER, 8): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
        GemmConfig(256, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.HOPPER, 4): (
        GemmConfig(16, 32, 128, num_warps=1, num_stages=6, fill=3.8),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
        GemmConfig(256, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.AMPERE, 16): (
        GemmConfig(16, 16, 128, num_warps=1, num_stages=6, fill=1.9),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=4),
        GemmConfig(64, 128, 64, num_warps=8, num_stages=6),
    ),
    (Architecture.AMPERE, 8): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=6, fill=1.9),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=5, fill=1.9),
        GemmConfig(64, 64, 64, num_warps=4, num_stages=5, fill=1.9),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.AMPERE, 4): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=6, fill=1.9),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=5, fill=1.9),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.SMALL, 16): (
        GemmConfig(16, 16, 128, num_warps=1, num_stages=5, fill=1.9),
        GemmConfig(32, 64, 64, num_warps=4, num_stages=4),
        GemmConfig(64, 128, 64, num_warps=8, num_stages=4),
    ),
    (Architecture.SMALL, 8): (
        GemmConfig(16, 64, 64, num_warps=4, num_stages=6, fill=1.9),
        GemmConfig(32, 64, 64, num_warps=4, num_stages=5, fill=1.9),
        GemmConfig(64, 64, 64, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(128, 128, 32, num_warps=8, num_stages=4),
    ),
    (Architecture.SMALL, 4): (
        GemmConfig(16, 64, 128, num_warps=4, num_stages=5, fill=1.9),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(64, 64, 128, num_warps=4, num_stages=3, fill=1.9),
        GemmConfig(128, 128, 64, num_warps=8, num_stages=3),
    ),
}
# FP8 by FP8, of steps of FP8_GROUP columns. Few tokens are bound by the weight's bytes as int8's are: as many are in
# flight. Many are bound by products: at 128 x 128 a step's fresh sums and all of them take 64 registers a thread each.
# Hopper's first row was measured as those above.
_FP8_CONFIGS: dict[Architecture, tuple[GemmConfig, ...]] = {
    Architecture.HOPPER: (
        GemmConfig(16, 64, FP8_GROUP, num_warps=4, num_stages=8, fill=0.7),
        GemmConfig(32, 64, FP8_GROUP, num_warps=4, num_stages=6, fill=0.7),
        GemmConfig(64, 64, FP8_GROUP, num_warps=4, num_stages=6, fill=0.7),
        GemmConfig(128, 128, FP8_GROUP, num_warps=8, num_stages=4),
    ),
    Architecture.SMALL: (
        GemmConfig(16, 64, FP8_GROUP, num_warps=4, num_stages=4, fill=1.9),
        GemmConfig(32, 64, FP8_GROUP, num_warps=4, num_stages=3, fill=1.9),
        GemmConfig(64, 64, FP8_GROUP, num_warps=4, num_stages=3, fill=1.9),
        GemmConfig(128, 128, FP8_GROUP, num_warps=8, num_stages=2),
    ),
}
# fp32 multiplies on the ordinary lanes, whose operands live in registers: small steps, on any GPU.
_FP32_CONFIGS = (
    GemmConfig(16, 16, 64, num_warps=2, num_stages=4),
    GemmConfig(32, 32, 32, num_warps=4, num_stages=4),
    GemmConfig(64, 64, 16, num_warps=8, num_stages=4),
)
_FP32_QUANT_CONFIGS = (
    GemmConfig(16, 16, 128, num_warps=4, num_stages=3),
    GemmConfig(32, 16, 128, num_warps=4, num_stages=2),
)


def gemm_config(
    target: GpuTarget, dtype: torch.dtype, bits: Bits, num_tokens: int, rows: int, columns: int
) -> GemmConfig:
    """The table's row for any number of tokens, of 16 bits for 1 to MAX_TOKENS, and the splits for a weight.

    `dtype` is that of what is multiplied with the weight: where that is FP8, so are both.
    """
    if dtype == torch.float8_e4m3fn:
        table = _FP8_CONFIGS[target.architecture]
    elif dtype == torch.float32:
        table = _FP32_CONFIGS if bits == 16 else _FP32_QUANT_CONFIGS
    else:
        table = _CONFIGS[target.architecture, bits]
    config = next((config for config in table if num_tokens <= config.block_t), table[-1])
    if num_tokens > min(MAX_TOKENS, config.block_t):
        return config  # programs of several tiles of tokens would be counted as one tile's
    return with_splits(config, target, rows, columns)


_BYTE_ZERO = tl.constexpr(BYTE_ZERO)
_NIBBLE_ZERO = tl.constexpr(NIBBLE_ZERO)
_MAX_TOKENS = tl.constexpr(MAX_TOKENS)
_TWO_SQRT_2_PI = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_GLU_ALPHA, _GLU_LIMIT = tl.constexpr(GLU_ALPHA), tl.constexpr(GLU_LIMIT)
_TILES_TOGETHER = tl.constexpr(8)  # of tokens, beside one another, so that they find a tile of the weight in the cache


@triton.jit
def widen(unsigned, MASK: tl.constexpr, ZERO: tl.constexpr):
    """uint8 -> fp32 `(unsigned & MASK) - ZERO`, exact: as the low bits of 2^23 it is a float already.

    Conversion instructions run at a fraction of an addition's rate, and would bound a decode step.
    """
    return ((unsigned.to(tl.uint32) & MASK) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def load_x(x_rows, real, columns, num_columns, WHOLE_STEPS: tl.constexpr):
    """x^T at `columns` [columns, tokens], zeros for tokens that are not real and columns past the end."""
    if WHOLE_STEPS:
        return tl.load(x_rows + columns[:, None], mask=real, other=0.0)
    else:
        return tl.load(x_rows + columns[:, None], mask=real & (columns < num_columns)[:, None], other=0.0)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, of fp32, or relu^2 of what has no gate.

    All activations of gates are gate * sigmoid(x): SiLU's x is the gate itself.

    GELU by its approximation with tanh: 0.5 (1 + tanh(u)) = sigmoid(2 u).
    """
    x = gate
    if ACTIVATION == "relu2":
        gate = tl.where(gate < 0.0, 0.0, gate)
        return gate * gate
    if ACTIVATION == "gelu_tanh":
        x = _TWO_SQRT_2_PI * gate * (1.0 + 0.044715 * gate * gate)
    if ACTIVATION == "clamped":
        # By comparisons, which leave a NaN what it is.
        gate = tl.where(gate > _GLU_LIMIT, _GLU_LIMIT, gate)
        up = tl.where(up > _GLU_LIMIT, _GLU_LIMIT, tl.where(up < -_GLU_LIMIT, -_GLU_LIMIT, up)) + 1.0
        x = gate * _GLU_ALPHA
    # Of both signs the exponential that can't overflow.
    shrunk = tl.exp(-tl.abs(x))
    sigmoid = tl.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk)
    return gate * sigmoid * up


# The number of tokens changes from step to step: specialised on it, the kernel would be compiled again while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def gemm_kernel(
    x,
    weight,
    scales,
    x_scales,
    bias,
    y,
    sums,
    arrived,
    num_tokens,
    num_rows,
    num_columns,
    BITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    FP8: tl.constexpr,
    SCALES_STEPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per split of the columns, BLOCK_N rows of the weight and BLOCK_T tokens.

    WHOLE_STEPS: the columns are a multiple of BLOCK_K, or of four bits of a block. Rows of a tile past the weight's
    read its last row, and their results are dropped. In eight bits, a row's scale is applied to its sums; of FP8 each
    step's own with SCALES_STEPS, and each token's.

    In four bits a step is BLOCK_K / 2 bytes, half of its columns of each of a block's two scale groups. Where tokens
    are few, each half is multiplied for itself, and its sums by the row's scale: less work than to scale its weights.
    Else the scaled weights of both halves are multiplied at once.

    With an ACTIVATION the weight's first half are rows of gates, and y has `activate` of each with its row of the
    other half. A tile has both by turns of eight, which a thread of the matrix instruction holds the sums of.
    """
    await_inputs(DEPENDENT)
    split = tl.program_id(0)
    if BITS == 16:  # of no more tokens than one tile has
        token_tile, tile = 0, tl.program_id(1)
    else:
        row_tiles = tl.cdiv(num_rows, BLOCK_N)
        token_tiles = tl.cdiv(num_tokens, BLOCK_T)
        program = tl.program_id(1)
        token_tile, tile = tl.swizzle2d(
            program // row_tiles, program % row_tiles, token_tiles, row_tiles, _TILES_TOGETHER
        )
    lanes_n = tl.arange(0, BLOCK_N)
    if ACTIVATION is None:
        rows = tile * BLOCK_N + lanes_n
        real_row = rows < num_rows
        real_rows = tl.minimum(rows, num_rows - 1)
    else:
        width = num_rows // 2
        pair = tile * (BLOCK_N // 2) + lanes_n // 16 * 8 + lanes_n % 8
        real_row = pair < width
        rows = pair + lanes_n // 8 % 2 * width
        real_rows = tl.minimum(pair, width - 1) + lanes_n // 8 % 2 * width
    tokens = token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    real = (tokens < num_tokens)[None, :]
    x_rows = x + tokens.to(tl.int64)[None, :] * num_columns
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)

    if BITS == 4:
        BYTES: tl.constexpr = BLOCK_K // 2
        STEPS: tl.constexpr = SCALE_GROUP // BYTES  # a block's
        lanes = tl.arange(0, BYTES)
        blocks = tl.cdiv(num_columns, 2 * SCALE_GROUP)
        steps = tl.cdiv(blocks * STEPS, SPLITS)
        begin = split * steps
        end = tl.minimum(begin + steps, blocks * STEPS)
        weight_at = weight + real_rows.to(tl.int64)[:, None] * (blocks * SCALE_GROUP) + lanes[None, :]
        following = scales + 2 * tl.minimum(begin // STEPS, blocks - 1) * num_rows + real_rows
        next_low = tl.load(following)
        next_high = tl.load(following + num_rows)
        for step in range(begin, end):
            both = tl.load(weight_at + step * BYTES)
            # The compiler reads weights and x steps ahead, but not what is two bytes wide.
            low_scale, high_scale = next_low[:, None].to(tl.float32), next_high[:, None].to(tl.float32)
            following = scales + 2 * tl.minimum((step + 1) // STEPS, blocks - 1) * num_rows + real_rows
            next_low = tl.load(following)
            next_high = tl.load(following + num_rows)
            low, high = widen(both, 0x0F, _NIBBLE_ZERO), widen(both, 0xF0, 16 * _NIBBLE_ZERO)
            first = step // STEPS * 2 * SCALE_GROUP + step % STEPS * BYTES
            if BLOCK_T <= _MAX_TOKENS:
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
    else:
        steps = tl.cdiv(tl.cdiv(num_columns, BLOCK_K), SPLITS)
        begin = split * steps * BLOCK_K
        end = tl.minimum(begin + steps * BLOCK_K, num_columns)
        weight_at = weight + real_rows.to(tl.int64)[:, None] * num_columns
        for start in range(begin, end, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            if WHOLE_STEPS:
                w = tl.load(weight_at + columns[None, :])
            else:
                w = tl.load(
                    weight_at + columns[None, :], mask=(columns < num_columns)[None, :], other=0.0 if FP8 else 0
                )
            x_tile = load_x(x_rows, real, columns, num_columns, WHOLE_STEPS)
            if FP8:
                if SCALES_STEPS:
                    of_step = tl.load(scales + start // BLOCK_K * num_rows + real_rows)[:, None]
                    acc += tl.dot(w, x_tile, max_num_imprecise_acc=BLOCK_K) * of_step
                else:
                    acc = tl.dot(w, x_tile, acc=acc, max_num_imprecise_acc=BLOCK_K)
            else:
                if BITS == 8:
                    w = widen(w, 0xFF, _BYTE_ZERO).to(x_tile.dtype)
                acc = tl.dot(w, x_tile, acc=acc, input_precision=PRECISION)
        if BITS == 8 and not SCALES_STEPS:
            acc *= tl.load(scales + real_rows)[:, None]
        if FP8:
            acc *= tl.load(x_scales + tokens, mask=tokens < num_tokens, other=0.0)[None, :]

    # y[tokens, rows] = bias[rows] + the sum over all splits of acc [rows, tokens], in the order of the splits.
    inside = real_row[:, None] & real
    at = tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    mine = True
    if SPLITS > 1:
        in_split = num_tokens.to(tl.int64) * num_rows
        tl.store(sums + split * in_split + at, acc, mask=inside)
        tl.debug_barrier()  # all threads' sums are written before the program is counted
        mine = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if mine:
            acc = tl.zeros_like(acc)
            AT_ONCE: tl.constexpr = 4 if SPLITS > 4 else SPLITS  # on their way to registers, of which more would spill
            for first in range(0, SPLITS, AT_ONCE):
                for other in tl.static_range(AT_ONCE):
                    # From the second-level cache: nothing else has seen the others' sums.
                    sum_at = sums + (first + other) * in_split + at
                    acc += tl.load(sum_at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if mine:
        if HAS_BIAS:
            acc += tl.load(bias + rows, mask=real_row, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION is None:
            tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            gate, up = tl.split(acc.reshape(BLOCK_N // 16, 2, 8, BLOCK_T).permute(0, 2, 3, 1))
            gated = activate(gate, up, ACTIVATION).reshape(HALF, BLOCK_T).to(y.dtype.element_ty)
            columns = tile * HALF + tl.arange(0, HALF)
            y_at = y + tokens.to(tl.int64)[None, :] * width + columns[:, None]
            tl.store(y_at, gated, mask=(columns < width)[:, None] & real)


def gemm(
    x: Tensor,
    weight: CudaPackedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    workspace: SplitWorkspace,
    config: GemmConfig,
    x_scales: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Compute the product of tests/rigs/cuda_reference.py; of FP8 with x of codes and `x_scales` fp32 [T].

    Returns a new tensor: with an activation, what `reference.gate` makes of the fp32 sums, [T, out / 2].

    With splits for no more tokens than MAX_TOKENS and config.block_t, with weights of 16 bits for no more than this.
    x [T, in] and bias [out] contiguous; weights of 16 bits are of x's dtype.
    """
    tokens, columns = x.shape
    rows = weight.rows
    y = torch.empty((tokens, rows if activation is None else rows // 2), dtype=out_dtype, device=x.device)
    if tokens and rows:
        gemm_kernel[(config.splits, triton.cdiv(rows, config.block_n) * triton.cdiv(tokens, config.block_t))](
            x, weight.packed, weight.scales, weight.scales if x_scales is None else x_scales,
            x if bias is None else bias, y, workspace.sums, workspace.arrived,
            tokens, rows, columns,
            BITS=weight.bits, BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            SPLITS=config.splits, WHOLE_STEPS=columns % (2 * INT4_GROUP if weight.bits == 4 else config.block_k) == 0,
            HAS_BIAS=bias is not None, PRECISION=dot_precision(x.dtype), SCALE_GROUP=INT4_GROUP,
            FP8=weight.is_fp8, SCALES_STEPS=weight.is_fp8 and len(weight.scales) > 1,
            ACTIVATION=activation,
            num_warps=config.num_warps, num_stages=config.num_stages, **dependent_launch(x),
        )  # fmt: skip
    return y
