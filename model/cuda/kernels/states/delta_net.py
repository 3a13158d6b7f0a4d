"""One token of gated delta nets: after the convolution, update of the states and gated norm in one pass over them.

A program holds the matrix of a value head in registers, so each of its numbers is read once and written once. With a
the decay, what a state gives of keys and queries is summed together:

    S' = a S + k u^T,  u = b (v - a S^T k),  S'^T q = a S^T q + (k . q) u.

Predicted, not measured: a token of a layer of Qwen3-Next (32 matrices of 128 x 128) reads 2.2 MB and writes 2.2 MB,
convolution included, which an H100's 3.35 TB/s takes 1.3 us for; its 4.7 MFLOP of fp32 take 0.07 us of 67 TFLOP/s. A
batch of one has 32 programs for 132 multiprocessors, and takes the latency of one load of 64 KiB instead.

Reference: model/architectures/delta_net.py.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.architectures.delta_net import NORM_EPS, DeltaWeights
from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.launch import await_inputs, dependent_launch, power_of_two
from twostroke.model.cuda.kernels.states.parts import (
    convolve,
    is_copy,
    load_matrix,
    matrix_warps,
    numbers_of,
    soft_plus,
    store_for_copies,
    store_matrix,
    target_of,
)

_NORM_EPS = tl.constexpr(NORM_EPS)


@triton.jit(do_not_specialize=["positions", "tables", "table_stride"])
def delta_step_kernel(
    inputs,
    convolved,
    strengths,
    decays,
    decay_biases,
    norm,
    cache,
    tables,
    positions,
    out,
    table_stride,
    eps,
    query_scale,
    COLUMNS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (row, value head)."""
    WIDTH: tl.constexpr = VALUE_HEADS * VALUE
    KEY_WIDTH: tl.constexpr = KEY_HEADS * KEY
    SHARE: tl.constexpr = VALUE_HEADS // KV_HEADS
    await_inputs(DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = target_of(tables, positions, row, table_stride, BLOCK_SIZE)
    if is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE):
        return
    matrix, places, real = load_matrix(
        cache, tables, positions, row, head, table_stride,
        SHARE, KEY, KEY_PADDED, VALUE, VALUE_PADDED, KV_HEADS, PART, BLOCK_SIZE,
    )  # fmt: skip

    keys, values = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    of_key, of_value = keys < KEY, values < VALUE
    of_row = convolved + row * (2 * KEY_WIDTH + WIDTH)
    of_head = of_row + head // (VALUE_HEADS // KEY_HEADS) * KEY
    q = tl.load(of_head + keys, mask=of_key, other=0.0)
    k = tl.load(of_head + KEY_WIDTH + keys, mask=of_key, other=0.0)
    v = tl.load(of_row + 2 * KEY_WIDTH + head * VALUE + values, mask=of_value, other=0.0)
    q *= query_scale / tl.sqrt(tl.sum(q * q, axis=0) + _NORM_EPS)
    k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + _NORM_EPS)
    match = tl.sum(k * q, axis=0)
    of_row = strengths + row * (2 * VALUE_HEADS) + head
    step = soft_plus(tl.load(of_row + VALUE_HEADS) + tl.load(decay_biases + head))
    decay = tl.exp(-tl.load(decays + head) * step)

    known, through = tl.sum(matrix * k[:, None], axis=0), tl.sum(matrix * q[:, None], axis=0)
    update = (v - decay * known) * tl.sigmoid(tl.load(of_row))
    matrix = matrix * decay + k[:, None] * update[None, :]
    store_matrix(cache, positions, row, target, head, matrix, places, real, match, SHARE, SEEN, KV_HEADS, PART)

    found = decay * through + match * update
    found *= 1.0 / tl.sqrt(tl.sum(found * found, axis=0) / VALUE + eps)
    found *= tl.load(norm + values, mask=of_value, other=0.0)
    gates = inputs + row * COLUMNS + (COLUMNS - WIDTH) + head * VALUE
    gate = tl.load(gates + values, mask=of_value, other=0.0).to(tl.float32)
    found *= gate * tl.sigmoid(gate)
    store_for_copies(
        out + head * VALUE + values, found, of_value, row, target, tables, positions, table_stride, WIDTH, BLOCK_SIZE
    )  # fmt: skip


def delta_step(
    products: Sequence[Tensor], weights: DeltaWeights, kv_layer: Tensor, layout: BatchLayout, out: Tensor
) -> None:
    """Implement StateKernels.step."""
    inputs, strengths = products
    sizes, tables = weights.sizes, layout.block_tables
    cache, form = numbers_of(kv_layer, sizes)
    convolved = convolve(inputs, 0, weights, cache, layout, form)
    delta_step_kernel[(layout.num_decodes, sizes.value_heads)](
        inputs, convolved, strengths, weights.decay, weights.decay_bias, weights.norm, cache, tables, layout.positions,
        out, tables.stride(0), weights.eps, sizes.key**-0.5,
        COLUMNS=inputs.shape[1], KEY_HEADS=sizes.key_heads, VALUE_HEADS=sizes.value_heads, KEY=sizes.key,
        KEY_PADDED=power_of_two(sizes.key), VALUE=sizes.value, VALUE_PADDED=power_of_two(sizes.value), **form,
        num_warps=matrix_warps(sizes.key, sizes.value), **dependent_launch(inputs),
    )  # fmt: skip
