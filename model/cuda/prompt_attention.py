"""Choice of the kernel of prefill attention: our own, or FlashAttention-3 where a setting asks for it.

FlashAttention-3 (Shah et al. 2024) is for Hopper and comes as a package of its own, `flash_attn_interface`. It reads
the paged cache as it lies. Before it is taken for a shape and form of attention it is held against our kernel. No GPU
has confirmed it here, so nothing takes it unasked.

Two other ways were measured on an H200 (2026-11-26, docs/results/index.md) and are gone: a kernel of ours by TMA, to
whose loads and products Triton 3.6 gives warps of their own, gave wrong results over blocks of 64 tokens, and without
such warps it was no faster; torch's attention by cuDNN won 2 to 10 % of the attention of lone prompts without a prefix.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from twostroke.model.backend import AttentionForm
from twostroke.model.batch import BatchLayout, make_layout
from twostroke.model.config import PrefillKernel
from twostroke.model.cuda.kernels import launch
from twostroke.model.cuda.kernels.launch import GpuTarget
from twostroke.model.cuda.kernels.paged_attention import PrefillTiling, prefill_attention, prefill_config, prompt_chunks
from twostroke.model.step import SequenceStep

# Enough tokens that a chunk takes large tiles.
MANY = 1 << 16
# Among the lengths of chunks that small tiles are for.
_SHORT_CHUNKS = range(1, 129)
# (queries, prefix) of the prompts by which kernels are held against each other: several tiles, whole and in part.
_CHECKED = ((300, 0), (70, 133))
_AGREEMENT = 0.02  # of values of about 1: several roundings of bf16
_FLASH_MODULE = "flash_attn_interface"


class PlainKernel:
    """`prefill_attention` by its table of tiles, of every form."""

    def __init__(self, target: GpuTarget):
        self._target = target

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        """Compute what `prefill_attention` does."""
        prefill_attention(q, kv_layer, layout, form, out, self._config(q, kv_layer, layout.max_query_len))

    def lengths(self, q: Tensor, kv_layer: Tensor) -> list[int]:
        """Return chunk lengths that make up all its variants, one of each."""
        variants = {self._config(q, kv_layer, length): length for length in (*_SHORT_CHUNKS, MANY)}
        return list(variants.values())

    def _config(self, q: Tensor, kv_layer: Tensor, longest: int) -> PrefillTiling:
        heads_per_group, is_fp8 = q.shape[1] // kv_layer.shape[2], kv_layer.dtype.itemsize == 1
        return prefill_config(self._target.architecture, q.shape[2], q.dtype, heads_per_group, longest, is_fp8)


class FlashKernel:
    """FlashAttention-3 over the paged cache. No GPU has confirmed it here.

    Its function is documented in hopper/flash_attn_interface.py of github.com/Dao-AILab/flash-attention.
    """

    def __init__(self, module: Any):
        """`module`: the imported `flash_attn_interface`, or one that has its function `flash_attn_with_kvcache`."""
        self._attend = module.flash_attn_with_kvcache

    def knows(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> bool:
        """Return True if the kernel computes this form over this cache; from shapes and plain numbers alone."""
        is_16_bit = q.dtype in (torch.float16, torch.bfloat16) and kv_layer.dtype == q.dtype
        return is_16_bit and form.sinks is None and form.window >= 0 and q.shape[2] <= 256 and q.shape[2] % 8 == 0

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        """Compute what `prefill_attention` does."""
        query_starts, context_lens, block_tables = prompt_chunks(layout)
        first = layout.num_decodes
        keys, values = (kv_layer[:, kind].transpose(1, 2) for kind in (0, 1))  # [blocks, block_size, G, D]
        result = self._attend(
            q, keys, values,
            cache_seqlens=context_lens, page_table=block_tables, cu_seqlens_q=query_starts,
            max_seqlen_q=layout.max_query_len, softmax_scale=form.scale, causal=True,
            window_size=(form.window - 1, 0) if form.window else (-1, -1), softcap=form.soft_cap, num_splits=1,
        )  # fmt: skip
        out[first:].view(-1, *q.shape[1:]).copy_(result[first:])


def flash_kernel(target: GpuTarget) -> FlashKernel:
    """Return FlashAttention-3's kernel. Raises ValueError where the GPU is no Hopper or the package is missing."""
    if not target.is_sm90 or importlib.util.find_spec(_FLASH_MODULE) is None:
        raise ValueError(
            f"prefill_kernel: fa3 needs a Hopper GPU and the package {_FLASH_MODULE} (FlashAttention-3); install it or "
            "set prefill_kernel: plain"
        )
    return FlashKernel(importlib.import_module(_FLASH_MODULE))


