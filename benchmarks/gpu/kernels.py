"""Parts of serving on a GPU: attention, packing KV, drawing tokens, and the start of a worker.

Attention of prompts is held against torch's, of scattered blocks and cached prefixes against that of blocks in order,
of decodes against the bandwidth, within windows against attention to all of a context.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from twostroke.benchmarks.gpu.limits import GpuLimits, GpuPlace, LimitRow, Sizes
from twostroke.benchmarks.random_model import write_random_model
from twostroke.model.backend import AttentionForm, Chosen, ExpertWeights
from twostroke.model.batch import make_layout
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.cuda.backend import CudaBackend, Fp8CudaLinear
from twostroke.model.cuda.kernels.elementwise import gate, gate_codes
from twostroke.model.cuda.kernels.fp8 import quantize_tokens
from twostroke.model.cuda.kernels.gemm import FP8_GROUP, MAX_TOKENS, SplitWorkspace
from twostroke.model.cuda.kernels.kv_units import address_tensor, copy_and_digest_units, packed_places, paged_places
from twostroke.model.cuda.sampler import DeviceSampler
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

_PEERS = (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION), ("plain", SDPBackend.MATH))


def measure_prefill_attention(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """Causal, of whole prompts, with blocks one after the other; torch's has its heads repeated beforehand."""
    for length in sizes.attention_lengths:
        yield _against_torch(sizes, place, length)


