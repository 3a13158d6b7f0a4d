"""Prefill attention by the tensor memory accelerator (TMA) of Hopper and later GPUs.

It computes what `prefill_attention` does, and differs in how: one copy instruction brings a whole block's keys of a
head; on sm_90 one warp group issues the copies while two others multiply, each half of a tile's rows; and a program
works off many tiles, so that the next tile's copies run while the last one's results are written.

It is for 16-bit types and blocks of a multiple of 64 tokens. Of 16 or 32 tokens, copies and products would have as few
rows: these stay with the other kernel, and so do chunks that would leave most of a tile empty. A tile's rows are one
head's, not a group's: beyond a tile, packing spares no work, and Triton 3.6 does not split a packed box between halves.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.model.backend import AttentionForm
from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.attention import NO_SCORE, chunks_of, soft_capped
from twostroke.model.cuda.kernels.launch import LOG2_E, Architecture, Target, padded_head

_LOG2_E = tl.constexpr(LOG2_E)
BLOCK_M = 128  # queries of a tile, all of one head: two products of 64 rows, the least that wgmma takes
LEAST_QUERY_LEN = BLOCK_M // 2  # of the longest chunk of a batch; below, more than half of the products were padding
_BLOCK_UNIT = 64


@dataclass(frozen=True, slots=True)
class TmaPrefillConfig:
    """How one launch is tiled, besides BLOCK_M."""

    block_n: int  # keys a step, of one block
    num_warps: int  # that multiply; a specialised kernel has four for the copies and as many again for the other half
    num_stages: int  # steps whose keys and values are in flight or in use
    specialized: bool


# By padded head dimension and block size (the row's is the least that it takes; the first that fits wins). A head of
# 80 or 96 takes the tiles of 128: what lies beyond it is filled with zeros and not read from memory.
#
# Predicted, not measured. A step of N keys costs 4 * 128 * N * D operations and brings 4 * N * D bytes, so 128
# operations a byte: 5.2 TB/s from the second-level cache at 660 TFLOP/s, near its limit, and no reason to look for
# smaller tiles. Registers: 3 groups of 4 warps leave 168 a thread. One of the two that multiply holds D / 2 of sums,
# N / 2 of scores and N / 4 of weights: 160 at D = N = 128, which just fits; 152 at D = 256 and N = 32, where N = 64
# spills (the product of 32 columns reads its queries as often as it can multiply them, so 0.7 of the rate at best).
# Shared memory: the queries twice (one tile ahead), keys and values num_stages times, and what Triton adds for the
# output: (2 * 128 + 2 * 2 * 128) * 256 B + 16 KiB = 208 KiB at D = N = 128; 3 stages of 64 keys take as much.
_SPECIALIZED = (
    (64, 128, TmaPrefillConfig(128, num_warps=4, num_stages=3, specialized=True)),
    (64, 64, TmaPrefillConfig(64, num_warps=4, num_stages=4, specialized=True)),
    (128, 128, TmaPrefillConfig(128, num_warps=4, num_stages=2, specialized=True)),
    (128, 64, TmaPrefillConfig(64, num_warps=4, num_stages=3, specialized=True)),
    (256, 64, TmaPrefillConfig(32, num_warps=4, num_stages=2, specialized=True)),
)
# sm_100: specialised warps spill there, as do wider heads and, with Triton 3.6, a third stage at 64.
_PLAIN = (
    (64, 64, TmaPrefillConfig(64, num_warps=8, num_stages=2, specialized=False)),
    (128, 64, TmaPrefillConfig(64, num_warps=8, num_stages=3, specialized=False)),
)


def tma_prefill_config(
    target: Target, head_dim: int, dtype: torch.dtype, block_size: int, max_query_len: int
) -> TmaPrefillConfig | None:
    """The table's row for a batch, or None where `prefill_attention` is the one to take."""
    if target.architecture is not Architecture.HOPPER or dtype not in (torch.float16, torch.bfloat16):
        return None
    # Rows of memory that the accelerator takes are multiples of 16 bytes.
    if block_size % _BLOCK_UNIT or head_dim % 8 or max_query_len < LEAST_QUERY_LEN:
        return None
    for widest, least_block, config in _SPECIALIZED if target.specializes_warps else _PLAIN:
        if head_dim <= widest and block_size % least_block == 0:
            return config
    return None


