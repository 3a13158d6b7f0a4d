"""Split of decodes' contexts into segments that run at once, and the merge of their results.

Split-KV, as in Flash-Decoding (Dao et al. 2023), by the lengths that the contexts have: the keys of all rows stand in
one line, of which each program takes an equal part (as Stream-K does with a product's steps: Osama et al. 2023). So one
context of 128k tokens among 63 of 1k is read by all of the GPU and not by a fixed share of it, and a captured graph
stays valid, and balanced, while contexts grow.

No list of parts is written down. Where a program's part begins and ends follows from `context_lens` alone, which it
adds up: of 256 rows that is two numbers a thread, and less than a launch that would make a list, in each layer, of what
all layers have in common.

How many segments a row has depends on the rows beside it: on GPUs a row's bits may differ from batch to batch, as those
of its projections may, but never between two runs of one batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.cuda.kernels.launch import LOG2_E, GpuTarget, await_inputs, dependent_launch, padded_head

PROGRAMS_PER_MULTIPROCESSOR = 2
_MAX_WAVES = 4  # of programs; more would even out little more, and each starts with a wait for memory
_MIN_STEPS = tl.constexpr(2)  # of a program: a shorter segment costs more in the merge than it saves
_MERGED = 16  # segments a step of the merging kernel

_ROWS = tl.constexpr(256)  # that a program looks at at once

LN_2 = tl.constexpr(1 / LOG2_E)
"""Factor that turns base-2 logarithms into natural ones."""


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Division of one launch's keys."""

    programs: int  # of a tile of heads, at most: each takes an equal part of the keys of all rows
    most_steps: int  # that a row may have

    @property
    def may_split(self) -> bool:
        """True if any row could have more than one segment."""
        return self.most_steps > 1 and self.programs > 1

    def programs_for(self, rows: int) -> int:
        """Return the programs for a tile of heads of `rows` rows: no more than there could be work for."""
        return max(1, min(self.programs, -(-rows * self.most_steps // int(_MIN_STEPS.value))))


def split_config(target: GpuTarget, tiles: int, most_keys: int, block_n: int) -> SplitConfig:
    """Return the split for `tiles` of heads per row, and rows of at most `most_keys` keys, which may begin within a
    step."""
    fitting = target.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR

    def idle(waves: int) -> float:
        return waves * fitting % tiles / (waves * fitting)

    # The fewest waves that leave about as few multiprocessors idle as can be: tiles may not divide them evenly.
    waves = min(range(1, _MAX_WAVES + 1), key=lambda waves: round(20 * idle(waves)))
    return SplitConfig(max(1, waves * fitting // tiles), -(-most_keys // block_n) + 1)


@triton.jit
def first_seen(positions, WINDOW: tl.constexpr):
    """Return the first position that queries at `positions` attend to, as protocol.kv_layout.first_seen; of a number or
    of a tensor of them. There is a window."""
    if WINDOW < 0:
        return tl.maximum(positions, 0) // -WINDOW * -WINDOW
    else:
        return tl.maximum(positions - WINDOW + 1, 0)


@triton.jit
def part_steps(context_lens, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(the first key of a context's first step, its steps): of a number or of a tensor of them.

    An empty context, a padding row of a captured graph, has one step of no keys: a program must write its zeros.
    """
    begin = context_lens * 0
    if WINDOW:
        begin = first_seen(context_lens - 1, WINDOW) // BLOCK_N * BLOCK_N
    return begin, tl.maximum((context_lens - begin + BLOCK_N - 1) // BLOCK_N, 1)


@triton.jit
def _steps_of_rows(context_lens, first, num_rows, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the steps of rows [first, first + _ROWS); zeros behind the last row."""
    rows = first + tl.arange(0, _ROWS)
    lens = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    _, steps = part_steps(lens, WINDOW, BLOCK_N)
    return tl.where(rows < num_rows, steps, 0)


@triton.jit
def part_of(context_lens, num_rows, program, programs, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(steps of every part, first row of this program's part, the row behind its last, steps of all rows before the
    first). Program p's part is steps [p * share, (p + 1) * share) of all rows' steps, one row after the other."""
    total = 0
    for first in tl.range(0, num_rows, _ROWS, num_stages=1):
        total += tl.sum(_steps_of_rows(context_lens, first, num_rows, WINDOW, BLOCK_N), axis=0)
    share = tl.maximum((total + programs - 1) // programs, _MIN_STEPS)
    begin = program * share
    row, end_row, row_start, passed = 0, 0, 0, 0
    for first in tl.range(0, num_rows, _ROWS, num_stages=1):
        steps = _steps_of_rows(context_lens, first, num_rows, WINDOW, BLOCK_N)
        ends = passed + tl.cumsum(steps, axis=0)
        is_before = (steps > 0) & (ends <= begin)
        row += tl.sum(is_before.to(tl.int32), axis=0)
        row_start = tl.maximum(row_start, tl.max(tl.where(is_before, ends, 0), axis=0))
        end_row += tl.sum(((steps > 0) & (ends - steps < begin + share)).to(tl.int32), axis=0)
        passed += tl.sum(steps, axis=0)
    return share, row, end_row, row_start


@triton.jit
def segment_at(context_len, row_start, program, share, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return, of a row that a program has a part of: its keys [begin, end), the first program that has one, how many
    have, and the row's steps."""
    first_key, steps = part_steps(context_len, WINDOW, BLOCK_N)
    from_step = tl.maximum(program * share - row_start, 0)
    to_step = tl.minimum((program + 1) * share - row_start, steps)
    first_program = row_start // share
    segments = (row_start + steps - 1) // share - first_program + 1
    end = tl.minimum(first_key + to_step * BLOCK_N, context_len)
    return first_key + from_step * BLOCK_N, end, first_program, segments, steps


@triton.jit
def merge_segments_kernel(
    partial_out,
    partial_log_sums,
    splits,
    out,
    log_sums,
    out_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    STEP: tl.constexpr,
    HAS_LOG_SUMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per head and a row: the segments' averages, weighted by their sums, to out [rows, H * D], and where
    HAS_LOG_SUMS natural logarithms of the sums together to log_sums [rows, H].

    Rows of one segment have their result already.
    """
    await_inputs(DEPENDENT)
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
            logs = tl.load(partial_log_sums + places, mask=some < segments, other=float("-inf"))
            new_best = tl.maximum(best, tl.max(logs, axis=0))
            weights = tl.exp2(logs - new_best)
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
        if HAS_LOG_SUMS:
            tl.store(log_sums + row * NUM_HEADS + head, (best + tl.log2(total)) * LN_2)


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial results of segments, for the merge of rows that have several."""

    out: Tensor  # fp32 [segments, H, D]: averages
    log_sums: Tensor  # fp32 [segments, H]: base-2 logarithms of their sums of weights
    splits: Tensor  # int32 [rows, 2]: of each row, its first segment and how many it has


def make_partials(config: SplitConfig, rows: int, heads: int, dim: int, device: torch.device) -> Partials:
    """Allocate partial results, undefined: the attending kernel writes every row's split. A segment's place is row +
    program."""
    most = rows + config.programs_for(rows) if config.may_split else 1
    return Partials(
        torch.empty((most, heads, dim), dtype=torch.float32, device=device),
        torch.empty((most, heads), dtype=torch.float32, device=device),
        torch.empty((rows, 2), dtype=torch.int32, device=device),
    )


def merge_segments(partials: Partials, out: Tensor, out_stride: int, log_sums: Tensor | None = None) -> None:
    """Rows of several segments to out, whose rows are `out_stride` values apart; natural logarithms of their sums of
    weights to log_sums, fp32 [rows, H]."""
    _, heads, dim = partials.out.shape
    merge_segments_kernel[(heads, len(partials.splits))](
        partials.out, partials.log_sums, partials.splits, out, log_sums, out_stride,
        NUM_HEADS=heads, HEAD_DIM=dim, HEAD_DIM_PADDED=padded_head(dim), STEP=_MERGED,
        HAS_LOG_SUMS=log_sums is not None, num_warps=4, **dependent_launch(out),
    )  # fmt: skip
