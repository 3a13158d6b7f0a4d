"""One token of Mamba-2: after the convolution, one pass over the states.

A program holds the matrix of a head in registers, so each of its numbers is read once and written once.

Predicted, not measured: a token of a layer of Nemotron Nano 9B v2 (128 matrices of 80 x 128) reads 5.4 MB and writes
5.4 MB, convolution included, which an H100's 3.35 TB/s takes 3.2 us for; its 6.6 MFLOP of fp32 take 0.1 us of 67
TFLOP/s.

Reference: model/architectures/mamba.py.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.architectures.mamba import MambaWeights
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


@triton.jit(do_not_specialize=["positions", "tables", "table_stride"])
def mamba_step_kernel(
    inputs,
    convolved,
    steps,
    decays,
    skips,
    step_biases,
    cache,
    tables,
    positions,
    out,
    table_stride,
    least_step,
    most_step,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    STATE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (row, head)."""
    WIDTH: tl.constexpr = HEADS * HEAD
    SHARE: tl.constexpr = HEADS // KV_HEADS
    await_inputs(DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = target_of(tables, positions, row, table_stride, BLOCK_SIZE)
    if is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE):
        return
    matrix, places, real = load_matrix(
        cache, tables, positions, row, head, table_stride,
        SHARE, HEAD, HEAD_PADDED, STATE, STATE_PADDED, KV_HEADS, PART, BLOCK_SIZE,
    )  # fmt: skip

    dims, states = tl.arange(0, HEAD_PADDED), tl.arange(0, STATE_PADDED)
    of_head, of_state = dims < HEAD, states < STATE
    of_row = convolved + row * (WIDTH + 2 * GROUPS * STATE)
    x = tl.load(of_row + head * HEAD + dims, mask=of_head, other=0.0)
    of_group = of_row + WIDTH + head // (HEADS // GROUPS) * STATE + states
    b = tl.load(of_group, mask=of_state, other=0.0)
    c = tl.load(of_group + GROUPS * STATE, mask=of_state, other=0.0)
    step = soft_plus(tl.load(steps + row * HEADS + head) + tl.load(step_biases + head))
    step = tl.minimum(tl.maximum(step, least_step), most_step)

    matrix = matrix * tl.exp(-tl.load(decays + head) * step) + (x * step)[:, None] * b[None, :]
    found = tl.sum(matrix * c[None, :], axis=1) + tl.load(skips + head) * x
    number = tl.sum(b, axis=0)
    store_matrix(cache, positions, row, target, head, matrix, places, real, number, SHARE, SEEN, KV_HEADS, PART)

    gate = tl.load(inputs + row * COLUMNS + head * HEAD + dims, mask=of_head, other=0.0).to(tl.float32)
    found *= gate * tl.sigmoid(gate)
    store_for_copies(
        out + head * HEAD + dims, found, of_head, row, target, tables, positions, table_stride, WIDTH, BLOCK_SIZE
    )  # fmt: skip


def mamba_step(
    products: Sequence[Tensor], weights: MambaWeights, kv_layer: Tensor, layout: BatchLayout, out: Tensor
) -> None:
    """Implement StateKernels.step, before the norm."""
    inputs, steps = products
    sizes, tables = weights.sizes, layout.block_tables
    cache, form = numbers_of(kv_layer, sizes)
    convolved = convolve(inputs, sizes.output_width, weights, cache, layout, form)
    mamba_step_kernel[(layout.num_decodes, sizes.heads)](
        inputs, convolved, steps, weights.decay, weights.skip, weights.step_bias, cache, tables, layout.positions, out,
        tables.stride(0), *map(float, weights.step_limits),
        COLUMNS=inputs.shape[1], HEADS=sizes.heads, HEAD=sizes.head, HEAD_PADDED=power_of_two(sizes.head),
        STATE=sizes.state, STATE_PADDED=power_of_two(sizes.state), GROUPS=sizes.groups, **form,
        num_warps=matrix_warps(sizes.head, sizes.state), **dependent_launch(inputs),
    )  # fmt: skip
