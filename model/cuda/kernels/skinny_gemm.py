"""Projections of few tokens: y = x W^T + b with up to 64 rows of x, at the speed at which W can be read.

The weight is the left operand of the matrix instruction, whose 16 or 64 rows it fills; the tokens are its columns, of
which as few as 8 are allowed. So one token costs no more instructions than eight.

Split-K with one result: several programs share the columns of a tile, and the last to arrive adds up their sums.

A decode step's projections are bound by memory: each weight is read once and multiplied by a few tokens. What counts is
that every multiprocessor reads the same share, and keeps enough bytes on their way. By Little's law those are bandwidth
x latency: about 3.35 TB/s x 0.7 us / 132 = 18 KB a multiprocessor on an H100, 4.8 x 0.7 / 132 = 26 KB on an H200,
2.0 x 0.6 / 108 = 11 KB on an A100; the launch tables keep 1.5 to 4 times that.

A projection with few rows has too few tiles for that, so its columns are split. Which program comes last differs from
run to run, but it adds the sums of all from memory in the order of the columns: the result does not depend on it, and
no second kernel is launched.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.cuda.kernels.launch import Architecture, Target, dot_precision

MOST_TOKENS = 64  # of a launch that splits
_SPLITS = (1, 2, 4, 8)
_CAPACITY = 1 << 22  # fp32 sums that the workspace holds, 16 MiB
_LEAST_ROWS = 16  # of a tile
# The last program's way: its own sum written, counted, all sums read again; 1.5 us. A multiprocessor reads as much of
# the weights meanwhile.
_MERGE_BYTES = 40_000


class SplitWorkspace:
    """What programs of one launch leave for one another: sums, and how many have come. For one stream at a time.

    It is never resized, so that a captured graph can go on using it; and counters are zero again after each launch.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.empty(_CAPACITY, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(_CAPACITY // (2 * MOST_TOKENS * _LEAST_ROWS), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one launch is tiled. A program computes y^T [block_n, block_t] in steps of block_k columns of the weight."""

    block_t: int  # tokens
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int  # steps in shared memory, the one in use included
    seats: int = 1  # programs that a multiprocessor should run at once, so that one's waiting is another's reading
    splits: int = 1  # programs that share a tile's columns


@cache
def with_splits(config: GemmConfig, target: Target, rows: int, columns: int, row_bytes: int) -> GemmConfig:
    """The config with as many splits as make the busiest multiprocessor's bytes the fewest.

    Those are its programs' shares of the weight [rows, columns], their sums written and read again, and what the
    merging costs it. The number of tokens does not count, only the tile's: a launch serves any that fit.
    """
    steps = -(-columns // config.block_k)

    def busiest(splits: int) -> float:
        programs = -(-rows // config.block_n) * splits
        programs = max(config.seats, -(-programs // target.multiprocessors))  # an empty seat is as bad as a busy one
        share = config.block_n * row_bytes * -(-steps // splits) / steps
        if splits == 1:
            return programs * share
        return programs * (share + 2 * 4 * config.block_n * config.block_t) + _MERGE_BYTES

    # Every program gets a step, and all sums fit into the workspace.
    most = max(1, min(steps, _CAPACITY // (MOST_TOKENS * rows)))
    return replace(config, splits=min((splits for splits in _SPLITS if splits <= most), key=busiest))


@triton.jit
def store_tile(
    acc,
    bias,
    y,
    sums,
    arrived,
    tile,
    split,
    rows,
    tokens,
    num_rows,
    num_tokens,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """y[tokens, rows] = bias[rows] + the sum over all splits of acc [rows, tokens], in the order of the splits."""
    inside = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
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
            acc += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)


# For 16-bit types, by architecture; the first row with room for the tokens wins. Up to 16 tokens, tiles of 16 rows: out
# = 4096 gives 256 of them, which is balanced (two on nearly each of 132) without a split. From there on x counts: each
# tile reads it again, from the second-level cache, which gives about twice the memory's bandwidth; so x may be half of
# a tile's bytes at most. In flight on a Hopper multiprocessor, two steps fewer than there are stages: 2 programs x 6 x
# 4 KiB = 48 KiB, 2 x 2 x 16 = 64, 2 x 32 = 64.
_CONFIGS: dict[Architecture, tuple[GemmConfig, ...]] = {
    Architecture.HOPPER: (
        GemmConfig(16, 16, 128, num_warps=1, num_stages=8, seats=2),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=4, seats=2),
        GemmConfig(64, 128, 128, num_warps=8, num_stages=4),
    ),
    Architecture.AMPERE: (
        GemmConfig(16, 16, 128, num_warps=1, num_stages=6, seats=2),
        GemmConfig(32, 64, 128, num_warps=4, num_stages=4, seats=2),
        GemmConfig(64, 128, 64, num_warps=8, num_stages=6),
    ),
    Architecture.SMALL: (
        GemmConfig(16, 16, 128, num_warps=1, num_stages=5, seats=2),
        GemmConfig(32, 64, 64, num_warps=4, num_stages=4, seats=2),
        GemmConfig(64, 128, 64, num_warps=8, num_stages=4),
    ),
}
# fp32 multiplies on the ordinary lanes, whose operands live in registers: small steps, on any GPU.
_FP32_CONFIGS = (
    GemmConfig(16, 16, 64, num_warps=2, num_stages=4),
    GemmConfig(32, 32, 32, num_warps=4, num_stages=4),
    GemmConfig(64, 64, 16, num_warps=8, num_stages=4),
)


def skinny_config(target: Target, dtype: torch.dtype, num_tokens: int, rows: int, columns: int) -> GemmConfig:
    """The table's row for 1 to MOST_TOKENS tokens, and the splits for a weight [rows, columns]."""
    table = _FP32_CONFIGS if dtype == torch.float32 else _CONFIGS[target.architecture]
    config = next(config for config in table if num_tokens <= config.block_t)
    return with_splits(config, target, rows, columns, columns * dtype.itemsize)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out]: summed in fp32, rounded once to out_dtype."""
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(out_dtype)


# The number of tokens changes from step to step: specialised on it, the kernel would be compiled again while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def skinny_gemm_kernel(
    x,
    weight,
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
):
    """One program a split of the columns and BLOCK_N rows of the weight, for all tokens.

    WHOLE_STEPS: the columns are a multiple of BLOCK_K. Rows of a tile past the weight's read its last row, and their
    results are dropped.
    """
    split = tl.program_id(0)
    tile = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(tl.cdiv(num_columns, BLOCK_K), SPLITS)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, num_columns)
    weight_at = weight + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * num_columns + columns[None, :]
    x_at = x + tokens.to(tl.int64)[None, :] * x_stride + columns[:, None]
    real = (tokens < num_tokens)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(begin, end, BLOCK_K):
        if WHOLE_STEPS:
            w = tl.load(weight_at + start)
            x_tile = tl.load(x_at + start, mask=real, other=0.0)
        else:
            inside = columns < num_columns - start
            w = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
            x_tile = tl.load(x_at + start, mask=real & inside[:, None], other=0.0)
        acc = tl.dot(w, x_tile, acc=acc, input_precision=PRECISION)
    store_tile(acc, bias, y, sums, arrived, tile, split, rows, tokens, num_rows, num_tokens, SPLITS, HAS_BIAS)


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    workspace: SplitWorkspace,
    config: GemmConfig,
) -> Tensor:
    """`linear_reference` on the GPU for no more tokens than config.block_t. Returns a new tensor.

    x [T, in] with contiguous rows; weight [out, in] and bias [out] contiguous, of x's dtype.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    y = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
    if tokens and rows:
        skinny_gemm_kernel[(config.splits, triton.cdiv(rows, config.block_n))](
            x, weight, x if bias is None else bias, y, workspace.sums, workspace.arrived,
            tokens, rows, columns, x.stride(0),
            BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
            WHOLE_STEPS=columns % config.block_k == 0, HAS_BIAS=bias is not None, PRECISION=dot_precision(x.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return y
