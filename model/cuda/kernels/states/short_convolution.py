"""One token of gated short convolutions: the convolution, then its gate.

Reference: model/architectures/short_convolution.py.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.architectures.short_convolution import ConvolutionWeights
from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.launch import await_inputs, dependent_launch
from twostroke.model.cuda.kernels.states.parts import (
    convolve,
    count_token,
    is_copy,
    numbers_of,
    store_for_copies,
    target_of,
)

_BLOCK = 1024  # channels of a program
_BLOCK_WARPS = 4


@triton.jit(do_not_specialize=["positions", "tables", "table_stride"])
def convolution_gate_kernel(
    inputs,
    convolved,
    cache,
    tables,
    positions,
    out,
    table_stride,
    WIDTH: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (row, BLOCK channels): the second third of the inputs times the convolution. A row's first program also
    writes the number of seen tokens."""
    await_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    target = target_of(tables, positions, row, table_stride, BLOCK_SIZE)
    if is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE):
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < WIDTH
    found = tl.load(convolved + row * WIDTH + channel, mask=real, other=0.0)
    found *= tl.load(inputs + row * (3 * WIDTH) + WIDTH + channel, mask=real, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        position = tl.load(positions + row)
        for kv_head in range(KV_HEADS):
            number = tl.load(convolved + row * WIDTH + kv_head * (WIDTH // KV_HEADS))
            count_token(cache, target, kv_head, position, number, SEEN, KV_HEADS, PART)
    store_for_copies(out + channel, found, real, row, target, tables, positions, table_stride, WIDTH, BLOCK_SIZE)


def convolution_step(
    products: Sequence[Tensor], weights: ConvolutionWeights, kv_layer: Tensor, layout: BatchLayout, out: Tensor
) -> None:
    """Implement StateKernels.step."""
    (inputs,) = products
    sizes, tables = weights.sizes, layout.block_tables
    cache, form = numbers_of(kv_layer, sizes)
    convolved = convolve(inputs, 0, weights, cache, layout, form, has_gates=True)
    convolution_gate_kernel[(layout.num_decodes, triton.cdiv(sizes.channel_count, _BLOCK))](
        inputs, convolved, cache, tables, layout.positions, out, tables.stride(0), WIDTH=sizes.channel_count,
        BLOCK=_BLOCK, **form, num_warps=_BLOCK_WARPS, **dependent_launch(inputs),
    )  # fmt: skip
