"""One token of Mamba-2 on CPUs: the convolution, then one pass over the states, which reads each number once.

Of the convolution a thread takes a block's part: x of a KV head's heads, or B and C of their groups, which other KV
heads may have, too. Of the states it takes one head of a sequence.

Reference: model/architectures/mamba.py.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.architectures.mamba import MambaWeights
from twostroke.model.backend import GroupNorm
from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels.elementwise import grain
from twostroke.model.cpu.kernels.floats import sigmoid, store, widen
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    Kernels,
    as_floats,
    as_integers,
    as_short_integers,
    as_stored,
    compiled,
    float_of_bits,
    taken,
)
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.cpu.kernels.states.parts import convolve, count_tokens, part_of, soft_plus


@compiled
def _convolve_neighbours(row, first, channel, count, conv, bias, before, after, place, is_first, out):
    """Convolve `count` channels from `channel` on, whose inputs lie in a row from `first` on."""
    taps = conv.shape[1]
    for i in range(count):
        new = widen(row[first + channel + i])
        total = convolve(new, conv, channel + i, before, after, place + i * (taps - 1), is_first)
        if bias.shape[0] > 0:
            total += bias[channel + i]
        out[channel + i] = total * sigmoid(total)


@Kernels
def _convolution_step(words):
    """words: inputs, convolution, its bias, cache, tables, positions, out, columns of inputs, width of x, groups,
    state, taps, entries of the bias, KV heads, bytes of a block's part, tokens of a block, rows of a table, numbers of
    matrices in a part; items are parts of sequences."""
    items, columns, x_width, groups, state, taps = words[1], words[10], words[11], words[12], words[13], words[14]
    kv_heads, part_bytes, size, width, matrices = words[16], words[17], words[18], words[19], words[20]
    count, channels = items // (2 * kv_heads), x_width + 2 * groups * state
    inputs = carray(as_stored(words, words[3]), (count, columns))
    conv, bias = carray(as_floats(words[4]), (channels, taps)), carray(as_floats(words[5]), (words[15],))
    tables = carray(as_short_integers(words[7]), (count, width))
    positions = carray(as_integers(words[8]), (count,))
    out = carray(as_floats(words[9]), (count, channels))
    of_x, of_groups = x_width // kv_heads, max(1, groups // kv_heads) * state
    for item in taken(words, items):
        sequence, part = item // (2 * kv_heads), item % (2 * kv_heads)
        position, kv_head, kind = positions[sequence], part // 2, part % 2
        is_first, row, found = position == 0, inputs[sequence], out[sequence]
        source = np.int64(tables[sequence, max(position - 1, 0) // size])
        target = np.int64(tables[sequence, position // size])
        before = part_of(words[6], source, kind, kv_head, kv_heads, part_bytes)
        after = part_of(words[6], target, kind, kv_head, kv_heads, part_bytes)
        if kind == 0:
            at = kv_head * of_x
            _convolve_neighbours(row, x_width, at, of_x, conv, bias, before, after, matrices, is_first, found)
        else:
            at, place = x_width + kv_head * groups // kv_heads * state, matrices
            for _ in range(2):
                _convolve_neighbours(row, x_width, at, of_groups, conv, bias, before, after, place, is_first, found)
                at, place = at + groups * state, place + of_groups * (taps - 1)


@compiled
def _rewrite(before, after, x, b, c, decay, is_first, out):
    """Rewrite half a state [rows, state], and give what it then makes of c."""
    for i in range(after.shape[0]):
        total = np.float32(0)
        if is_first:
            for n in range(after.shape[1]):
                value = x[i] * b[n]
                after[i, n] = value
                total += value * c[n]
        else:
            for n in range(after.shape[1]):
                value = before[i, n] * decay + x[i] * b[n]
                after[i, n] = value
                total += value * c[n]
        out[i] = total


@Kernels
def _state_step(words):
    """words: inputs, convolved, steps, decays, skips, biases of steps, cache, tables, positions, out, columns of
    inputs, heads, head, groups, state, KV heads, bytes of a block's part, tokens of a block, rows of a table, the
    count's place in a part, limits of steps; items are heads of sequences."""
    items, columns, heads, dim, groups, state = words[1], words[13], words[14], words[15], words[16], words[17]
    kv_heads, part_bytes, size, width, place = words[18], words[19], words[20], words[21], words[22]
    least, most = float_of_bits(np.uint32(words[23])), float_of_bits(np.uint32(words[24]))
    count, half, each, x_width = items // heads, dim // 2, heads // kv_heads, heads * dim
    inputs = carray(as_stored(words, words[3]), (count, columns))
    convolved = carray(as_floats(words[4]), (count, x_width + 2 * groups * state))
    steps = carray(as_floats(words[5]), (count, heads))
    decays, skips = carray(as_floats(words[6]), (heads,)), carray(as_floats(words[7]), (heads,))
    biases = carray(as_floats(words[8]), (heads,))
    tables = carray(as_short_integers(words[10]), (count, width))
    positions = carray(as_integers(words[11]), (count,))
    out = carray(as_floats(words[12]), (count, x_width))
    scaled, found = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for item in taken(words, items):
        sequence, head = item // heads, item % heads
        position, kv_head, inside = positions[sequence], head // each, head % each
        is_first = position == 0
        source = np.int64(tables[sequence, max(position - 1, 0) // size])
        target = np.int64(tables[sequence, position // size])
        step = min(max(soft_plus(steps[sequence, head] + biases[head]), least), most)
        decay = np.exp(-decays[head] * step)
        seen = part_of(words[9], source, 1, kv_head, kv_heads, part_bytes)[place]
        if not is_first and seen != np.float32(position):
            decay = np.float32(np.nan)
        x = convolved[sequence, head * dim : (head + 1) * dim]
        first = x_width + head // (heads // groups) * state
        b, c = convolved[sequence, first : first + state], convolved[sequence, first + groups * state :][:state]
        for i in range(dim):
            scaled[i] = x[i] * step
        begin, end = inside * half * state, (inside + 1) * half * state
        for kind in range(2):
            before = part_of(words[9], source, kind, kv_head, kv_heads, part_bytes)[begin:end].reshape(half, state)
            after = part_of(words[9], target, kind, kv_head, kv_heads, part_bytes)[begin:end].reshape(half, state)
            rows = slice(kind * half, (kind + 1) * half)
            _rewrite(before, after, scaled[rows], b, c, decay, is_first, found[rows])
        for i in range(dim):
            gate = widen(inputs[sequence, head * dim + i])
            out[sequence, head * dim + i] = (found[i] + skips[head] * x[i]) * gate * sigmoid(gate)


def mamba_step(
    launcher: Launcher,
    products: Sequence[Tensor],
    weights: MambaWeights,
    kv_layer: Tensor,
    layout: BatchLayout,
    out: Tensor,
) -> None:
    """Implement StateKernels.step, before the norm."""
    inputs, steps = products
    sizes, count, tables = weights.sizes, layout.num_decodes, layout.block_tables
    _, _, kv_heads, size, dim = kv_layer.shape
    cut = kv_heads, size * dim * kv_layer.itemsize, size, tables.shape[1]
    convolved, bias = launcher.empty((count, sizes.conv_width), torch.float32), weights.conv_bias
    launcher.run(
        _convolution_step.of(inputs.dtype),
        count * 2 * kv_heads,
        1,
        *(inputs, weights.conv, weights.conv if bias is None else bias, kv_layer, tables, layout.positions, convolved),
        *(inputs.shape[1], sizes.output_width, sizes.groups, sizes.state, sizes.taps, 0 if bias is None else len(bias)),
        *(*cut, sizes.matrix_numbers_in(kv_heads)),
    )
    launcher.run(
        _state_step.of(inputs.dtype),
        count * sizes.heads,
        1,
        *(inputs, convolved, steps, weights.decay, weights.skip, weights.step_bias),
        *(kv_layer, tables, layout.positions, out),
        *(inputs.shape[1], sizes.heads, sizes.head, sizes.groups, sizes.state, *cut),
        *(sizes.numbers_in(1, kv_heads) - 1, *map(float, weights.step_limits)),
    )
    count_tokens(launcher, sizes, kv_layer, layout)


@Kernel
def _square_sums(words):
    """words: x, sums, width, groups of the row, columns of sums, the first group's column."""
    rows, width, groups, columns, first = words[1], words[5], words[6], words[7], words[8]
    x, sums = carray(as_floats(words[3]), (rows, groups, width // groups)), carray(as_floats(words[4]), (rows, columns))
    for row in taken(words, rows):
        sums[row, :] = np.float32(0)
        for group in range(groups):
            total = np.float32(0)
            for i in range(width // groups):
                total += x[row, group, i] * x[row, group, i]
            sums[row, first + group] = total


@Kernels
def _norm_groups(words):
    """words: x, sums, weight, out, width, groups of the row, columns of sums, the first group's column, numbers of a
    group on all ranks, eps."""
    rows, width, groups, columns, first = words[1], words[7], words[8], words[9], words[10]
    whole, eps = words[11], float_of_bits(np.uint32(words[12]))
    x, sums = carray(as_floats(words[3]), (rows, width)), carray(as_floats(words[4]), (rows, columns))
    weight, out = carray(as_floats(words[5]), (width,)), carray(as_stored(words, words[6]), (rows, width))
    size = width // groups
    for row in taken(words, rows):
        for group in range(groups):
            factor = np.float32(1) / np.sqrt(sums[row, first + group] / np.float32(whole) + eps)
            for i in range(group * size, (group + 1) * size):
                store(out[row], i, x[row, i] * factor * weight[i])


def group_square_sums(launcher: Launcher, x: Tensor, norm: GroupNorm) -> Tensor:
    """Implement Backend.group_square_sums."""
    rows, width = x.shape
    sums = launcher.empty((rows, norm.columns), torch.float32)
    arguments = x, sums, width, norm.own_groups, norm.columns, norm.first
    launcher.run(_square_sums, rows, grain(width), *arguments)
    return sums


def norm_groups(launcher: Launcher, x: Tensor, square_sums: Tensor, norm: GroupNorm, dtype: torch.dtype) -> Tensor:
    """Implement Backend.norm_groups."""
    rows, width = x.shape
    out = launcher.empty((rows, width), dtype)
    launcher.run(
        _norm_groups.of(dtype),
        rows,
        grain(width),
        *(x, square_sums, norm.weight, out, width, norm.own_groups, norm.columns, norm.first, norm.size, norm.eps),
    )
    return out
