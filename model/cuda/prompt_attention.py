"""Which kernel attends from prompts: ours by TMA, ours plain, or torch's by cuDNN, as a worker measures at its start.

For each shape and form of attention, kernels that know it are held against the plain one, and those that agree are
timed, by the chunk's length, with and without a prefix. All that may be launched later has been compiled by then.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import triton
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from twostroke.model.backend import AttentionForm
from twostroke.model.batch import BatchLayout, make_layout
from twostroke.model.config import PrefillKernel
from twostroke.model.cuda.kernels.attention import PrefillConfig, prefill_attention, prefill_config
from twostroke.model.cuda.kernels.launch import Target
from twostroke.model.cuda.kernels.tma_prefill import LEAST_QUERY_LEN, tma_prefill_attention, tma_prefill_config
from twostroke.model.step import SequenceStep

_log = logging.getLogger(__name__)

# Enough tokens that a chunk takes large tiles.
MANY = 1 << 16
# Among the lengths of chunks that small tiles are for.
_SHORT_CHUNKS = range(1, 2 * LEAST_QUERY_LEN)
# (queries, prefix) of the prompts by which kernels are held against each other: several tiles, whole and in part.
_CHECKED = ((300, 0), (70, 133))
_AGREEMENT = 0.02  # of values of about 1: several roundings of bf16
# Chunks of cuDNN are padded to one of these, as it compiles for each length anew; its other batches are ours. The
# shortest that is padded so far, 7/8 of it, is what is timed.
LENGTHS = (512, 1024, 2048, 4096)
_TIMED_PREFIX = 2048
_MARGIN = 1.05  # by which a kernel must be faster than the one before it to be taken instead
_REPEATS = 3
_MOST_SECONDS = 1.0  # of a start, for the timing of one shape; kernels of lengths that are left over are the first's


class PromptKernel(Protocol):
    """Attention of a layout's chunks."""

    @property
    def name(self) -> PrefillKernel: ...

    def knows(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> bool:
        """Whether it computes this form over such a cache at all."""

    def takes(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> bool:
        """Whether it computes this batch, of a form that it knows; from shapes and plain numbers alone."""

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        """As `prefill_attention`."""


class PlainKernel:
    """`prefill_attention` by its table of tiles: of every form and batch. Implements PromptKernel."""

    name: PrefillKernel = "plain"

    def __init__(self, target: Target):
        self._target = target

    def knows(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> bool:
        return True

    def takes(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> bool:
        return True

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        prefill_attention(q, kv_layer, layout, form, out, self._config(q, kv_layer, layout.max_query_len))

    def lengths(self, q: Tensor, kv_layer: Tensor) -> list[int]:
        """Chunk lengths that make up all its variants, one of each."""
        variants = {self._config(q, kv_layer, length): length for length in (*_SHORT_CHUNKS, MANY)}
        return list(variants.values())

    def _config(self, q: Tensor, kv_layer: Tensor, longest: int) -> PrefillConfig:
        heads_per_group, is_fp8 = q.shape[1] // kv_layer.shape[2], kv_layer.dtype.itemsize == 1
        return prefill_config(self._target.architecture, q.shape[2], q.dtype, heads_per_group, longest, is_fp8)


class TmaKernel:
    """`tma_prefill_attention` by its table of tiles. Implements PromptKernel."""

    name: PrefillKernel = "tma"

    def __init__(self, target: Target):
        self._target = target

    def knows(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> bool:
        is_there = tma_prefill_config(self._target, q.shape[2], q.dtype, kv_layer.shape[3], MANY) is not None
        return is_there and kv_layer.dtype == q.dtype

    def takes(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> bool:
        return layout.max_query_len >= LEAST_QUERY_LEN

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        config = tma_prefill_config(self._target, q.shape[2], q.dtype, kv_layer.shape[3], layout.max_query_len)
        if config is None:
            raise ValueError("the TMA kernel doesn't take this batch")
        tma_prefill_attention(q, kv_layer, layout, form, out, self._target, config)


class CudnnKernel:
    """torch's attention by cuDNN: of one chunk without a prefix, whose keys are gathered from the cache first.

    Implements PromptKernel.
    """

    name: PrefillKernel = "cudnn"

    def __init__(self, implementation: SDPBackend = SDPBackend.CUDNN_ATTENTION):
        """`implementation`: another of torch's where there is no GPU."""
        self._implementation = implementation

    def knows(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> bool:
        is_plain = not form.window and not form.soft_cap and form.sinks is None
        return is_plain and kv_layer.dtype == q.dtype != torch.float32

    def takes(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> bool:
        # The longest context is no longer than the chunk: so it begins at 0.
        tokens, chunks = len(q) - layout.num_decodes, len(layout.context_lens) - layout.num_decodes
        return chunks == 1 and layout.max_context_len == tokens and _padded(tokens) is not None

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        first, block_size = layout.num_decodes, kv_layer.shape[3]
        padded = _padded(len(q) - first)
        if padded is None:
            raise ValueError("cuDNN's kernel doesn't take this batch")
        slots = layout.slots[first:]
        kv = kv_layer[slots // block_size, :, :, slots % block_size]  # [T, 2, G, D]
        queries, empty = q[first:], padded - len(slots)
        if empty:
            # Zeros: a NaN would not be silenced by the weight of zero that rows behind the queries have.
            queries, kv = functional.pad(queries, (0, 0, 0, 0, 0, empty)), functional.pad(kv, (0, 0) * 3 + (0, empty))
        queries, keys, values = (part.transpose(0, 1)[None] for part in (queries, kv[:, 0], kv[:, 1]))
        with sdpa_kernel([self._implementation]):
            result = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=form.scale, enable_gqa=q.shape[1] != kv_layer.shape[2]
            )
        out[first:].view(-1, *q.shape[1:]).copy_(result[0].transpose(0, 1)[: len(slots)])


def _padded(tokens: int) -> int | None:
    return next((length for length in LENGTHS if _least(length) <= tokens <= length), None)


def _least(length: int) -> int:
    return length * 7 // 8


def kernels_for(target: Target) -> tuple[PromptKernel, ...]:
    """Behind the plain one, those that may be taken instead."""
    return TmaKernel(target), CudnnKernel()


Clock = Callable[[Callable[[], None]], float]
"""Seconds that the device needs for a call, once it has been made before."""


def device_seconds(call: Callable[[], None]) -> float:
    """The least of some turns, by events of the current CUDA stream. Waits for the device."""
    least = float("inf")
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3)
    return least


@dataclass(frozen=True)
class _Choice:
    """Kernels for a batch, by (the least length, whether there is a prefix): the first that takes it is its own."""

    by_length: dict[tuple[int, bool], Sequence[PromptKernel]]
    otherwise: Sequence[PromptKernel]

    def kernel(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> PromptKernel:
        has_prefix = layout.max_context_len > layout.max_query_len
        least = max((_least(n) for n in LENGTHS if _least(n) <= layout.max_query_len), default=0)
        order = self.by_length.get((least, has_prefix), self.otherwise)
        return next(kernel for kernel in order if kernel.takes(q, kv_layer, layout))


class PromptAttention:
    """Attention of chunks by the kernel that suits a batch."""

    def __init__(
        self,
        target: Target,
        setting: PrefillKernel,
        kernels: Sequence[PromptKernel] | None = None,
        plain: PlainKernel | None = None,
        seconds: Clock | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kernels`: beside the plain one, `kernels_for` if None. `seconds`: to time them by; None: as events tell
        where tensors are a GPU's, and elsewhere none is timed and ours are taken."""
        self._plain = plain or PlainKernel(target)
        self._kernels = kernels_for(target) if kernels is None else kernels
        self._setting = setting
        self._seconds = seconds
        self._now = now
        self._choices: dict[tuple[object, ...], _Choice] = {}

    def __call__(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor) -> None:
        """As `prefill_attention`, of a shape and form that were prepared."""
        self._choices[variant_key(q, kv_layer, form)].kernel(q, kv_layer, layout)(q, kv_layer, layout, form, out)

    def prepare(self, q: Tensor, kv_layer: Tensor, form: AttentionForm, empty: BatchLayout) -> None:
        """Choose kernels for such a shape and form, once, and compile what they launch; `empty`: a layout of a chunk
        without tokens.

        Raises ValueError where the kernel that is set doesn't know the form or fails.
        """
        key = variant_key(q, kv_layer, form)
        if key not in self._choices:
            self._choices[key] = self._choice(q, kv_layer, form)
            out = rows_like(q[:1])
            for length in self._plain.lengths(q, kv_layer):
                self._plain(q[:1], kv_layer, _chunk(empty, length), form, out)
            self(q[:1], kv_layer, _chunk(empty, MANY), form, out)

    def _choice(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> _Choice:
        wanted = {"auto": ("tma", "cudnn"), "plain": (), "tma": ("tma",), "cudnn": ("cudnn",)}[self._setting]
        known = [one for one in self._kernels if one.name in wanted and one.knows(q, kv_layer, form)]
        if self._setting == "cudnn" and not known:
            raise ValueError("prefill_kernel: cudnn doesn't know windows, soft caps, sinks, fp32, or caches in FP8")
        clock = self._seconds or (device_seconds if q.device.type == "cuda" else None)
        if self._setting == "tma" or (clock is None and self._setting == "cudnn"):
            return _Choice({}, (*known, self._plain))
        right = [one for one in known if not self._is_faulty(one, q, kv_layer, form, clock is None)]
        ours = [one for one in right if one.name == "tma"]
        if clock is None:
            return _Choice({}, (*ours, self._plain))
        if self._setting == "cudnn":
            if not right:
                raise ValueError("prefill_kernel: cudnn fails on this GPU")
            for length in LENGTHS:
                self._time(right[0], q, kv_layer, form, length, 0, clock)  # compiles
            return _Choice({}, (*right, self._plain))
        return self._measured(right, ours, q, kv_layer, form, clock)

    def _measured(
        self,
        right: Sequence[PromptKernel],
        ours: Sequence[PromptKernel],
        q: Tensor,
        kv_layer: Tensor,
        form: AttentionForm,
        clock: Clock,
    ) -> _Choice:
        """By length and prefix: those behind come first only where they are faster by the margin."""
        started, told = self._now(), list[str]()
        by_length: dict[tuple[int, bool], Sequence[PromptKernel]] = {}
        for length in LENGTHS if right else ():
            for prefix in (0, _TIMED_PREFIX):
                if self._now() - started > _MOST_SECONDS:
                    break
                order: list[PromptKernel] = [self._plain]
                best = self._time(self._plain, q, kv_layer, form, length, prefix, clock)
                times = [f"plain {best * 1e6:.0f}"]
                for kernel in right:
                    seconds = self._time(kernel, q, kv_layer, form, length, prefix, clock)
                    times += [f"{kernel.name} {seconds * 1e6:.0f}"] if seconds < float("inf") else []
                    if seconds * _MARGIN < best:
                        order, best = [kernel, *order], seconds
                by_length[_least(length), prefix > 0] = order
                told.append(f"{_least(length)} tokens{' after a prefix' * (prefix > 0)}: {', '.join(times)} us")
        if told:
            _log.info("prompts' attention (prefill_kernel), the first of %s: %s", q.dtype, "; ".join(told))
        return _Choice(by_length, (*ours, self._plain))

    def _time(
        self, kernel: PromptKernel, q: Tensor, kv_layer: Tensor, form: AttentionForm, length: int, prefix: int,
        clock: Clock,
    ) -> float:  # fmt: skip
        """Infinite for a batch that it doesn't take, or where it fails."""
        try:
            queries, kv, layout = _random_prompts(q, kv_layer, [(_least(length), prefix)])
            if not kernel.takes(queries, kv, layout):
                return float("inf")
            out = rows_like(queries)
            kernel(queries, kv, layout, form, out)
            return clock(lambda: kernel(queries, kv, layout, form, out))
        except (RuntimeError, triton.TritonError) as error:
            _log.warning("prompts' attention by %s fails (%s)", kernel.name, _first_line(error))
            return float("inf")

    def _is_faulty(
        self, kernel: PromptKernel, q: Tensor, kv_layer: Tensor, form: AttentionForm, is_brief: bool
    ) -> bool:
        """Whether it gives other results than the plain kernel, with or without a prefix, or fails; logged."""
        checked = [list(_CHECKED)] if is_brief else [list(_CHECKED), [(_least(LENGTHS[0]) + 3, 0)]]
        for lengths in checked:
            queries, kv, layout = _random_prompts(q, kv_layer, lengths)
            if not kernel.takes(queries, kv, layout):
                continue
            out, expected = (rows_like(queries) for _ in range(2))
            fault = None
            try:
                kernel(queries, kv, layout, form, out)
            except (RuntimeError, triton.TritonError) as error:
                fault = f"fails ({_first_line(error)})"
            if fault is None:
                self._plain(queries, kv, layout, form, expected)
                if not torch.allclose(out.float(), expected.float(), rtol=_AGREEMENT, atol=_AGREEMENT):
                    fault = "is wrong"
            if fault is not None:
                _log.warning("prompts' attention by %s %s on this GPU: it is not taken", kernel.name, fault)
                return True
        return False


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def variant_key(q: Tensor, kv_layer: Tensor, form: AttentionForm) -> tuple[object, ...]:
    """Of all that decides which variants of the attention kernels are launched, but a batch's lengths."""
    return q.dtype, q.shape[1:], kv_layer.dtype, kv_layer.shape[1:], form.window, form.soft_cap, form.sinks is None


def rows_like(q: Tensor) -> Tensor:
    """q [T, H, D] -> [T, H * D], of any values."""
    tokens, heads, dim = q.shape
    return torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)


def _chunk(empty: BatchLayout, length: int) -> BatchLayout:
    """As if its longest chunk had that many tokens, of a longer context."""
    return replace(empty, num_decodes=0, max_query_len=length, max_context_len=MANY + 1)


def _random_prompts(
    q: Tensor, kv_layer: Tensor, lengths: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, BatchLayout]:
    """Queries, a cache and the layout of chunks (queries, prefix) like these, of normal values."""
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
