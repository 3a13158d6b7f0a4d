"""Common parts of the kernels of layers with a state: parts of blocks, the convolution, the count of tokens.

A state is read from the block of the token before and written into that of its own, which mostly are the same.
"""

import numpy as np
from numba import carray
from torch import Tensor

from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    as_floats,
    as_integers,
    as_short_integers,
    compiled,
    taken,
)
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.shapes.state_sizes import StateSizes


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
