"""`twostroke bench machine`: what this machine's CPU can do, and how long an engine's steps take on it, as files.

`--hardware` writes a row of the planner's table of hardware. Its rates are those of torch's own kernels, on as many
threads as an engine would take: products in the numbers that an engine computes bf16 checkpoints in here, and reads of
far more than caches hold.

`--costs` writes what `simulate --costs` reads. Steps of many contents run in a random order, and what workers learn
their own costs with (worker/step_costs.py) learns from them. The last round is kept from it, and told how far off what
was learnt is.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from twostroke.benchmarks.console import conclude, positive, say, write_json
from twostroke.benchmarks.engine import BLOCK_SIZE, decode_step, prompt_step
from twostroke.benchmarks.random_model import MODELS, write_random_model
from twostroke.loadtests.commands.arguments import above_zero
from twostroke.loadtests.generator.run_facts import machine_facts
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.machine_limits import ROUNDS, hardware_row, measure_rounds
from twostroke.model.step import SequenceStep
from twostroke.protocol.stats import StepCosts
from twostroke.worker.profile import WorkerProfile
from twostroke.worker.step_costs import COLD_STEPS, StepContent, StepCostFit

PROMPTS = (16, 64, 256, 1024)  # tokens of a step
BATCHES = (1, 4, 16, 32)
CONTEXTS = (64, 256, 1024)
LINK_BYTES_PER_S = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench machine`."""
    files = parser.add_argument_group("what is measured", "Without either option the CPU's rates, which are printed.")
    files.add_argument("--hardware", type=Path, metavar="FILE", help="write the CPU's rates for `plan --gpu`")
    files.add_argument("--costs", type=Path, metavar="FILE", help="write how long steps take, as `--costs` reads it")
    parser.add_argument("--threads", type=positive, default=None, help="cores to use; default: all")
    parser.add_argument("--name", default="this-cpu", help="of the row of hardware (default: %(default)s)")
    parser.add_argument("--usd-per-hour", type=above_zero, default=1.0, metavar="USD", help="an assumption: yours")
    parser.add_argument("--model", choices=MODELS, default="160m", help="of costs: the shape of the random model")
    parser.add_argument("--rounds", type=positive, default=5, help="of all kinds of steps; the last one checks")
    parser.add_argument("--kv-tokens", type=positive, default=200_000, help="of a simulated worker's cache")
    parser.add_argument("--link", type=positive, default=int(LINK_BYTES_PER_S), help="bytes a second between workers")


def run(args: argparse.Namespace) -> int:
    """Measure and write; the last line of stdout is one JSON object. Raises ConfigError."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    figures = measure_costs(args) if args.costs is not None else {}
    if args.hardware is not None or args.costs is None:
        figures |= measure_hardware(args)
    conclude(figures)
    return 0


def measure_hardware(args: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU's rates, medians of some rounds with the least and the most. Raises ConfigError."""
    measured, dtype = measure_rounds(ROUNDS, say)
    row = hardware_row(measured, dtype, args.name, args.usd_per_hour, machine_facts()["cpu"])
    if args.hardware is not None:
        write_json(args.hardware, row)
    gemm, read = [one.gemm for one in measured], [one.read for one in measured]
    return {
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


def measure_costs(args: argparse.Namespace) -> dict[str, Any]:
    """Return how long steps of a random model take, fitted and written. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        say(f"writing a random model of the shape {args.model}")
        write_random_model(Path(folder), args.model)
        largest = max(BATCHES) * (max(CONTEXTS) + BLOCK_SIZE)
        loaded = load_engine(
            EngineConfig(Path(folder), dtype="bfloat16", threads=args.threads, num_blocks=_blocks(folder, largest))
        )
        try:
            costs, error = asyncio.run(fit_costs(loaded, args.rounds))
        finally:
            loaded.engine.close()
        config = loaded.model_config
    kind = WorkerProfile(
        name=args.model,
        costs=costs,
        kv_bytes=2.0 * config.kv_values,
        kv_tokens=args.kv_tokens,
        link_bytes_per_s=float(args.link),
        step_tokens=2048,
        max_batch=256,
        source=f"twostroke bench machine --costs --model {args.model}, {torch.get_num_threads()} threads",
        num_layers=config.num_layers,
    )
    write_json(args.costs, kind)
    return {"file": str(args.costs), "median_error": error, **msgspec.structs.asdict(costs)}


def _blocks(folder: str, tokens: int) -> int:
    return (-(-tokens // BLOCK_SIZE) + 1) * load_model_config(Path(folder)).kv_groups.count


async def fit_costs(loaded: LoadedEngine, rounds: int) -> tuple[StepCosts, float]:
    """The costs, and the median relative error of a round of steps that they were not learnt from."""
    draw, fit = random.Random(0), StepCostFit(loaded.model_config.expert_share)
    steps = _steps(loaded.model_config.kv_groups.count)
    for step in steps[:COLD_STEPS]:
        await loaded.engine.step(step)
    costs: StepCosts | None = None
    errors: list[float] = []
    for number in range(rounds + 1):
        say(f"round {number + 1} of {rounds + 1}: {len(steps)} steps")
        draw.shuffle(steps)
        for step in steps:
            began = time.perf_counter()
            await loaded.engine.step(step)
            seconds = time.perf_counter() - began
            content = StepContent.of(step)
            if number < rounds:
                fit.add(content, seconds)
            elif costs is not None:
                errors.append(abs(content.expected_s(costs) / seconds - 1))
        fit.take_in()
        costs = fit.costs()
    if costs is None:
        raise RuntimeError("too few steps for a fit")
    return costs, statistics.median(errors)


def _steps(groups: int) -> list[list[SequenceStep]]:
    """Prompts alone, decodes alone, and both together. What the cache holds doesn't change the speed."""

    def decodes(batch: int, context: int) -> list[SequenceStep]:
        return decode_step(batch, context, -(-(context + 1) // BLOCK_SIZE) * groups)

    alone = [[prompt_step(tokens, groups, before)] for tokens in PROMPTS for before in (0, 512)]
    beside = [
        [*decodes(batch, 256), prompt_step(tokens, groups)]
        for batch, tokens in ((4, 64), (16, 64), (4, 256), (16, 256))
    ]
    return alone + [decodes(batch, context) for batch in BATCHES for context in CONTEXTS] + beside
