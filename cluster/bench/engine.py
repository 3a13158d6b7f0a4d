"""`twostroke bench engine`: prefill and decode speed of one CPU engine, as shares of what this machine can do.

A shared machine's memory bandwidth jumps several-fold within a minute, so absolute figures mislead. Limit and subject
are measured in turns (limit, subject, limit, ...), each subject is divided by the limits on both sides of it, and the
median of these ratios is what counts. The floor of a step is max(bytes / read bandwidth, operations / GEMM rate).
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.config import ModelConfig, load_model_config
from model.load import EngineConfig, LoadedEngine, load_engine
from model.step import Draw, SequenceStep
from model.weights import SINGLE_FILE, expected_shapes
from protocol.requests import SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BLOCK_SIZE = 16
BATCHES = (1, 8, 32)
GEMM_SIZE = 2048  # [1024, 2048] x [2048, 2048], three times: 26 GFLOP
READ_BYTES = 512 * 2**20  # far more than any cache holds
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Limits:
    """What the machine did just now."""

    gemm: float  # bf16 operations a second
    read: float  # bytes a second


@dataclass(frozen=True)
class Work:
    """What one step can't do without."""

    tokens: int  # tokens that count
    operations: float
    bytes: float  # weights and cached KV that must be read

    def floor_s(self, limits: Limits) -> float:
        """Seconds that the step takes at least."""
        return max(self.operations / limits.gemm, self.bytes / limits.read)


