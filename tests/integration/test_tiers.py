"""KV that outlives its worker: prompts whose KV comes from storage give the tokens of a worker that computes them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.kvtiers import kv_tiers
from twostroke.kvtiers.config import DiskTierConfig, TiersConfig

NEW_TOKENS = 16
PROMPTS = random_prompts(96, 1, (40, 64, 65, 128, 200, 300))
PLENTY = Shape(None, num_blocks=512)
OBJECT_TOKENS = 32
FOUND = sum((len(prompt) - 1) // OBJECT_TOKENS * OBJECT_TOKENS for prompt in PROMPTS if len(prompt) > 64)
"""Tokens in whole objects of the prompts that have enough of them to be worth a read (`min_pull_tokens`)."""

FAMILIES = {
    "qwen3": "all tokens are kept",
    "gemma3": "some layers keep a window of 24",
    "llama4": "some layers keep a chunk",
    "deepseek_v3": "latents",
    "gemma4": "wide layers' rows are several blocks",
    "qwen3_5": "delta nets' states",
    "nemotron_h": "Mamba's states",
}
WAYS = {
    "the same": (PLENTY, PLENTY),
    "by a prefill worker": (replace(PLENTY, transport="shm"), replace(PLENTY, transport="tcp")),
    "in FP8": (replace(PLENTY, kv_cache_dtype="fp8"), replace(PLENTY, kv_cache_dtype="fp8")),
    "2 ranks to 1": (replace(PLENTY, decode_ranks=2), PLENTY),
    "1 rank to 2 stages": (PLENTY, replace(PLENTY, decode_stages=2)),
}


def on_disk(path: Path, **more: Any) -> TiersConfig:
    disk = DiskTierConfig(path=str(path), bytes=2**30)
    return TiersConfig(host_bytes=2**22, disk=disk, object_tokens=OBJECT_TOKENS, write_share=1.0, **more)


async def answers(served: Served) -> list[list[int]]:
    return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS))


async def written(served: Served) -> None:
    """Return once nothing waits to be written."""
    await served.idle()
    tiers = [parts.deps.tiers for parts in served.fleet.parts.values()]
    async with asyncio.timeout(60):
        while any(one is not None and one.is_busy for one in tiers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def hit_tokens(served: Served, tier: str) -> int:
    workers = served.fleet.by_peer.values()
    return sum(one.hit_tokens for worker in workers for one in worker.stats().tiers if one.name == tier)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reads take their time: the machine may be busy, and computing such small prompts is quick."""
    monkeypatch.setattr(kv_tiers, "LEAST_WAIT_S", 30.0)


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    made: Path = write_checkpoint(seed=3, **FAMILY_SHAPES["qwen3"])
    return made


async def check_restart(folder: Path, path: Path, before: Shape, after: Shape) -> int:
    """Write with one shape, read with the other; return the tokens that were found."""
    expected = await asyncio.to_thread(of_one_worker, folder, answers, replace(before, transport=None, decode_ranks=1))
    async with serve(folder, replace(before, tiers=on_disk(path))) as served:
        assert await answers(served) == expected
        assert await answers(served) == expected, "the second use, which is written"
        await written(served)
    async with serve(folder, replace(after, tiers=on_disk(path))) as served:
        assert await answers(served) == expected, "read from the disk"
        await written(served)
        assert sum(one.errors + one.quarantined for one in served.fleet.stats("decode").tiers) == 0
        return hit_tokens(served, "disk")


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_kind_of_layers_is_found_again(family: str, write_checkpoint: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(seed=3, **FAMILY_SHAPES[family])
    assert await check_restart(folder, tmp_path, PLENTY, PLENTY) == FOUND


@pytest.mark.parametrize("way", WAYS)
async def test_a_restarted_worker_reads_its_disk(way: str, folder: Path, tmp_path: Path) -> None:
    assert await check_restart(folder, tmp_path, *WAYS[way]) == FOUND
