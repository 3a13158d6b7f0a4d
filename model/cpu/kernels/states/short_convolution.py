"""One token of gated short convolutions on CPUs. A thread takes a block's part: channels of a KV head.

Reference: model/architectures/short_convolution.py.
"""

from collections.abc import Sequence

import numpy as np
from numba import carray
from torch import Tensor

from twostroke.model.architectures.short_convolution import ConvolutionWeights
from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels.floats import store, widen
from twostroke.model.cpu.kernels.launch import (
    Kernels,
    as_floats,
    as_integers,
    as_short_integers,
    as_stored,
    taken,
)
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.cpu.kernels.states.parts import convolve, count_tokens, part_of


@Kernels
def _convolution_step(words):
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
        _convolution_step.of(inputs.dtype),
        layout.num_decodes * 2 * kv_heads,
        1,
        *(inputs, weights.conv, 0 if weights.conv_bias is None else weights.conv_bias),
        *(kv_layer, tables, layout.positions, out, sizes.channel_count, sizes.taps, kv_heads),
        *(size * dim * kv_layer.itemsize, size, tables.shape[1], sizes.numbers_in(1, kv_heads) - 1),
    )
    count_tokens(launcher, sizes, kv_layer, layout)
