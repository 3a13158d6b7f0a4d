"""One token of gated delta nets on CPUs: convolution, update of the states and gated norm in one pass over the states.

A thread takes a key head of a sequence, with the value heads that share it. A state is read from the block of the token
before and written into that of its own, which mostly are the same: each number is read once before it is written. With
a the decay, what a state gives of keys and queries is summed in one pass, so the output needs no second one:

    S' = a S + k u^T,  u = b (v - a S^T k),  S'^T q = a S^T q + (k . q) u.

Reference: model/architectures/delta_net.py.
"""

from collections.abc import Sequence

import numpy as np
from numba import carray
from torch import Tensor

from twostroke.model.architectures.delta_net import NORM_EPS, DeltaWeights
from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels.floats import sigmoid, store, widen
from twostroke.model.cpu.kernels.launch import (
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
def _convolve_neighbours(row, first, conv, before, after, place, is_first, out):
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
def _rewrite(before, after, k, update, decay, is_first):
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
        _convolve_neighbours(row, head * key, conv, before_keys, after_keys, place, is_first, q)
        place += keys_of_part * key * (taps - 1)
        _convolve_neighbours(row, (key_heads + head) * key, conv, before_keys, after_keys, place, is_first, k)
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
            _convolve_neighbours(row, channel, conv, before_values, after_values, place, is_first, v)
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
            _rewrite(upper, after_keys[begin:end].reshape(half, value), k[:half], v, decay, is_first)
            _rewrite(lower, after_values[begin:end].reshape(half, value), k[half:], v, decay, is_first)
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
