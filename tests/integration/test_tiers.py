"""KV that outlives its worker: prompts whose KV comes from storage give the tokens of a worker that computes them."""

import asyncio
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, asking, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.kvtiers import config, kv_tiers
from twostroke.kvtiers.config import DiskTierConfig, SharedTierConfig, TiersConfig
from twostroke.protocol.stats import TierStats
from twostroke.worker.tier_transfers import TierTransfers

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


answers = asking(PROMPTS, NEW_TOKENS)


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
    monkeypatch.setattr(kv_tiers, "MIN_WAIT_S", 30.0)
    monkeypatch.setattr(TierTransfers, "computing_s", lambda *_: math.inf)


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


async def test_a_worker_finds_what_another_wrote_into_a_shared_directory(folder: Path, tmp_path: Path) -> None:
    expected = await asyncio.to_thread(of_one_worker, folder, answers, PLENTY)
    shared = TiersConfig(
        shared=SharedTierConfig(path=str(tmp_path)), object_tokens=OBJECT_TOKENS, host_bytes=2**22, write_share=1.0
    )
    async with serve(folder, replace(PLENTY, tiers=shared)) as served:
        for _ in range(2):
            assert await answers(served) == expected
        await written(served)
        async with serve(folder, replace(PLENTY, tiers=shared)) as other:
            assert await answers(other) == expected
            assert hit_tokens(other, "shared") == FOUND
            await written(other)


@pytest.mark.parametrize("harm", ["flip", "truncate", "swap", "delete", "another key"])
async def test_an_object_that_is_harmed_is_computed(harm: str, folder: Path, tmp_path: Path) -> None:
    expected = await asyncio.to_thread(of_one_worker, folder, answers, PLENTY)
    keys = [tmp_path / "key", tmp_path / "another"]
    for key in keys:
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
    disk = tmp_path / "disk"
    tiers = on_disk(disk, key_file=str(keys[0]))
    async with serve(folder, replace(PLENTY, tiers=tiers)) as served:
        for _ in range(2):
            assert await answers(served) == expected
        await written(served)
    paths = sorted(disk.rglob("*.kv"))
    assert len(paths) > 10
    contents = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        data = contents[number]
        match harm:
            case "flip":
                place = (number + 1) * len(data) // (len(paths) + 1)
                path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            case "truncate":
                path.write_bytes(data[: len(data) * number // len(paths)])
            case "swap":
                path.write_bytes(contents[number - 1])
            case "delete":
                path.unlink()
    if harm == "another key":
        tiers = on_disk(disk, key_file=str(keys[1]))
    async with serve(folder, replace(PLENTY, tiers=tiers)) as served:
        assert await answers(served) == expected
        await written(served)
        stats = served.fleet.stats("decode")
    assert sum(tier.hit_tokens for tier in stats.tiers) == 0
    assert stats.aborted_requests == 0


def test_prompts_of_four_caches_are_found_on_a_disk_of_a_small_quota(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "PASSING_BYTES", 2**18)
    draw = random.Random(5)
    different = random_prompts(96, 5, (250,) * 12)
    prompts = [draw.choice(different) for _ in range(40)]

    async def ask(served: Served) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            answers.append(await served.generate(prompt, 2, GREEDY))
            await written(served)
        return answers

    async def run() -> TierStats:
        async with serve(folder, replace(PLENTY, num_blocks=48, tiers=tiers)) as served:
            assert await ask(served) == expected
            return served.fleet.stats("decode").tiers[1]

    expected = of_one_worker(folder, ask, PLENTY)
    disk = DiskTierConfig(path=str(tmp_path), bytes=2**20)  # half of the prompts, of which memory holds one
    tiers = on_disk(tmp_path).model_copy(update={"disk": disk, "host_bytes": 2**18})
    found = asyncio.run(run())
    assert 0 < found.num_bytes <= found.max_bytes
    assert found.hit_tokens > 0
    assert found.evicted > 0
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= found.max_bytes
