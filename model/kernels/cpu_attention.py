"""Paged attention on CPUs.

Decode (one query a sequence): a numba kernel over (sequence, KV head) pairs that walks the block table once, with the
online softmax of FlashAttention (Dao et al. 2022): every key and value is read once for all query heads of its group.
In bf16, where the CPU has the instructions and the shape fits, cpu_decode does the same in tiles.
Prefill chunks: the context is gathered sequence by sequence, then flash attention: ours in bf16 where the CPU has the
instructions (cpu_prefill), else torch's.
Reference: model/kernels/cpu_reference.py.
"""

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from model.backend import BatchLayout
from model.kernels import cpu_decode, cpu_dot, cpu_prefill
from model.kernels.cpu_floats import exponential, store, widen
from model.kernels.cpu_launch import (
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
from model.kernels.cpu_launcher import Launcher


@compiled
def _attend(queries, kv, head, table, context, block_size, out):
    """queries fp32 [R, D], scaled; kv [blocks, 2, G, block_size, D]; table int32, its first entries; out [R, D].

    Four tokens share a pass over the head dimension: with one, the loops' own cost is most of the time.
    """
    group, dim = queries.shape
    best = np.full(group, np.float32(-np.inf))
    weight_sum = np.zeros(group, np.float32)
    mixed = np.zeros((group, dim), np.float32)
    scores = np.zeros((group, block_size + 3), np.float32)
    wide = np.empty((block_size + 3, dim), np.float32)  # keys, then values, of one block in fp32
    blocks = (context + block_size - 1) // block_size
    run_bytes = block_size * dim * kv.itemsize
    for index in range(blocks):
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
    for query in range(group):
        for i in range(dim):
            store(out[query], i, mixed[query, i] / weight_sum[query])


@compiled
def _decode(words, q, kv, out):
    """words: q, KV layer, out, tables, contexts, heads, KV heads, head dim, block size, blocks, table width, scale."""
    items, grain = words[1], words[2]
    heads, kv_heads, dim, block_size = words[8], words[9], words[10], words[11]
    sequences, group = items // kv_heads, heads // kv_heads
    scale = float_of_bits(np.uint32(words[14]))
    q, out = carray(q, (sequences, heads, dim)), carray(out, (sequences, heads, dim))
    kv = carray(kv, (words[12], 2, kv_heads, block_size, dim))
    tables = carray(as_short_integers(words[6]), (sequences, words[13]))
    contexts = carray(as_short_integers(words[7]), (sequences,))
    queries = np.empty((group, dim), np.float32)
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        for item in range(begin, min(begin + grain, items)):
            sequence, head = item // kv_heads, item % kv_heads
            first = head * group
            for query in range(group):
                for i in range(dim):
                    queries[query, i] = widen(q[sequence, first + query, i]) * scale
            table, context, rows = tables[sequence], np.int64(contexts[sequence]), out[sequence, first : first + group]
            _attend(queries, kv, head, table, context, block_size, rows)


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
    launcher.run(
        kernel,
        layout.num_decodes * kv_heads,
        1,
        q.data_ptr(),
        kv_layer.data_ptr(),
        out.data_ptr(),
        layout.block_tables.data_ptr(),
        layout.context_lens.data_ptr(),
        q.shape[1],
        kv_heads,
        dim,
        block_size,
        num_blocks,
        layout.block_tables.shape[1],
        float_bits(dim**-0.5),
    )


def prefill_attention(q: Tensor, kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
    """The rows of q [T, H, D] after the decodes into those of out, one prefill chunk after the other."""
    _, _, kv_heads, block_size, dim = kv_layer.shape
    starts = layout.query_starts[layout.num_decodes :].tolist()
    contexts = layout.context_lens[layout.num_decodes :].tolist()
    tables = layout.block_tables[layout.num_decodes :].long()
    use_tiles = q.dtype == torch.bfloat16 and cpu_dot.is_supported()
    for begin, end, context, table in zip(starts[:-1], starts[1:], contexts, tables, strict=True):
        blocks = kv_layer[table[: -(-context // block_size)]]
        # [blocks, 2, G, block_size, D] -> [2, G, context, D]
        keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :context]
        if use_tiles:
            cpu_prefill.attend(q[begin:end], keys, values, out[begin:end])
        else:
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
