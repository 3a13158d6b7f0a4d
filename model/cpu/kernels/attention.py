"""Paged attention on CPUs.

Decode (one query a sequence) walks each block table once, with the online softmax of FlashAttention (Dao et al. 2022):
every key and value is read once for all query heads of its group. In bf16, where the CPU has the instructions and the
shape fits, decode.py does so in tiles, elsewhere a kernel here.
Prefill chunks, sequence by sequence: flash attention, ours under the same conditions (prefill.py), else torch's over a
gathered context.
Reference: model/reference.py.
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
    segment_tokens,
    token_range,
)
from twostroke.model.cpu.kernels.floats import exponential, fits_tiles, hyperbolic_tangent, prefetch, widen
from twostroke.model.cpu.kernels.launch import (
    Kernels,
    as_cached,
    as_short_integers,
    as_stored,
    compiled,
    float_of_bits,
    taken,
)
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.protocol.kv_layout import first_seen

PLAIN_ROWS = 64  # of queries, whose scores are in memory at a time


@compiled
def _read(tokens, count, rounded, wide):
    """wide [rounded, D] = what comes first of tokens [count, D or more], zeros after them."""
    for token in range(count):
        for i in range(wide.shape[1]):
            wide[token, i] = widen(tokens[token, i])
    for token in range(count, rounded):
        for i in range(wide.shape[1]):
            wide[token, i] = np.float32(0)


@compiled
def _attend(queries, kv, head, table, begin, context, block_size, cap, mixed, best, weight_sum):
    """queries fp32 [R, D], scaled; kv [blocks, kinds, G, block_size, D or more]; table int32; tokens `begin` to
    `context`; `cap` is 0 where there is none. Results fp32: sums [R, V], maxima and sums of weights [R].

    Four tokens share a pass over the head dimension: with one, the loops' own cost is most of the time.
    """
    group, dim = queries.shape
    mixed_dim = mixed.shape[1]
    best[:] = np.float32(-np.inf)
    weight_sum[:] = np.float32(0)
    mixed[:] = np.float32(0)
    scores = np.zeros((group, block_size + 3), np.float32)
    wide = np.empty((block_size + 3, dim), np.float32)  # keys, then values, of one block in fp32
    blocks, kinds = (context + block_size - 1) // block_size, kv.shape[1]
    run_bytes = block_size * kv.shape[4] * kv.itemsize
    for index in range(begin // block_size, blocks):
        block = table[index]
        if index + 1 < blocks:
            # A head's part of a block is too short for the hardware to see a stream in it.
            following = kv.ctypes.data + (np.int64(table[index + 1]) * kinds * kv.shape[2] + head) * run_bytes
            for line in range(0, run_bytes, 64):
                prefetch(following + line)
                if kinds > 1:
                    prefetch(following + kv.shape[2] * run_bytes + line)
        outside = max(0, begin - index * block_size)
        count = min(block_size, context - index * block_size)
        rounded = (count + 3) // 4 * 4
        _read(kv[block, 0, head], count, rounded, wide)
        for query in range(group):
            for token in range(0, rounded, 4):
                first, second, third, fourth = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for i in range(dim):
                    value = queries[query, i]
                    first += value * wide[token, i]
                    second += value * wide[token + 1, i]
                    third += value * wide[token + 2, i]
                    fourth += value * wide[token + 3, i]
                scores[query, token] = first
                scores[query, token + 1] = second
                scores[query, token + 2] = third
                scores[query, token + 3] = fourth
        for query in range(group):
            if cap > 0:
                for token in range(outside, count):
                    scores[query, token] = cap * hyperbolic_tangent(scores[query, token] / cap)
            highest = best[query]
            for token in range(outside, count):
                highest = max(highest, scores[query, token])
            if highest > best[query]:
                shrink = exponential(best[query] - highest)
                best[query] = highest
                weight_sum[query] *= shrink
                for i in range(mixed_dim):
                    mixed[query, i] *= shrink
            total = np.float32(0)
            for token in range(outside, count):
                probability = exponential(scores[query, token] - highest)
                scores[query, token] = probability
                total += probability
            weight_sum[query] += total
            for token in range(outside):
                scores[query, token] = np.float32(0)
            for token in range(count, rounded):
                scores[query, token] = np.float32(0)
        if kinds > 1:
            _read(kv[block, 1, head], count, rounded, wide)
        for query in range(group):
            for token in range(0, rounded, 4):
                first, second = scores[query, token], scores[query, token + 1]
                third, fourth = scores[query, token + 2], scores[query, token + 3]
                for i in range(mixed_dim):
                    mixed[query, i] += (
                        first * wide[token, i]
                        + second * wide[token + 1, i]
                        + third * wide[token + 2, i]
                        + fourth * wide[token + 3, i]
                    )


@Kernels
def _decode(words):
    """words: as those of tiled_decode.decode; an item has one KV head."""
    heads, kv_heads, dim, block_size, sequences = words[8], words[9], words[10], words[11], words[15]
    tokens, most, window, group, mixed_dim = words[16], words[17], words[19], heads // kv_heads, words[22]
    scale, cap = float_of_bits(np.uint32(words[14])), float_of_bits(np.uint32(words[20]))
    q = carray(as_stored(words, words[3]), (sequences, heads, dim))
    kv = carray(as_cached(words, words[4]), (words[12], words[21], kv_heads, block_size, words[23]))
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    queries, mixed = np.empty((group, dim), np.float32), np.empty((group, mixed_dim), np.float32)
    best, weight_sum = np.empty(group, np.float32), np.empty(group, np.float32)
    segments = num_segments(contexts, window, tokens)
    for item in taken(words, sequences * kv_heads * segments):
        pair, segment = item // segments, item % segments
        sequence, head = pair // kv_heads, pair % kv_heads
        begin, end = token_range(np.int64(contexts[sequence]), window, tokens, segment)
        if begin < end:
            for query in range(group):
                for i in range(dim):
                    queries[query, i] = widen(q[sequence, head * group + query, i]) * scale
            _attend(queries, kv, head, tables[sequence], begin, end, block_size, cap, mixed, best, weight_sum)
            keep(words[5], pair * most + segment, group, mixed_dim, mixed, best, weight_sum)


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
    launcher.run(
        (tiled_decode.decode if use_tiles else _decode).of(q.dtype, kv_layer.dtype),
        count * kv_heads // heads_together * segments,
        1,
        *(q, kv_layer, partials, layout.block_tables, layout.context_lens),
        *(heads, kv_heads, dim, block_size, num_blocks, layout.block_tables.shape[1], form.cached_scale),
        *(count, tokens, segments, heads_together, window, form.soft_cap, kinds, mixed_dim, row),
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
