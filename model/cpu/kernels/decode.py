"""Decode attention in segments of the context, so that few long sequences can be shared by many cores (flash-decoding,
Dao et al. 2023).

A segment's attention begins afresh, with its own maximum, and segments are merged in their order. So a result depends
neither on the batch nor on the number of threads.

In bf16 on AVX512-BF16, a segment is FlashAttention's online softmax (Dao et al. 2022) over chunks of 128 tokens, all
query heads of a KV head together, so that every key and value is read from memory once. Where there are enough
sequences, a thread takes all KV heads of one and reads whole blocks.

Segments lie where they do whatever the window is; of those that it does not reach nothing is read.

Reference: tests/rigs/reference.py.
"""

import numpy as np
from numba import carray
from torch import Tensor

from twostroke.model.backend import AttentionForm
from twostroke.model.cpu.kernels.floats import (
    LANES,
    LINE_BYTES,
    TILE_ROWS,
    cached_bytes,
    dot_rows,
    exponential,
    in_bf16,
    interleave,
    multiply,
    prefetch,
    store,
)
from twostroke.model.cpu.kernels.launch import (
    Kernels,
    Launcher,
    as_floats,
    as_short_integers,
    as_stored,
    compiled,
    float_of_bits,
    taken,
)
from twostroke.model.cpu.kernels.prefill import KEY_PADDING, first_seen, soften

SEGMENT_TOKENS = 512  # about; whole blocks


