"""Single tokens of layers that keep a state, on CPUs: gated delta nets, Mamba-2, gated short convolutions.

A state is read from the block of the token before and written into that of its own, which mostly are the same.

One token of gated delta nets on CPUs: convolution, update of the states and gated norm in one pass over the states.

A thread takes a key head of a sequence, with the value heads that share it. A state is read from the block of the token
before and written into that of its own, which mostly are the same: each number is read once before it is written. With
a the decay, what a state gives of keys and queries is summed in one pass, so the output needs no second one:

    S' = a S + k u^T,  u = b (v - a S^T k),  S'^T q = a S^T q + (k . q) u.

One token of Mamba-2 on CPUs: the convolution, then one pass over the states, which reads each number once.

Of the convolution a thread takes a block's part: x of a KV head's heads, or B and C of their groups, which other KV
heads may have, too. Of the states it takes one head of a sequence.

One token of gated short convolutions on CPUs. A thread takes a block's part: channels of a KV head.

References: model/architectures/delta_net.py, mamba.py, states.py.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.architectures.delta_net import NORM_EPS, DeltaWeights
from twostroke.model.architectures.mamba import MambaWeights
from twostroke.model.architectures.states import ConvolutionWeights
from twostroke.model.backend import GroupNorm
from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels.elementwise import grain
from twostroke.model.cpu.kernels.floats import sigmoid, store, widen
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    Kernels,
    Launcher,
    as_floats,
    as_integers,
    as_short_integers,
    as_stored,
    compiled,
    float_of_bits,
    taken,
)
from twostroke.model.state_sizes import StateSizes


@compiled
def soft_plus(x):
    return max(x, np.float32(0)) + np.log(np.float32(1) + np.exp(-abs(x)))


@compiled
def part_of(cache, block, kind, kv_head, kv_heads, part_bytes):
    """Return a block's part for a kind and a KV head, of a cache at this address."""
    return carray(as_floats(cache + ((block * 2 + kind) * kv_heads + kv_head) * part_bytes), (part_bytes // 4,))


@compiled
def convolve(new, conv, channel, before, after, place, is_first):
    """Return the convolution of a channel's new input and its last ones, and move those on by one."""
    taps = conv.shape[1]
    total = conv[channel, taps - 1] * new
    for tap in range(taps - 1):
        old = np.float32(0) if is_first else before[place + tap]
        total += conv[channel, tap] * old
        if tap > 0:
            after[place + tap - 1] = old
    after[place + taps - 2] = new
    return total


@Kernel
def _count_token(words):
    """words: cache, tables, positions, KV heads, bytes of a block's part, tokens of a block, rows of a table, the
    count's place in a part; items are sequences."""
    kv_heads, part_bytes, size, width, place = words[6], words[7], words[8], words[9], words[10]
    tables = carray(as_short_integers(words[4]), (words[1], width))
    positions = carray(as_integers(words[5]), (words[1],))
    for sequence in taken(words, words[1]):
        position = positions[sequence]
        source = np.int64(tables[sequence, max(position - 1, 0) // size])
        target = np.int64(tables[sequence, position // size])
        for kv_head in range(kv_heads):
            before = part_of(words[3], source, 1, kv_head, kv_heads, part_bytes)[place]
            seen = np.float32(position + 1)
            if position > 0 and before != np.float32(position):
                seen = np.float32(np.nan)  # a state of other tokens stays without number
            part_of(words[3], target, 1, kv_head, kv_heads, part_bytes)[place] = seen


def count_tokens(launcher: Launcher, sizes: StateSizes, kv_layer: Tensor, layout: BatchLayout) -> None:
    """Write the number of tokens that the states of the step's single tokens have seen, which all else has read."""
    _, _, kv_heads, size, dim = kv_layer.shape
    tables, place = layout.block_tables, sizes.numbers_in(1, kv_heads) - 1
    part_bytes = size * dim * kv_layer.itemsize
    arguments = kv_layer, tables, layout.positions, kv_heads, part_bytes, size, tables.shape[1], place
    launcher.run(_count_token, layout.num_decodes, 16, *arguments)


@compiled
def _convolve_heads(row, first, conv, before, after, place, is_first, out):
    """Convolve as many channels as `out` has, from the input's `first` on."""
    for i in range(out.shape[0]):
        at = place + i * (conv.shape[1] - 1)
        total = convolve(widen(row[first + i]), conv, first + i, before, after, at, is_first)
        out[i] = total * sigmoid(total)


@compiled
def _to_length(x, length):
    """Scale a vector to this length."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = length / np.sqrt(total + np.float32(NORM_EPS))
    for i in range(x.shape[0]):
        x[i] *= factor


@compiled
def _look_up(matrix, k, q, known, through):
    """Add to `known` what half a state [rows, value] gives of keys, and to `through` what it gives of queries."""
    for i in range(matrix.shape[0]):
        for c in range(matrix.shape[1]):
            known[c] += matrix[i, c] * k[i]
            through[c] += matrix[i, c] * q[i]


@compiled
def _rewrite_delta(before, after, k, update, decay, is_first):
    for i in range(after.shape[0]):
        if is_first:
            for c in range(after.shape[1]):
                after[i, c] = k[i] * update[c]
        else:
            for c in range(after.shape[1]):
                after[i, c] = before[i, c] * decay + k[i] * update[c]


@Kernels
def _delta_step(words):
    """words: inputs, strengths, convolution, decays, their biases, norm, cache, tables, positions, out, columns of
    inputs, key heads, value heads, key, value, taps, KV heads, bytes of a block's part, tokens of a block, rows of a
    table, eps; items are key heads of sequences."""
    items, columns, key_heads, value_heads = words[1], words[13], words[14], words[15]
    key, value, taps = words[16], words[17], words[18]
    kv_heads, part_bytes, size, width = words[19], words[20], words[21], words[22]
    eps = float_of_bits(np.uint32(words[23]))
    count, each, half = items // key_heads, value_heads // key_heads, key // 2
    inputs = carray(as_stored(words, words[3]), (count, columns))
    strengths = carray(as_floats(words[4]), (count, 2 * value_heads))
    conv = carray(as_floats(words[5]), (2 * key_heads * key + value_heads * value, taps))
    decays, biases = carray(as_floats(words[6]), (value_heads,)), carray(as_floats(words[7]), (value_heads,))
    norm = carray(as_floats(words[8]), (value,))
    tables = carray(as_short_integers(words[10]), (count, width))
    positions = carray(as_integers(words[11]), (count,))
    out = carray(as_stored(words, words[12]), (count, value_heads * value))
    keys_of_part, values_of_part = key_heads // kv_heads, value_heads // kv_heads
    matrices = values_of_part * half * value
    q, k, v = np.empty(key, np.float32), np.empty(key, np.float32), np.empty(value, np.float32)
    known, through = np.empty(value, np.float32), np.empty(value, np.float32)
    for item in taken(words, items):
        sequence, head = item // key_heads, item % key_heads
        part, inside = head // keys_of_part, head % keys_of_part
        position = positions[sequence]
        is_first = position == 0
        source = np.int64(tables[sequence, max(position - 1, 0) // size])
        target = np.int64(tables[sequence, position // size])
        before_keys = part_of(words[9], source, 0, part, kv_heads, part_bytes)
        before_values = part_of(words[9], source, 1, part, kv_heads, part_bytes)
        after_keys = part_of(words[9], target, 0, part, kv_heads, part_bytes)
        after_values = part_of(words[9], target, 1, part, kv_heads, part_bytes)
        row = inputs[sequence]
        place = matrices + inside * key * (taps - 1)
        _convolve_heads(row, head * key, conv, before_keys, after_keys, place, is_first, q)
        place += keys_of_part * key * (taps - 1)
        _convolve_heads(row, (key_heads + head) * key, conv, before_keys, after_keys, place, is_first, k)
        _to_length(q, np.float32(1) / np.sqrt(np.float32(key)))
        _to_length(k, np.float32(1))
        match = np.float32(0)
        for i in range(key):
            match += k[i] * q[i]
        seen = before_values[matrices + values_of_part * value * (taps - 1)]
        for index in range(each):
            own, inside_part = head * each + index, inside * each + index
            channel = 2 * key_heads * key + own * value
            place = matrices + inside_part * value * (taps - 1)
            _convolve_heads(row, channel, conv, before_values, after_values, place, is_first, v)
            beta = sigmoid(strengths[sequence, own])
            decay = np.exp(-decays[own] * soft_plus(strengths[sequence, value_heads + own] + biases[own]))
            if not is_first and seen != np.float32(position):
                decay = np.float32(np.nan)
            begin, end = inside_part * half * value, (inside_part + 1) * half * value
            upper, lower = before_keys[begin:end].reshape(half, value), before_values[begin:end].reshape(half, value)
            known[:] = np.float32(0)
            through[:] = np.float32(0)
            if not is_first:
                _look_up(upper, k[:half], q[:half], known, through)
                _look_up(lower, k[half:], q[half:], known, through)
                for c in range(value):
                    known[c] *= decay
                    through[c] *= decay
            total = np.float32(0)
            for c in range(value):
                v[c] = (v[c] - known[c]) * beta
                through[c] += match * v[c]
                total += through[c] * through[c]
            _rewrite_delta(upper, after_keys[begin:end].reshape(half, value), k[:half], v, decay, is_first)
            _rewrite_delta(lower, after_values[begin:end].reshape(half, value), k[half:], v, decay, is_first)
            factor = np.float32(1) / np.sqrt(total / np.float32(value) + eps)
            first = own * value
            gates = columns - value_heads * value + first
            for c in range(value):
                gate = widen(row[gates + c])
                store(out[sequence], first + c, through[c] * factor * norm[c] * gate * sigmoid(gate))


def delta_step(
    launcher: Launcher,
    products: Sequence[Tensor],
    weights: DeltaWeights,
    kv_layer: Tensor,
    layout: BatchLayout,
    out: Tensor,
) -> None:
    """Implement StateKernels.step."""
    inputs, strengths = products
    sizes, count = weights.sizes, layout.num_decodes
    _, _, kv_heads, size, dim = kv_layer.shape
    part_bytes, tables = size * dim * kv_layer.itemsize, layout.block_tables
    heads = sizes.key_heads, sizes.value_heads, sizes.key, sizes.value, sizes.taps, kv_heads
    launcher.run(
        _delta_step.of(inputs.dtype),
        count * sizes.key_heads,
        1,
        *(inputs, strengths, weights.conv, weights.decay, weights.decay_bias, weights.norm),
        *(kv_layer, tables, layout.positions, out),
        *(inputs.shape[1], *heads, part_bytes, size, tables.shape[1], weights.eps),
    )
    count_tokens(launcher, sizes, kv_layer, layout)


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
def _rewrite_mamba(before, after, x, b, c, decay, is_first, out):
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
            _rewrite_mamba(before, after, scaled[rows], b, c, decay, is_first, found[rows])
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


@Kernels
def _gated_convolution_step(words):
    """words: inputs, convolution, its bias or 0, cache, tables, positions, out, channels, taps, KV heads, bytes of a
    block's part, tokens of a block, rows of a table, the count's place in a part; items are parts of sequences."""
    items, channels, taps, kv_heads, part_bytes = words[1], words[10], words[11], words[12], words[13]
    size, width, place = words[14], words[15], words[16]
    count, each = items // (2 * kv_heads), channels // (2 * kv_heads)
    inputs = carray(as_stored(words, words[3]), (count, 3, channels))
    conv = carray(as_floats(words[4]), (channels, taps))
    bias = carray(as_floats(words[5]), (channels,))
    tables = carray(as_short_integers(words[7]), (count, width))
    positions = carray(as_integers(words[8]), (count,))
    out = carray(as_stored(words, words[9]), (count, channels))
    for item in taken(words, items):
        sequence, part = item // (2 * kv_heads), item % (2 * kv_heads)
        position, (kv_head, kind) = positions[sequence], (part // 2, part % 2)
        source = np.int64(tables[sequence, max(position - 1, 0) // size])
        target = np.int64(tables[sequence, position // size])
        before = part_of(words[6], source, kind, kv_head, kv_heads, part_bytes)
        after = part_of(words[6], target, kind, kv_head, kv_heads, part_bytes)
        seen = part_of(words[6], source, 1, kv_head, kv_heads, part_bytes)[place]
        factor = np.float32(1)
        if position > 0 and seen != np.float32(position):
            factor = np.float32(np.nan)
        for i in range(each):
            channel = part * each + i
            new = widen(inputs[sequence, 0, channel]) * widen(inputs[sequence, 2, channel])
            total = convolve(new, conv, channel, before, after, i * (taps - 1), position == 0)
            if words[5] != 0:
                total += bias[channel]
            store(out[sequence], channel, total * widen(inputs[sequence, 1, channel]) * factor)


def convolution_step(
    launcher: Launcher,
    products: Sequence[Tensor],
    weights: ConvolutionWeights,
    kv_layer: Tensor,
    layout: BatchLayout,
    out: Tensor,
) -> None:
    """Implement StateKernels.step."""
    (inputs,) = products
    sizes, tables = weights.sizes, layout.block_tables
    _, _, kv_heads, size, dim = kv_layer.shape
    launcher.run(
        _gated_convolution_step.of(inputs.dtype),
        layout.num_decodes * 2 * kv_heads,
        1,
        *(inputs, weights.conv, 0 if weights.conv_bias is None else weights.conv_bias),
        *(kv_layer, tables, layout.positions, out, sizes.channel_count, sizes.taps, kv_heads),
        *(size * dim * kv_layer.itemsize, size, tables.shape[1], sizes.numbers_in(1, kv_heads) - 1),
    )
    count_tokens(launcher, sizes, kv_layer, layout)
