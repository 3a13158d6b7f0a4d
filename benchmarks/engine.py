"""`twostroke bench engine`: prefill and decode speed of one CPU engine, as shares of what this machine can do.

A shared machine's memory bandwidth jumps several-fold within a minute, so absolute figures mislead. Limit and subject
are measured in turns (limit, subject, limit, ...), each subject is divided by the limits on both sides of it, and the
median of these ratios is what counts. The floor of a step is max(bytes / read bandwidth, operations / GEMM rate); the
GEMM rate that prefill is held against is measured with the model's own projections. What quantisation gains at batch 1
is measured in turns too, step by step, with one engine for each kind of weights.

Models are random: what speed depends on is their shape.
"""

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from twostroke.benchmarks.console import positive, say
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.model.config import ModelConfig, ModelShape, Quantization
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.operations import Limits, Work, decode_work, input_sizes, prefill_work
from twostroke.model.served import Way
from twostroke.model.sizes import expected_shapes
from twostroke.model.step import Draw, SequenceStep
from twostroke.model.this_machine import Machine
from twostroke.protocol.requests import SamplingParams

_1_2B = {  # Llama-3.2-1B
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
MODELS: Mapping[str, dict[str, Any]] = {
    "160m": {  # GPT-2 small's layers, with grouped-query attention: 125 million parameters
        **_LLAMA,
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "1.2b": {**_LLAMA, **_1_2B},
    "smollm2": {  # SmolLM2-135M
        **_LLAMA,
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
    "mla-small": {  # the attention of DeepSeek-V2-Lite, in fewer layers, all of them dense: 520 million parameters
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "rms_norm_eps": 1e-6,
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 8,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "moe-small": {  # as Qwen3-MoE, narrow: 860 million parameters, of which a token takes 160
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rms_norm_eps": 1e-6,
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "moe-1.2b-active": {  # as Qwen3-MoE, of 1.2b's size for a token: its MLPs are eight of 32 experts
        **_1_2B,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 1024,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
_DISTINCT = 1 << 22  # values, repeated: drawing a billion takes longer than measuring


def write_random_model(folder: Path, name: str = "160m", *, max_position: int = 4096) -> None:
    """A bf16 checkpoint of a shape in MODELS; small weights, so that nothing overflows."""
    (folder / "config.json").write_text(json.dumps({**MODELS[name], "max_position_embeddings": max_position}))
    values = (torch.randn(_DISTINCT, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for tensor, shape in expected_shapes(load_model_config(folder)):
        count = math.prod(shape)
        tensors[tensor] = values.repeat(-(-count // _DISTINCT))[:count].view(shape)
    save_file(tensors, folder / SINGLE_FILE)


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


BLOCK_SIZE = 16
BATCHES = (1, 8, 32)
KINDS: tuple[Quantization, ...] = ("none", "int8", "int4")
GREEDY = SamplingParams(temperature=0.0)


class Result(NamedTuple):
    """Of one turn, or medians over all."""

    tokens_per_s: float
    over_floor: float  # floor / time
    over_gemm: float  # operations / time / GEMM rate
    over_read: float  # bytes / time / read bandwidth


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


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns the exit code."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.against is not None:
        return _run_pair(args)
    with tempfile.TemporaryDirectory() as folder:
        say(f"writing a random model of the shape {args.model}")
        write_random_model(Path(folder), args.model, max_position=max(4096, args.prompt_tokens))
        engine = _load(Path(folder), args.quantization, args, args.way)
        try:
            results = asyncio.run(_measure_all(engine, args))
            gains = asyncio.run(_compare_kinds(engine, Path(folder), args))
            share = asyncio.run(_share_of_native(engine, Path(folder), args)) if args.way != "native" else None
        finally:
            engine.engine.close()
    _print(results, gains, share, args)
    return 0


def _load(folder: Path, quantization: Quantization, args: argparse.Namespace, way: Way) -> LoadedEngine:
    most_tokens = max(args.prompt_tokens, max(BATCHES) * (args.context + args.steps + BLOCK_SIZE))
    groups = load_model_config(folder).kv_groups
    return load_engine(
        EngineConfig(
            folder,
            way=way,
            dtype="bfloat16",
            quantization=quantization,
            threads=args.threads,
            block_size=BLOCK_SIZE,
            num_blocks=(-(-most_tokens // BLOCK_SIZE) + 1) * groups.count,
        )
    )


async def _measure_all(loaded: LoadedEngine, args: argparse.Namespace) -> dict[str, Result]:
    config = loaded.model_config
    prompt = [1 + i % 31000 for i in range(args.prompt_tokens)]
    table = range(-(-args.prompt_tokens // BLOCK_SIZE) * config.kv_groups.count)
    prefill = [SequenceStep(prompt, 0, table, Draw(GREEDY, prompt, len(prompt)))]
    machine = prefill_machine(config, args.prompt_tokens)
    work = prefill_work(config, args.prompt_tokens, args.quantization)
    results = {"prefill": await _in_turns("prefill", machine, loaded, [prefill], work, args.rounds)}
    machine = Machine()
    for batch in BATCHES:
        work = decode_work(config, batch, args.context + args.steps / 2, args.quantization)
        results[f"decode_b{batch}"] = await _in_turns(
            f"decode at batch {batch}", machine, loaded, _decode_steps(batch, config, args), work, args.rounds
        )
    return results


def _decode_steps(batch: int, config: ModelShape, args: argparse.Namespace) -> list[list[SequenceStep]]:
    """Steps of `batch` sequences, each with its own blocks. What the cache holds doesn't change the speed."""
    width = -(-(args.context + args.steps + 1) // BLOCK_SIZE) * config.kv_groups.count
    tables = [range(row * width, (row + 1) * width) for row in range(batch)]
    return [
        [
            SequenceStep([1 + row], position, table, Draw(GREEDY, [1] * (position + 1), 1))
            for row, table in enumerate(tables)
        ]
        for position in range(args.context, args.context + args.steps)
    ]


async def _in_turns(
    name: str,
    machine: Machine,
    loaded: LoadedEngine,
    steps: Sequence[Sequence[SequenceStep]],
    work: Work,
    rounds: int,
) -> Result:
    results: list[Result] = []
    await _step_s(loaded, steps[:2])
    before = machine.measure()
    for turn in range(rounds):
        say(f"{name}: turn {turn + 1} of {rounds}")
        step_s = await _step_s(loaded, steps)
        after = machine.measure()
        limits = before.mean(after)
        before = after
        results.append(_result(work, step_s, limits))
    return _medians(results)


def _result(work: Work, step_s: float, limits: Limits) -> Result:
    return Result(
        tokens_per_s=work.tokens / step_s,
        over_floor=work.floor_s(limits) / step_s,
        over_gemm=work.operations / step_s / limits.gemm,
        over_read=work.bytes / step_s / limits.read,
    )


def _medians(results: Sequence[Result]) -> Result:
    return Result(*(statistics.median(figures) for figures in zip(*results, strict=True)))


async def _compare_kinds(measured: LoadedEngine, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """How many times as fast as bf16 each quantisation decodes at batch 1."""
    engines: dict[Quantization, LoadedEngine] = {args.quantization: measured}
    try:
        for kind in KINDS:
            if kind not in engines:
                engines[kind] = _load(folder, kind, args, args.way)
        steps = _decode_steps(1, measured.model_config, args)
        ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(-1, 2 * args.rounds):
            say(f"bf16, int8 and int4 at batch 1: turn {turn + 1} of {2 * args.rounds}")
            times = {kind: await _step_s(engine, steps) for kind, engine in engines.items()}
            for kind, step_s in times.items():
                if turn >= 0:  # the first warms up
                    ratios[kind].append(times["none"] / step_s)
    finally:
        for engine in engines.values():
            if engine is not measured:
                engine.engine.close()
    return {kind: statistics.median(ratios[kind]) for kind in KINDS if kind != "none"}


def _run_pair(args: argparse.Namespace) -> int:
    """Decodes of two shapes, in turns: limit, one, the other, limit, ..."""
    names, loaded = (args.model, args.against), []
    try:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                say(f"writing a random model of the shape {name}")
                write_random_model(Path(folder), name)
                loaded.append(_load(Path(folder), args.quantization, args, "native"))
        results = {batch: asyncio.run(_pair_in_turns(loaded, batch, args)) for batch in BATCHES}
    finally:
        for engine in loaded:
            engine.engine.close()
    print(f"{args.model} and {args.against}, {'bf16' if args.quantization == 'none' else args.quantization}")
    print(f"{'':12}" + "".join(f"{name:>18}{'of floor':>10}" for name in names) + f"{'ratio':>8}")
    told: dict[str, float] = {}
    for batch, pair in results.items():
        ratio = pair[0].tokens_per_s / pair[1].tokens_per_s
        shares = "".join(f"{result.tokens_per_s:>18.1f}{result.over_floor:>10.2f}" for result in pair)
        print(f"{f'decode_b{batch}':12}{shares}{ratio:>8.2f}")
        for result, who in zip(pair, ("", "against_"), strict=True):
            told[f"{who}decode_b{batch}_tok_s"] = round(result.tokens_per_s, 1)
            told[f"{who}decode_b{batch}_over_floor"] = round(result.over_floor, 3)
    print(json.dumps(told))
    return 0


async def _pair_in_turns(loaded: Sequence[LoadedEngine], batch: int, args: argparse.Namespace) -> list[Result]:
    """Medians of each."""
    machine, turns = Machine(), []
    each = [
        (
            engine,
            _decode_steps(batch, engine.model_config, args),
            decode_work(engine.model_config, batch, args.context + args.steps / 2, args.quantization),
        )
        for engine in loaded
    ]
    for engine, steps, _ in each:
        await _step_s(engine, steps[:2])
    before = machine.measure()
    for turn in range(args.rounds):
        say(f"decode at batch {batch}: turn {turn + 1} of {args.rounds}")
        seconds = [await _step_s(engine, steps) for engine, steps, _ in each]
        after = machine.measure()
        limits, before = before.mean(after), after
        turns.append([_result(work, step_s, limits) for (*_, work), step_s in zip(each, seconds, strict=True)])
    return [_medians(results) for results in zip(*turns, strict=True)]


async def _share_of_native(measured: LoadedEngine, folder: Path, args: argparse.Namespace) -> float:
    """The speed of decode at batch 8 over that of our own decoder, step by step in turns."""
    native = _load(folder, args.quantization, args, "native")
    try:
        steps = _decode_steps(8, measured.model_config, args)
        ratios: list[float] = []
        for turn in range(-1, 2 * args.rounds):
            say(f"through transformers and by our own decoder at batch 8: turn {turn + 1} of {2 * args.rounds}")
            ratio = await _step_s(native, steps) / await _step_s(measured, steps)
            if turn >= 0:  # the first warms up
                ratios.append(ratio)
    finally:
        native.engine.close()
    return statistics.median(ratios)


async def _step_s(loaded: LoadedEngine, steps: Sequence[Sequence[SequenceStep]]) -> float:
    """Seconds a step."""
    begin = time.perf_counter()
    for batch in steps:
        await loaded.engine.step(batch)
    return (time.perf_counter() - begin) / len(steps)


def _print(
    results: Mapping[str, Result], gains: Mapping[str, float], share: float | None, args: argparse.Namespace
) -> None:
    print(f"{args.model}, {'bf16' if args.quantization == 'none' else args.quantization}, {args.way}")
    print(f"{'':12}{'tokens/s':>12}{'of floor':>10}{'of GEMM':>10}{'of read':>10}")
    for name, result in results.items():
        shares = "".join(f"{share:>10.2f}" for share in (result.over_floor, result.over_gemm, result.over_read))
        print(f"{name:12}{result.tokens_per_s:>12.1f}{shares}")
    for kind, gain in gains.items():
        print(f"batch 1 in {kind}: {gain:.2f} times as fast as in bf16")
    if share is not None:
        print(f"batch 8: {share:.2f} of the speed of our own decoder")
    print(
        json.dumps(
            {
                "prefill_over_gemm": round(results["prefill"].over_gemm, 3),
                "decode_b1_over_bandwidth": round(results["decode_b1"].over_read, 3),
                "decode_b8_over_floor": round(results["decode_b8"].over_floor, 3),
                "decode_b32_over_floor": round(results["decode_b32"].over_floor, 3),
                **{f"{kind}_b1_over_bf16": round(gain, 3) for kind, gain in gains.items()},
                **({} if share is None else {"decode_b8_over_native": round(share, 3)}),
                "prefill_tok_s": round(results["prefill"].tokens_per_s, 1),
                **{f"decode_b{b}_tok_s": round(results[f"decode_b{b}"].tokens_per_s, 1) for b in BATCHES},
            }
        )
    )
