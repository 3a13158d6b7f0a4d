"""A DeepSeek-like model's rows of latents on their way: sent, shared, swapped out and damaged. No token changes by it.

Its experts are counted on the way, and its workers know what part of them a token takes.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, flip_a_bit, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts

NEW_TOKENS = 24
PROMPTS = random_prompts(96, 1, (1, 15, 16, 17, 64, 100, 300))
PLENTY = Shape(None, num_blocks=256)
RANKED = "tcp, 2 ranks to 1"
WAYS = {
    "swapped out": replace(
        PLENTY, num_blocks=40, swap_bytes=2**20, decode={"preemption": "swap", "swap_gib": 1.0}, decode_step_tokens=64
    ),
    "tcp, unequal blocks": replace(PLENTY, transport="tcp", decode_block_size=8, prefill_step_tokens=129),
    "shm": replace(PLENTY, transport="shm"),
    RANKED: replace(PLENTY, transport="tcp", prefill_ranks=2),
    "tcp, 1 rank to 2 of whole experts": replace(PLENTY, transport="tcp", decode_ranks=2, whole_experts="decode"),
    "shm, 1 rank to 2 that share contexts, swapped out": replace(
        PLENTY,
        transport="shm",
        num_blocks=40,
        decode_ranks=2,
        whole_experts="decode",
        shares_context=("decode",),
        swap_bytes=2**20,
        decode={"preemption": "swap", "swap_gib": 1.0},
    ),
}
# Each rank but the first of a worker is a process, which takes 4 s of a core to load torch.
MORE_WAYS = {
    "tcp, 1 rank to 2": replace(PLENTY, transport="tcp", decode_ranks=2),
    "tcp, 2 ranks to 4": replace(PLENTY, transport="tcp", prefill_ranks=2, decode_ranks=4),
    "shm, 4 ranks to 1": replace(PLENTY, transport="shm", prefill_ranks=4),
    "shm, 4 ranks of whole experts to 1": replace(PLENTY, transport="shm", prefill_ranks=4, whole_experts="prefill"),
    "tcp, 2 ranks to 4 of whole experts": replace(
        PLENTY, transport="tcp", prefill_ranks=2, decode_ranks=4, whole_experts="decode"
    ),
    "tcp, 2 ranks that share contexts to 4": replace(
        PLENTY, transport="tcp", prefill_ranks=2, decode_ranks=4, shares_context=("prefill", "decode")
    ),
    "tcp, 4 ranks that share contexts to 2": replace(
        PLENTY, transport="tcp", prefill_ranks=4, decode_ranks=2, shares_context=("prefill",)
    ),
    "tcp, 4 ranks of whole experts to 2": replace(
        PLENTY, transport="tcp", prefill_ranks=4, decode_ranks=2, whole_experts="prefill"
    ),
}


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    made: Path = write_checkpoint(seed=3, **FAMILY_SHAPES["deepseek_v3_experts"])
    return made


async def answers(served: Served) -> list[list[int]]:
    return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return of_one_worker(folder, answers, PLENTY)


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.models) for way in MORE_WAYS)])
async def test_latents_are_sent_swapped_and_found_again(way: str, folder: Path, expected: list[list[int]]) -> None:
    shape = {**WAYS, **MORE_WAYS}[way]
    async with serve(folder, shape) as served:
        assert {info.layout.kinds for info in served.fleet.infos} == {1}
        assert await answers(served) == expected
        await served.idle()
        hits = served.fleet.stats("decode").prefix_hits
        assert await answers(served) == expected, "with a warm prefix cache"
        await served.idle()
        stats = served.fleet.stats("decode")
        dense, *routed = stats.expert_skews
        infos = served.fleet.infos
        shards = [parts.rank.loaded.parallel.shard for parts in served.fleet.parts.values()]
        parts = [parts.deps for parts in served.fleet.parts.values()]
    assert sum(shard.has_whole_experts for shard in shards) == (shape.whole_experts is not None)
    assert {info.role for info in infos if info.layout.context_ranks > 1} == set(shape.shares_context)
    assert stats.prefix_hits > hits
    assert stats.transfers_failed == 0
    assert stats.transfers_done == (2 * len(PROMPTS) if shape.transport else 0)
    assert (stats.swaps > 0) == ("swapped out" in way)
    assert dense == 0
    assert all(1 < skew < 8 / 3 + 1e-9 for skew in routed), "of eight experts each token takes three"
    assert {one.expert_share for one in parts} == {3 / 8}


@pytest.fixture(scope="module")
def indexed(write_checkpoint: Any) -> tuple[Path, list[list[int]]]:
    """A model with an index, and its answers."""
    made: Path = write_checkpoint(seed=3, **FAMILY_SHAPES["glm_moe_dsa"])
    return made, of_one_worker(made, answers, PLENTY)


@pytest.mark.parametrize("way", ["swapped out", "tcp, unequal blocks", pytest.param(RANKED, marks=pytest.mark.models)])
async def test_keys_of_an_index_travel_with_latents(way: str, indexed: tuple[Path, list[list[int]]]) -> None:
    folder, without_transfers = indexed
    async with serve(folder, WAYS[way]) as served:
        assert await answers(served) == without_transfers
        await served.idle()
        hits = served.fleet.stats("decode").prefix_hits
        assert await answers(served) == without_transfers, "with a warm prefix cache"
        await served.idle()
        stats = served.fleet.stats("decode")
    assert stats.prefix_hits > hits
    assert stats.transfers_failed == 0
    assert (stats.swaps > 0) == ("swapped out" in way)


@pytest.mark.parametrize("way", ["tcp, unequal blocks", pytest.param(RANKED, marks=pytest.mark.models)])
async def test_a_flipped_bit_of_a_latent_is_found_by_its_digest(
    way: str, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped = flip_a_bit(monkeypatch)
    async with serve(folder, WAYS[way]) as served:
        assert await answers(served) == expected
        await served.idle()
        stats = served.fleet.stats("decode")
    (block_bytes,) = flipped
    assert block_bytes >= 8 * (32 + 8) * 4, "a block of latents with what of their keys turns, in fp32"
    assert stats.transfer_digest_failures == 1
    assert stats.transfers_failed >= 1
