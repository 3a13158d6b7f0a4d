"""Paged attention on CPUs.

Decode (one query a sequence) walks each block table once, with the online softmax of FlashAttention (Dao et al. 2022):
every key and value is read once for all query heads of its group. In bf16, where the CPU has the instructions and the
shape fits, decode.py does so in tiles, elsewhere a kernel here, which also reads blocks once that neighbouring rows
share, such as the drafts of a sequence or requests with a common prefix.
Prefill chunks, sequence by sequence: flash attention, ours under the same conditions (prefill.py), else torch's over a
gathered context.
Reference: tests/rigs/reference.py.
"""

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import AttentionForm
from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels import decode as tiled_decode
from twostroke.model.cpu.kernels import prefill as tiled_prefill
from twostroke.model.cpu.kernels.decode import (
    combine,
    keep,
    most_segments,
    num_segments,
    segment_range,
    segment_tokens,
    token_range,
)
from twostroke.model.cpu.kernels.floats import (
    LINE_BYTES,
    exponential,
    fits_tiles,
    hyperbolic_tangent,
    largest,
    prefetch,
    widen,
)
from twostroke.model.cpu.kernels.launch import (
    Kernels,
    Launcher,
    as_cached,
    as_short_integers,
    as_stored,
    compiled,
    float_of_bits,
    taken,
)
from twostroke.model.cpu.kernels.projections.short_tiles import COLUMNS_TOGETHER, LANES, multiply, transpose
from twostroke.protocol.kv_layout import first_seen

PLAIN_ROWS = 64  # of queries, whose scores are in memory at a time


CHUNK_TOKENS = 64
"""Tokens whose scores are in memory at a time. Chunks begin where their segment does, whatever rows there are."""
MAX_ROWS, MAX_BYTES = 16, 256 << 10  # of the rows that read KV together, and of their queries and sums


@compiled
def _linked(tables, contexts, window, block_size, row):
    """Return True if a row has the block of the row before it where both begin to see."""
    one, other = np.int64(contexts[row - 1]), np.int64(contexts[row])
    seen = tiled_prefill.first_seen(window, one - 1), tiled_prefill.first_seen(window, other - 1)
    block = max(seen[0], seen[1]) // block_size
    return block * block_size < min(one, other) and tables[row - 1, block] == tables[row, block]


@compiled
def _cut(tables, contexts, window, tokens, block_size, most, starts, first_segments):
    """Cut the rows into runs of at most `most` that may share blocks, which `starts` gets, with each run's first
    segment. Return how many runs there are, and the segments of the run that has the most."""
    rows = contexts.shape[0]
    runs, most_segments, last = 0, np.int64(1), np.int64(0)
    for row in range(rows):
        first, end = segment_range(np.int64(contexts[row]), window, tokens)
        if runs and row - starts[runs - 1] < most and _linked(tables, contexts, window, block_size, row):
            first_segments[runs - 1], last = min(first_segments[runs - 1], first), max(last, end)
        else:
            starts[runs], first_segments[runs], last = row, first, end
            runs += 1
        most_segments = max(most_segments, last - first_segments[runs - 1])
    starts[runs] = rows
    return runs, most_segments


