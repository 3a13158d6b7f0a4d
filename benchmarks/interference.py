"""`twostroke bench interference`: what running streams feel of a long prompt that the same decode worker computes.

One decode worker in a process of its own, with a random model; the streams come off its token channel. In turns: the
streams alone for a while, then with a long prompt until its first token has come, and so on, so that both see the same
machine. Each turn with a prompt is divided by the turns without one on both sides of it.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.benchmarks.console import positive, say
from twostroke.benchmarks.engines.engine import MODELS, write_random_model
from twostroke.benchmarks.transfers.worker_process import ProcessFleet, Settings, serve_workers
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import DecodePolicy
from twostroke.loadtests.report.estimates import percentile
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import StepCosts
from twostroke.worker.scheduling.policy import StepBudget

BLOCK_SIZE = 16
STREAM_TOKENS = 8192  # more than any stream writes while the bench lasts
WARM_UP_TURNS = 1  # the worker learns what its steps take


@dataclass(frozen=True)
class GapWindow:
    """One stretch of time, and the gaps between the tokens of all streams that ended in it."""

    seconds: float
    gaps_s: tuple[float, ...]

    def at(self, percent: float) -> float:
        """A percentile of the gaps, in seconds. Raises ConfigError where there are none."""
        value = percentile(self.gaps_s, percent)
        if value is None:
            raise ConfigError("no stream got a token in one of the turns: make --alone-s longer")
        return value


@dataclass
class Stream:
    """Moments of a stream's tokens, in seconds of CLOCK_MONOTONIC."""

    times: list[float] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(self, num_tokens: int) -> None:
        """Some more tokens are there."""
        self.times.extend([time.monotonic()] * num_tokens)
        self.has_begun.set()

    def gaps(self, begin: float, end: float) -> Iterable[float]:
        """Those between tokens that ended between two moments."""
        for before, after in itertools.pairwise(self.times):
            if begin < after <= end:
                yield after - before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="160m", help="shape of the random model (%(default)s)")
    parser.add_argument("--threads", type=positive, default=None, help="cores of the worker; default: all")
    parser.add_argument("--streams", type=positive, default=16, help="that run all the time (%(default)s)")
    parser.add_argument("--context", type=positive, default=512, help="tokens of the streams' prompts (%(default)s)")
    parser.add_argument("--prompt-tokens", type=positive, default=16384, help="of the long prompt (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="long prompts, one after the other (%(default)s)")
    parser.add_argument("--alone-s", type=float, default=15.0, help="seconds without one in between (%(default)s)")
    parser.add_argument("--tpot-ms", type=float, default=None, help="promised to the streams; default: nothing")
    parser.add_argument("--max-stall-s", type=float, default=None, help="decode.max_stall_s; default: derived")
    parser.add_argument("--stall-factor", type=float, default=None, help="decode.stall_factor; default: none")
    parser.add_argument(
        "--no-limit", action="store_true", help="fill each step up to decode.max_step_tokens, whatever it takes"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Raises WorkerLost where the worker ends."""
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), arguments.model, max_position=arguments.prompt_tokens + STREAM_TOKENS)
        alone, beside, costs = asyncio.run(_measure(Path(folder), arguments))
    alone_s = statistics.median(turn.at(50) for turn in alone)
    print(json.dumps(summarise(alone, beside, bound_s(arguments, costs, alone_s))))
    return 0


def bound_s(arguments: argparse.Namespace, costs: StepCosts | None, alone_s: float) -> float | None:
    """Return the longest time of a step beside a prompt, where one without takes `alone_s`; None: there is no limit."""
    if arguments.no_limit:
        return None
    if arguments.tpot_ms is not None:
        return float(arguments.tpot_ms) / 1e3
    if costs is None:
        return None
    bounds = StepBudget(_config(arguments), lambda: costs, DecodePolicy.longest_chunk, DecodePolicy.most_stall_s)
    return bounds.stall_s(costs, alone_s, alone_s + costs.weights_s - costs.reading_s(arguments.streams))


def summarise(alone: list[GapWindow], beside: list[GapWindow], bound: float | None = None) -> dict[str, float | None]:
    """`alone` are the turns around those `beside` a prompt: one more than these. `bound` is the time promised."""
    neighbours = list(itertools.pairwise(alone))
    beside_s = statistics.median(turn.at(99) for turn in beside)
    return {
        f"itl_p{percent}_{name}": statistics.median(turn.at(percent) for turn in turns)
        for percent in (50, 99)
        for name, turns in (("without_s", alone), ("with_s", beside))
    } | {
        "ratio": statistics.median(
            turn.at(99) / statistics.fmean((before.at(99), after.at(99)))
            for turn, (before, after) in zip(beside, neighbours, strict=True)
        ),
        "prompt_s": statistics.median(turn.seconds for turn in beside),
        "bound_s": bound,
        "over_bound": None if bound is None else beside_s / bound,
    }


def _config(arguments: argparse.Namespace) -> DecodeConfig:
    factor = 1e9 if arguments.no_limit else arguments.stall_factor
    return DecodeConfig(max_stall_s=arguments.max_stall_s, stall_factor=factor)


async def _measure(
    folder: Path, arguments: argparse.Namespace
) -> tuple[list[GapWindow], list[GapWindow], StepCosts | None]:
    most_tokens = arguments.streams * (arguments.context + STREAM_TOKENS) + 2 * arguments.prompt_tokens
    settings = Settings(
        role="decode",
        model=str(folder),
        num_blocks=most_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        threads=arguments.threads or len(os.sched_getaffinity(0)),
        decode=_config(arguments),
    )
    async with serve_workers(settings) as served:
        alone, beside = await _take_turns(served, arguments)
        [notes] = await served.notes()
        return alone, beside, notes.stats.costs


async def _take_turns(served: ProcessFleet, arguments: argparse.Namespace) -> tuple[list[GapWindow], list[GapWindow]]:
    draw = random.Random(0)
    streams = [Stream() for _ in range(arguments.streams)]
    promise = Promise(tpot_s=None if arguments.tpot_ms is None else arguments.tpot_ms / 1e3)
    alone: list[GapWindow] = []
    beside: list[GapWindow] = []
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(_read(served, _prompt(draw, arguments.context), STREAM_TOKENS, stream, promise))
            for stream in streams
        ]
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        for turn in range(WARM_UP_TURNS + arguments.rounds):
            say(f"turn {turn + 1} of {WARM_UP_TURNS + arguments.rounds}: alone")
            alone.append(await _turn(streams, asyncio.sleep(arguments.alone_s)))
            say(f"turn {turn + 1}: P99 {alone[-1].at(99) * 1e3:.1f} ms; now with a prompt")
            prompt = _read(served, _prompt(draw, arguments.prompt_tokens), 1, Stream(), Promise())
            beside.append(await _turn(streams, prompt))
            say(f"turn {turn + 1}: P99 {beside[-1].at(99) * 1e3:.1f} ms, prompt {beside[-1].seconds:.1f} s")
        alone.append(await _turn(streams, asyncio.sleep(arguments.alone_s)))
        for task in running:
            task.cancel()
    return alone[WARM_UP_TURNS:], beside[WARM_UP_TURNS:]


async def _read(
    served: ProcessFleet, prompt: tuple[int, ...], max_tokens: int, answer: Stream, promise: Promise
) -> None:
    """Run one greedy request; notes when each of its tokens came. Raises WorkerLost where it fails."""
    async with aclosing(served.generate(prompt, max_tokens, promise)) as events:
        async for event in events:
            answer.on_tokens(len(event.tokens))


async def _turn(streams: Sequence[Stream], until: Awaitable[None]) -> GapWindow:
    begin = time.monotonic()
    await until
    end = time.monotonic()
    return GapWindow(end - begin, tuple(gap for stream in streams for gap in stream.gaps(begin, end)))


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(1, 31000) for _ in range(length))
