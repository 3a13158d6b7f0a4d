"""The whole engine on CUDA against the same on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NEW_TOKENS = 24
CHUNK = 37


async def greedy(folder: Path, device: Literal["cpu", "cuda"], prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations: the prompts in chunks one after the other, then all of them decoded as one batch."""
    loaded = load_engine(
        EngineConfig(folder, device=device, dtype="float32", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    )
    try:
        histories = [list(prompt) for prompt in prompts]
        width = NUM_BLOCKS // len(prompts)
        tables = [list(range(row * width, (row + 1) * width)) for row in range(len(prompts))]

        def step(row: int, start: int, end: int) -> SequenceStep:
            history = histories[row]
            draw = Draw(SamplingParams(temperature=0.0), history, len(prompts[row])) if end == len(history) else None
            return SequenceStep(history[start:end], start, tables[row], draw)

        async def run(rows: list[int], batch: list[SequenceStep]) -> None:
            for row, token in zip(rows, await loaded.engine.step(batch), strict=True):
                if token is not None:
                    histories[row].append(token.token_id)

        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), CHUNK):
                await run([row], [step(row, start, min(start + CHUNK, len(prompt)))])
        rows = list(range(len(prompts)))
        for _ in range(NEW_TOKENS - 1):
            await run(rows, [step(row, len(histories[row]) - 1, len(histories[row])) for row in rows])
        return [history[len(prompt) :] for history, prompt in zip(histories, prompts, strict=True)]
    finally:
        loaded.engine.close()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 80},
    ],
    ids=["grouped", "multi-head", "multi-query, head_dim 80"],
)
async def test_greedy_tokens_on_cuda_equal_those_on_a_cpu(
    write_checkpoint: Callable[..., Path], fields: dict[str, int]
) -> None:
    pytest.importorskip("numba", reason="the CPU's engine needs it, a GPU's doesn't")
    folder = write_checkpoint(seed=1, **fields)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in (1, 15, 33, 200)]
    assert await greedy(folder, "cuda", prompts) == await greedy(folder, "cpu", prompts)
