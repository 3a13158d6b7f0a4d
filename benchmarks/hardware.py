"""`twostroke bench hardware`: what this machine's CPU can do, as a row of the planner's table of hardware.

Rates are those of torch's own kernels, on as many threads as an engine would take: products in the numbers that an
engine computes bf16 checkpoints in here, and reads of far more than caches hold. A shared machine's bandwidth jumps
(docs/performance-log.md), so that the median of some rounds is the row, and the least and the most are told.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from twostroke.benchmarks.console import conclude, positive, say, write_json
from twostroke.loadtests.commands.arguments import above_zero
from twostroke.loadtests.generator.run_facts import machine_facts
from twostroke.model.cache.memory import available_bytes
from twostroke.model.config import ModelConfig, ModelShape
from twostroke.model.engine_config import resolve_dtype
from twostroke.model.operations import Limits, input_sizes
from twostroke.model.published.hardware import Hardware, Number

CPU = torch.device("cpu")
NUMBERS: dict[torch.dtype, Number] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


GEMM_SIZE = 2048  # [1024, 2048] x [2048, 2048], three times: 26 GFLOP
READ_BYTES = 512 * 2**20  # far more than any cache holds


class Machine:
    """Measures the limits with torch's own kernels, on as many threads as torch uses here."""

    def __init__(self, shapes: list[tuple[int, int, int]] | None = None, dtype: torch.dtype = torch.bfloat16):
        """`shapes`: (rows, columns in, columns out) of the products that the GEMM rate is measured with."""
        self._products = [
            (torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype))
            for rows, inner, outer in shapes or [(1024, GEMM_SIZE, GEMM_SIZE)]
        ]
        self._operations = 2.0 * sum(left.numel() * len(right) for left, right in self._products)
        self._memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        self.measured: list[Limits] = []
        self.measure()

    def measure(self) -> Limits:
        """Return the limits of now; the best of a few passes each."""
        gemm_s = min(_timed(self._multiply) for _ in range(3))
        read_s = min(_timed(lambda: self._memory.sum()) for _ in range(2))
        self.measured.append(Limits(gemm=self._operations / gemm_s, read=READ_BYTES / read_s))
        return self.measured[-1]

    def median(self) -> Limits:
        """Return the medians of all that was measured, after the first time."""
        gemm, read = ([getattr(one, name) for one in self.measured[1:]] for name in ("gemm", "read"))
        return Limits(statistics.median(gemm), statistics.median(read))

    def _multiply(self) -> None:
        for left, right in self._products:
            functional.linear(left, right)


def prefill_machine(config: ModelShape, tokens: int) -> Machine:
    """Its GEMM rate is that of a layer's own projections over `tokens` rows."""
    hidden = config.hidden_size
    queries, kv, of_pair = input_sizes(config)
    mixed = of_pair // 2 if config.latent is None else config.num_heads * config.latent.value
    shapes = [(tokens, hidden, (queries + kv) // hidden), (tokens, mixed, hidden)]
    experts = config.spec.layer.experts if isinstance(config, ModelConfig) else None
    size, copies, rows = config.intermediate_size, 1, tokens
    if experts is not None:  # each with its share of the tokens' choices
        size, copies = experts.size, experts.routing.num_experts
        rows = max(1, tokens * experts.routing.top_k // copies)
    return Machine(shapes + [(rows, hidden, 2 * size), (rows, size, hidden)] * copies)


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench hardware`."""
    parser.add_argument("--name", default="this-cpu", help="of the row (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=None, help="cores to use; default: all")
    parser.add_argument("--rounds", type=positive, default=7, help="medians are taken (default: %(default)s)")
    parser.add_argument("--usd-per-hour", type=above_zero, default=1.0, metavar="USD", help="an assumption: yours")
    parser.add_argument("--output", type=Path, metavar="FILE", help="that `twostroke plan --gpu FILE` reads")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; the last line of stdout is one JSON object. Raises ConfigError."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = resolve_dtype("auto", torch.bfloat16, CPU)
    machine = Machine(dtype=dtype)
    for number in range(args.rounds):
        now = machine.measure()
        say(f"round {number + 1} of {args.rounds}: {now.gemm / 1e9:.0f} GFLOP/s, {now.read / 1e9:.1f} GB/s")
    measured = machine.measured[1:]
    row = row_of(measured, dtype, args.name, args.usd_per_hour)
    if args.output is not None:
        write_json(args.output, row)
    gemm, read = [one.gemm for one in measured], [one.read for one in measured]
    conclude(
        {
            "name": row.name,
            "number": row.native,
            "flops_per_s": row.flops_per_s[row.native],
            "flops_per_s_range": [min(gemm), max(gemm)],
            "read_bytes_per_s": row.read_bytes_per_s,
            "read_bytes_per_s_range": [min(read), max(read)],
            "ridge": row.ridge(),
            "memory_bytes": row.memory_bytes,
            "source": row.source,
        }
    )
    return 0


def row_of(measured: list[Limits], dtype: torch.dtype, name: str, usd_per_hour: float) -> Hardware:
    """Medians; ranks of one host sum up through its memory, where each byte is written and read."""
    read = statistics.median(one.read for one in measured)
    return Hardware(
        name=name,
        title=f"{machine_facts()['cpu'] or platform.machine()}, {torch.get_num_threads()} threads",
        memory_bytes=available_bytes(CPU),
        read_bytes_per_s=read,
        flops_per_s={NUMBERS[dtype]: statistics.median(one.gemm for one in measured)},
        link_bytes_per_s=read / 2,
        usd_per_hour=usd_per_hour,
        source=f"twostroke bench hardware, medians of {len(measured)} rounds",
        is_gpu=False,
    )
