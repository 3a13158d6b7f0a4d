"""KV in FP8 from the write to the last token, by every way: the tokens of plain torch over a cache of such numbers."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.local_fleet import GREEDY, VOCAB, Served, Shape, serve
from tests.kernels.paged_cases import ReferenceBackend
from tests.model.architectures.test_conformance import random_prompts
from tests.model.conftest import make_decoder
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.protocol.kv_layout import FP8

PROMPTS = random_prompts(VOCAB, 1, (1, 15, 16, 17, 64, 100, 300))
NEW_TOKENS = 24
IN_FP8 = Shape(None, kv_cache_dtype="fp8", num_blocks=256)
WAYS = {
    "aggregated, small chunks": replace(IN_FP8, decode_step_tokens=37),
    "swapped out": replace(
        IN_FP8, num_blocks=40, swap_bytes=2**20, decode={"preemption": "swap", "swap_gib": 1.0}, decode_step_tokens=64
    ),
    "tcp, unequal blocks": replace(IN_FP8, transport="tcp", decode_block_size=8, prefill_step_tokens=129),
    "shm": replace(IN_FP8, transport="shm"),
    "gloo": replace(IN_FP8, transport="torch_distributed"),
    "tcp, 2 ranks to 1": replace(IN_FP8, transport="tcp", prefill_ranks=2),
}


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    made: Path = write_checkpoint(seed=3, num_key_value_heads=2)
    return made


def by_reference(folder: Path, generate: Any, kv_dtype: torch.dtype | None) -> list[list[int]]:
    decoder, cache = make_decoder(folder, ReferenceBackend(), num_blocks=256, block_size=16, kv_dtype=kv_dtype)
    runner = ModelRunner(decoder, Sampler(VOCAB), cache, 1024)
    answers: list[list[int]] = generate(runner, PROMPTS, NEW_TOKENS, chunk=300, block_size=16)
    return answers


@pytest.fixture(scope="module")
def expected(folder: Path, generate: Any) -> list[list[int]]:
    answers = by_reference(folder, generate, torch.float8_e4m3fn)
    assert answers != by_reference(folder, generate, None), "else nothing is shown"
    return answers


async def answers(served: Served) -> list[list[int]]:
    return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS))


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.models if "ranks" in way else []) for way in WAYS])
async def test_every_way_draws_the_references_tokens(way: str, folder: Path, expected: list[list[int]]) -> None:
    async with serve(folder, WAYS[way]) as served:
        assert {info.layout.dtype for info in served.fleet.infos} == {FP8}
        assert await answers(served) == expected
        await served.idle()
        assert await answers(served) == expected, "with a warm prefix cache"
        await served.idle()
        stats = served.fleet.stats("decode")
    assert stats.transfers_failed == 0
    assert stats.transfers_done == (2 * len(PROMPTS) if WAYS[way].transport else 0)
    assert (stats.swaps > 0) == (way == "swapped out")
    assert stats.prefix_hits > 0
