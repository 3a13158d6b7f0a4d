"""`python3 -m tests.gpu.first.kernel_times`: which kernel takes how long, in steps of the 8B shape.

Decode steps of 1 and 32 rows, prompts of 128 and 4096 tokens, and what the host takes to launch a decode step.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.first.bench import log_to_stderr
from twostroke.benchmarks.gpu.limits import CudaClock, GpuPlace, Sizes
from twostroke.benchmarks.gpu.steps import GpuModel, make_model
from twostroke.model.cuda.graphs import Recorder
from twostroke.model.cuda.kernels.launch import GpuTarget

SIZES = Sizes(decode_batches=(1, 32), prompts=(4096,), decode_steps=8, block_size=64)
TOP = 14  # kernels
# Columns times rows of a layer's products, in their order, and of the head.
PRODUCTS = {"qkv": 6144 * 4096, "o": 4096 * 4096, "gate_up": 28672 * 4096, "down": 4096 * 14336}
HEAD = SIZES.model.vocab_size * 4096


def profiled(run: Callable[[], object], steps: int) -> dict[str, Any]:
    """Profile a run of `steps` steps, which ends when the device has done them."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    wall_s = (time.perf_counter() - began) / steps
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if "CUDA" in str(event.device_type)
    ]
    return {"wall_ms": round(wall_s * 1e3, 3)} | summary(spans, steps)


def summary(spans: Sequence[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Summarise kernels' names, starts and ends, in microseconds."""
    spans = sorted(spans, key=lambda span: span[1])
    by_name: dict[str, list[float]] = defaultdict(list)
    busy_us, last = 0.0, 0.0
    for name, start, end in spans:
        by_name[name].append(end - start)
        busy_us += max(0.0, end - max(start, last))
        last = max(last, end)
    total_us = sum(map(sum, by_name.values())) or 1.0
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "busy_ms": round(busy_us / steps / 1e3, 3),
        "launches": round(len(spans) / steps, 1),
        "top": [
            [name[:48], round(len(each) / steps, 1), round(statistics.fmean(each), 2), round(sum(each) / total_us, 3)]
            for name, each in top
        ],
        **_product_rates([end - start for name, start, end in spans if name.startswith("gemm_kernel")], steps),
    }


def _product_rates(times_us: Sequence[float], steps: int) -> dict[str, list[float]]:
    """Microseconds and GB/s of each product of decode steps; nothing where they aren't all there by that name."""
    layers = SIZES.model.num_layers
    each_step = len(PRODUCTS) * layers + 1
    if len(times_us) != each_step * steps:
        return {}
    last = times_us[-each_step:]
    means = {name: statistics.fmean(last[index:-1:4]) for index, name in enumerate(PRODUCTS)}
    rates = {name: [round(mean, 2), round(PRODUCTS[name] * 2 / mean / 1e3)] for name, mean in means.items()}
    return rates | {"head": [round(last[-1], 1), round(HEAD * 2 / last[-1] / 1e3)]}


def host_ms(model: GpuModel, batch: int) -> float:
    """Return the host's milliseconds for a decode step when nothing waits for the device."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda._sleep(CudaClock.SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        model.launch_two(batch)
        times.append((time.perf_counter() - began) / 2)
    torch.cuda.synchronize()
    return round(statistics.median(times) * 1e3, 3)


def main() -> dict[str, Any]:
    device, steps = torch.device("cuda", 0), SIZES.decode_steps
    place = GpuPlace(device, GpuTarget.of_device(device), CudaClock(), lambda: Recorder(device))
    model = make_model(SIZES, place, "none", max(SIZES.decode_batches))
    measurements: dict[str, Callable[[], object]] = {
        "decode 1": lambda: profiled(lambda: model.decode(1, steps), steps),
        "decode 32": lambda: profiled(lambda: model.decode(32, steps), steps),
        "prompt 4096": lambda: profiled(lambda: model.prefill(4096), 1),
        "prompt 128": lambda: profiled(lambda: model.prefill(128), 1),
        "prompt 128, eager": lambda: profiled(lambda: model.prefill_eagerly(128), 1),
        "host_ms_a_step_1": lambda: host_ms(model, 1),
        "host_ms_a_step_32": lambda: host_ms(model, 32),
    }
    facts: dict[str, Any] = {}
    for name, measure in measurements.items():
        try:
            facts[name] = measure()
        except Exception as error:  # the others may still be had
            facts[name] = f"{type(error).__name__}: {error}"[:300]
        print(name, json.dumps(facts[name]), file=sys.stderr, flush=True)
    return facts


if __name__ == "__main__":
    log_to_stderr()
    print(json.dumps(main()))