@triton.jit
def find_tile(query_starts, tile, num_sequences, search_steps, BLOCK_M: tl.constexpr):
    """The sequence that a tile of the batch belongs to, and which of its tiles it is.

    The tiles of sequence b begin at tokens_before(b) // BLOCK_M + b: room for each sequence's last one, which may be
    partly empty, without knowing other lengths. So a sequence may be given a tile too many, which is empty. There are
    at most ceil(tokens / BLOCK_M) + sequences - 1.
    """
    first_query = tl.load(query_starts)
    low = 0
    high = num_sequences - 1
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        past = (tl.load(query_starts + middle) - first_query) // BLOCK_M + middle > tile
        low = tl.where(past, low, middle)
        high = tl.where(past, middle - 1, high)
    return low, tile - ((tl.load(query_starts + low) - first_query) // BLOCK_M + low)


# What changes from step to step must not cause a compilation.
@triton.jit(
    do_not_specialize=[
        "query_starts", "context_lens", "block_tables", "sinks", "num_rows", "num_sequences", "num_tiles",
        "search_steps", "table_stride",
    ]
)  # fmt: skip
def tma_prefill_attention_kernel(
    q,
    kv,
    query_starts,
    context_lens,
    block_tables,
    sinks,
    out,
    scale_log2,
    num_rows,
    num_sequences,
    num_tiles,
    search_steps,
    token_stride,
    out_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """Programs take one pair of tile and head a wave, the tiles that see the most keys first.

    Every other wave goes round the other way: who had the longest of one has the shortest of the next.

    kv describes [num_blocks * 2 * NUM_GROUPS, BLOCK_SIZE, HEAD_DIM] in boxes of BLOCK_N tokens: a token or dimension
    outside, on either side, is read as zero.
    """
    # Made here and not by the caller: each half's warps wait for a box of their own, and only these can Triton split.
    queries = tl.make_tensor_descriptor(
        q, shape=[num_rows, NUM_HEADS * HEAD_DIM], strides=[token_stride, 1], block_shape=[BLOCK_M, HEAD_DIM_PADDED]
    )
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_items = num_tiles * NUM_HEADS
    for wave in tl.range(0, (num_items + num_programs - 1) // num_programs):
        item = wave * num_programs + tl.where(wave % 2 == 0, program, num_programs - 1 - program)
        head = item % NUM_HEADS
        group = head // (NUM_HEADS // NUM_GROUPS)
        # Past the last item stands a tile past the batch's, which is empty.
        batch_tile = tl.where(item < num_items, num_tiles - 1 - item // NUM_HEADS, num_tiles)
        sequence, tile = find_tile(query_starts, batch_tile, num_sequences, search_steps, BLOCK_M)
        query_start = tl.load(query_starts + sequence)
        query_len = tl.load(query_starts + sequence + 1) - query_start
        context_len = tl.load(context_lens + sequence)
        block_table = block_tables + sequence.to(tl.int64) * table_stride
        tokens = tile * BLOCK_M + rows
        first = context_len - query_len + tile * BLOCK_M  # position of the tile's first token
        positions = first + rows

        # Rows past the sequence are others' queries, and columns past a narrow head the next one's: the former are not
        # stored, and the latter meet the zeros that follow the keys.
        q_tile = queries.load([query_start + tile * BLOCK_M, head * HEAD_DIM])
        best = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
        if sinks is not None:
            best = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head) * _LOG2_E
            total += 1.0
        begin = 0
        if WINDOW:
            begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        # An empty tile takes no step. One loop, masked throughout: Triton does not specialise two.
        end = tl.where(tile * BLOCK_M < query_len, tl.minimum(first + BLOCK_M, context_len), 0)
        for start in tl.range(begin, end, BLOCK_N, warp_specialize=SPECIALIZED):
            # Slots past the context may hold NaN, which a weight of zero would not silence. So the last box ends with
            # the context: it begins early, with keys that have been seen, or before the block, with zeros.
            block_start = start // BLOCK_SIZE * BLOCK_SIZE
            box_start = tl.minimum(start, context_len - BLOCK_N)
            plane = tl.load(block_table + start // BLOCK_SIZE) * (2 * NUM_GROUPS) + group
            k = kv.load([plane, box_start - block_start, 0]).reshape([BLOCK_N, HEAD_DIM_PADDED])
            scores = tl.dot(q_tile, k.T)
            if SOFT_CAP > 0.0:
                scores = soft_capped(scores, scale_log2, SOFT_CAP)
            keys = box_start + tl.arange(0, BLOCK_N)
            unseen = tl.where(keys >= start, keys, 0x7FFFFFFF)
            visible = unseen[None, :] <= positions[:, None]
            if WINDOW:
                visible = visible & (unseen[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weights, axis=1)
            v = kv.load([plane + NUM_GROUPS, box_start - block_start, 0]).reshape([BLOCK_N, HEAD_DIM_PADDED])
            acc = tl.dot(weights.to(v.dtype), v, acc=acc * shrink[:, None])
            best = new_best

        tl.store(
            out + (query_start + tokens).to(tl.int64)[:, None] * out_stride + head * HEAD_DIM + dims[None, :],
            (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(out.dtype.element_ty),
            mask=(tokens < query_len)[:, None] & (dims < HEAD_DIM)[None, :],
        )


def _device_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where programs keep the descriptors that they make. The caching allocator aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def tma_prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    layout: BatchLayout,
    form: AttentionForm,
    out: Tensor,
    target: Target,
    config: TmaPrefillConfig,
) -> None:
    """As `prefill_attention`, for chunks of any length."""
    num_rows, heads, dim = q.shape
    groups, block_size = kv_layer.shape[2], kv_layer.shape[3]
    query_starts, context_lens, block_tables = chunks_of(layout)
    sequences = context_lens.shape[0]
    padded = padded_head(dim)
    planes = kv_layer.view(-1, block_size, dim)
    kv = TensorDescriptor(planes, list(planes.shape), list(planes.stride()), [1, config.block_n, padded])
    num_tiles = triton.cdiv(num_rows - layout.num_decodes, BLOCK_M) + sequences - 1
    # The setting belongs to the thread or task at hand, which need not be the one that imported this.
    triton.set_allocator(_device_memory)
    tma_prefill_attention_kernel[(min(target.multiprocessors, num_tiles * heads),)](
        q, kv, query_starts, context_lens, block_tables, form.sinks, out, form.scale * LOG2_E,
        num_rows, sequences, num_tiles, (sequences - 1).bit_length(), q.stride(0), out.stride(0),
        block_tables.stride(0),
        NUM_HEADS=heads, NUM_GROUPS=groups, HEAD_DIM=dim, HEAD_DIM_PADDED=padded, BLOCK_SIZE=block_size,
        BLOCK_M=BLOCK_M, BLOCK_N=config.block_n, WINDOW=form.window, SOFT_CAP=form.soft_cap,
        SPECIALIZED=config.specialized,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
