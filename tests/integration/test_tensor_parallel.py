"""Workers of several ranks, each rank but 0 a process of its own: the same tokens as one rank draws, in fp32.

Sizes differ between prefill and decode, so KV travels over lanes of every kind: heads shared out, gathered and copied.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.requests import SamplingParams
from tests.integration.local_fleet import Served, Shape, serve

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 96  # of the checkpoints that tests write
LENGTHS = (1, 15, 16, 17, 100, 200)
NEW_TOKENS = 24
PROMPTS = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
SHAPE = Shape("tcp", num_blocks=256, prefill_step_tokens=129)

WAYS = {
    "2 to 1": replace(SHAPE, prefill_ranks=2),
    "1 to 2, through shared memory": replace(SHAPE, transport="shm", decode_ranks=2),
    "4 to 2, unequal blocks": replace(SHAPE, prefill_ranks=4, decode_ranks=2, decode_block_size=8),
    "2 to 4": replace(SHAPE, prefill_ranks=2, decode_ranks=4),
}


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    """A model with fewer KV heads than the most ranks here."""
    return write_checkpoint(seed=3, num_attention_heads=8, num_key_value_heads=2)


async def answers(served: Served) -> list[list[int]]:
    """To all prompts at once."""
    return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What a single worker of one rank draws."""

    async def ask() -> list[list[int]]:
        async with serve(folder, Shape(None, num_blocks=256)) as served:
            return await answers(served)

    return asyncio.run(ask())


@pytest.mark.parametrize("way", WAYS)
async def test_several_ranks_draw_the_tokens_that_one_draws(way: str, folder: Path, expected: list[list[int]]) -> None:
    async with serve(folder, WAYS[way]) as served:
        assert await answers(served) == expected
        await served.idle()
        hits = served.fleet.stats("prefill").prefix_hits
        assert await answers(served) == expected, "with a warm prefix cache"
        await served.idle()
        assert served.fleet.stats("prefill").prefix_hits > hits
        stats = served.fleet.stats("decode")
        assert (stats.transfers_done, stats.transfers_failed) == (2 * len(PROMPTS), 0)
        assert served.fleet.stats("prefill").transfers_failed == 0
