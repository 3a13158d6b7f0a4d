"""Whole steps of a model on a GPU: prompts, decodes, what the host costs them, and what quantisation gains."""

import statistics
import time
from collections.abc import Callable

from twostroke.benchmarks.engine import Limits, decode_work, prefill_work
from twostroke.benchmarks.gpu.limits import GpuLimits, GpuPlace, Row, Sizes
from twostroke.benchmarks.gpu.model import GpuModel, make_model
from twostroke.model.config import Quantization

TURNS = 3
GAINS: dict[Quantization, float] = {"int8": 1.6, "int4": 2.3}


def measure_steps(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """Prompts first, then decodes from the smallest batch on."""
    model = make_model(sizes, place, "none", max(sizes.decode_batches))
    rows = [_prefill(model, tokens, limits) for tokens in sizes.prompts]
    for batch in sizes.decode_batches:
        rows += _decode(model, place, batch, limits)
    return rows


def measure_quantized(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """Batch 1, in turns with bf16."""
    kinds: tuple[Quantization, ...] = ("none", *GAINS)
    models = {kind: make_model(sizes, place, kind, 1) for kind in kinds}
    times: dict[Quantization, list[float]] = {kind: [] for kind in kinds}
    for turn in range(TURNS + 1):
        for kind, model in models.items():
            step_s = _step_s(model, 1)
            if turn:  # the first warms up
                times[kind].append(step_s)
    rows = []
    for kind, aim in GAINS.items():
        gain = statistics.median(bf16 / ours for bf16, ours in zip(times["none"], times[kind], strict=True))
        work = decode_work(sizes.model, 1, sizes.decode_context + sizes.decode_steps / 2, kind)
        share = work.bytes / limits.read / min(times[kind])
        figure = f"{1 / min(times[kind]):.0f} tokens/s, {share:.2f} of read bandwidth"
        rows.append(Row(f"decode in {kind}, batch 1", gain, aim, figure, "bf16"))
    return rows


def _prefill(model: GpuModel, tokens: int, limits: GpuLimits) -> Row:
    work = prefill_work(model.sizes.model, tokens, "none")
    model.prefill(tokens)
    prefill_s = min(_elapsed_s(lambda: model.prefill(tokens)) for _ in range(TURNS))
    share = work.operations / prefill_s / limits.gemm
    return Row(f"prefill, {tokens} tokens", share, 0.85, f"{tokens / prefill_s:.0f} tokens/s", "GEMM rate")


def _decode(model: GpuModel, place: GpuPlace, batch: int, limits: GpuLimits) -> list[Row]:
    sizes = model.sizes
    work = decode_work(sizes.model, batch, sizes.decode_context + sizes.decode_steps / 2, "none")
    _step_s(model, batch)
    step_s = min(_step_s(model, batch) for _ in range(TURNS))
    share = work.floor_s(Limits(limits.gemm, limits.read)) / step_s
    # What the host adds: the same two steps, when all of both has been launched before they begin.
    device_s = place.clock.queued_seconds(lambda: model.launch_two(batch)) / 2
    busy = device_s / step_s
    return [
        Row(f"decode, batch {batch}", share, 0.85 if batch == 1 else 0.8, f"{batch / step_s:.0f} tokens/s", "floor"),
        Row(f"GPU busy, batch {batch}", busy, 0.98, f"{device_s * 1e3:.2f} of {step_s * 1e3:.2f} ms", "the step"),
    ]


def _step_s(model: GpuModel, batch: int) -> float:
    steps = model.sizes.decode_steps
    return _elapsed_s(lambda: model.decode(batch, steps)) / steps


def _elapsed_s(run: Callable[[], None]) -> float:
    """Of what ends with a token on the host."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
