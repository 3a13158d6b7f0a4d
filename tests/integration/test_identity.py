"""Greedy output of the whole path equals transformers' `generate` in fp32: aggregated, over tcp, over gloo.

20 prompts of 1 to 700 tokens at once, 64 new tokens each; a second round finds them in the prefix cache. The random
models have no near-tie between two tokens; the trained one may have, and is compared up to it.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import Served, Shape, serve
from tests.model.test_conformance import (
    NEW_TOKENS,
    SEEDS,
    SHAPES,
    lengths_before_near_ties,
    random_prompts,
    reference,
)
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.protocol.requests import SamplingParams
from twostroke.protocol.stats import Role

GREEDY = SamplingParams(temperature=0.0)

WAYS = {
    "aggregated": Shape(None, decode_step_tokens=256),
    "aggregated, small chunks and blocks": Shape(None, block_size=5, decode_step_tokens=37),
    "tcp": Shape("tcp"),
    "tcp, small chunks, unequal blocks": Shape("tcp", block_size=8, decode_block_size=12, prefill_step_tokens=129),
    "shm": Shape("shm"),
    "shm, unequal blocks": Shape("shm", block_size=32, decode_block_size=8, prefill_step_tokens=129),
    "gloo": Shape("torch_distributed"),
    "gloo, small chunks, large blocks": Shape("torch_distributed", block_size=64, prefill_step_tokens=48),
}


@dataclass(frozen=True)
class Case:
    """What is asked, and what is right."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    lengths: list[int]  # tokens of each answer that can be compared

    def is_right(self, answers: list[list[int]]) -> bool:
        """Whether the answers are complete, and equal wherever they can be compared."""
        complete = all(len(answer) == NEW_TOKENS for answer in answers)
        rows = zip(answers, self.expected, self.lengths, strict=True)
        return complete and all(answer[:length] == row[:length] for answer, row, length in rows)


@pytest.fixture(scope="module", params=["bundled", "mha", "gqa", "mqa", "tied", "llama3_rope", "head_dim_40"])
def case(request: pytest.FixtureRequest, write_checkpoint: Any) -> Case:
    """A model, prompts, and what transformers makes of them."""
    if request.param == "bundled":
        folder = BUNDLED_MODEL_DIR
    else:
        folder = write_checkpoint(seed=SEEDS.get(request.param, 0), **SHAPES[request.param])
    prompts = random_prompts(load_model_config(folder).vocab_size, seed=1)
    expected, margins = reference(folder, prompts)
    lengths = lengths_before_near_ties(margins)
    assert sum(lengths) > (0.9 if request.param == "bundled" else 1 - 1e-9) * len(prompts) * NEW_TOKENS
    return Case(folder, prompts, expected, lengths)


@pytest.mark.parametrize("way", WAYS)
async def test_greedy_output_of_the_whole_path_equals_transformers(way: str, case: Case) -> None:
    async with serve(case.folder, WAYS[way]) as served:

        async def answers() -> list[list[int]]:
            return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in case.prompts))

        assert case.is_right(await answers())
        await served.idle()
        assert_all_arrived(served, way)
        before = {role: served.fleet.stats(role).prefix_hits for role in roles(way)}
        assert case.is_right(await answers()), "with a warm prefix cache"
        assert all(served.fleet.stats(role).prefix_hits > before[role] for role in roles(way))
        await served.idle()
        assert_all_arrived(served, way)


def roles(way: str) -> list[Role]:
    return ["decode"] if WAYS[way].transport is None else ["prefill", "decode"]


def assert_all_arrived(served: Served, way: str) -> None:
    """No transfer failed, so the answers weren't merely computed again by the decode worker."""
    if WAYS[way].transport is None:
        return
    stats = served.fleet.stats("decode")
    assert stats.transfers_failed == 0
    assert stats.transfers_done >= 20