def measure_prefix(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """A chunk after a cached prefix, in blocks in any order, by the rate of a whole prompt in order."""
    whole = sizes.prefix + sizes.chunk
    in_order = _operations(sizes, 0, whole) / place.clock.seconds(_ours(sizes, place, [(whole, whole)], False))
    for name, first in (("paged", 0), ("paged, after a prefix", sizes.prefix)):
        run = _ours(sizes, place, [(whole - first, whole)], True)
        rate = _operations(sizes, first, whole) / place.clock.seconds(run)
        figure = f"{rate / 1e12:.0f} TFLOP/s, {whole - first} of {whole} tokens"
        yield LimitRow(f"prefill attention, {name}", rate / in_order, 0.95, figure, "contiguous")


def measure_decode_attention(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """One token a sequence: all that it must read is its context's keys and values. In FP8 they are half the bytes,
    which hardware widens twice as fast as they come, beside what a launch and the merge take anyway."""
    times: list[float] = []
    for batch, context in sizes.long_decodes:
        times.append(place.clock.seconds(_ours(sizes, place, [(1, context)] * batch, True)))
        read = batch * context * 2 * sizes.model.kv_size * 2 / times[-1]
        name = f"decode attention, batch {batch}, context {context}"
        yield LimitRow(name, read / limits.read, 0.9, f"{read / 1e12:.2f} TB/s", "read bandwidth")
    yield _skewed_decodes(sizes, place, limits)
    for (batch, context), bf16_s in zip(sizes.long_decodes, times, strict=True):
        run = _ours(sizes, place, [(1, context)] * batch, True, kv_dtype=torch.float8_e4m3fn)
        fp8_s = place.clock.seconds(run)
        figure = f"{batch * context * 2 * sizes.model.kv_size / fp8_s / 1e12:.2f} TB/s"
        name = f"decode attention over FP8, batch {batch}, context {context}"
        yield LimitRow(name, bf16_s / fp8_s, 1.7, figure, "bf16", predicted=1.8)


def _skewed_decodes(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> LimitRow:
    """One long context among short ones, whose keys the whole GPU is to read.

    Predicted: 0.05 of the time idle for parts that are not quite equal, and a few us for dividing and merging.
    """
    longest, (others, short) = sizes.skewed_decode
    contexts = [longest, *[short] * others]
    skewed_s = place.clock.seconds(_ours(sizes, place, [(1, context) for context in contexts], True))
    read = sum(contexts) * 2 * sizes.model.kv_size * 2 / skewed_s
    name = f"decode attention, {longest} beside {others} x {short}"
    return LimitRow(name, read / limits.read, 0.8, f"{read / 1e12:.2f} TB/s", "read bandwidth", predicted=0.8)


def measure_fp8_products(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """FP8 by FP8, activations rounded on the way, of the gate and up projections' size: by what bounds it, and by
    torch's own product of codes that are there already.

    Predicted: prompts, which torch multiplies where it agrees with our kernel, at 0.8 of twice the bf16 rate with
    scales of rows and 0.7 with those of blocks, which are 1.6 and 1.4 of our kernel's rate; few tokens, which our
    kernel multiplies, at 0.75 of the bandwidth, where rounding is a launch of its own.
    """
    rows, columns = 2 * sizes.model.intermediate_size, sizes.model.hidden_size
    codes = torch.empty((rows, columns), dtype=torch.bfloat16, device=place.device).normal_().to(torch.float8_e4m3fn)
    one, backend = torch.ones((), device=place.device), CudaBackend(place.target)
    linears, workspace = {}, SplitWorkspace(place.device)
    for name, groups in (("rows", 1), ("blocks", -(-columns // FP8_GROUP))):
        scales = torch.ones((rows, groups), device=place.device)
        weight = QuantizedWeight(codes, scales, columns if name == "rows" else FP8_GROUP, 8)
        kernel = Fp8CudaLinear(weight, None, place.target, workspace)
        linears[name] = backend.make_linear(weight, None, "auto", torch.bfloat16), kernel
    for tokens in sizes.fp8_tokens:
        x = torch.empty((tokens, columns), dtype=torch.bfloat16, device=place.device).normal_()
        x_codes = x.to(torch.float8_e4m3fn)
        torch_s = place.clock.seconds(
            partial(torch._scaled_mm, x_codes, codes.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
        least_s = max(rows * columns / limits.read, 2.0 * tokens * rows * columns / (2 * limits.gemm))
        for name, (linear, kernel) in linears.items():
            ours_s = place.clock.seconds(partial(linear, x))
            label, figure = f"FP8 by FP8, {tokens} tokens, scales of {name}", f"{ours_s * 1e6:.0f} us"
            of_prompts, of_kernel = {"rows": (0.8, 1.6), "blocks": (0.7, 1.4)}[name]
            predicted = 0.75 if tokens <= MAX_TOKENS else of_prompts
            yield LimitRow(label, least_s / ours_s, None, figure, "the limit", predicted)
            yield LimitRow(f"{label}, peer", torch_s / ours_s, 0.8, figure, "torch._scaled_mm", 0.8)
            if tokens > MAX_TOKENS:
                kernel_s = place.clock.seconds(partial(kernel, x))
                yield LimitRow(
                    f"{label}, torch", kernel_s / ours_s, 1.0, f"{kernel_s * 1e6:.0f} us", "our kernel", of_kernel
                )


def measure_gated_products(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """The gate and up projections of decodes ending in the activation, by their product and a launch for it.

    Predicted: a launch of 2 to 3 us less beside 235 MB of bf16 weights, which take 75.
    """
    rows, columns = 2 * sizes.model.intermediate_size, sizes.model.hidden_size
    weight = torch.empty((rows, columns), dtype=torch.bfloat16, device=place.device).normal_()
    backend = CudaBackend(place.target)
    linear = backend.make_linear(weight, None, "auto", torch.bfloat16)

    def apart(x: Tensor) -> Tensor:
        return gate(linear(x), "silu")

    for tokens in sizes.gated_tokens:
        x = torch.empty((tokens, columns), dtype=torch.bfloat16, device=place.device).normal_()
        ours_s = place.clock.seconds(partial(backend.gated, x, linear, "silu"))
        apart_s = place.clock.seconds(partial(apart, x))
        read = rows * columns * 2 / ours_s
        name = f"gate and up in one launch, {tokens} tokens"
        yield LimitRow(name, apart_s / ours_s, 1.0, f"{read / 1e12:.2f} TB/s", "two launches", 1.03)


def measure_experts(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """The experts of a layer as Qwen3-30B-A3B has them, of tokens that take them at random: by what bounds it.

    Predicted: decodes at 0.5 of the bandwidth, since a program looks its expert up before it reads; prompts at 0.4 of
    the GEMM rate, since a tile is half full of an expert's rows at 512 tokens, and each reads the weights again.
    """
    number, top_k, size, hidden = sizes.experts
    shapes = (number * 2 * size, hidden), (number * hidden, size)
    gate_up, down = (torch.empty(shape, dtype=torch.bfloat16, device=place.device).normal_() for shape in shapes)
    weights = ExpertWeights(number, gate_up, down, None, None)
    layer = CudaBackend(place.target).make_experts(weights, "silu", "none", torch.bfloat16)
    for tokens in sizes.expert_tokens:
        x = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=place.device).normal_()
        scores, experts = torch.rand((tokens, number), device=place.device).topk(top_k)
        taken = int(torch.bincount(experts.flatten(), minlength=number).count_nonzero())
        read_s = taken * 3 * size * hidden * 2 / limits.read
        least_s = max(read_s, 6.0 * tokens * top_k * size * hidden / limits.gemm)
        taken_s = place.clock.seconds(partial(layer, x, Chosen(experts.int(), scores)))
        predicted = 0.5 if least_s == read_s else 0.4
        yield LimitRow(
            f"experts, {tokens} tokens", least_s / taken_s, None, f"{taken_s * 1e6:.0f} us", "the limit", predicted
        )


def measure_gated_codes(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """The activation of FP8 prompts with the rounding of its result, by a launch for each.

    Predicted: 235 MB read and 59 written of 4,096 tokens by 8B's width, where two launches read 352 and write 176.
    """

    def apart(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_tokens(gate(x, "silu"))

    width = sizes.model.intermediate_size
    for tokens in sizes.gated_prompts:
        x = torch.empty((tokens, 2 * width), dtype=torch.bfloat16, device=place.device).normal_()
        ours_s = place.clock.seconds(partial(gate_codes, x, "silu"))
        apart_s = place.clock.seconds(partial(apart, x))
        moved = 5 * tokens * width / ours_s
        name = f"gate and FP8 in one launch, {tokens} tokens"
        yield LimitRow(name, apart_s / ours_s, 1.0, f"{moved / 1e12:.2f} TB/s", "two launches", 1.4)


def measure_windows(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """Measure what a window saves: the rate of a prompt against a whole one's, and decodes against contexts as
    short. A tile of 128 queries multiplies up to 255 keys more than count, so 0.8 to 0.89 of the rate is left at
    1,024."""
    window, prompt = sizes.window, [(sizes.windowed_prompt, sizes.windowed_prompt)]
    rates = []
    for seen in (0, window):
        operations = _operations(sizes, 0, sizes.windowed_prompt)
        operations -= _operations(sizes, 0, sizes.windowed_prompt - seen) if seen else 0.0
        rates.append(operations / place.clock.seconds(_ours(sizes, place, prompt, False, seen)))
    name, figure = f"prefill attention, {sizes.windowed_prompt}, window {window}", f"{rates[1] / 1e12:.0f} TFLOP/s"
    yield LimitRow(name, rates[1] / rates[0], 0.75, figure, "no window")
    for batch, context in sizes.windowed_decodes:
        ours_s = place.clock.seconds(_ours(sizes, place, [(1, context)] * batch, True, window))
        short_s = place.clock.seconds(_ours(sizes, place, [(1, window)] * batch, True))
        read = batch * window * 2 * sizes.model.kv_size * 2 / ours_s
        name = f"decode attention, {batch} x {context}, window {window}"
        yield LimitRow(name, short_s / ours_s, 0.9, f"{read / 1e12:.2f} TB/s", f"contexts of {window}")
        yield LimitRow(f"{name}, bytes", read / limits.read, None, f"{ours_s * 1e6:.0f} us", "read bandwidth")


def _against_torch(sizes: Sizes, place: GpuPlace, length: int) -> LimitRow:
    config, batch = sizes.model, max(1, sizes.attention_tokens // length)
    ours_s = place.clock.seconds(_ours(sizes, place, [(length, length)] * batch, False))
    shape = (batch, config.num_heads, length, config.head_dim)
    q, k, v = (torch.randn(shape, device=place.device).to(torch.bfloat16) for _ in range(3))
    peer, torch_s = _fastest(place, q, k, v)
    figure = f"{batch * _operations(sizes, 0, length) / ours_s / 1e12:.0f} TFLOP/s"
    return LimitRow(f"prefill attention, {batch} x {length}", torch_s / ours_s, 1.0, figure, f"torch, {peer}")


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
    sizes: Sizes,
    place: GpuPlace,
    lengths: Sequence[tuple[int, int]],
    is_scattered: bool,
    window: int = 0,
    kv_dtype: torch.dtype = torch.bfloat16,
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
    kv_layer = torch.empty(shape, dtype=torch.bfloat16, device=place.device).normal_().to(kv_dtype)
    tokens = sum(query for query, _ in lengths)
    q = torch.empty((tokens, config.num_heads, config.head_dim), dtype=torch.bfloat16, device=place.device).normal_()
    backend, form = CudaBackend(place.target), AttentionForm(config.head_dim**-0.5, window)
    return lambda: backend.attention(q, kv_layer, layout, form)


def _operations(sizes: Sizes, first: int, end: int) -> float:
    """Return about how many operations queries `first` to `end` need over all keys that they see: two products per
    pair."""
    return 4.0 * sizes.model.q_size * math.fsum((end * end / 2, -first * first / 2))


SEAL = 12345


@dataclass(frozen=True)
class Sampled:
    """A way of drawing, and what reasoning gives for it on an H100 over logits of 128,256 tokens."""

    sampling: SamplingParams
    launches: int  # of ours, each with a start and an end that nothing hides
    logit_s: float  # the device's time for each logit, over all launches
    spread: float = 4.0  # standard deviation of the logits: 4 is as a language model's, 1 is flat

    def expected_s(self, count: int, vocab_size: int) -> float:
        return (self.launches + _COPIES) * _LAUNCH_S + count * vocab_size * self.logit_s


# A launch takes 2 to 3 us beside its work: a start, an end, and a chain of loads. A logit's 4 bytes take 1.33 ps of the
# 3.0 TB/s that are left of 3.35. An instruction for each logit takes 0.06 ps: 132 multiprocessors issue four times 32 a
# clock, 60 percent of which are used. extremes: a read. weigh: a read, and in its first pass 45 instructions of
# masses, 30 of counts. race: a read and a few, or 85 where whole tiles are kept. Each of flat logits is added to a bin,
# of which a multiprocessor sends one in less than two clocks.
_LAUNCH_S, _COPIES = 2.5e-6, 2
_READ_S, _ADD_S = 1.33e-12, 7.5e-12
_DENSE_RACE_S, _SPARSE_RACE_S = 85 * 0.06e-12, 1.7e-12
_COUNTED_S, _WEIGHED_S = 2.0e-12, 2.8e-12
_H100_READ = 3.0e12
SAMPLINGS = {
    "greedy": Sampled(SamplingParams(temperature=0.0), 2, _READ_S),
    "top_p 0.9": Sampled(
        SamplingParams(temperature=0.8, top_p=0.9, seed=1), 8, 3 * _READ_S + _WEIGHED_S + _SPARSE_RACE_S
    ),
    "top_k 50": Sampled(
        SamplingParams(temperature=0.8, top_k=50, seed=1), 8, 3 * _READ_S + _COUNTED_S + _SPARSE_RACE_S
    ),
    "top_k 50, top_p 0.9": Sampled(
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1),
        12,
        5 * _READ_S + _COUNTED_S + _WEIGHED_S + _SPARSE_RACE_S,
    ),
    "no filter": Sampled(SamplingParams(temperature=0.8, seed=1), 4, _READ_S + _DENSE_RACE_S),
    "top_p 0.9, flat": Sampled(
        SamplingParams(temperature=0.8, top_p=0.9, seed=1), 8, 3 * _READ_S + _WEIGHED_S + _ADD_S + _DENSE_RACE_S, 1.0
    ),
}
COLD_START_S = 20.0


def measure_packing(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """Whole blocks in any order to one buffer and back, with their digest, against a plain copy."""
    for block_size in sizes.pack_blocks:
        yield from _packing(sizes, place, limits, block_size)


def measure_sampling(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """Drawing from logits of the whole vocabulary, against reading them once, and against torch's operations.

    These draw with another generator, and by a sort where top_p alone is asked for.
    """
    sampler, vocab_size = DeviceSampler(sizes.model.vocab_size, place.device), sizes.model.vocab_size
    for count in sizes.sampled_rows:
        for name, sampled in SAMPLINGS.items():
            logits = torch.randn(count, vocab_size, device=place.device) * sampled.spread
            launch = partial(sampler.launch, logits, [Draw(sampled.sampling, [1], 1)] * count, [1] * count)
            peer = partial(_draw_by_torch, logits, sampled.sampling)
            taken_s, torch_s = (_queued_seconds(place, run) for run in (launch, peer))
            figure, label = f"{taken_s * 1e6:.0f} us", f"sampling {count} rows, {name}"
            expected_s = sampled.expected_s(count, vocab_size)
            read_s, predicted = logits.nbytes / limits.read, logits.nbytes / _H100_READ / expected_s
            yield LimitRow(label, read_s / taken_s, None, figure, "one read", predicted)
            yield LimitRow(f"{label}, torch", torch_s / taken_s, 1.0, f"{torch_s * 1e6:.0f} us", "torch")


def _queued_seconds(place: GpuPlace, run: Callable[[], object]) -> float:
    run()  # compiles
    return place.clock.queued_seconds(run)


def _draw_by_torch(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Tokens [N], with the filters of a usual pipeline: top_k, then top_p over what is left."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    ids = None
    if sampling.top_k:
        logits, ids = logits.topk(min(sampling.top_k, logits.shape[1]))
    elif sampling.top_p < 1:
        logits, ids = logits.sort(descending=True)
    probabilities = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1)
    return drawn if ids is None else ids.gather(1, drawn)


START = """
import sys
from pathlib import Path
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
load_engine(EngineConfig(Path(sys.argv[1]), device=sys.argv[2], num_blocks=256, block_size=64)).engine.close()
"""
"""Loads a model, which draws a token. The cache has room for a prompt: its zeros would be no part of a start."""


def measure_start(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """A process's way to an engine that has drawn a token, before and after kernels are compiled."""
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), sizes.started)
        cache = Path(folder, "triton")
        for name in ("kernels to compile", "kernels compiled"):
            begin = time.perf_counter()
            command = [sys.executable, "-c", START, folder, place.device.type]
            subprocess.run(command, check=True, env={**os.environ, "TRITON_CACHE_DIR": str(cache)})
            taken_s = time.perf_counter() - begin
            yield LimitRow(f"start, {name}", COLD_START_S / taken_s, 1.0, f"{taken_s:.1f} s", "20 s")


def _packing(sizes: Sizes, place: GpuPlace, limits: GpuLimits, block_size: int) -> Iterator[LimitRow]:
    config, device = sizes.model, place.device
    paged = paged_places(
        row_bytes=config.head_dim * 2,
        heads_per_block=config.num_kv_heads,
        block_size=block_size,
        first_head=0,
        num_heads=config.num_kv_heads,
        unit_tokens=block_size,
    )
    flat, units = packed_places(paged), max(1, sizes.pack_bytes // paged.unit_bytes)
    cache, buffer = (torch.zeros(units * paged.unit_bytes // 8, dtype=torch.int64, device=device) for _ in range(2))
    there = np.random.default_rng(0).permutation(units)
    scattered = address_tensor(paged.addresses(np.int64(cache.data_ptr()), there), device)
    packed = address_tensor(flat.addresses(np.int64(buffer.data_ptr()), np.arange(units)), device)
    digest = torch.zeros(2, dtype=torch.int64, device=device)
    ways = {"pack": (paged, scattered, flat, packed), "unpack": (flat, packed, paged, scattered)}
    for name, way in ways.items():
        rate = units * paged.unit_bytes / place.clock.seconds(partial(copy_and_digest_units, *way, SEAL, digest))
        figure = f"{rate / 1e12:.2f} TB/s"
        yield LimitRow(f"KV {name}, blocks of {block_size}", rate / limits.copy, 0.85, figure, "copy rate")
