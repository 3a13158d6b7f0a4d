"""Norms, rotation, KV write and gated activation on CPUs: one pass over memory each, in fp32 registers.

Every kernel exists for fp32 and for bf16. Reference: model/reference.py.
"""

import numpy as np
from numba import carray
from torch import Tensor

from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels.floats import exponential, store, widen
from twostroke.model.cpu.kernels.launch import (
    KernelPair,
    as_floats,
    as_halves,
    as_integers,
    compiled,
    float_bits,
    float_of_bits,
    take_items,
)
from twostroke.model.cpu.kernels.program import Launcher

GRAIN_ELEMENTS = 8192  # what a thread takes at a time: some microseconds of work


@compiled
def _normalise(x, weight, eps, out):
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += widen(x[i]) * widen(x[i])
    scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        store(out, i, widen(x[i]) * scale * widen(weight[i]))


@compiled
def _rms_norm(words, x, weight, out):
    """words: x, weight, out, hidden, eps as bits."""
    rows, grain, hidden = words[1], words[2], words[6]
    eps = float_of_bits(np.uint32(words[7]))
    x, weight, out = carray(x, (rows, hidden)), carray(weight, (hidden,)), carray(out, (rows, hidden))
    while True:
        begin = take_items(words)
        if begin >= rows:
            return
        for row in range(begin, min(begin + grain, rows)):
            _normalise(x[row], weight, eps, out[row])


@compiled
def _add_rms_norm(words, x, residual, weight):
    """words: x (becomes the normalised sum), residual (becomes the sum), weight, hidden, eps as bits."""
    rows, grain, hidden = words[1], words[2], words[6]
    eps = float_of_bits(np.uint32(words[7]))
    x, residual, weight = carray(x, (rows, hidden)), carray(residual, (rows, hidden)), carray(weight, (hidden,))
    while True:
        begin = take_items(words)
        if begin >= rows:
            return
        for row in range(begin, min(begin + grain, rows)):
            for i in range(hidden):
                store(residual[row], i, widen(x[row, i]) + widen(residual[row, i]))
            _normalise(residual[row], weight, eps, x[row])


@compiled
def _rotate(source, cos_sin, out):
    half = source.shape[0] // 2
    for i in range(half):
        first, second = widen(source[i]), widen(source[half + i])
        store(out, i, first * cos_sin[i] - second * cos_sin[half + i])
        store(out, half + i, second * cos_sin[i] + first * cos_sin[half + i])


@compiled
def _rope_and_write_kv(words, qkv, kv, out):
    """words: qkv, KV layer, out, cos_sin, positions, slots, heads, KV heads, dim, block size, blocks, positions."""
    rows, grain = words[1], words[2]
    heads, kv_heads, dim, block_size = words[9], words[10], words[11], words[12]
    cos_sin = carray(as_floats(words[6]), (words[14], dim))
    positions, slots = carray(as_integers(words[7]), (rows,)), carray(as_integers(words[8]), (rows,))
    qkv = carray(qkv, (rows, heads + 2 * kv_heads, dim))
    kv = carray(kv, (words[13], 2, kv_heads, block_size, dim))
    out = carray(out, (rows, heads, dim))
    while True:
        begin = take_items(words)
        if begin >= rows:
            return
        for row in range(begin, min(begin + grain, rows)):
            angles = cos_sin[positions[row]]
            block, offset = slots[row] // block_size, slots[row] % block_size
            for head in range(heads):
                _rotate(qkv[row, head], angles, out[row, head])
            for head in range(kv_heads):
                _rotate(qkv[row, heads + head], angles, kv[block, 0, head, offset])
                value, place = qkv[row, heads + kv_heads + head], kv[block, 1, head, offset]
                for i in range(dim):
                    place[i] = value[i]


