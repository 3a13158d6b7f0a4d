"""Split-K with one result: several programs share the columns of a tile, and the last to arrive adds up their sums.

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

from twostroke.model.kernels.launch import Target

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