def segment_tokens(block_size: int) -> int:
    """Return the tokens of each segment but a context's last."""
    return -(-SEGMENT_TOKENS // block_size) * block_size


def most_segments(context: int, window: int, tokens: int) -> int:
    """Return the most segments that a context of this length has within its window (as AttentionForm.window), wherever
    the window begins."""
    return min(-(-context // tokens), (abs(window) + tokens - 2) // tokens + 1 if window else context)


@compiled
def segment_range(context, window, tokens):
    """Return a sequence's first segment with tokens within the window, and the one behind its last."""
    return first_seen(window, context - 1) // tokens, (context + tokens - 1) // tokens


@compiled
def num_segments(contexts, window, tokens):
    """Return the number of segments of the sequence that has the most."""
    most = np.int64(1)
    for i in range(contexts.shape[0]):
        first, end = segment_range(np.int64(contexts[i]), window, tokens)
        most = max(most, end - first)
    return most


@compiled
def token_range(context, window, tokens, index):
    """Return the tokens of a sequence's `index`-th segment within the window; none where the segment does not exist."""
    first, _ = segment_range(context, window, tokens)
    begin = (first + index) * tokens
    return max(begin, first_seen(window, context - 1)), min(begin + tokens, context)


@compiled
def keep(partials, index, group, dim, mixed, best, weight_sum):
    """Write a segment's sums [group, D], maxima and sums of weights [group] to its place, the `index`-th."""
    place = carray(as_floats(partials + index * group * (dim + 2) * 4), (group, dim + 2))
    for row in range(group):
        for i in range(dim):
            place[row, i] = mixed[row, i]
        place[row, dim], place[row, dim + 1] = best[row], weight_sum[row]


@Kernels
def _combine(words):
    """words: partials, out, contexts, heads, KV heads, head dim, segment tokens, segments, window, sinks or 0, what
    values are multiplied by, logarithms of sums of weights or 0; items are query heads."""
    items, heads, kv_heads, dim, tokens, segments = words[1], words[6], words[7], words[8], words[9], words[10]
    sequences, group, window, has_sinks = items // heads, heads // kv_heads, words[11], words[12] != 0
    sinks, factor = carray(as_floats(words[12]), (heads,)), float_of_bits(np.uint32(words[13]))
    partials = carray(as_floats(words[3]), (sequences * kv_heads, segments, group, dim + 2))
    out = carray(as_stored(words, words[4]), (items, dim))
    contexts = carray(as_short_integers(words[5]), (sequences,))
    log_sums = carray(as_floats(words[14]), (items,))
    mixed = np.empty(dim, np.float32)
    for item in taken(words, items):
        pair, row = item // group, item % group
        mixed[:] = np.float32(0)
        best, weight_sum = np.float32(-np.inf), np.float32(0)
        if has_sinks:
            best, weight_sum = sinks[item % heads], np.float32(1)
        first, end = segment_range(np.int64(contexts[item // heads]), window, tokens)
        for segment in range(end - first):
            part = partials[pair, segment, row]
            highest = max(best, part[dim])
            shrink, grow = exponential(best - highest), exponential(part[dim] - highest)
            for i in range(dim):
                mixed[i] = mixed[i] * shrink + part[i] * grow
            best, weight_sum = highest, weight_sum * shrink + part[dim + 1] * grow
        if words[14] != 0:
            log_sums[item] = best + np.log(weight_sum)
        if weight_sum == 0:  # an empty context
            weight_sum = np.float32(1)
        for i in range(dim):
            store(out[item], i, mixed[i] / weight_sum * factor)


def combine(
    launcher: Launcher,
    partials: Tensor,
    contexts: Tensor,
    kv_heads: int,
    block_size: int,
    window: int,
    form: AttentionForm,
    out: Tensor,
    log_sums: Tensor | None = None,
) -> None:
    """out [B, H, D] of fp32 [B KV heads, segments, heads of a group, D + 2]: sums, maximum, sum of weights; zeros for
    an empty context.

    `window` is at least the longest context where all of it is seen. `log_sums`, fp32 [B, H], gets the logarithms of
    the sums of weights.
    """
    sequences, heads, dim = out.shape
    sizes = heads, kv_heads, dim, segment_tokens(block_size), partials.shape[1], window
    extra = 0 if form.sinks is None else form.sinks, form.kv_scales.value, 0 if log_sums is None else log_sums
    launcher.run(_combine.of(out.dtype), sequences * heads, 4, partials, out, contexts, *sizes, *extra)


CHUNK_TOKENS = 128  # packed values of a chunk: one head's stay in the L1 cache, all heads' in L2
SEQUENCES_A_THREAD = 4  # of these each thread takes whole sequences: shares then differ little


@compiled
def _place(words, table, head, token):
    """The address of the keys of the 16 tokens that `token` is among."""
    kv_heads, row, block_size, kinds = words[9], words[23], words[11], words[21]
    block, offset = np.int64(table[token // block_size]), token % block_size // LANES * LANES
    return words[4] + (((block * kinds * kv_heads) + head) * block_size + offset) * row * cached_bytes(words)


@compiled
def _ask_for(words, place, part, parts):
    """Ask for one of as many parts of the keys or values of 16 tokens, at the address `place`."""
    lines = LANES * words[23] * cached_bytes(words) // LINE_BYTES
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        prefetch(place + line * LINE_BYTES)


@compiled
def _pack(values, count, nothing, row, mixed_dim, packed):
    """The first `count` of 16 tokens' values, two by two, of each row what is mixed; a missing one is `nothing`.
    Addresses."""
    for token in range(0, count, 2):
        first = values + token * 2 * row
        second = first + 2 * row if token + 1 < count else nothing
        interleave(first, second, mixed_dim // (2 * LANES), packed + token * 2 * mixed_dim)


@compiled
def _score_and_pack(words, queries, table, first_head, num_heads, start, end, scores, packed, nothing, unpacked):
    """Read the keys and values of some KV heads for the tokens `start` to `end`, at most a chunk, block after block as
    they lie in memory: scores [KV heads, group, CHUNK_TOKENS], packed values [KV heads, CHUNK_TOKENS / 2, V].

    queries: the address of the first head's. unpacked: room for 16 tokens of one. With a head at a time, 2 KiB here and
    2 KiB there, the CPU sees no stream.
    """
    kv_heads, dim, block_size, mixed_dim, row = words[9], words[10], words[11], words[22], words[23]
    size, group, numbers = cached_bytes(words), scores.shape[1], unpacked.ctypes.data
    to_values = (words[21] - 1) * kv_heads * block_size * row * size
    token = start
    while token < end:
        stop = min(end, token + block_size - token % block_size)  # where the block ends
        for part in range(num_heads):
            query = queries + part * group * 2 * dim
            for first in range(token, stop, LANES):
                keys = _place(words, table, first_head + part, first)
                ahead = _place(words, table, first_head + part, min(first + block_size, end - 1))
                keys = in_bf16(words, keys, LANES * row, numbers)
                place = scores[part].ctypes.data + 4 * (first - start)
                for one in range(group):
                    _ask_for(words, ahead, one, group)
                    dot_rows(query + one * 2 * dim, keys, 2 * row, dim // (2 * LANES), place + 4 * CHUNK_TOKENS * one)
        for part in range(num_heads):
            for first in range(token, stop, LANES):
                values = _place(words, table, first_head + part, first) + to_values
                if to_values:
                    ahead = _place(words, table, first_head + part, min(first + block_size, end - 1))
                    _ask_for(words, ahead + to_values, 0, 1)
                values = in_bf16(words, values, LANES * row, numbers)
                place = packed[part].ctypes.data + (first - start) * 2 * mixed_dim
                _pack(values, min(LANES, end - first), nothing.ctypes.data, row, mixed_dim, place)
        token = stop


@compiled
def _attend(words, tables, item, begin, end, scratch, state):
    """Query heads of one or all KV heads of a sequence over its tokens `begin` to `end`.

    item: the sequence, its first KV head and how many. scratch: scores, packed values, probabilities, zeros,
    unpacked keys or values. state, fp32: sums [KV heads, rows, V], maxima and sums of weights.
    """
    sequence, first_head, num_heads = item
    scores, packed, probabilities, nothing, unpacked = scratch
    mixed, best, weight_sum = state
    heads, dim, mixed_dim = words[8], words[10], words[22]
    group, rows, table = scores.shape[1], mixed.shape[1], tables[sequence]
    queries = words[3] + (sequence * heads + first_head * group) * dim * 2
    scale, cap = float_of_bits(np.uint32(words[14])), float_of_bits(np.uint32(words[20]))
    mixed[:] = np.float32(0)
    best[:] = np.float32(-np.inf)
    weight_sum[:] = np.float32(0)
    for start in range(begin // LANES * LANES, end, CHUNK_TOKENS):
        count, outside = min(CHUNK_TOKENS, end - start), max(0, begin - start)
        width = (count + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING
        _score_and_pack(
            words, queries, table, first_head, num_heads, start, start + count, scores, packed, nothing, unpacked
        )
        for part in range(num_heads):
            source, place, target = probabilities.ctypes.data, packed[part].ctypes.data, mixed[part].ctypes.data
            for row in range(group):
                best[part, row], weight_sum[part, row] = soften(
                    scores[part].ctypes.data + 4 * CHUNK_TOKENS * row,
                    outside,
                    count,
                    width,
                    scale,
                    cap,
                    best[part, row],
                    weight_sum[part, row],
                    target + 4 * mixed_dim * row,
                    mixed_dim,
                    source + 2 * CHUNK_TOKENS * row,
                )
            stride = 4 * mixed_dim
            multiply(rows, source, 2 * CHUNK_TOKENS, place, stride, (count + 1) // 2, target, stride, mixed_dim, 1)


@Kernels
def decode(words):
    """words: q, KV layer, partials, tables, contexts, heads, KV heads, head dim, block size, blocks, table width,
    scale, sequences, segment tokens, segments that there is room for, KV heads of an item, window, cap or 0, kinds of
    rows: where there is but one, each is a key, and its first numbers a value; V, the numbers of a value; the numbers
    from one row to the next."""
    heads, kv_heads, sequences, tokens, mixed_dim = words[8], words[9], words[15], words[16], words[22]
    most, together, window, group = words[17], words[18], words[19], heads // kv_heads
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    rows = (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    scratch = (
        np.empty((together, group, CHUNK_TOKENS), np.float32),
        np.empty((together, CHUNK_TOKENS // 2, mixed_dim), np.uint32),
        np.zeros((rows, CHUNK_TOKENS), np.uint16),
        np.zeros(mixed_dim, np.uint16),
        np.empty(LANES * words[23], np.uint16),
    )
    mixed = np.empty((together, rows, mixed_dim), np.float32)
    best, weight_sum = np.empty((together, group), np.float32), np.empty((together, group), np.float32)
    shares = kv_heads // together  # of a sequence
    segments = num_segments(contexts, window, tokens)
    for index in taken(words, sequences * shares * segments):
        share, segment = index // segments, index % segments
        sequence, first_head = share // shares, share % shares * together
        begin, end = token_range(np.int64(contexts[sequence]), window, tokens, segment)
        if begin < end:
            _attend(words, tables, (sequence, first_head, together), begin, end, scratch, (mixed, best, weight_sum))
            for part in range(together):
                place = (sequence * kv_heads + first_head + part) * most + segment
                keep(words[5], place, group, mixed_dim, mixed[part], best[part], weight_sum[part])
