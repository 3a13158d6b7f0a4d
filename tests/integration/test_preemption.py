"""Running ahead and giving way change no token, through the whole path: greedy, seeded, with penalties."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import Served, Shape, serve
from twostroke.protocol.requests import SamplingParams

PLENTY = Shape(None, num_blocks=256, block_size=4, decode_step_tokens=64, decode={"run_ahead": False})
TIGHT = replace(PLENTY, num_blocks=24)
MIB = 2**20

WAYS = {
    "running ahead": replace(PLENTY, decode={}),
    "recompute": replace(TIGHT, decode={"preemption": "recompute"}),
    "swap": replace(TIGHT, swap_bytes=MIB, decode={"preemption": "swap", "swap_gib": 1.0}),
    "swap, not ahead": replace(
        TIGHT, swap_bytes=MIB, decode={"preemption": "swap", "swap_gib": 1.0, "run_ahead": False}
    ),
    "auto": replace(TIGHT, swap_bytes=MIB, decode={"preemption": "auto", "swap_gib": 1.0}),
    "swap on two ranks": replace(TIGHT, swap_bytes=MIB, decode_ranks=2, decode={"preemption": "swap", "swap_gib": 1.0}),
}


async def answers(served: Served) -> list[list[int]]:
    """To a dozen requests of all kinds at once."""
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9, top_k=20),
        SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.5),
    )
    prompts = [[(7 * i + j) % 90 + 1 for j in range(5 + 2 * i)] for i in range(12)]
    return await asyncio.gather(
        *(served.generate(prompt, 30, kinds[i % len(kinds)]) for i, prompt in enumerate(prompts))
    )


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    return write_checkpoint(seed=5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The answers of a worker that has room for all, and schedules nothing ahead."""

    async def ask() -> list[list[int]]:
        async with serve(folder, PLENTY) as served:
            return await answers(served)

    return asyncio.run(ask())


@pytest.mark.parametrize("way", WAYS)
async def test_tokens_are_the_same_when(way: str, folder: Path, expected: list[list[int]]) -> None:
    async with serve(folder, WAYS[way]) as served:
        assert await answers(served) == expected
        await served.idle()
        stats = served.fleet.stats("decode")
    assert (stats.preemptions > 0) == (way != "running ahead")
    assert (stats.swaps > 0) == (stats.swap_bytes > 0) == (WAYS[way].swap_bytes > 0)
    assert stats.swapped_blocks == 0
