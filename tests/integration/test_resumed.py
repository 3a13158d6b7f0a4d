"""A decode worker dies amid answers whose prompts end around the borders of blocks: another one goes on from there."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.local_fleet import Shape, asking, die_at, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.model.checkpoint.config_file import load_model_config

NEW_TOKENS = 30
SHAPE = Shape("tcp", num_blocks=4096, num_decode=2)
FAMILIES = ["qwen3_5", "granite4", "lfm2", "gemma4", "llama4", "glm_moe_dsa"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [3, pytest.param(17, marks=pytest.mark.models)])
async def test_answers_of_a_worker_that_dies_go_on_elsewhere(family: str, step: int, write_checkpoint: Any) -> None:
    folder = write_checkpoint(seed=3, **FAMILY_SHAPES[family])
    block = load_model_config(folder).fitting_block_size(16, 4)
    lengths = tuple(rows * block + beyond for rows in (1, 2, 3, 4) for beyond in range(-2, 4))
    prompts = random_prompts(96, 1, lengths)

    ask = asking(prompts, NEW_TOKENS)
    expected = await asyncio.to_thread(of_one_worker, folder, ask, replace(SHAPE, transport=None, num_decode=1))
    async with serve(folder, SHAPE) as served:
        failed = die_at(served.fleet.engine("decode"), step)
        assert await ask(served) == expected
        assert failed
