"""`python3 -m tests.gpu.first.start FOLDER`: a worker's engine, from its start to its first tokens.

Says how long that takes, what of the GPU's memory is taken, and the time of steps through the engine's thread. A folder
that is not there gets a random model of 1.2 billion parameters.
"""

import argparse
import asyncio
import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gpu.first.bench import log_to_stderr
from twostroke.benchmarks.random_model import write_random_model
from twostroke.model.cuda import compile_ahead
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

BLOCK_SIZE = 64
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
PROMPTS = (500, 2000)  # tokens
ROWS = (1, 32)  # of decode steps
STEPS = 40  # the median of which counts


def measure(config: EngineConfig, prompts: Sequence[int] = PROMPTS, steps: int = STEPS) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    on_gpu = config.device == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else 0

    def taken_gib() -> float:
        return round((free - torch.cuda.mem_get_info()[0]) / 2**30, 2) if on_gpu else 0.0

    begin = time.perf_counter()
    loaded = load_engine(config)
    facts |= {"load_s": round(time.perf_counter() - begin, 1), "blocks": loaded.num_blocks, "taken_gib": taken_gib()}
    try:
        facts |= asyncio.run(_step_times(loaded, prompts, steps))
    finally:
        loaded.engine.close()
    return facts | {"taken_after_gib": taken_gib()}


async def _step_times(loaded: LoadedEngine, prompts: Sequence[int], steps: int) -> dict[str, float]:
    times: dict[str, float] = {}

    async def step_s(batch: Sequence[SequenceStep]) -> float:
        began = time.perf_counter()
        await loaded.engine.step(batch)
        return time.perf_counter() - began

    for tokens in prompts:
        prompt = [1 + index % 90 for index in range(tokens)]
        batch = [SequenceStep(prompt, 0, range(-(-tokens // BLOCK_SIZE)), Draw(GREEDY, prompt, tokens))]
        await step_s(batch)
        times[f"prompt_{tokens}_ms"] = round(await step_s(batch) * 1e3, 2)
    draw = Draw(DRAWN, [1], 1)
    for rows in ROWS:
        each = [
            await step_s([SequenceStep([5], 100 + i, range(4 * row, 4 * row + 4), draw) for row in range(rows)])
            for i in range(steps)
        ]
        times[f"step_{rows}_ms"] = round(statistics.median(each) * 1e3, 3)
    return times


def engine_config(arguments: Sequence[str] | None = None) -> EngineConfig:
    """Raises SystemExit for what argparse refuses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--blocks", type=int, help="of the cache; default: what half of the memory holds")
    parsed = parser.parse_args(arguments)
    return EngineConfig(
        parsed.folder, device=parsed.device, block_size=BLOCK_SIZE, num_blocks=parsed.blocks, gpu_memory_share=0.5
    )


if __name__ == "__main__":
    log_to_stderr()
    config = engine_config()
    if not (config.model_dir / "config.json").exists():
        config.model_dir.mkdir(parents=True, exist_ok=True)
        write_random_model(config.model_dir, "1.2b")
    compiled: list[str] = []
    log = logging.Handler()
    log.emit = lambda record: compiled.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(compile_ahead.__name__).addHandler(log)
    print(json.dumps(measure(config) | {"compiled": compiled}))
    if config.device == "cuda" and not compiled:
        raise SystemExit("no kernel was compiled ahead: the first steps compile one after the other")
