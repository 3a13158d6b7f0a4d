"""Norms, sums, order, rotation, KV write and gated activation on CPUs: one pass over memory each, in fp32 registers.

Reference: tests/rigs/reference.py.
"""

import math
from typing import get_args

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.backend import AS_THEY_ARE, HeadNorms, KVScales, LayerNorm, RowNorms
from twostroke.model.batch import BatchLayout
from twostroke.model.config import GLU_ALPHA, GLU_LIMIT, Activation
from twostroke.model.cpu.kernels.floats import exponential, hyperbolic_tangent, sigmoid, store, widen
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    Kernels,
    Launcher,
    as_cached,
    as_floats,
    as_halves,
    as_integers,
    as_stored,
    compiled,
    float_of_bits,
    taken,
)

GRAIN_ELEMENTS = 8192  # what a thread takes at a time: some microseconds of work
LOGITS = 4096  # as many, where one row can be more
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)  # of twice what tanh is taken of (Hendrycks & Gimpel 2016)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


@compiled
def _square_sum(x):
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += widen(x[i]) * widen(x[i])
    return total


@compiled
def normalise(x, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    total = _square_sum(x)
    scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        store(out, i, widen(x[i]) * scale * weight[i])


@Kernels
def _rms_norm(words):
    """words: x, weight, out, hidden, eps."""
    rows, hidden, eps = words[1], words[6], float_of_bits(np.uint32(words[7]))
    x, weight = carray(as_stored(words, words[3]), (rows, hidden)), carray(as_floats(words[4]), (hidden,))
    out = carray(as_stored(words, words[5]), (rows, hidden))
    for row in taken(words, rows):
        normalise(x[row], weight, eps, out[row])


@Kernels
def _add_rms_norm(words):
    """words: x (becomes the normalised sum), residual (becomes the sum), weight, hidden, eps."""
    rows, hidden, eps = words[1], words[6], float_of_bits(np.uint32(words[7]))
    x, residual = carray(as_stored(words, words[3]), (rows, hidden)), carray(as_stored(words, words[4]), (rows, hidden))
    weight = carray(as_floats(words[5]), (hidden,))
    for row in taken(words, rows):
        for i in range(hidden):
            store(residual[row], i, widen(x[row, i]) + widen(residual[row, i]))
        normalise(residual[row], weight, eps, x[row])


@Kernels
def _square_sums(words):
    """words: qkv, out, its columns, those of queries, those of keys."""
    rows, columns, of_q, of_k = words[1], words[5], words[6], words[7]
    qkv = carray(as_stored(words, words[3]), (rows, columns))
    sums = carray(as_floats(words[4]), (rows, 2))
    for row in taken(words, rows):
        sums[row, 0] = _square_sum(qkv[row, :of_q])
        sums[row, 1] = _square_sum(qkv[row, of_q : of_q + of_k])


@compiled
def _normalise_by(x, total, count, weight, eps):
    scale = np.float32(1) / np.sqrt(total / np.float32(count) + eps)
    for i in range(x.shape[0]):
        store(x, i, widen(x[i]) * scale * weight[i])


@Kernels
def _norm_rows(words):
    """words: qkv, square sums, weights of queries and of keys, qkv's columns, those of queries and of keys, ranks,
    eps."""
    rows, columns, of_q, of_k, ranks = words[1], words[7], words[8], words[9], words[10]
    eps = float_of_bits(np.uint32(words[11]))
    qkv = carray(as_stored(words, words[3]), (rows, columns))
    sums = carray(as_floats(words[4]), (rows, 2))
    q_weight, k_weight = carray(as_floats(words[5]), (of_q,)), carray(as_floats(words[6]), (of_k,))
    for row in taken(words, rows):
        _normalise_by(qkv[row, :of_q], sums[row, 0], of_q * ranks, q_weight, eps)
        _normalise_by(qkv[row, of_q : of_q + of_k], sums[row, 1], of_k * ranks, k_weight, eps)


@Kernels
def _add(words):
    """words: x, residual (becomes the sum), columns."""
    rows, columns = words[1], words[5]
    x = carray(as_stored(words, words[3]), (rows, columns))
    residual = carray(as_stored(words, words[4]), (rows, columns))
    for row in taken(words, rows):
        for i in range(columns):
            store(residual[row], i, widen(x[row, i]) + widen(residual[row, i]))


@Kernels
def _scale(words):
    """words: x (becomes the product), columns, factor."""
    rows, columns, factor = words[1], words[4], float_of_bits(np.uint32(words[5]))
    x = carray(as_stored(words, words[3]), (rows, columns))
    for row in taken(words, rows):
        for i in range(columns):
            store(x[row], i, widen(x[row, i]) * factor)


@Kernels
def _scale_by_position(words):
    """words: x (becomes the product), scales, positions, columns, scales' number."""
    rows, columns = words[1], words[6]
    x, scales = carray(as_stored(words, words[3]), (rows, columns)), carray(as_floats(words[4]), (words[7],))
    positions = carray(as_integers(words[5]), (rows,))
    for row in taken(words, rows):
        for i in range(columns):
            store(x[row], i, widen(x[row, i]) * scales[positions[row]])


@Kernel
def _soft_cap(words):
    """words: fp32 logits (become the capped ones), columns, cap; items are runs of LOGITS of a row."""
    columns, cap = words[4], float_of_bits(np.uint32(words[5]))
    runs = (columns + LOGITS - 1) // LOGITS
    logits = carray(as_floats(words[3]), (words[1] // runs, columns))
    for item in taken(words, words[1]):
        row, first = item // runs, item % runs * LOGITS
        for i in range(first, min(first + LOGITS, columns)):
            logits[row, i] = cap * hyperbolic_tangent(logits[row, i] / cap)


@compiled
def rotate(source, cos_sin, factor, out):
    """A head, by one position's cos and sin, times a factor."""
    half = source.shape[0] // 2
    for i in range(half):
        first, second = widen(source[i]), widen(source[half + i])
        store(out, i, (first * cos_sin[i] - second * cos_sin[half + i]) * factor)
        store(out, half + i, (second * cos_sin[i] + first * cos_sin[half + i]) * factor)


@Kernels
def _rope_and_write_kv(words):
    """words: qkv, KV layer, out, cos_sin, positions, slots, heads, KV heads, dim, block size, blocks, positions,
    whether heads are normalised, their norms' weights and eps, what keys and what values are multiplied by, what
    queries are by position, or 0, and the weights of the values' norm, or 0."""
    rows, heads, kv_heads, dim, block_size = words[1], words[9], words[10], words[11], words[12]
    is_normalised, eps = words[15] != 0, float_of_bits(np.uint32(words[18]))
    q_norm, k_norm = carray(as_floats(words[16]), (dim,)), carray(as_floats(words[17]), (dim,))
    qkv = carray(as_stored(words, words[3]), (rows, heads + 2 * kv_heads, dim))
    kv = carray(as_cached(words, words[4]), (words[13], 2, kv_heads, block_size, dim))
    of_keys, of_values = float_of_bits(np.uint32(words[19])), float_of_bits(np.uint32(words[20]))
    out = carray(as_stored(words, words[5]), (rows, heads, dim))
    cos_sin = carray(as_floats(words[6]), (words[14], dim))
    positions, slots = carray(as_integers(words[7]), (rows,)), carray(as_integers(words[8]), (rows,))
    query_scales, v_norm = carray(as_floats(words[21]), (words[14],)), carray(as_floats(words[22]), (dim,))
    for row in taken(words, rows):
        angles = cos_sin[positions[row]]
        of_queries = query_scales[positions[row]] if words[21] != 0 else np.float32(1)
        block, offset = slots[row] // block_size, slots[row] % block_size
        if is_normalised:
            for head in range(heads + kv_heads):
                normalise(qkv[row, head], q_norm if head < heads else k_norm, eps, qkv[row, head])
        for head in range(heads):
            rotate(qkv[row, head], angles, of_queries, out[row, head])
        for head in range(kv_heads):
            if words[22] != 0:
                value = qkv[row, heads + kv_heads + head]
                normalise(value, v_norm, eps, value)
            rotate(qkv[row, heads + head], angles, of_keys, kv[block, 0, head, offset])
            value, place = qkv[row, heads + kv_heads + head], kv[block, 1, head, offset]
            for i in range(dim):
                store(place, i, widen(value[i]) * of_values)


@Kernels
def _write_latents(words):
    """words: rows, KV layer, norm, cos_sin, positions, slots, rank, rotary, slots of the cache, positions, eps, width
    of a row of the cache."""
    count, rank, rotary, eps = words[1], words[9], words[10], float_of_bits(np.uint32(words[13]))
    rows = carray(as_stored(words, words[3]), (count, rank + rotary))
    cache = carray(as_stored(words, words[4]), (words[11], words[14]))
    norm, cos_sin = carray(as_floats(words[5]), (rank,)), carray(as_floats(words[6]), (words[12], rotary))
    positions, slots = carray(as_integers(words[7]), (count,)), carray(as_integers(words[8]), (count,))
    for row in taken(words, count):
        if slots[row] < 0:
            continue
        place = cache[slots[row]]
        normalise(rows[row, :rank], norm, eps, place[:rank])
        rotate(rows[row, rank:], cos_sin[positions[row]], np.float32(1), place[rank : rank + rotary])


@Kernels
def _write_index_keys(words):
    """words: keys, KV layer, weight and bias of the norm, cos_sin, positions, slots, width of a key, of a row of the
    cache, of the rotary part, slots of the cache, positions, eps."""
    count, width, row_width, rotary = words[1], words[10], words[11], words[12]
    eps = float_of_bits(np.uint32(words[15]))
    keys = carray(as_stored(words, words[3]), (count, width))
    cache = carray(as_stored(words, words[4]), (words[13], row_width))
    weight, bias = carray(as_floats(words[5]), (width,)), carray(as_floats(words[6]), (width,))
    cos_sin = carray(as_floats(words[7]), (words[14], rotary))
    positions, slots = carray(as_integers(words[8]), (count,)), carray(as_integers(words[9]), (count,))
    normed = np.empty(width, np.float32)
    for row in taken(words, count):
        mean, square_sum = np.float32(0), np.float32(0)
        for i in range(width):
            mean += widen(keys[row, i])
        mean /= np.float32(width)
        for i in range(width):
            normed[i] = widen(keys[row, i]) - mean
            square_sum += normed[i] * normed[i]
        scale = np.float32(1) / np.sqrt(square_sum / np.float32(width) + eps)
        for i in range(width):
            normed[i] = normed[i] * scale * weight[i] + bias[i]
        place = cache[slots[row], row_width - width :]
        for i in range(width - rotary):
            store(place, i, normed[i])
        rotate(normed[width - rotary :], cos_sin[positions[row]], np.float32(1), place[width - rotary :])


@Kernels
def _turn_queries(words):
    """words: q, out, cos_sin, positions, heads, width of a query, of out, the rotary part of both, positions of the
    table."""
    count, heads, width, out_width, rotary = words[1], words[7], words[8], words[9], words[10]
    q, out = (
        carray(as_stored(words, words[3]), (count, heads, width)),
        carray(as_stored(words, words[4]), (count, heads, out_width)),
    )
    cos_sin = carray(as_floats(words[5]), (words[11], rotary))
    positions = carray(as_integers(words[6]), (count,))
    for row in taken(words, count):
        for head in range(heads):
            place = out[row, head, out_width - rotary :]
            rotate(q[row, head, width - rotary :], cos_sin[positions[row]], np.float32(1), place)


@compiled
def _gate_by_silu(gate, up, out):
    for i in range(out.shape[0]):
        value = widen(gate[i])
        store(out, i, value / (np.float32(1) + exponential(-value)) * widen(up[i]))


@compiled
def _gate_by_gelu(gate, up, out):
    """(1 + tanh(x)) / 2 is 1 / (1 + e^-2x)."""
    for i in range(out.shape[0]):
        value = widen(gate[i])
        twice = value * (np.float32(_GELU_LINEAR) + np.float32(_GELU_CUBIC) * value * value)
        store(out, i, value / (np.float32(1) + exponential(-twice)) * widen(up[i]))


@compiled
def _gate_clamped(gate, up, out):
    for i in range(out.shape[0]):
        value = min(widen(gate[i]), np.float32(GLU_LIMIT))
        other = min(max(widen(up[i]), np.float32(-GLU_LIMIT)), np.float32(GLU_LIMIT))
        active = value / (np.float32(1) + exponential(np.float32(-GLU_ALPHA) * value))
        store(out, i, active * (other + np.float32(1)))


@compiled
def _activate(gate, up, out, activation):
    if activation == 1:
        _gate_by_gelu(gate, up, out)
    elif activation == 2:
        _gate_clamped(gate, up, out)
    else:
        _gate_by_silu(gate, up, out)


@compiled
def _square_of_positive(x, out):
    for i in range(out.shape[0]):
        value = max(widen(x[i]), np.float32(0))
        store(out, i, value * value)


@Kernels
def _gate(words):
    """words: gate_up, out, inner size, the activation's place in ACTIVATIONS."""
    rows, inner, activation = words[1], words[5], words[6]
    alone = carray(as_stored(words, words[3]), (rows, inner))
    gate_up = carray(as_stored(words, words[3]), (rows, 2, inner))
    out = carray(as_stored(words, words[4]), (rows, inner))
    for row in taken(words, rows):
        if activation == 3:
            _square_of_positive(alone[row], out[row])
        else:
            _activate(gate_up[row, 0], gate_up[row, 1], out[row], activation)


@Kernels
def _gate_columns(words):
    """words: gates, x, out, columns of gates, of x, the first one, the activation's place in ACTIVATIONS."""
    rows, inner, columns, first, activation = words[1], words[6], words[7], words[8], words[9]
    gates, x = carray(as_stored(words, words[3]), (rows, inner)), carray(as_stored(words, words[4]), (rows, columns))
    out = carray(as_stored(words, words[5]), (rows, inner))
    for row in taken(words, rows):
        _activate(gates[row], x[row, first : first + inner], out[row], activation)


@Kernels
def _gate_rows(words):
    """words: x (becomes the product), gates, columns."""
    rows, columns = words[1], words[5]
    x, gates = carray(as_stored(words, words[3]), (rows, columns)), carray(as_stored(words, words[4]), (rows, columns))
    for row in taken(words, rows):
        for i in range(columns):
            store(x[row], i, widen(x[row, i]) * sigmoid(widen(gates[row, i])))


def rms_norm(launcher: Launcher, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x contiguous [T, hidden], weight fp32 [hidden] -> x's shape and dtype."""
    rows, hidden = x.shape
    out = launcher.empty((rows, hidden), x.dtype)
    launcher.run(_rms_norm.of(x.dtype), rows, grain(hidden), x, weight, out, hidden, eps)
    return out


def add_rms_norm(launcher: Launcher, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both contiguous [T, hidden] and overwritten: x becomes norm(x + residual), residual becomes the sum.

    weight fp32 [hidden].
    """
    rows, hidden = x.shape
    launcher.run(_add_rms_norm.of(x.dtype), rows, grain(hidden), x, residual, weight, hidden, eps)
    return x, residual


def add(launcher: Launcher, x: Tensor, residual: Tensor) -> Tensor:
    """Both contiguous [T, hidden]; residual becomes the sum, and is returned."""
    rows, hidden = x.shape
    launcher.run(_add.of(x.dtype), rows, grain(hidden), x, residual, hidden)
    return residual


def scale(launcher: Launcher, x: Tensor, factor: float) -> Tensor:
    """x contiguous [T, hidden], which becomes the product, and is returned."""
    rows, hidden = x.shape
    launcher.run(_scale.of(x.dtype), rows, grain(hidden), x, hidden, factor)
    return x


def scale_by_position(launcher: Launcher, x: Tensor, scales: Tensor, positions: Tensor) -> Tensor:
    """x contiguous [T, width], which becomes the product, and is returned."""
    rows, width = x.shape
    launcher.run(_scale_by_position.of(x.dtype), rows, grain(width), x, scales, positions, width, len(scales))
    return x


def soft_cap(launcher: Launcher, logits: Tensor, cap: float) -> Tensor:
    """logits contiguous fp32 [N, vocab], which become the capped ones, and are returned."""
    rows, columns = logits.shape
    launcher.run(_soft_cap, rows * -(-columns // LOGITS), 1, logits, columns, cap)
    return logits


def square_sums(launcher: Launcher, qkv: Tensor, norms: RowNorms) -> Tensor:
    """qkv contiguous [T, (H + 2 G) D] -> fp32 [T, 2]."""
    rows, width = qkv.shape
    sums = launcher.empty((rows, 2), torch.float32)
    launcher.run(_square_sums.of(qkv.dtype), rows, grain(width), qkv, sums, width, len(norms.q), len(norms.k))
    return sums


def norm_rows(launcher: Launcher, qkv: Tensor, square_sums: Tensor, norms: RowNorms) -> Tensor:
    """qkv contiguous [T, (H + 2 G) D], whose queries and keys become the normalised ones, and which is returned."""
    rows, width = qkv.shape
    launcher.run(
        _norm_rows.of(qkv.dtype),
        rows,
        grain(width),
        *(qkv, square_sums, norms.q, norms.k, width, len(norms.q), len(norms.k), norms.ranks, norms.eps),
    )
    return qkv


def rope_and_write_kv(
    launcher: Launcher,
    qkv: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    layout: BatchLayout,
    norms: HeadNorms | None = None,
    kv_scales: KVScales = AS_THEY_ARE,
    query_scales: Tensor | None = None,
) -> Tensor:
    """qkv contiguous [T, (H + 2 G) D] -> rotated Q [T, H, D]; K and V go to `layout.slots` of `kv_layer`.

    Norms are written over what they are of, rounded as a tensor of their own would be.
    """
    num_blocks, _, kv_heads, block_size, dim = kv_layer.shape
    rows, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    out = launcher.empty((rows, heads, dim), qkv.dtype)
    launcher.run(
        _rope_and_write_kv.of(qkv.dtype, kv_layer.dtype),
        rows,
        grain(width),
        *(qkv, kv_layer, out, cos_sin, layout.positions, layout.slots),
        *(heads, kv_heads, dim, block_size, num_blocks, cos_sin.shape[0]),
        *((0, qkv, qkv, 0.0) if norms is None else (1, norms.q, norms.k, norms.eps)),
        *(1 / kv_scales.key, 1 / kv_scales.value, 0 if query_scales is None else query_scales),
        0 if norms is None or norms.v is None else norms.v,
    )
    return out


def write_latents(
    launcher: Launcher,
    rows: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    kv_layer: Tensor,
    layout: BatchLayout,
) -> None:
    """Implement Backend.write_latents."""
    count, width = rows.shape
    rank, num_slots = len(norm), kv_layer.shape[0] * kv_layer.shape[3]
    launcher.run(
        _write_latents.of(rows.dtype),
        count,
        grain(width),
        *(rows, kv_layer, norm, cos_sin, layout.positions, layout.slots),
        *(rank, width - rank, num_slots, cos_sin.shape[0], eps, kv_layer.shape[4]),
    )


def write_index_keys(
    launcher: Launcher, keys: Tensor, norm: LayerNorm, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
) -> None:
    """Implement Backend.write_index_keys."""
    count, width = keys.shape
    num_slots, (places, rotary) = kv_layer.shape[0] * kv_layer.shape[3], cos_sin.shape
    launcher.run(
        _write_index_keys.of(keys.dtype),
        count,
        grain(width),
        *(keys, kv_layer, norm.weight, norm.bias, cos_sin, layout.positions, layout.slots),
        *(width, kv_layer.shape[4], rotary, num_slots, places, norm.eps),
    )


def turn_queries(launcher: Launcher, q: Tensor, out: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """The last numbers of each head's queries, as many as cos_sin has columns, rotated, to the last ones of `out`.

    q [T, H, width] and out [T, H, another width], both contiguous.
    """
    count, heads, width = q.shape
    places, rotary = cos_sin.shape
    arguments = q, out, cos_sin, positions, heads, width, out.shape[2], rotary, places
    launcher.run(_turn_queries.of(q.dtype), count, grain(heads * rotary), *arguments)


def gate(launcher: Launcher, gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up contiguous [T, 2 I], or [T, I] where there is no gate -> [T, I]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // (1 if activation == "relu2" else 2)
    out = launcher.empty((rows, inner), gate_up.dtype)
    number = ACTIVATIONS.index(activation)
    launcher.run(_gate.of(gate_up.dtype), rows, grain(inner), gate_up, out, inner, number)
    return out


def gate_columns(launcher: Launcher, gates: Tensor, x: Tensor, first: int, activation: Activation) -> Tensor:
    """Implement Backend.gate_columns."""
    rows, inner = gates.shape
    out = launcher.empty((rows, inner), gates.dtype)
    number = ACTIVATIONS.index(activation)
    launcher.run(_gate_columns.of(gates.dtype), rows, grain(inner), gates, x, out, inner, x.shape[1], first, number)
    return out


def gate_rows(launcher: Launcher, x: Tensor, gates: Tensor) -> Tensor:
    """Implement Backend.gate_rows; writes into x."""
    rows, columns = x.shape
    launcher.run(_gate_rows.of(x.dtype), rows, grain(columns), x, gates, columns)
    return x


def grain(row_elements: int) -> int:
    """Return how many rows a thread takes at a time."""
    return max(1, GRAIN_ELEMENTS // row_elements)


@Kernel
def _sum_groups(words):
    """words: x, sums fp32 [rows, groups], rows, columns, columns of a group, groups."""
    rows, columns, group, groups = words[5], words[6], words[7], words[8]
    x, sums = carray(as_halves(words[3]), (rows, columns)), carray(as_floats(words[4]), (rows, groups))
    for row in taken(words, rows):
        for index in range(groups):
            total = np.float32(0)
            for i in range(index * group, min(columns, (index + 1) * group)):
                total += widen(x[row, i])
            sums[row, index] = total


def sum_groups(launcher: Launcher, x: Tensor, group_size: int) -> Tensor:
    """x bf16 [T, in] -> fp32 [T, groups]: the sum of every `group_size` neighbours, of which the last may be fewer."""
    rows, columns = x.shape
    groups = -(-columns // group_size)
    sums = launcher.empty((rows, groups), torch.float32)
    launcher.run(_sum_groups, rows, 1, x, sums, rows, columns, group_size, groups)
    return sums


@Kernel
def _reorder(words):
    """words: x, order, out, rows, columns."""
    rows, columns = words[6], words[7]
    x, out = carray(as_halves(words[3]), (rows, columns)), carray(as_halves(words[5]), (rows, columns))
    order = carray(as_integers(words[4]), (columns,))
    for row in taken(words, rows):
        for i in range(columns):
            out[row, i] = x[row, order[i]]


def reorder(launcher: Launcher, x: Tensor, order: Tensor) -> Tensor:
    """x[:, order] of x bf16 [T, in] and order int64 [in]."""
    out = launcher.empty((x.shape[0], x.shape[1]), torch.bfloat16)
    launcher.run(_reorder, len(x), 1, x, order, out, *x.shape)
    return out
