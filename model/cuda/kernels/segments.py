"""How the contexts of decodes are split into segments that run at once, and how their results are merged.

Split-KV, as in Flash-Decoding (Dao et al. 2023), by the lengths that the contexts have: each program finds on the
device how long segments are, and which of them are its own. So one context of 128k tokens among 63 of 1k is read by all
of the GPU and not by a fixed share of it, and a captured graph stays valid, and balanced, while contexts grow.

The list of segments is not written down. It follows from `context_lens` alone, row by row, and whoever needs an entry
adds up the rows before it: of 256 rows that is two numbers a thread, and less than a launch that would make a list, in
each layer, of what all layers have in common.

A row's segments are whole steps of BLOCK_N keys, as equal as can be. How many depends on the rows beside it: on GPUs a
row's bits may differ from batch to batch, as those of its projections may, but never between two runs of one batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.cuda.kernels.launch import Target, padded_head

PROGRAMS_PER_MULTIPROCESSOR = 2
_MOST_WAVES = 4  # of segments; more would even out little more, and each starts with a wait for memory
_LEAST_STEPS = 2  # of a segment: a shorter one costs more in the merge than it saves
_MERGED = 16  # segments a step of the merging kernel

MOST_WAVES = tl.constexpr(_MOST_WAVES)
LEAST_STEPS = tl.constexpr(_LEAST_STEPS)
ROWS = tl.constexpr(256)  # that a program looks at at once


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How one launch's segments are dealt out. `places` programs at most share a tile of heads' contexts."""

    places: int  # segments of one tile of heads that run at the same time
    most_steps: int  # that a row may have

    @property
    def may_split(self) -> bool:
        """Whether any row could have more than one segment: `segments_of`."""
        return 2 * self.most_steps >= 3 * _LEAST_STEPS

    def most_segments(self, rows: int) -> int:
        """Of so many rows together: what partial results need room for, whatever the lengths."""
        if not self.may_split:
            return rows
        return rows + min(self.places * _MOST_WAVES, rows * (self.most_steps // _LEAST_STEPS))

    def programs(self, rows: int) -> int:
        """Of a tile of heads: each takes one segment after the other."""
        return min(self.places, self.most_segments(rows))


def split_config(target: Target, tiles: int, most_keys: int, block_n: int) -> SplitConfig:
    """For `tiles` of heads of each row, and rows of at most so many keys, which may begin within a step."""
    places = max(1, target.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // tiles)
    return SplitConfig(places, -(-most_keys // block_n) + 1)


@triton.jit
def steps_of(context_lens, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(the first key of a context's first step, its steps): of a number or of a tensor of them."""
    begin = context_lens * 0
    if WINDOW:
        begin = tl.maximum(context_lens - WINDOW, 0) // BLOCK_N * BLOCK_N
    return begin, (context_lens - begin + BLOCK_N - 1) // BLOCK_N


@triton.jit
def segments_of(steps, wanted):
    """How many segments of about `wanted` steps, and never empty ones, so many steps are cut into: at least one."""
    return tl.maximum((2 * steps + wanted) // (2 * wanted), 1)


@triton.jit
def segments_of_rows(context_lens, first, num_rows, wanted, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of rows [first, first + ROWS): (their steps, their segments); zeros behind the last row."""
    rows = first + tl.arange(0, ROWS)
    lens = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    _, steps = steps_of(lens, WINDOW, BLOCK_N)
    return steps, tl.where(rows < num_rows, segments_of(steps, wanted), 0)


@triton.jit
def plan_segments(context_lens, num_rows, places, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(steps that a segment should have, how many segments all rows have then).

    Of one to four waves of `places` segments, the fewest that take nearly the least time: waves follow each other, and
    each takes the time of its longest segment. Integers alone, so that all programs find the same.
    """
    total = 0
    for first in tl.range(0, num_rows, ROWS, num_stages=1):
        steps, _ = segments_of_rows(context_lens, first, num_rows, LEAST_STEPS, WINDOW, BLOCK_N)
        total += tl.sum(steps, axis=0)
    chosen, chosen_count, least = 0, 0, 0
    for waves in tl.range(1, MOST_WAVES + 1, num_stages=1):
        wanted = tl.maximum((total + places * waves - 1) // (places * waves), LEAST_STEPS)
        count, longest = 0, 0
        for first in tl.range(0, num_rows, ROWS, num_stages=1):
            steps, segments = segments_of_rows(context_lens, first, num_rows, wanted, WINDOW, BLOCK_N)
            count += tl.sum(segments, axis=0)
            parts = tl.maximum(segments, 1)
            longest = tl.maximum(longest, tl.max((steps + parts - 1) // parts, axis=0))
        time = (count + places - 1) // places * longest
        is_better = (waves == 1) | (time * 21 < least * 20)
        chosen = tl.where(is_better, wanted, chosen)
        chosen_count = tl.where(is_better, count, chosen_count)
        least = tl.where(is_better, time, least)
    return chosen, chosen_count


@triton.jit
def find_segment(context_lens, num_rows, wanted, entry, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(row, which of its segments) of the list's entry: prefix sums over the rows."""
    row, of_rows_before, passed = 0, 0, 0
    for first in tl.range(0, num_rows, ROWS, num_stages=1):
        _, segments = segments_of_rows(context_lens, first, num_rows, wanted, WINDOW, BLOCK_N)
        ends = passed + tl.cumsum(segments, axis=0)
        is_before = (ends <= entry) & (segments > 0)
        row += tl.sum(is_before.to(tl.int32), axis=0)
        of_rows_before = tl.maximum(of_rows_before, tl.max(tl.where(is_before, ends, 0), axis=0))
        passed += tl.sum(segments, axis=0)
    return row, entry - of_rows_before


@triton.jit
def keys_of(context_len, segment, segments, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) of a context's segment."""
    first, steps = steps_of(context_len, WINDOW, BLOCK_N)
    begin = first + segment * steps // segments * BLOCK_N
    end = first + (segment + 1) * steps // segments * BLOCK_N
    return begin, tl.minimum(end, context_len)


@triton.jit
def merge_segments_kernel(
    partial_out,
    partial_log_sums,
    splits,
    out,
    out_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program a head and a row: the segments' averages, weighted by their sums, to out [rows, H * D].

    Rows of one segment have their result already.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segments = tl.load(splits + 2 * row + 1)
    if segments > 1:
        entry = tl.load(splits + 2 * row).to(tl.int64)
        dims = tl.arange(0, HEAD_DIM_PADDED)
        real = dims < HEAD_DIM
        best = -1.0e30
        total = 0.0
        acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
        for first in range(0, segments, STEP):
            some = first + tl.arange(0, STEP)
            places = (entry + some) * NUM_HEADS + head
            log_sums = tl.load(partial_log_sums + places, mask=some < segments, other=float("-inf"))
            new_best = tl.maximum(best, tl.max(log_sums, axis=0))
            weights = tl.exp2(log_sums - new_best)
            values = tl.load(
                partial_out + places[:, None] * HEAD_DIM + dims[None, :],
                mask=(some < segments)[:, None] & real[None, :],
                other=0.0,
            )
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weights, axis=0)
            acc = acc * shrink + tl.sum(weights[:, None] * values, axis=0)
            best = new_best
        tl.store(out + row * out_stride + head * HEAD_DIM + dims, (acc / total).to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class Partials:
    """What segments leave for the merge: where rows have several."""

    out: Tensor  # fp32 [segments, H, D]: averages, in the list's order
    log_sums: Tensor  # fp32 [segments, H]: base-2 logarithms of their sums of weights
    splits: Tensor  # int32 [rows, 2]: of each row, its first segment and how many it has


def make_partials(config: SplitConfig, rows: int, heads: int, dim: int, device: torch.device) -> Partials:
    """Of undefined values; the attending kernel writes every row's split."""
    most = config.most_segments(rows) if config.may_split else 1
    return Partials(
        torch.empty((most, heads, dim), dtype=torch.float32, device=device),
        torch.empty((most, heads), dtype=torch.float32, device=device),
        torch.empty((rows, 2), dtype=torch.int32, device=device),
    )


def merge_segments(partials: Partials, out: Tensor, out_stride: int) -> None:
    """Rows of several segments to out, whose rows are `out_stride` values apart."""
    _, heads, dim = partials.out.shape
    merge_segments_kernel[(heads, len(partials.splits))](
        partials.out, partials.log_sums, partials.splits, out, out_stride,
        NUM_HEADS=heads, HEAD_DIM=dim, HEAD_DIM_PADDED=padded_head(dim), STEP=_MERGED, num_warps=4,
    )  # fmt: skip
