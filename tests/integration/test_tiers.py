"""KV that outlives its worker: prompts whose KV comes from storage give the tokens of a worker that computes them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.kvtiers.config import DiskTierConfig, TiersConfig

NEW_TOKENS = 16
PROMPTS = random_prompts(96, 1, (40, 64, 65, 128, 200, 300))
ALONE = Shape(None, num_blocks=256)
OBJECT_TOKENS = 32


def on_disk(path: Path, **more: Any) -> TiersConfig:
    return TiersConfig(
        host_bytes=4 * 2**20,
        disk=DiskTierConfig(path=str(path), bytes=2**30),
        object_tokens=OBJECT_TOKENS,
        write_share=1.0,
        **more,
    )


async def answers(served: Served) -> list[list[int]]:
    return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS))


async def written(served: Served) -> None:
    """Return once nothing waits to be written."""
    async with asyncio.timeout(60):
        while any(parts.deps.tiers.is_busy for parts in served.fleet.parts.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def hit_tokens(served: Served, tier: str) -> int:
    return sum(one.hit_tokens for w in served.fleet.by_peer.values() for one in w.stats().tiers if one.name == tier)


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    made: Path = write_checkpoint(seed=3, **FAMILY_SHAPES["qwen3"])
    return made


def test_a_restarted_worker_reads_its_disk(folder: Path, tmp_path: Path) -> None:
    shape = replace(ALONE, tiers=on_disk(tmp_path))
    expected = of_one_worker(folder, answers)

    async def run() -> None:
        async with serve(folder, shape) as served:
            assert await answers(served) == expected
            assert await answers(served) == expected  # the second use, which is written
            await served.idle()
            await written(served)
        async with serve(folder, shape) as served:
            assert await answers(served) == expected
            assert hit_tokens(served, "disk") == sum(
                (len(prompt) - 1) // OBJECT_TOKENS * OBJECT_TOKENS for prompt in PROMPTS if len(prompt) > 64
            )
            await served.idle()

    asyncio.run(run())
