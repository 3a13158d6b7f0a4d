"""A decode worker dies amid answers whose prompts end around the borders of blocks: another one goes on from there."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.protocol.errors import WorkerLost

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

    async def answers(served: Served) -> list[list[int]]:
        return await asyncio.gather(*(served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in prompts))

    expected = await asyncio.to_thread(of_one_worker, folder, answers, replace(SHAPE, transport=None, num_decode=1))
    async with serve(folder, SHAPE) as served:
        worker = served.fleet.worker("decode")
        run, num_steps = worker._deps.engine.step, 0

        async def dies(*args: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps >= step:
                raise WorkerLost("killed")
            return await run(*args)

        worker._deps.engine.step = dies  # type: ignore[method-assign]
        assert await answers(served) == expected
        assert num_steps >= step
