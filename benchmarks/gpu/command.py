"""`twostroke bench gpu`: the engine on one GPU, as shares of what that GPU, or torch on it, does in the same run.

Nothing is read from a file but by the last row: models are random and made on the GPU. All rows take about five minutes
on an H100; those that have not begun after the time given are left out, and named.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from twostroke.benchmarks.gpu.kernels import (
    measure_decode_attention,
    measure_packing,
    measure_prefill_attention,
    measure_prefix,
    measure_sampling,
    measure_start,
    measure_windows,
)
from twostroke.benchmarks.gpu.limits import CudaClock, GpuLimits, GpuPlace, Measure, Row, Sizes, measure_limits
from twostroke.benchmarks.gpu.steps import measure_quantized, measure_steps
from twostroke.model.cuda.graphs import Recorder
from twostroke.model.cuda.kernels.launch import Target
from twostroke.protocol.errors import ConfigError

MEASURES: Mapping[str, Measure] = {
    "attention": measure_prefill_attention,
    "prefix": measure_prefix,
    "decode-attention": measure_decode_attention,
    "windows": measure_windows,
    "packing": measure_packing,
    "sampling": measure_sampling,
    "steps": measure_steps,
    "quantized": measure_quantized,
    "start": measure_start,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench gpu`."""
    parser.add_argument("--only", default=",".join(MEASURES), help=f"of {','.join(MEASURES)}; default: all")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which no further kind of row is begun")


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns the exit code: 1 where a row failed."""
    chosen = args.only.split(",")
    if unknown := sorted(set(chosen) - set(MEASURES)):
        raise ConfigError(f"--only: {', '.join(unknown)} is none of {', '.join(MEASURES)}")
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device, and torch finds none here")
    device = torch.device("cuda", torch.cuda.current_device())
    place = GpuPlace(device, Target.of_device(device), CudaClock(), lambda: Recorder(device))
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    return measure_all(Sizes(), place, chosen, args.seconds)


def measure_all(sizes: Sizes, place: GpuPlace, chosen: Sequence[str], seconds: float) -> int:
    """As `run`, on whatever `place` is."""
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {what}", file=sys.stderr, flush=True)

    say("limits")
    limits = measure_limits(place.clock, place.device, sizes.read_bytes, sizes.gemm_size)
    print(
        f"reads {limits.read / 1e12:.2f} TB/s, copies {limits.copy / 1e12:.2f} TB/s, {limits.gemm / 1e12:.0f} TFLOP/s"
    )
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name in (name for name in MEASURES if name in chosen):
        if time.perf_counter() - began > seconds:
            failed[name] = "not begun in time"
            continue
        say(name)
        try:
            measured = MEASURES[name](sizes, place, limits)
        except Exception as error:  # other rows may still be had on a machine that is lent for minutes
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"{name} failed: {failed[name]}")
        else:
            _print(measured)
            rows += measured
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    say("done")
    print(json.dumps(_summary(limits, rows, failed)))
    return 1 if failed else 0


def _print(rows: Sequence[Row]) -> None:
    for row in rows:
        aim = "" if row.aim is None else f"(aim {row.aim:g})"
        print(f"{row.name:44}{row.ratio:>7.2f} of {row.against:18}{aim:11}{row.figure}", flush=True)


def _summary(limits: GpuLimits, rows: Sequence[Row], failed: Mapping[str, str]) -> dict[str, object]:
    return {
        "read_tb_s": round(limits.read / 1e12, 3),
        "copy_tb_s": round(limits.copy / 1e12, 3),
        "gemm_tflop_s": round(limits.gemm / 1e12, 1),
        "ratios": {row.name: round(row.ratio, 3) for row in rows},
        "missed": [row.name for row in rows if row.aim is not None and row.ratio < row.aim],
        "failed": dict(failed),
    }
