"""`twostroke bench engine`: prefill and decode speed of one CPU engine, as shares of what this machine can do.

A shared machine's memory bandwidth jumps several-fold within a minute, so absolute figures mislead. Limit and subject
are measured in turns (limit, subject, limit, ...), each subject is divided by the limits on both sides of it, and the
median of these ratios is what counts. The floor of a step is max(bytes / read bandwidth, operations / GEMM rate); the
GEMM rate that prefill is held against is measured with the model's own projections. What quantisation gains at batch 1
is measured in turns too, step by step, with one engine for each kind of weights.

Models are random: what speed depends on is their shape. They are computed as bf16 checkpoints are served here, in fp32
where the CPU does not multiply bf16 faster, and so are the limits.
"""

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twostroke.benchmarks.console import positive, say
from twostroke.benchmarks.random_model import MODELS, write_random_model
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.config import ModelConfig, ModelShape, Quantization
from twostroke.model.costs.operations import MachineLimits, OperationWork, decode_work, prefill_work, product_weights
from twostroke.model.engine_config import EngineConfig, resolve_dtype
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.machine_limits import CPU, LimitsMeter
from twostroke.model.served import Way
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import SamplingParams

NUMBERS_HERE = resolve_dtype("auto", torch.bfloat16, CPU)
"""Dtype that an engine computes bf16 checkpoints in on this CPU: bf16 where it multiplies that faster, else fp32."""
BLOCK_SIZE = 16
BATCHES = (1, 8, 32)
SWEPT = (1, 2, 4, 8, 16, 32, 64)
KINDS: tuple[Quantization, ...] = ("none", "int8", "int4")
_NUMBERS = {torch.bfloat16: "bf16", torch.float32: "fp32"}[NUMBERS_HERE]
GREEDY = SamplingParams(temperature=0.0)
UNKNOWN = MachineLimits(math.inf, math.inf)


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


Turns = dict[str, list["EngineFigures"]]
"""Figures of each round, by subject."""


class EngineFigures(NamedTuple):
    """The figures of one turn, or medians over all."""

    tokens_per_s: float
    over_floor: float  # floor / time
    over_gemm: float  # operations / time / GEMM rate
    over_read: float  # bytes / time / read bandwidth


@dataclass(frozen=True)
class Subject:
    """A participant in turns: an engine, the steps that it is given, and the least work of one of them."""

    loaded: LoadedEngine
    steps: Sequence[Sequence[SequenceStep]]
    work: OperationWork

    async def step_s(self) -> float:
        """Run all steps; return the seconds of one."""
        begin = time.perf_counter()
        for batch in self.steps:
            await self.loaded.engine.step(batch)
        return (time.perf_counter() - begin) / len(self.steps)


async def in_turns(
    what: str, subjects: Mapping[str, Subject], rounds: int, machine: LimitsMeter | None = None
) -> Turns:
    """Return each subject's figures of each round, by which they can be divided: all see the same machine.

    The limits are measured between the rounds; without a machine shares of them are 0.
    """
    for subject in subjects.values():
        await replace(subject, steps=subject.steps[:2]).step_s()
    turns: Turns = {name: [] for name in subjects}
    before = machine.measure() if machine else UNKNOWN
    for turn in range(rounds):
        say(f"{what}: turn {turn + 1} of {rounds}")
        seconds = {name: await subject.step_s() for name, subject in subjects.items()}
        after = machine.measure() if machine else UNKNOWN
        limits, before = before.mean(after), after
        for name, step_s in seconds.items():
            work = subjects[name].work
            shares = work.floor_s(limits), work.operations / limits.gemm, work.bytes / limits.read
            turns[name].append(EngineFigures(work.tokens / step_s, *(share / step_s for share in shares)))
    return turns


def medians(results: Sequence[EngineFigures]) -> EngineFigures:
    return EngineFigures(*(statistics.median(figures) for figures in zip(*results, strict=True)))


