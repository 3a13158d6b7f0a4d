"""Paged attention on CPUs.

Decode (one query a sequence): a numba kernel over (sequence, KV head) pairs that walks the block table once, with the
online softmax of FlashAttention (Dao et al. 2022): every key and value is read once for all query heads of its group.
In bf16, where the CPU has the instructions and the shape fits, cpu_decode does the same in tiles. Where there are too
few pairs for the cores, their contexts are shared in segments (cpu_segments).
Prefill chunks, sequence by sequence: flash attention, ours in bf16 where the CPU has the instructions (cpu_prefill),
else torch's over a gathered context.
Reference: model/reference.py.
"""

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from twostroke.model.batch import BatchLayout
from twostroke.model.cpu.kernels import decode as cpu_decode
from twostroke.model.cpu.kernels import decode as cpu_segments
from twostroke.model.cpu.kernels import floats as cpu_dot
from twostroke.model.cpu.kernels import prefill as cpu_prefill
from twostroke.model.cpu.kernels.decode import keep, merge, num_segments
from twostroke.model.cpu.kernels.floats import exponential, store, widen
from twostroke.model.cpu.kernels.launch import (
    KernelPair,
    as_floats,
    as_halves,
    as_short_integers,
    compiled,
    float_bits,
    float_of_bits,
    prefetch,
    take_items,
)
from twostroke.model.cpu.kernels.program import Launcher


