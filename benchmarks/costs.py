"""`twostroke bench costs`: how well a worker's own fit predicts how long its engine's steps take.

A grid of steps, chunks of prompts, batches of decodes, and both in one, runs on the real engine again and again, in an
order that changes. Every other point is told to the fit as it runs, the slow first ones too, as on a live worker. The
points between are what it is judged by. What it expects of one at that moment is divided by what the step then takes,
since a shared machine's speed changes within seconds; the median of a point's ratios says how far off it is. Routers,
admission and schedulers decide by these predictions.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from twostroke.benchmarks.arguments import positive
from twostroke.benchmarks.engine import BLOCK_SIZE, GREEDY, MODELS, decode_batch, write_random_model
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.stats import StepCosts
from twostroke.worker.step_costs import StepContent, StepCostFit

CHUNKS = (16, 48, 128, 256, 512)
BEFORE = (0, 256, 1024)  # tokens of the prompt that are computed already
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 512, 1024)
MIXED_CHUNKS = (32, 128, 256)
MIXED_BATCHES = (2, 8, 24)
MIXED_CONTEXT = 384

Kind = Literal["prompts", "decodes", "mixed"]


@dataclass(frozen=True, eq=False)
class Point:
    """A step of the grid."""

    kind: Kind
    name: str
    batch: Sequence[SequenceStep]
    is_held_out: bool


@dataclass(frozen=True)
class Judged:
    """A held-out point. Medians over all times that it ran."""

    point: Point
    measured_s: float
    ratio: float  # of what was expected to what was measured

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench costs`."""
    parser.add_argument("--model", choices=MODELS, default="160m", help="the shape of the random model")
    parser.add_argument("--rounds", type=positive, default=8, help="how often each step of the grid runs")
    parser.add_argument("--threads", type=positive, default=None, help="cores to use; default: all")


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns the exit code."""
    grid = make_grid()
    with tempfile.TemporaryDirectory() as folder:
        _say(f"writing a random model of the shape {args.model}")
        write_random_model(Path(folder), args.model)
        loaded = load_engine(
            EngineConfig(
                Path(folder),
                dtype="bfloat16",
                threads=args.threads,
                block_size=BLOCK_SIZE,
                num_blocks=1 + max(block for point in grid for one in point.batch for block in one.block_ids),
            )
        )
        try:
            costs, judged = asyncio.run(_measure(loaded, grid, args.rounds))
        finally:
            loaded.engine.close()
    _print(costs, judged)
    return 0


def make_grid() -> list[Point]:
    """All steps; of neighbours in the grid one is held out and the other not."""
    points: list[Point] = []

    def add(kind: Kind, name: str, batch: Sequence[SequenceStep], place: int) -> None:
        points.append(Point(kind, name, batch, is_held_out=place % 2 == 1))

    for i, num_tokens in enumerate(CHUNKS):
        for j, num_before in enumerate(BEFORE):
            add("prompts", f"{num_tokens} tokens after {num_before}", [_chunk(num_tokens, num_before, 0)], i + j)
    for i, rows in enumerate(BATCHES):
        for j, context in enumerate(CONTEXTS):
            add("decodes", f"{rows} rows of {context}", decode_batch(rows, context, context), i + j)
    for i, num_tokens in enumerate(MIXED_CHUNKS):
        for j, rows in enumerate(MIXED_BATCHES):
            decodes = decode_batch(rows, MIXED_CONTEXT, MIXED_CONTEXT)
            chunk = _chunk(num_tokens, 0, first_block=1 + max(block for one in decodes for block in one.block_ids))
            add("mixed", f"{num_tokens} tokens and {rows} rows", [*decodes, chunk], i + j)
    return points


def _chunk(num_tokens: int, num_before: int, first_block: int) -> SequenceStep:
    """The end of a prompt, which draws a token."""
    end = num_before + num_tokens
    prompt = [1 + i % 31_000 for i in range(end)]
    table = range(first_block, first_block - (-end // BLOCK_SIZE))
    return SequenceStep(prompt[num_before:], num_before, table, Draw(GREEDY, prompt, end))


async def _measure(loaded: LoadedEngine, grid: Sequence[Point], rounds: int) -> tuple[StepCosts, list[Judged]]:
    """The costs in the end, and every held-out point."""
    fit = StepCostFit()
    ratios: dict[Point, list[float]] = defaultdict(list)
    taken: dict[Point, list[float]] = defaultdict(list)
    draw = random.Random(0)
    order = list(grid)
    costs: StepCosts | None = None
    for turn in range(rounds + 1):  # in the first nothing is known yet
        _say(f"round {turn} of {rounds}")
        draw.shuffle(order)
        for point in order:
            content = StepContent.of(point.batch)
            began = time.perf_counter()
            await loaded.engine.step(point.batch)
            seconds = time.perf_counter() - began
            if not point.is_held_out:
                fit.add(content, seconds)
                costs = fit.costs()
            elif turn > 0 and costs is not None:
                ratios[point].append(content.expected_s(costs) / seconds)
                taken[point].append(seconds)
    if costs is None:
        raise ValueError(f"a grid of {len(grid)} steps is too small to fit anything")
    return costs, [
        Judged(point, statistics.median(taken[point]), statistics.median(ratios[point]))
        for point in grid
        if point.is_held_out
    ]


def error_at(judged: Sequence[Judged], share: float) -> float:
    """The error that this share of the points stays within. Raises ValueError where there are none."""
    errors = sorted(one.error for one in judged)
    if not errors:
        raise ValueError("nothing was judged")
    return errors[min(len(errors) - 1, int(share * len(errors)))]


def _print(costs: StepCosts, judged: Sequence[Judged]) -> None:
    print(f"{'held out':34}{'ms':>10}{'expected':>10}")
    for one in judged:
        print(f"{one.point.name:34}{one.measured_s * 1e3:>10.2f}{one.ratio - 1:>+10.1%}")
    by_kind = {kind: [one for one in judged if one.point.kind == kind] for kind in get_args(Kind)}
    for kind, of_kind in by_kind.items():
        print(f"{kind}: median error {error_at(of_kind, 0.5):.1%}, nine in ten within {error_at(of_kind, 0.9):.1%}")
    print(
        f"a step {costs.base_s * 1e3:.2f} ms, a prompt token {costs.token_s * 1e6:.1f} us, a pair "
        f"{costs.pair_s * 1e9:.2f} ns, a row {costs.row_s * 1e6:.1f} us, a token of context "
        f"{costs.context_s * 1e9:.1f} ns"
    )
    print(
        json.dumps(
            {
                "error_p50": round(error_at(judged, 0.5), 4),
                "error_p90": round(error_at(judged, 0.9), 4),
                **{f"{kind}_error_p50": round(error_at(of_kind, 0.5), 4) for kind, of_kind in by_kind.items()},
                "samples": costs.num_samples,
            }
        )
    )


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
