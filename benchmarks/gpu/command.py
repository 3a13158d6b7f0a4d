"""`twostroke bench gpu`: the engine on one GPU, as shares of what that GPU, or torch on it, does in the same run.

Nothing is read from a file but by the last row: models are random and made on the GPU. Each kind of rows has a share of
the time, and what one leaves goes to those behind it. The last line is JSON whatever happens: a row that fails leaves
the others, and where the time is up in the midst of one, the process says what it has, and ends.
"""

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from twostroke.benchmarks.gpu.kernels import (
    measure_decode_attention,
    measure_experts,
    measure_fp8_products,
    measure_gated_codes,
    measure_gated_products,
    measure_packing,
    measure_prefill_attention,
    measure_prefix,
    measure_sampling,
    measure_start,
    measure_windows,
)
from twostroke.benchmarks.gpu.limits import CudaClock, GpuLimits, GpuPlace, LimitRow, Measure, Sizes, measure_limits
from twostroke.benchmarks.gpu.steps import measure_quantized, measure_steps
from twostroke.model.cuda.graphs import Recorder
from twostroke.model.cuda.kernels.launch import GpuTarget
from twostroke.protocol.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """A kind of rows."""

    measure: Measure
    share: float  # of the time, beside other kinds: about the seconds that it takes on an H100


KINDS: Mapping[str, Kind] = {  # the most telling first
    "steps": Kind(measure_steps, 130),
    "attention": Kind(measure_prefill_attention, 40),
    "decode-attention": Kind(measure_decode_attention, 30),
    "sampling": Kind(measure_sampling, 20),
    "quantized": Kind(measure_quantized, 90),
    "fp8": Kind(measure_fp8_products, 20),
    "gated": Kind(measure_gated_products, 10),
    "gated-codes": Kind(measure_gated_codes, 5),
    "experts": Kind(measure_experts, 10),
    "packing": Kind(measure_packing, 30),
    "prefix": Kind(measure_prefix, 20),
    "windows": Kind(measure_windows, 40),
    "start": Kind(measure_start, 60),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench gpu`."""
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {','.join(KINDS)}; default: all")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds that all rows may take; default: 480")


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns the exit code: 1 where a row failed."""
    chosen = args.only.split(",")
    if unknown := sorted(set(chosen) - set(KINDS)):
        raise ConfigError(f"--only: {', '.join(unknown)} is none of {', '.join(KINDS)}")
    if not args.budget > 0:
        raise ConfigError(f"--budget: {args.budget:g} is no number of seconds above 0")
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device, and torch finds none here")
    device = torch.device("cuda", torch.cuda.current_device())
    place = GpuPlace(device, GpuTarget.of_device(device), CudaClock(), lambda: Recorder(device))
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    return measure_all(Sizes(), place, chosen, args.budget)


class GpuReport:
    """Rows so far. The first to finish it prints it: the end of the last row, or the end of the time."""

    def __init__(self) -> None:
        self.limits: GpuLimits | None = None
        self.rows: list[LimitRow] = []
        self.failed: dict[str, str] = {}
        self.left_out: list[str] = []
        self.under_way = "limits"
        self._is_finished = False
        self._printing = threading.Lock()

    def add(self, row: LimitRow) -> None:
        aim = "" if row.aim is None else f"(aim {row.aim:g})"
        predicted = "" if row.predicted is None else f", predicted {row.predicted:.2g}"
        with self._printing:
            if not self._is_finished:
                self.rows.append(row)
                print(f"{row.name:44}{row.ratio:>7.2f} of {row.against:18}{aim:11}{row.figure}{predicted}", flush=True)

    def finish(self) -> int | None:
        """Print the JSON; returns the exit code, None where somebody else has printed it."""
        with self._printing:
            if self._is_finished:
                return None
            self._is_finished = True
            print(json.dumps(self._summary()), flush=True)
        return 1 if self.failed else 0

    def _summary(self) -> dict[str, object]:
        limits = (
            {}
            if self.limits is None
            else {
                "read_tb_s": round(self.limits.read / 1e12, 3),
                "copy_tb_s": round(self.limits.copy / 1e12, 3),
                "gemm_tflop_s": round(self.limits.gemm / 1e12, 1),
            }
        )
        return {
            **limits,
            "rows": len(self.rows),
            "ratios": {row.name: round(row.ratio, 3) for row in self.rows},
            "predicted": {row.name: row.predicted for row in self.rows if row.predicted is not None},
            "missed": [row.name for row in self.rows if row.aim is not None and row.ratio < row.aim],
            "left_out": list(self.left_out),
            "failed": dict(self.failed),
        }


def measure_all(
    sizes: Sizes, place: GpuPlace, chosen: Sequence[str], budget_s: float, leave: Callable[[int], object] = os._exit
) -> int:
    """Run the bench on `place`. `leave` ends the process when a row hangs beyond the time."""
    began = time.perf_counter()
    report = GpuReport()

    def give_up() -> None:
        report.failed[report.under_way] = "not ended in time"
        if report.finish() is not None:
            leave(1)

    watch = threading.Timer(budget_s, give_up)
    watch.daemon = True
    watch.start()
    try:
        _measure(sizes, place, [name for name in KINDS if name in chosen], report, began, began + budget_s)
    finally:  # also where somebody interrupts it
        watch.cancel()
        code = report.finish()
    return 1 if code is None else code


def _measure(sizes: Sizes, place: GpuPlace, names: Sequence[str], report: GpuReport, began: float, end: float) -> None:
    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {what}", file=sys.stderr, flush=True)

    say("limits")
    limits = report.limits = measure_limits(place.clock, place.device, sizes.read_bytes, sizes.gemm_size)
    print(
        f"reads {limits.read / 1e12:.2f} TB/s, copies {limits.copy / 1e12:.2f} TB/s, {limits.gemm / 1e12:.0f} TFLOP/s"
    )
    for index, name in enumerate(names):
        begin = time.perf_counter()
        share = KINDS[name].share / sum(KINDS[later].share for later in names[index:])
        report.under_way = name
        say(name)
        try:
            if not _add_rows(KINDS[name].measure(sizes, place, limits), report, begin + share * (end - begin)):
                report.left_out.append(name)
                say(f"{name}: the rest is left out, for its time is up")
        except Exception as error:  # other rows may still be had on a machine that is lent for minutes
            report.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"{name} failed: {report.failed[name]}")
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    say("done")


def _add_rows(rows: Iterator[LimitRow], report: GpuReport, until: float) -> bool:
    """Add the rows and return whether there was time for all of them."""
    while time.perf_counter() < until:
        row = next(rows, None)
        if row is None:
            return True
        report.add(row)
    return False