@compiled
def _silu_mul(words, gate_up, out):
    """words: gate_up, out, inner size."""
    rows, grain, inner = words[1], words[2], words[5]
    gate_up, out = carray(gate_up, (rows, 2 * inner)), carray(out, (rows, inner))
    while True:
        begin = take_items(words)
        if begin >= rows:
            return
        for row in range(begin, min(begin + grain, rows)):
            for i in range(inner):
                gate = widen(gate_up[row, i])
                sigmoid = np.float32(1) / (np.float32(1) + exponential(-gate))
                store(out[row], i, gate * sigmoid * widen(gate_up[row, inner + i]))


def _rms_norm_fp32(words):
    _rms_norm(words, as_floats(words[3]), as_floats(words[4]), as_floats(words[5]))


def _rms_norm_bf16(words):
    _rms_norm(words, as_halves(words[3]), as_halves(words[4]), as_halves(words[5]))


def _add_rms_norm_fp32(words):
    _add_rms_norm(words, as_floats(words[3]), as_floats(words[4]), as_floats(words[5]))


def _add_rms_norm_bf16(words):
    _add_rms_norm(words, as_halves(words[3]), as_halves(words[4]), as_halves(words[5]))


def _rope_and_write_kv_fp32(words):
    _rope_and_write_kv(words, as_floats(words[3]), as_floats(words[4]), as_floats(words[5]))


def _rope_and_write_kv_bf16(words):
    _rope_and_write_kv(words, as_halves(words[3]), as_halves(words[4]), as_halves(words[5]))


def _silu_mul_fp32(words):
    _silu_mul(words, as_floats(words[3]), as_floats(words[4]))


def _silu_mul_bf16(words):
    _silu_mul(words, as_halves(words[3]), as_halves(words[4]))


_RMS_NORM = KernelPair(_rms_norm_fp32, _rms_norm_bf16)
_ADD_RMS_NORM = KernelPair(_add_rms_norm_fp32, _add_rms_norm_bf16)
_ROPE_AND_WRITE_KV = KernelPair(_rope_and_write_kv_fp32, _rope_and_write_kv_bf16)
_SILU_MUL = KernelPair(_silu_mul_fp32, _silu_mul_bf16)


def rms_norm(launcher: Launcher, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x contiguous [T, hidden] -> the same shape and dtype."""
    rows, hidden = x.shape
    out = launcher.empty((rows, hidden), x.dtype)
    launcher.run(
        _RMS_NORM.of(x.dtype),
        rows,
        _grain(hidden),
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        hidden,
        float_bits(eps),
    )
    return out


def add_rms_norm(launcher: Launcher, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both contiguous [T, hidden] and overwritten: x becomes norm(x + residual), residual becomes the sum."""
    rows, hidden = x.shape
    launcher.run(
        _ADD_RMS_NORM.of(x.dtype),
        rows,
        _grain(hidden),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        hidden,
        float_bits(eps),
    )
    return x, residual


def rope_and_write_kv(
    launcher: Launcher, qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
) -> Tensor:
    """qkv contiguous [T, (H + 2 G) D] -> rotated Q [T, H, D]; K and V go to `layout.slots` of `kv_layer`."""
    num_blocks, _, kv_heads, block_size, dim = kv_layer.shape
    rows, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    out = launcher.empty((rows, heads, dim), qkv.dtype)
    launcher.run(
        _ROPE_AND_WRITE_KV.of(qkv.dtype),
        rows,
        _grain(width),
        qkv.data_ptr(),
        kv_layer.data_ptr(),
        out.data_ptr(),
        cos_sin.data_ptr(),
        layout.positions.data_ptr(),
        layout.slots.data_ptr(),
        heads,
        kv_heads,
        dim,
        block_size,
        num_blocks,
        cos_sin.shape[0],
    )
    return out


def silu_mul(launcher: Launcher, gate_up: Tensor) -> Tensor:
    """gate_up contiguous [T, 2 I] -> [T, I]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = launcher.empty((rows, inner), gate_up.dtype)
    launcher.run(_SILU_MUL.of(gate_up.dtype), rows, _grain(inner), gate_up.data_ptr(), out.data_ptr(), inner)
    return out


def _grain(row_elements: int) -> int:
    return max(1, GRAIN_ELEMENTS // row_elements)
