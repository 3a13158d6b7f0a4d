"""States are sent, shared as prefixes, swapped out and damaged, and no token changes by it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, flip_a_bit, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.errors import ConfigError

NEW_TOKENS = 70
PROMPTS = random_prompts(96, 1, (1, 15, 16, 17, 64, 100, 300))
PLENTY = Shape(None, num_blocks=512)
SWAPPED: dict[str, Any] = {
    **{"num_blocks": 60, "swap_bytes": 2**22, "decode_step_tokens": 64, "prefill_step_tokens": 64},
    "decode": {"preemption": "swap", "swap_gib": 1.0},
}
RANKED = "tcp, 2 ranks to 1"
WAYS = {
    "swapped out": replace(PLENTY, **SWAPPED),
    "computed again": replace(PLENTY, num_blocks=60, decode_step_tokens=64, prefill_step_tokens=64),
    "tcp": replace(PLENTY, transport="tcp", prefill_step_tokens=129),
    "shm, swapped out": replace(PLENTY, transport="shm", **SWAPPED),
    "torch_distributed": replace(PLENTY, transport="torch_distributed"),
    RANKED: replace(PLENTY, transport="tcp", prefill_ranks=2),
}
# Each rank but the first of a worker is a process, which takes 4 s of a core to load torch.
MORE_WAYS = {
    "tcp, 1 rank to 4": replace(PLENTY, transport="tcp", decode_ranks=4),
    "shm, 4 ranks to 2": replace(PLENTY, transport="shm", prefill_ranks=4, decode_ranks=2),
    "tcp, 2 stages to 1": replace(PLENTY, transport="tcp", prefill_stages=2),
}


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    heads = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 8}
    made: Path = write_checkpoint(seed=3, **FAMILY_SHAPES["qwen3_5"] | heads)
    return made


async def answers(served: Served) -> list[list[int]]:
    return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return of_one_worker(folder, answers, PLENTY)


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.models) for way in MORE_WAYS)])
async def test_states_are_sent_swapped_and_found_again(way: str, folder: Path, expected: list[list[int]]) -> None:
    await check_way(way, folder, expected)


OTHERS = {"granite4": RANKED, "nemotron_h": "shm, swapped out", "lfm2": "tcp"}


@pytest.mark.parametrize("family", OTHERS)
async def test_states_of_other_kinds_are_sent_swapped_and_found_again(family: str, write_checkpoint: Any) -> None:
    folder = write_checkpoint(seed=3, **FAMILY_SHAPES[family])
    expected = await asyncio.to_thread(of_one_worker, folder, answers, PLENTY)
    await check_way(OTHERS[family], folder, expected)


async def check_way(way: str, folder: Path, expected: list[list[int]]) -> None:
    """Serve a model in a way, cold and warm, and compare its answers."""
    shape = {**WAYS, **MORE_WAYS}[way]
    async with serve(folder, shape) as served:
        assert all(info.layout.state_numbers for info in served.fleet.infos)
        assert await answers(served) == expected
        await served.idle()
        reader = "prefill" if shape.transport else "decode"
        hits = served.fleet.stats(reader).prefix_hits
        assert await answers(served) == expected, "with a warm prefix cache"
        await served.idle()
        stats, hits = served.fleet.stats("decode"), served.fleet.stats(reader).prefix_hits - hits
    assert hits >= 288 or shape.num_blocks < PLENTY.num_blocks, "the longest prompt's full blocks at least"
    assert stats.transfers_failed == 0
    assert stats.transfers_done == (2 * len(PROMPTS) if shape.transport else 0)
    assert (stats.swaps > 0) == ("swapped out" in way)


async def test_a_prompt_that_shares_a_beginning_computes_the_rest_alone(folder: Path) -> None:
    first, second = PROMPTS[-1], [*PROMPTS[-1][:288], *PROMPTS[-2]]
    async with serve(folder, PLENTY) as served:
        await served.generate(first, NEW_TOKENS, GREEDY)
        before = served.fleet.stats("decode").computed_tokens
        answer = await served.generate(second, NEW_TOKENS, GREEDY)
        computed = served.fleet.stats("decode").computed_tokens - before
    async with serve(folder, PLENTY) as served:
        assert await served.generate(second, NEW_TOKENS, GREEDY) == answer
    assert computed == len(PROMPTS[-2])


@pytest.mark.parametrize("shape", ["qwen3_5", "granite4"])
async def test_of_4096_shared_tokens_less_than_a_block_is_computed_again(shape: str, write_checkpoint: Any) -> None:
    folder = write_checkpoint(seed=3, **FAMILY_SHAPES[shape] | {"max_position_embeddings": 8192})
    shared, first, second = random_prompts(96, 2, (4096, 33, 50))
    async with serve(folder, replace(PLENTY, num_blocks=4096)) as served:
        await served.generate(shared + first, 4, GREEDY)
        stats = served.fleet.stats
        before, block = stats("decode").computed_tokens, served.fleet.infos[0].layout.block_size
        answer = await served.generate(shared + second, 4, GREEDY)
        computed = stats("decode").computed_tokens - before
    assert computed < len(second) + block + len(answer)


async def test_states_are_not_encoded(folder: Path) -> None:
    with pytest.raises(ConfigError, match="encoding: int8 is for keys and values"):
        async with serve(folder, replace(PLENTY, transport="tcp", transfers=TransferConfig(encoding="int8"))):
            pass


@pytest.mark.parametrize("way", ["tcp", pytest.param(RANKED, marks=pytest.mark.models)])
async def test_a_flipped_bit_of_a_state_is_found_by_its_digest(
    way: str, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped = flip_a_bit(monkeypatch)
    async with serve(folder, WAYS[way]) as served:
        assert await answers(served) == expected
        await served.idle()
        stats = served.fleet.stats("decode")
    assert flipped
    assert stats.transfer_digest_failures == 1