@compiled
def _attend(queries, kv, head, table, begin, context, block_size, mixed, best, weight_sum):
    """queries fp32 [R, D], scaled; kv [blocks, 2, G, block_size, D]; table int32; tokens `begin`, which begins a block,
    to `context`. Results fp32: sums [R, D], maxima and sums of weights [R].

    Four tokens share a pass over the head dimension: with one, the loops' own cost is most of the time.
    """
    group, dim = queries.shape
    best[:] = np.float32(-np.inf)
    weight_sum[:] = np.float32(0)
    mixed[:] = np.float32(0)
    scores = np.zeros((group, block_size + 3), np.float32)
    wide = np.empty((block_size + 3, dim), np.float32)  # keys, then values, of one block in fp32
    blocks = (context + block_size - 1) // block_size
    run_bytes = block_size * dim * kv.itemsize
    for index in range(begin // block_size, blocks):
        block = table[index]
        if index + 1 < blocks:
            # A head's part of a block is too short for the hardware to see a stream in it.
            following = kv.ctypes.data + (np.int64(table[index + 1]) * 2 * kv.shape[2] + head) * run_bytes
            for line in range(0, run_bytes, 64):
                prefetch(following + line)
                prefetch(following + kv.shape[2] * run_bytes + line)
        count = min(block_size, context - index * block_size)
        rounded = (count + 3) // 4 * 4
        for token in range(count):
            for i in range(dim):
                wide[token, i] = widen(kv[block, 0, head, token, i])
        for token in range(count, rounded):
            for i in range(dim):
                wide[token, i] = np.float32(0)
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
            highest = best[query]
            for token in range(count):
                highest = max(highest, scores[query, token])
            if highest > best[query]:
                shrink = exponential(best[query] - highest)
                best[query] = highest
                weight_sum[query] *= shrink
                for i in range(dim):
                    mixed[query, i] *= shrink
            total = np.float32(0)
            for token in range(count):
                probability = exponential(scores[query, token] - highest)
                scores[query, token] = probability
                total += probability
            weight_sum[query] += total
            for token in range(count, rounded):
                scores[query, token] = np.float32(0)
        for token in range(count):
            for i in range(dim):
                wide[token, i] = widen(kv[block, 1, head, token, i])
        for token in range(count, rounded):
            for i in range(dim):
                wide[token, i] = np.float32(0)
        for query in range(group):
            for token in range(0, rounded, 4):
                first, second = scores[query, token], scores[query, token + 1]
                third, fourth = scores[query, token + 2], scores[query, token + 3]
                for i in range(dim):
                    mixed[query, i] += (
                        first * wide[token, i]
                        + second * wide[token + 1, i]
                        + third * wide[token + 2, i]
                        + fourth * wide[token + 3, i]
                    )


@compiled
def _decode(words, q, kv, out):
    """words: q, KV layer, out, tables, contexts, heads, KV heads, head dim, block size, blocks, table width, scale,
    sequences, segment tokens, partials."""
    items, grain = words[1], words[2]
    heads, kv_heads, dim, block_size, sequences = words[8], words[9], words[10], words[11], words[15]
    tokens, partials, group = words[16], words[17], heads // kv_heads
    scale = float_of_bits(np.uint32(words[14]))
    q, out = carray(q, (sequences, heads, dim)), carray(out, (sequences, heads, dim))
    kv = carray(kv, (words[12], 2, kv_heads, block_size, dim))
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    queries = np.empty((group, dim), np.float32)
    mixed, part = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
    best, part_best = np.empty(group, np.float32), np.empty(group, np.float32)
    weight_sum, part_weight_sum = np.empty(group, np.float32), np.empty(group, np.float32)
    most, segments = items // (sequences * kv_heads), np.int64(1)
    if partials != 0:
        segments = num_segments(contexts, tokens)
        items = sequences * kv_heads * segments
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            pair, segment = item // segments, item % segments
            sequence, head = pair // kv_heads, pair % kv_heads
            first, table, context = head * group, tables[sequence], np.int64(contexts[sequence])
            for query in range(group):
                for i in range(dim):
                    queries[query, i] = widen(q[sequence, first + query, i]) * scale
            if partials != 0:
                start = segment * tokens
                if start < context:
                    end = min(start + tokens, context)
                    _attend(queries, kv, head, table, start, end, block_size, part, part_best, part_weight_sum)
                    keep(partials, pair * most + segment, group, dim, part, part_best, part_weight_sum)
                continue
            end = min(tokens, context)
            _attend(queries, kv, head, table, 0, end, block_size, mixed, best, weight_sum)
            for start in range(tokens, context, tokens):
                end = min(start + tokens, context)
                _attend(queries, kv, head, table, start, end, block_size, part, part_best, part_weight_sum)
                for row in range(group):
                    best[row], weight_sum[row] = merge(
                        mixed[row], best[row], weight_sum[row], part[row], part_best[row], part_weight_sum[row]
                    )
            for row in range(group):
                for i in range(dim):
                    store(out[sequence, first + row], i, mixed[row, i] / weight_sum[row])


def _decode_fp32(words):
    _decode(words, as_floats(words[3]), as_floats(words[4]), as_floats(words[5]))


def _decode_bf16(words):
    _decode(words, as_halves(words[3]), as_halves(words[4]), as_halves(words[5]))


_DECODE = KernelPair(_decode_fp32, _decode_bf16)


def decode_attention(launcher: Launcher, q: Tensor, kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
    """The first `layout.num_decodes` rows of q [T, H, D] into those of out [T, H, D], both contiguous."""
    num_blocks, _, kv_heads, block_size, dim = kv_layer.shape
    use_tiles = q.dtype == torch.bfloat16 and cpu_decode.is_supported(dim, block_size)
    kernel = cpu_decode.kernel() if use_tiles else _DECODE.of(q.dtype)
    count, heads = layout.num_decodes, q.shape[1]
    plan = cpu_segments.plan(launcher, count * kv_heads, heads // kv_heads, dim, block_size, layout.max_context_len)
    enough = cpu_decode.SEQUENCES_A_THREAD * torch.get_num_threads()
    heads_together = kv_heads if use_tiles and plan.partials is None and count >= enough else 1
    launcher.run(
        kernel,
        plan.num_items // heads_together,
        1,
        q.data_ptr(),
        kv_layer.data_ptr(),
        out.data_ptr(),
        layout.block_tables.data_ptr(),
        layout.context_lens.data_ptr(),
        heads,
        kv_heads,
        dim,
        block_size,
        num_blocks,
        layout.block_tables.shape[1],
        float_bits(dim**-0.5),
        count,
        plan.tokens,
        plan.address,
        heads_together,
    )
    cpu_segments.combine(launcher, plan, layout.context_lens, count, kv_heads, out)


def prefill_attention(q: Tensor, kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
    """The rows of q [T, H, D] after the decodes into those of out, one prefill chunk after the other."""
    _, _, kv_heads, block_size, dim = kv_layer.shape
    starts = layout.query_starts[layout.num_decodes :].tolist()
    contexts = layout.context_lens[layout.num_decodes :].tolist()
    tables = layout.block_tables[layout.num_decodes :]
    use_tiles = q.dtype == torch.bfloat16 and cpu_dot.is_supported()
    for begin, end, context, table in zip(starts[:-1], starts[1:], contexts, tables, strict=True):
        if use_tiles:
            cpu_prefill.attend(q[begin:end], kv_layer, table, context, out[begin:end])
            continue
        blocks = kv_layer[table[: -(-context // block_size)].long()]
        # [blocks, 2, G, block_size, D] -> [2, G, context, D]
        keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :context]
        _attend_by_torch(q[begin:end], keys, values, out[begin:end])


def _attend_by_torch(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """q, out [rows, H, D]; keys, values [G, tokens, D]."""
    rows, tokens = q.shape[0], keys.shape[1]
    mask = None
    if rows < tokens:  # torch's is_causal aligns the diagonal to the top left
        mask = torch.ones(rows, tokens, dtype=torch.bool).tril_(tokens - rows)
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != keys.shape[0],
    )
    out.copy_(mixed[0].transpose(0, 1))