def gain(turns: Turns, name: str, over: str) -> float:
    """Return how many times as fast one subject is as another, by the median of the rounds."""
    pairs = zip(turns[name], turns[over], strict=True)
    return statistics.median(one.tokens_per_s / other.tokens_per_s for one, other in pairs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench engine`."""
    parser.add_argument("--model", choices=MODELS, default="160m", help="the shape of the random model")
    parser.add_argument("--quantization", choices=KINDS, default="none", help="of the engine that is measured whole")
    parser.add_argument("--way", choices=("native", "transformers"), default="native", help="who computes the layers")
    parser.add_argument(
        "--against",
        choices=MODELS,
        default=None,
        help="decode in turns with a model of this shape, and measure no more",
    )
    parser.add_argument("--rounds", type=positive, default=7, help="turns of limit and subject; medians are reported")
    parser.add_argument("--threads", type=positive, default=None, help="cores to use; default: all")
    parser.add_argument("--prompt-tokens", type=positive, default=1024, help="length of the prompt that prefill reads")
    parser.add_argument("--context", type=positive, default=256, help="tokens of context of each decoding sequence")
    parser.add_argument("--steps", type=positive, default=16, help="decode steps a turn")
    parser.add_argument(
        "--sweep",
        type=Path,
        metavar="FILE",
        help="decode at batches 1 to 64 alone, and draw a PNG of what this machine's limits allow beside it",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns the exit code. Raises ConfigError."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:

        def load(
            shape: str = args.model, quantization: Quantization = args.quantization, way: Way = args.way
        ) -> LoadedEngine:
            path = Path(folder) / shape
            if not path.exists():
                say(f"writing a random model of the shape {shape}")
                path.mkdir()
                write_random_model(path, shape, max_position=max(4096, args.prompt_tokens))
            loaded = _load(path, quantization, args, way)
            closing.callback(loaded.engine.close)
            return loaded

        held = _NUMBERS if args.quantization == "none" else args.quantization
        if args.against is not None:
            print(f"{args.model} and {args.against}, {held}")
            figures = asyncio.run(_measure_pair(load(), load(args.against), args))
        elif args.sweep is not None:
            print(f"{args.model}, {held}, {args.way}, contexts of {args.context} tokens")
            figures = asyncio.run(_measure_sweep(load(), args))
        else:
            print(f"{args.model}, {held}, {args.way}")
            figures = asyncio.run(_measure_all(load, args))
    print(json.dumps({name: round(one, 3) if isinstance(one, float) else one for name, one in figures.items()}))
    return 0


def _load(folder: Path, quantization: Quantization, args: argparse.Namespace, way: Way) -> LoadedEngine:
    largest, model = max(SWEPT if args.sweep else BATCHES), load_model_config(folder)
    block_size = model.fitting_block_size(BLOCK_SIZE, NUMBERS_HERE.itemsize)
    most_tokens = max(args.prompt_tokens, largest * (args.context + args.steps + 2 * block_size))
    return load_engine(
        EngineConfig(
            folder,
            way=way,
            quantization=quantization,
            threads=args.threads,
            block_size=block_size,
            num_blocks=(-(-most_tokens // block_size) + 1) * model.kv_groups.count,
        )
    )


def prompt_step(tokens: int, groups: int, before: int = 0) -> SequenceStep:
    """A prompt's chunk after `before` cached tokens, which draws. What the cache holds doesn't change the speed."""
    ids = [1 + number % 31000 for number in range(tokens)]
    table = range(-(-(before + tokens) // BLOCK_SIZE) * groups)
    return SequenceStep(ids, before, table, Draw(GREEDY, [1] * before + ids, before + tokens))


def decode_step(batch: int, position: int, width: int) -> list[SequenceStep]:
    """One token of each of `batch` sequences, with `width` blocks of their own."""
    tables = [range(row * width, (row + 1) * width) for row in range(batch)]
    draw = Draw(GREEDY, [1] * (position + 1), 1)
    return [SequenceStep([1 + row], position, table, draw) for row, table in enumerate(tables)]


async def decodes(loaded: LoadedEngine, batch: int, args: argparse.Namespace) -> Subject:
    """Return decode steps behind `args.context` tokens, which count as cached whatever the cache holds.

    States must have seen all of them. So their prompts are computed here, up to the end of a block, and all steps
    compute the token behind it: the state that they go on from stays as it is.
    """
    config, size = loaded.model_config, loaded.kv_cache.block_size
    width = -(-(args.context + args.steps + 1) // size) * config.kv_groups.count
    steps = [decode_step(batch, args.context + number, width) for number in range(args.steps)]
    if config.state is not None:
        context = -(-args.context // size) * size
        width = (context // size + 1) * config.kv_groups.count
        steps = [decode_step(batch, context, width)] * args.steps
        for step in steps[0]:
            ids = [1 + number % 31000 for number in range(context)]
            await loaded.engine.step([SequenceStep(ids, 0, step.block_ids, None)])
    work = decode_work(config, batch, args.context + args.steps / 2, args.quantization, NUMBERS_HERE.itemsize)
    return Subject(loaded, steps, work)


async def _measure_all(load: Callable[..., LoadedEngine], args: argparse.Namespace) -> dict[str, float]:
    loaded, rounds = load(), args.rounds
    config = loaded.model_config
    work = prefill_work(config, args.prompt_tokens, args.quantization, NUMBERS_HERE.itemsize)
    subject = Subject(loaded, [[prompt_step(args.prompt_tokens, config.kv_groups.count)]], work)
    machine = prefill_machine(config, args.prompt_tokens)
    results = {"prefill": medians((await in_turns("prefill", {"": subject}, rounds, machine))[""])}
    machine = LimitsMeter(dtype=NUMBERS_HERE)
    for batch in BATCHES:
        turns = await in_turns(f"decode at batch {batch}", {"": await decodes(loaded, batch, args)}, rounds, machine)
        results[f"decode_b{batch}"] = medians(turns[""])
    print(f"{'':12}{'tokens/s':>12}{'of floor':>10}{'of GEMM':>10}{'of read':>10}")
    for name, result in results.items():
        shares = "".join(f"{share:>10.2f}" for share in (result.over_floor, result.over_gemm, result.over_read))
        print(f"{name:12}{result.tokens_per_s:>12.1f}{shares}")
    figures = {
        "prefill_over_gemm": results["prefill"].over_gemm,
        "decode_b1_over_bandwidth": results["decode_b1"].over_read,
        "decode_b8_over_floor": results["decode_b8"].over_floor,
        "decode_b32_over_floor": results["decode_b32"].over_floor,
    }
    kinds = {kind: loaded if kind == args.quantization else load(quantization=kind) for kind in KINDS}
    subjects: dict[str, Subject] = {kind: await decodes(engine, 1, args) for kind, engine in kinds.items()}
    turns = await in_turns(f"{_NUMBERS}, int8 and int4 at batch 1", subjects, 2 * rounds)
    for kind in KINDS[1:]:
        figures[f"{kind}_b1_over_bf16"] = gain(turns, kind, "none")
        print(f"batch 1 in {kind}: {gain(turns, kind, 'none'):.2f} times as fast as in {_NUMBERS}")
    if args.way != "native":
        subjects = {"ours": await decodes(load(way="native"), 8, args), args.way: await decodes(loaded, 8, args)}
        turns = await in_turns("through transformers and by our own decoder at batch 8", subjects, 2 * rounds)
        figures["decode_b8_over_native"] = gain(turns, args.way, "ours")
        print(f"batch 8: {gain(turns, args.way, 'ours'):.2f} of the speed of our own decoder")
    return figures | {f"{name}_tok_s": result.tokens_per_s for name, result in results.items()}


async def _measure_pair(one: LoadedEngine, other: LoadedEngine, args: argparse.Namespace) -> dict[str, float]:
    """Decode with two shapes: limit, one, the other, limit, ..."""
    print(f"{'':12}" + "".join(f"{name:>18}{'of floor':>10}" for name in (args.model, args.against)) + f"{'ratio':>8}")
    figures: dict[str, float] = {}
    machine = LimitsMeter(dtype=NUMBERS_HERE)
    for batch in BATCHES:
        pair = {"": await decodes(one, batch, args), "against_": await decodes(other, batch, args)}
        turns = await in_turns(f"decode at batch {batch}", pair, args.rounds, machine)
        results = {who: medians(of_one) for who, of_one in turns.items()}
        shares = "".join(f"{result.tokens_per_s:>18.1f}{result.over_floor:>10.2f}" for result in results.values())
        print(f"{f'decode_b{batch}':12}{shares}{gain(turns, '', 'against_'):>8.2f}")
        for who, result in results.items():
            figures[f"{who}decode_b{batch}_tok_s"] = result.tokens_per_s
            figures[f"{who}decode_b{batch}_over_floor"] = result.over_floor
    return figures


async def _measure_sweep(loaded: LoadedEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Decode at batches 1 to 64, and draw it beside what the model's operations take at this machine's limits.

    A shared machine's limits change from minute to minute. So each batch is held against the limits around it, and both
    curves are drawn for the medians of all limits.
    """
    from twostroke.planning.costs.pictures import batch_sweep  # hosts of GPUs have no matplotlib
    from twostroke.planning.costs.roofline import knee

    machine, subjects = LimitsMeter(dtype=NUMBERS_HERE), {batch: await decodes(loaded, batch, args) for batch in SWEPT}
    results = {}
    for batch, subject in subjects.items():
        turns = await in_turns(f"decode at batch {batch}", {"": subject}, args.rounds, machine)
        results[batch] = medians(turns[""])
    limits = machine.median()
    floors = [batch / subject.work.floor_s(limits) for batch, subject in subjects.items()]
    rates = [floor * result.over_floor for floor, result in zip(floors, results.values(), strict=True)]
    print(f"{limits.gemm / 1e9:.0f} GFLOP/s, {limits.read / 1e9:.1f} GB/s; of the model's rate at these limits:")
    print(f"{'batch':>5}{'tokens/s':>12}{'of model':>10}{'at medians':>12}{'model':>10}{'ms a token':>12}{'model':>8}")
    for (batch, result), rate, floor in zip(results.items(), rates, floors, strict=True):
        as_told = f"{result.tokens_per_s:>12.1f}{result.over_floor:>10.2f}{rate:>12.1f}{floor:>10.1f}"
        print(f"{batch:>5}{as_told}{1e3 * batch / rate:>12.2f}{1e3 * batch / floor:>8.2f}")
    knees = knee(SWEPT, rates), knee(SWEPT, floors)
    try:
        args.sweep.write_bytes(batch_sweep(SWEPT, {"measured": rates, "model": floors}, {"knee": knees[0]}).png)
    except OSError as error:
        raise ConfigError(f"--sweep {args.sweep}: {error.strerror}") from error
    print(f"knee at batch {knees[0]}, by the model at {knees[1]}; {args.sweep} shows it")
    return {
        "batches": list(SWEPT),
        "tok_s": [round(result.tokens_per_s, 1) for result in results.values()],
        "of_model": [round(result.over_floor, 3) for result in results.values()],
        "model_tok_s": [round(floor, 1) for floor in floors],
        "knee": knees[0],
        "model_knee": knees[1],
        "picture": str(args.sweep),
    }