@compiled
def _shares(tables, row, first, begins, ends, base, block_size):
    """Return True if a row has tokens that begin and end no earlier than those of the row before it, and its blocks are
    those of the rows from `first` on. begins, ends: of rows from `base` on."""
    here, before = row - base, row - base - 1
    if begins[here] >= ends[here] or begins[here] < begins[before] or ends[here] < ends[before]:
        return False
    for block in range(begins[first - base] // block_size, (ends[before] + block_size - 1) // block_size):
        if tables[row, block] != tables[row - 1, block]:
            return False
    return True


@compiled
def _read(kv, table, kind, head, start, begin, end, block_size, wide):
    """wide [CHUNK_TOKENS, D or more], which begins at the token `start`, gets what comes first of the tokens `begin` to
    `end` of one kind and head, in fp32."""
    token, width = begin, min(wide.shape[1], kv.shape[4])
    while token < end:
        block, offset = table[token // block_size], token % block_size
        count = min(block_size - offset, end - token)
        for i in range(count):
            for j in range(width):
                wide[token - start + i, j] = widen(kv[block, kind, head, offset + i, j])
        token += count


@compiled
def _ask_for(kv, table, kind, head, begin, end, block_size):
    """Ask for the blocks of the tokens `begin` to `end` of one kind and head: a CPU sees no stream in short runs."""
    run_bytes = block_size * kv.shape[4] * kv.itemsize
    for index in range(begin // block_size, (end + block_size - 1) // block_size):
        run = ((np.int64(table[index]) * kv.shape[1] + kind) * kv.shape[2] + head) * run_bytes
        for line in range(0, run_bytes, LINE_BYTES):
            prefetch(kv.ctypes.data + run + line)


@compiled
def _soften(scores, cap, best, weight_sum, mixed):
    """Make probabilities of a query's scores; returns the maximum and the sum of weights so far, by which `mixed` is
    scaled."""
    count = scores.shape[0]
    if cap > 0:
        for token in range(count):
            scores[token] = cap * hyperbolic_tangent(scores[token] / cap)
    highest = max(best, largest(scores, count))
    if highest > best:
        shrink = exponential(best - highest)
        weight_sum *= shrink
        for i in range(mixed.shape[0]):
            mixed[i] *= shrink
    total = np.float32(0)
    for token in range(count):
        probability = exponential(scores[token] - highest)
        scores[token] = probability
        total += probability
    return highest, weight_sum + total


@compiled
def _mix(scores, wide, group, begins, ends, start, mixed):
    """Add probabilities [rows group, CHUNK_TOKENS] times the values `wide` of the chunk at `start` to `mixed`.

    Tokens that all rows attend to are one product; each row adds those before and behind by itself, in their order.
    """
    rows, columns = begins.shape[0], mixed.shape[1]
    low, high = np.int64(0), np.int64(CHUNK_TOKENS)
    for row in range(rows):
        low, high = max(low, begins[row] - start), min(high, ends[row] - start)
    if low >= high:
        low = high = np.int64(CHUNK_TOKENS)
    for part in range(3):
        together = rows if part == 1 else 1
        for row in range(0, rows, together):
            begin, end = low, high
            if part == 0:
                begin, end = max(np.int64(0), begins[row] - start), min(low, ends[row] - start)
            elif part == 2:
                begin, end = high, min(np.int64(CHUNK_TOKENS), ends[row] - start)
            if begin < end:
                a, b = scores[row * group, begin:].ctypes.data, wide[begin].ctypes.data
                c, stride = mixed[row * group].ctypes.data, 4 * columns
                multiply(
                    together * group, a, 4 * CHUNK_TOKENS, b, 4 * wide.shape[1], end - begin, c, stride, columns, 1
                )


@compiled
def _attend(queries, kv, head, table, base, begins, ends, block_size, cap, scratch, state):
    """queries fp32 [rows group, D], scaled; kv [blocks, kinds, G, block_size, D or more]; table int32, of all rows,
    of which each attends to its tokens begins[row] to ends[row] of a segment that starts at `base`; `cap` is 0 where
    there is none. scratch: scores, keys turned round, a chunk's keys or values. state, fp32: sums
    [rows group, V or more], maxima and sums of weights [rows group].

    A row's results have the same bits whatever rows there are beside it.
    """
    scores, turned, wide = scratch
    mixed, best, weight_sum = state
    rows, group, dim = begins.shape[0], queries.shape[0] // begins.shape[0], queries.shape[1]
    best[:] = np.float32(-np.inf)
    weight_sum[:] = np.float32(0)
    mixed[:] = np.float32(0)
    last = ends[rows - 1]
    for start in range(base + (begins[0] - base) // CHUNK_TOKENS * CHUNK_TOKENS, last, CHUNK_TOKENS):
        begin, end = max(start, begins[0]), min(start + CHUNK_TOKENS, last)
        following = min(start + 2 * CHUNK_TOKENS, last)
        _read(kv, table, 0, head, start, begin, end, block_size, wide)
        if kv.shape[1] > 1:
            _ask_for(kv, table, 1, head, begin, end, block_size)
        for token in range((begin - start) // LANES * LANES, end - start, LANES):
            for i in range(0, dim, LANES):
                source, target = wide[token, i:].ctypes.data, turned[i, token:].ctypes.data
                transpose(source, 4 * wide.shape[1], target, 4 * CHUNK_TOKENS)
        columns = (end - start + COLUMNS_TOGETHER - 1) // COLUMNS_TOGETHER * COLUMNS_TOGETHER
        stride, place = 4 * CHUNK_TOKENS, scores.ctypes.data
        multiply(rows * group, queries.ctypes.data, 4 * dim, turned.ctypes.data, stride, dim, place, stride, columns, 0)
        for row in range(rows):
            first, behind = max(begins[row] - start, np.int64(0)), min(ends[row] - start, np.int64(CHUNK_TOKENS))
            if first < behind:
                for query in range(row * group, (row + 1) * group):
                    best[query], weight_sum[query] = _soften(
                        scores[query, first:behind], cap, best[query], weight_sum[query], mixed[query]
                    )
        if kv.shape[1] > 1:
            _read(kv, table, 1, head, start, begin, end, block_size, wide)
        _ask_for(kv, table, 0, head, end, following, block_size)
        _mix(scores, wide, group, begins, ends, start, mixed)


@Kernels
def _decode(words):
    """words: as those of tiled_decode.decode, but for the number of threads in place of an item's KV heads. An item is
    a KV head and segment of some rows that stand next to one another and have blocks in common, such as the drafts of
    one sequence: what they share of the segment is read once for all of them."""
    heads, kv_heads, dim, block_size, sequences = words[8], words[9], words[10], words[11], words[15]
    tokens, most, window, group, mixed_dim = words[16], words[17], words[19], heads // kv_heads, words[22]
    scale, cap = float_of_bits(np.uint32(words[14])), float_of_bits(np.uint32(words[20]))
    q = carray(as_stored(words, words[3]), (sequences, heads, dim))
    kv = carray(as_cached(words, words[4]), (words[12], words[21], kv_heads, block_size, words[23]))
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    columns = (mixed_dim + COLUMNS_TOGETHER - 1) // COLUMNS_TOGETHER * COLUMNS_TOGETHER
    width = max((dim + LANES - 1) // LANES * LANES, columns)
    # As many rows together as leave two items for each thread.
    items = sequences * kv_heads * num_segments(contexts, window, tokens)
    together = max(np.int64(1), min(items // (2 * words[18]), MAX_ROWS, MAX_BYTES // (4 * group * (dim + columns))))
    starts, first_segments = np.empty(sequences + 1, np.int64), np.empty(sequences, np.int64)
    runs, segments = _cut(tables, contexts, window, tokens, block_size, together, starts, first_segments)
    most_queries = together * group
    queries, mixed = np.empty((most_queries, dim), np.float32), np.empty((most_queries, columns), np.float32)
    best, weight_sum = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
    scores = np.empty((most_queries, CHUNK_TOKENS), np.float32)
    turned, wide = np.zeros((width, CHUNK_TOKENS), np.float32), np.zeros((CHUNK_TOKENS, width), np.float32)
    begins, ends = np.empty(together, np.int64), np.empty(together, np.int64)
    for item in taken(words, runs * kv_heads * segments):
        run, head, segment = item // segments // kv_heads, item // segments % kv_heads, item % segments
        base, end_of_run, segment = starts[run], starts[run + 1], first_segments[run] + segment
        for row in range(base, end_of_run):
            first, _ = segment_range(np.int64(contexts[row]), window, tokens)
            begins[row - base], ends[row - base] = token_range(np.int64(contexts[row]), window, tokens, segment - first)
        row = base
        while row < end_of_run:
            first, row = row, row + 1
            if begins[first - base] >= ends[first - base]:
                continue
            while row < end_of_run and _shares(tables, row, first, begins, ends, base, block_size):
                row += 1
            count = (row - first) * group
            for query in range(count):
                for i in range(dim):
                    value = q[first + query // group, head * group + query % group, i]
                    queries[query, i] = widen(value) * scale
            state = mixed[:count], best[:count], weight_sum[:count]
            seen = begins[first - base : row - base], ends[first - base : row - base]
            scratch = scores, turned, wide
            _attend(
                queries[:count], kv, head, tables[row - 1], segment * tokens, *seen, block_size, cap, scratch, state
            )
            for of in range(first, row):
                own, behind = (of - first) * group, (of - first + 1) * group
                number, _ = segment_range(np.int64(contexts[of]), window, tokens)
                place = (of * kv_heads + head) * most + segment - number
                keep(words[5], place, group, mixed_dim, mixed[own:behind], best[own:behind], weight_sum[own:behind])


def decode_attention(
    launcher: Launcher,
    q: Tensor,
    kv_layer: Tensor,
    layout: BatchLayout,
    form: AttentionForm,
    out: Tensor,
    log_sums: Tensor | None = None,
) -> None:
    """The first `layout.num_decodes` rows of q [T, H, D] into those of out [T, H, V], both contiguous; zeros for an
    empty context. `log_sums` as to `combine`.

    kv_layer [blocks, kinds, G, block_size, D]: where there is one kind, its rows are keys, and what comes first of them
    values; rows may then be longer than D. Else V is D.
    """
    num_blocks, kinds, kv_heads, block_size, row = kv_layer.shape
    count, (heads, dim), mixed_dim = layout.num_decodes, q.shape[1:], out.shape[2]
    tokens = segment_tokens(block_size)
    segments = most_segments(layout.max_context_len, form.window, tokens)
    window = form.window or layout.max_context_len
    partials = launcher.empty((count * kv_heads, segments, heads // kv_heads, mixed_dim + 2), torch.float32)
    use_tiles = q.dtype == torch.bfloat16 and all(fits_tiles(width, block_size) for width in (dim, mixed_dim))
    enough = count >= tiled_decode.SEQUENCES_A_THREAD * torch.get_num_threads()
    heads_together = kv_heads if use_tiles and enough else 1
    threads = torch.get_num_threads()
    launcher.run(
        (tiled_decode.decode if use_tiles else _decode).of(q.dtype, kv_layer.dtype),
        count * kv_heads // heads_together * segments,
        1,
        *(q, kv_layer, partials, layout.block_tables, layout.context_lens),
        *(heads, kv_heads, dim, block_size, num_blocks, layout.block_tables.shape[1], form.cached_scale),
        *(
            count,
            tokens,
            segments,
            heads_together if use_tiles else threads,
            window,
            form.soft_cap,
            kinds,
            mixed_dim,
            row,
        ),
    )
    combine(launcher, partials, layout.context_lens, kv_heads, block_size, window, form, out[:count], log_sums)


def prefill_attention(q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
    """The rows of q [T, H, D] after the decodes into those of out, one prefill chunk after the other."""
    starts = layout.query_starts[layout.num_decodes :].tolist()
    contexts = layout.context_lens[layout.num_decodes :].tolist()
    tables = layout.block_tables[layout.num_decodes :]
    for begin, end, context, table in zip(starts[:-1], starts[1:], contexts, tables, strict=True):
        attend_chunk(q[begin:end], kv_layer, table, context, form, out[begin:end])


def attend_chunk(q: Tensor, kv_layer: Tensor, table: Tensor, context: int, form: AttentionForm, out: Tensor) -> None:
    """The last rows of a sequence's context: q and out [rows, H, D]. The layer is as `decode_attention`'s."""
    _, _, kv_heads, block_size, dim = kv_layer.shape
    # To these rows the context begins with the block in which the first one's window does.
    outside = first_seen(form.window, context - len(q)) // block_size
    before = outside * block_size
    seen, tokens = table[outside : -(-context // block_size)], context - before
    if q.dtype == torch.bfloat16 and fits_tiles(dim, block_size):
        tiled_prefill.attend(q, kv_layer, seen, tokens, form, out, before)
        return
    # [blocks, kinds, G, block_size, D] -> [kinds, G, tokens, D]
    blocks = kv_layer[seen.long()].permute(1, 2, 0, 3, 4).to(q.dtype)
    kinds = blocks.reshape(len(blocks), kv_heads, -1, dim)[:, :, :tokens]
    keys, values = kinds[0], kinds[-1]
    if form.soft_cap or form.sinks is not None:
        _attend_plainly(q, keys, values, form, out, before)
    else:
        _attend_by_torch(q, keys, values, form, out, before)
    if form.kv_scales.value != 1:
        out.mul_(form.kv_scales.value)


def _attend_by_torch(q: Tensor, keys: Tensor, values: Tensor, form: AttentionForm, out: Tensor, before: int) -> None:
    """q, out [rows, H, D]; keys, values [G, tokens, D], behind `before` tokens that no row attends to."""
    rows, tokens = q.shape[0], keys.shape[1]
    mask = None
    if rows < tokens or 0 < abs(form.window) < tokens:  # torch's is_causal aligns the diagonal to the top left
        mask = _visible(tokens - rows, tokens, tokens, form.window, before)
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=form.cached_scale,
        enable_gqa=q.shape[1] != keys.shape[0],
    )
    out.copy_(mixed[0].transpose(0, 1))


def _attend_plainly(q: Tensor, keys: Tensor, values: Tensor, form: AttentionForm, out: Tensor, before: int) -> None:
    """Attend as `_attend_by_torch`, some rows at a time, with the forms that torch's attention lacks."""
    rows, heads, dim = q.shape
    groups, tokens, _ = keys.shape
    keys, values = keys.float().transpose(1, 2), values.float()
    for first in range(0, rows, PLAIN_ROWS):
        part = q[first : first + PLAIN_ROWS].float().transpose(0, 1)  # [H, part, D]
        count = part.shape[1]
        scores = part.reshape(groups, -1, dim) @ keys * form.cached_scale
        if form.soft_cap:
            scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
        begin = tokens - rows + first
        hidden = ~_visible(begin, begin + count, tokens, form.window, before)
        scores = scores.view(heads, count, tokens).masked_fill(hidden, -math.inf)
        if form.sinks is not None:
            scores = torch.cat((scores, form.sinks[:, None, None].expand(-1, count, 1)), dim=2)
        weights = scores.softmax(-1)[:, :, :tokens].reshape(groups, -1, tokens)
        out[first : first + count] = (weights @ values).view(heads, count, dim).transpose(0, 1)


def _visible(begin: int, end: int, tokens: int, window: int, before: int) -> Tensor:
    """bool [end - begin, tokens]: which keys the queries at these positions attend to, all behind `before` others."""
    visible = torch.ones(end - begin, tokens, dtype=torch.bool).tril_(begin)
    if window < 0:
        positions = torch.arange(before, before + end)
        return visible & (positions[:tokens] // -window == positions[begin:, None] // -window)
    return visible.triu_(begin - window + 1) if window else visible
