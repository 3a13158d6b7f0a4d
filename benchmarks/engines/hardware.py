"""`twostroke bench hardware`: what this machine's CPU can do, as a row of the planner's table of hardware.

Rates are those of torch's own kernels, on as many threads as an engine would take: products in the numbers that an
engine computes bf16 checkpoints in here, and reads of far more than caches hold. A shared machine's bandwidth jumps
(docs/results/index.md), so that the median of some rounds is the row, and the least and the most are told.
"""

import argparse
from pathlib import Path

import torch

from twostroke.benchmarks.console import conclude, positive, say, write_json
from twostroke.loadtests.commands.arguments import above_zero
from twostroke.loadtests.generator.run_facts import machine_facts
from twostroke.model.config import ModelConfig, ModelShape
from twostroke.model.costs.operations import product_weights
from twostroke.model.engine_config import resolve_dtype
from twostroke.model.machine_limits import CPU, ROUNDS, LimitsMeter, measure_rounds, row_of

NUMBERS_HERE = resolve_dtype("auto", torch.bfloat16, CPU)
"""Dtype that an engine computes bf16 checkpoints in on this CPU: bf16 where it multiplies that faster, else fp32."""


def prefill_machine(config: ModelShape, tokens: int) -> LimitsMeter:
    """Its GEMM rate is that of a layer's own projections over `tokens` rows, in the numbers of NUMBERS_HERE."""
    hidden = config.hidden_size
    weights = product_weights(config)[0][0]
    mixed = config.query_width(0) if config.latent is None else config.num_heads * config.latent.value
    shapes = [(tokens, hidden, (weights["queries"] + weights["keys and values"]) // hidden), (tokens, mixed, hidden)]
    experts = config.spec.layer.experts if isinstance(config, ModelConfig) else None
    size, copies, rows = config.intermediate_size, 1, tokens
    if experts is not None:  # each with its share of the tokens' choices
        size, copies = experts.size, experts.routing.num_experts
        rows = max(1, tokens * experts.routing.top_k // copies)
    return LimitsMeter(shapes + [(rows, hidden, 2 * size), (rows, size, hidden)] * copies, NUMBERS_HERE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench hardware`."""
    parser.add_argument("--name", default="this-cpu", help="of the row (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=None, help="cores to use; default: all")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="medians are taken (default: %(default)s)")
    parser.add_argument("--usd-per-hour", type=above_zero, default=1.0, metavar="USD", help="an assumption: yours")
    parser.add_argument("--output", type=Path, metavar="FILE", help="that `twostroke plan --gpu FILE` reads")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; the last line of stdout is one JSON object. Raises ConfigError."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    measured, dtype = measure_rounds(args.rounds, say)
    row = row_of(measured, dtype, args.name, args.usd_per_hour, machine_facts()["cpu"])
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
