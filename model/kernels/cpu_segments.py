"""Decode attention in segments of the context, so that few long sequences can be shared by many cores (flash-decoding,
Dao et al. 2023).

A segment's attention begins afresh, with its own maximum, and segments are merged in their order. That is so whether
one thread takes all of them or each thread one: a result depends neither on the batch nor on the number of threads.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.kernels.cpu_floats import exponential, store
from twostroke.model.kernels.cpu_launch import KernelPair, as_floats, as_halves, as_short_integers, compiled, take_items
from twostroke.model.kernels.cpu_launcher import Launcher

SEGMENT_TOKENS = 512  # about; whole blocks


@dataclass(frozen=True)
class SegmentPlan:
    """How the work of a launch is cut. An item is a segment of a (sequence, KV head) pair, or the whole pair."""

    tokens: int  # of a segment
    num_items: int  # at most: kernels leave out the segments that all contexts end before
    partials: Tensor | None  # fp32 [pairs, segments, heads of a group, D + 2]: sums, maximum, sum of weights

    @property
    def address(self) -> int:
        """Of the partial results; 0 where there are none."""
        return 0 if self.partials is None else self.partials.data_ptr()


def plan(launcher: Launcher, pairs: int, group: int, dim: int, block_size: int, max_context: int) -> SegmentPlan:
    """Segments are taken apart where whole pairs would leave threads idle."""
    tokens = -(-SEGMENT_TOKENS // block_size) * block_size
    segments = -(-max_context // tokens)
    threads = torch.get_num_threads()
    if threads == 1 or segments == 1 or pairs >= 2 * threads:
        return SegmentPlan(tokens, pairs, None)
    return SegmentPlan(tokens, pairs * segments, launcher.empty((pairs, segments, group, dim + 2), torch.float32))


@compiled
def num_segments(contexts, tokens):
    """Of the longest."""
    longest = np.int64(1)
    for i in range(contexts.shape[0]):
        longest = max(longest, np.int64(contexts[i]))
    return (longest + tokens - 1) // tokens


@compiled
def keep(partials, index, group, dim, mixed, best, weight_sum):
    """Write a segment's sums [group, D], maxima and sums of weights [group] to its place, the `index`-th."""
    place = carray(as_floats(partials + index * group * (dim + 2) * 4), (group, dim + 2))
    for row in range(group):
        for i in range(dim):
            place[row, i] = mixed[row, i]
        place[row, dim], place[row, dim + 1] = best[row], weight_sum[row]


@compiled
def merge(mixed, best, weight_sum, more, more_best, more_weight_sum):
    """Add a segment's row to that of those before it, mixed [D] (0 at first, best -inf); returns maximum and sum."""
    highest = max(best, more_best)
    shrink, grow = exponential(best - highest), exponential(more_best - highest)
    for i in range(mixed.shape[0]):
        mixed[i] = mixed[i] * shrink + more[i] * grow
    return highest, weight_sum * shrink + more_weight_sum * grow


@compiled
def _combine(words, out):
    """words: partials, out, contexts, heads, KV heads, head dim, segment tokens, segments; items are query heads."""
    items, grain = words[1], words[2]
    heads, kv_heads, dim, tokens, segments = words[6], words[7], words[8], words[9], words[10]
    sequences, group = items // heads, heads // kv_heads
    partials = carray(as_floats(words[3]), (sequences * kv_heads, segments, group, dim + 2))
    contexts = carray(as_short_integers(words[5]), (sequences,))
    out = carray(out, (items, dim))
    mixed = np.empty(dim, np.float32)
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            pair, row = item // group, item % group
            mixed[:] = np.float32(0)
            best, weight_sum = np.float32(-np.inf), np.float32(0)
            for segment in range((np.int64(contexts[item // heads]) + tokens - 1) // tokens):
                part = partials[pair, segment, row]
                best, weight_sum = merge(mixed, best, weight_sum, part[:dim], part[dim], part[dim + 1])
            for i in range(dim):
                store(out[item], i, mixed[i] / weight_sum)


def _combine_fp32(words):
    _combine(words, as_floats(words[4]))


def _combine_bf16(words):
    _combine(words, as_halves(words[4]))


_COMBINE = KernelPair(_combine_fp32, _combine_bf16)


def combine(
    launcher: Launcher, plan: SegmentPlan, contexts: Tensor, sequences: int, kv_heads: int, out: Tensor
) -> None:
    """The first `sequences` rows of out [T, H, D] from the plan's partial results."""
    if plan.partials is None:
        return
    _, heads, dim = out.shape
    launcher.run(
        _COMBINE.of(out.dtype),
        sequences * heads,
        4,
        plan.address,
        out.data_ptr(),
        contexts.data_ptr(),
        heads,
        kv_heads,
        dim,
        plan.tokens,
        plan.partials.shape[1],
    )