class PromptAttention:
    """Attention of chunks by the kernel that is set."""

    def __init__(self, target: GpuTarget, setting: PrefillKernel) -> None:
        """Raises ValueError where `fa3` is set and can't be had."""
        self._plain = PlainKernel(target)
        self._flash = flash_kernel(target) if setting == "fa3" else None

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        """Compute what `prefill_attention` does, of a shape and form that were prepared."""
        (self._flash or self._plain)(q, kv_layer, layout, form, out)

    def prepare(self, q: Tensor, kv_layer: Tensor, form: AttentionForm, empty: BatchLayout) -> None:
        """Compile the kernels for this shape and form, and check the results.

        `empty` is a layout of a chunk without tokens. Raises ValueError where `fa3` is set and doesn't know the form,
        fails or is wrong.
        """
        out = rows_like(q[:1])
        for length in self._plain.lengths(q, kv_layer):
            self._plain(q[:1], kv_layer, _chunk(empty, length), form, out)
        if self._flash is not None and not launch.compiles_only:  # else there are no results to check
            fault = self._first_fault(self._flash, q, kv_layer, form)
            if fault is not None:
                raise ValueError(f"prefill_kernel: fa3 {fault}; set prefill_kernel: plain")

    def _first_fault(self, flash: FlashKernel, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> str | None:
        """Return why the kernel can't serve this shape and form: it must give the plain kernel's results."""
        if not flash.knows(q, kv_layer, form):
            return "doesn't know sinks, chunks, fp32, caches in FP8 or heads of more than 256"
        queries, kv, layout = _random_prompts(q, kv_layer, _CHECKED)
        out, expected = (rows_like(queries) for _ in range(2))
        try:
            flash(queries, kv, layout, form, out)
            self._plain(queries, kv, layout, form, expected)
            is_right = torch.allclose(out.float(), expected.float(), rtol=_AGREEMENT, atol=_AGREEMENT)
        except (RuntimeError, TypeError, triton.TritonError) as error:  # TypeError: a version with other arguments
            return f"fails on this GPU ({(str(error) or repr(error)).splitlines()[0]})"
        return None if is_right else "is wrong on this GPU"


def variant_key(q: Tensor, kv_layer: Tensor, form: AttentionForm) -> tuple[object, ...]:
    """Return all that decides which variants of the attention kernels are launched, but a batch's lengths."""
    return q.dtype, q.shape[1:], kv_layer.dtype, kv_layer.shape[1:], form.window, form.soft_cap, form.sinks is None


def rows_like(q: Tensor) -> Tensor:
    """Return a tensor [T, H * D] of any values for q [T, H, D]."""
    tokens, heads, dim = q.shape
    return torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)


def _chunk(empty: BatchLayout, length: int) -> BatchLayout:
    """Return the layout as if its longest chunk had that many tokens, of a longer context."""
    return replace(empty, num_decodes=0, max_query_len=length, max_context_len=MANY + 1)


def _random_prompts(
    q: Tensor, kv_layer: Tensor, lengths: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, BatchLayout]:
    """Return queries, a cache and the layout of chunks (queries, prefix) like these, of normal values."""
    block_size, steps, used = kv_layer.shape[3], [], 0
    for query_len, prefix in lengths:
        width = -(-(prefix + query_len) // block_size)
        steps.append(SequenceStep([0] * query_len, prefix, range(used + width, used, -1), None))
        used += width
    layout = make_layout(steps, block_size, q.device)
    generator = torch.Generator(q.device).manual_seed(0)
    shapes = (len(layout.slots), *q.shape[1:]), (used + 1, *kv_layer.shape[1:])
    queries, kv = (torch.randn(shape, generator=generator, device=q.device) for shape in shapes)
    return queries.to(q.dtype), kv.to(kv_layer.dtype), layout