@dataclass(frozen=True)
class Result:
    """Medians over all turns."""

    tokens_per_s: float
    over_floor: float  # floor / time
    over_gemm: float  # operations / time / GEMM rate
    over_read: float  # bytes / time / read bandwidth


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench engine`."""
    parser.add_argument("--rounds", type=int, default=7, help="turns of limit and subject; medians are reported")
    parser.add_argument("--threads", type=int, default=None, help="cores to use; default: all")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="length of the prompt that prefill reads")
    parser.add_argument("--context", type=int, default=256, help="tokens of context of each decoding sequence")
    parser.add_argument("--steps", type=int, default=16, help="decode steps a turn")


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        _say("writing a random model of 12 layers x 768")
        write_random_model(Path(folder))
        most_tokens = max(args.prompt_tokens, max(BATCHES) * (args.context + args.steps + BLOCK_SIZE))
        loaded = load_engine(
            EngineConfig(
                Path(folder), dtype="bfloat16", threads=args.threads, num_blocks=-(-most_tokens // BLOCK_SIZE) + 1
            )
        )
        try:
            if args.threads is not None:
                torch.set_num_threads(args.threads)
            results = asyncio.run(_measure_all(loaded, args))
        finally:
            loaded.engine.close()
    _print(results)
    return 0


def write_random_model(folder: Path, *, max_position: int = 4096) -> None:
    """A bf16 checkpoint of MODEL's shape; small weights, so that nothing overflows."""
    (folder / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": max_position}))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in expected_shapes(load_model_config(folder))
    }
    save_file(tensors, folder / SINGLE_FILE)


def prefill_work(config: ModelConfig, tokens: int) -> Work:
    """A prompt in one chunk that draws one token: only one row needs the last layer's output and the logits."""
    attention, mlp, head = _matrix_sizes(config)
    kv = config.hidden_size * 2 * config.kv_size
    last_layer = tokens * (kv + config.hidden_size * config.q_size) + (attention - kv + mlp)
    products = tokens * (config.num_layers - 1) * (attention + mlp) + last_layer + head
    scores = config.num_layers * config.q_size * tokens * tokens  # causal: half of 2 x 2 x tokens^2
    return Work(tokens, 2.0 * products + 2.0 * scores, _weight_bytes(config))


def decode_work(config: ModelConfig, batch: int, context: float) -> Work:
    """One decode step of `batch` sequences with `context` tokens each."""
    attention, mlp, head = _matrix_sizes(config)
    products = batch * (config.num_layers * (attention + mlp) + head)
    scores = batch * config.num_layers * 2 * config.q_size * context
    kv_bytes = batch * config.num_layers * 2 * config.kv_size * context * 2
    return Work(batch, 2.0 * (products + scores), _weight_bytes(config) + kv_bytes)


def _matrix_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Weights of a layer's attention, of its MLP, and of the LM head."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    return attention, 3 * config.hidden_size * config.intermediate_size, config.hidden_size * config.vocab_size


def _weight_bytes(config: ModelConfig) -> float:
    attention, mlp, head = _matrix_sizes(config)
    return 2.0 * (config.num_layers * (attention + mlp) + head)


class _Machine:
    """Measures the limits with torch's own kernels."""

    def __init__(self) -> None:
        self._left = torch.randn(1024, GEMM_SIZE).to(torch.bfloat16)
        self._right = torch.randn(GEMM_SIZE, GEMM_SIZE).to(torch.bfloat16)
        self._memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        self.measure()

    def measure(self) -> Limits:
        gemm_s = min(_timed(lambda: torch.mm(self._left, self._right)) for _ in range(3))
        read_s = min(_timed(lambda: self._memory.sum()) for _ in range(2))
        return Limits(gemm=2.0 * 1024 * GEMM_SIZE * GEMM_SIZE / gemm_s, read=READ_BYTES / read_s)


async def _measure_all(loaded: LoadedEngine, args: argparse.Namespace) -> dict[str, Result]:
    config, machine = loaded.model_config, _Machine()
    prompt = [1 + i % 31000 for i in range(args.prompt_tokens)]
    table = range(-(-args.prompt_tokens // BLOCK_SIZE))
    prefill = [SequenceStep(prompt, 0, table, Draw(GREEDY, prompt, len(prompt)))]
    results = {
        "prefill": await _in_turns(
            "prefill", machine, loaded, [prefill], prefill_work(config, args.prompt_tokens), args.rounds
        )
    }
    for batch in BATCHES:
        steps = [decode_batch(batch, args.context + i, args.context + args.steps) for i in range(args.steps)]
        work = decode_work(config, batch, args.context + args.steps / 2)
        results[f"decode_b{batch}"] = await _in_turns(
            f"decode at batch {batch}", machine, loaded, steps, work, args.rounds
        )
    return results


def decode_batch(batch: int, position: int, end: int) -> list[SequenceStep]:
    """One decode step of `batch` sequences, each with its own blocks. What the cache holds doesn't change the speed."""
    width = -(-(end + 1) // BLOCK_SIZE)
    history = [1] * (position + 1)
    return [
        SequenceStep([1 + row], position, range(row * width, (row + 1) * width), Draw(GREEDY, history, 1))
        for row in range(batch)
    ]


async def _in_turns(
    name: str,
    machine: _Machine,
    loaded: LoadedEngine,
    steps: Sequence[Sequence[SequenceStep]],
    work: Work,
    rounds: int,
) -> Result:
    results: list[Result] = []
    for batch in steps[:2]:
        await loaded.engine.step(batch)
    before = machine.measure()
    for turn in range(rounds):
        _say(f"{name}: turn {turn + 1} of {rounds}")
        begin = time.perf_counter()
        for batch in steps:
            await loaded.engine.step(batch)
        step_s = (time.perf_counter() - begin) / len(steps)
        after = machine.measure()
        limits = Limits((before.gemm + after.gemm) / 2, (before.read + after.read) / 2)
        before = after
        results.append(
            Result(
                tokens_per_s=work.tokens / step_s,
                over_floor=work.floor_s(limits) / step_s,
                over_gemm=work.operations / step_s / limits.gemm,
                over_read=work.bytes / step_s / limits.read,
            )
        )

    def median(of: Callable[[Result], float]) -> float:
        return statistics.median(of(result) for result in results)

    return Result(
        median(lambda r: r.tokens_per_s),
        median(lambda r: r.over_floor),
        median(lambda r: r.over_gemm),
        median(lambda r: r.over_read),
    )


def _print(results: dict[str, Result]) -> None:
    print(f"{'':12}{'tokens/s':>12}{'of floor':>10}{'of GEMM':>10}{'of read':>10}")
    for name, result in results.items():
        shares = "".join(f"{share:>10.2f}" for share in (result.over_floor, result.over_gemm, result.over_read))
        print(f"{name:12}{result.tokens_per_s:>12.1f}{shares}")
    print(
        json.dumps(
            {
                "prefill_over_gemm": round(results["prefill"].over_gemm, 3),
                "decode_b1_over_bandwidth": round(results["decode_b1"].over_read, 3),
                "decode_b8_over_floor": round(results["decode_b8"].over_floor, 3),
                "decode_b32_over_floor": round(results["decode_b32"].over_floor, 3),
                "prefill_tok_s": round(results["prefill"].tokens_per_s, 1),
                **{f"decode_b{b}_tok_s": round(results[f"decode_b{b}"].tokens_per_s, 1) for b in BATCHES},
            }
        )
    )


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.bench.engine", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
