"""Attention on a GPU: prompts against torch's, scattered blocks and cached prefixes against neither, decodes against
the bandwidth.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from twostroke.benchmarks.gpu.limits import GpuLimits, GpuPlace, Row, Sizes
from twostroke.model.batch import make_layout
from twostroke.model.cuda.backend import CudaBackend
from twostroke.model.step import SequenceStep

_PEERS = (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION), ("plain", SDPBackend.MATH))


def measure_prefill_attention(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """Causal, of whole prompts, with blocks one after the other; torch's has its heads repeated beforehand."""
    return [_against_torch(sizes, place, length) for length in sizes.attention_lengths]


def measure_prefix(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """A chunk after a cached prefix, in blocks in any order, by the rate of a whole prompt in order."""
    whole = sizes.prefix + sizes.chunk
    in_order = _operations(sizes, 0, whole) / place.clock.seconds(_ours(sizes, place, [(whole, whole)], False))
    rows = []
    for name, first in (("paged", 0), ("paged, after a prefix", sizes.prefix)):
        run = _ours(sizes, place, [(whole - first, whole)], True)
        rate = _operations(sizes, first, whole) / place.clock.seconds(run)
        figure = f"{rate / 1e12:.0f} TFLOP/s, {whole - first} of {whole} tokens"
        rows.append(Row(f"prefill attention, {name}", rate / in_order, 0.95, figure, "contiguous"))
    return rows


def measure_decode_attention(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """One token a sequence: all that it must read is its context's keys and values."""
    rows = []
    for batch, context in sizes.long_decodes:
        run = _ours(sizes, place, [(1, context)] * batch, True)
        read = batch * context * 2 * sizes.model.kv_size * 2 / place.clock.seconds(run)
        name = f"decode attention, batch {batch}, context {context}"
        rows.append(Row(name, read / limits.read, 0.9, f"{read / 1e12:.2f} TB/s", "read bandwidth"))
    return rows


def _against_torch(sizes: Sizes, place: GpuPlace, length: int) -> Row:
    config, batch = sizes.model, max(1, sizes.attention_tokens // length)
    ours_s = place.clock.seconds(_ours(sizes, place, [(length, length)] * batch, False))
    shape = (batch, config.num_heads, length, config.head_dim)
    q, k, v = (torch.randn(shape, device=place.device).to(torch.bfloat16) for _ in range(3))
    peer, torch_s = _fastest(place, q, k, v)
    figure = f"{batch * _operations(sizes, 0, length) / ours_s / 1e12:.0f} TFLOP/s"
    return Row(f"prefill attention, {batch} x {length}", torch_s / ours_s, 1.0, figure, f"torch, {peer}")


def _fastest(place: GpuPlace, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, float]:
    """The first of torch's implementations that takes these, cuDNN's before others, and its seconds."""
    for name, backend in _PEERS:
        try:
            with sdpa_kernel([backend]):
                return name, place.clock.seconds(
                    lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                )
        except RuntimeError:  # torch's word for one that is not built in, or doesn't take this
            if backend is SDPBackend.MATH:
                raise
    raise AssertionError("the last of them was raised")


def _ours(
    sizes: Sizes, place: GpuPlace, lengths: Sequence[tuple[int, int]], is_scattered: bool
) -> Callable[[], Tensor]:
    """Attention of sequences (query length, context length) over a cache of random values."""
    config, size = sizes.model, sizes.block_size
    widths = [-(-context // size) for _, context in lengths]
    blocks = torch.randperm(sum(widths)).tolist() if is_scattered else list(range(sum(widths)))
    steps, used = [], 0
    for (query, context), width in zip(lengths, widths, strict=True):
        steps.append(SequenceStep([0] * query, context - query, blocks[used : used + width], None))
        used += width
    layout = make_layout(steps, size, place.device)
    shape = (used, 2, config.num_kv_heads, size, config.head_dim)
    kv_layer = torch.empty(shape, dtype=torch.bfloat16, device=place.device).normal_()
    tokens = sum(query for query, _ in lengths)
    q = torch.empty((tokens, config.num_heads, config.head_dim), dtype=torch.bfloat16, device=place.device).normal_()
    backend = CudaBackend(place.target)
    return lambda: backend.attention(q, kv_layer, layout)


def _operations(sizes: Sizes, first: int, end: int) -> float:
    """Of the queries from `first` to `end` over all keys that they see, about: two products of each pair."""
    return 4.0 * sizes.model.q_size * math.fsum((end * end / 2, -first * first / 2))
