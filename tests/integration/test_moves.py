"""Streams that move to another worker while they are written keep their tokens, each once. All of it is real."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, of_one_worker, serve
from tests.integration.test_transfers import some_tokens
from twostroke.protocol.requests import SamplingParams
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.observe.stages import SequenceStages

ANSWER = 600
PROMPTS = [some_tokens(length, seed=length) for length in (3, 16, 150, 300)]
DRAWN = msgspec.structs.replace(GREEDY, temperature=0.8, seed=5, repetition_penalty=1.1, frequency_penalty=0.2)
LOGGED = msgspec.structs.replace(GREEDY, logprobs=3)
SAMPLINGS: list[SamplingParams] = [GREEDY, DRAWN, LOGGED, DRAWN]
SHAPE = Shape(
    "tcp", num_prefill=1, num_decode=2, num_blocks=256, pipeline=PipelineConfig(roles="fixed", decodes_alone=False)
)


def stages_of_all() -> list[SequenceStages]:
    return [SequenceStages(time.monotonic()) for _ in PROMPTS]


async def answers(served: Served, stages: list[SequenceStages] | None = None) -> list[list[int]]:
    stages = stages or stages_of_all()
    calls = [
        served.generate(prompt, ANSWER, how, one) for prompt, how, one in zip(PROMPTS, SAMPLINGS, stages, strict=True)
    ]
    return list(await asyncio.gather(*calls))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The right answers, of a single worker."""
    return of_one_worker(folder, answers)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_streams_leave_a_worker_that_drains_and_lose_nothing(
    transport: str, folder: Path, expected: list[list[int]]
) -> None:
    async with serve(folder, replace(SHAPE, transport=transport)) as served:
        stages = stages_of_all()
        under_way = asyncio.create_task(answers(served, stages))
        first = served.fleet.worker("decode", 0)
        while not all(one.num_output_tokens > 20 for one in stages):  # noqa: ASYNC110  (no event says so)
            await asyncio.sleep(0.005)
        assert first.stats().num_decoding, "streams are spread over both"
        first.leave()
        assert await under_way == expected
        assert first.stats().num_decoding == 0
        moved = [one for one in stages if one.attempts > 1]
        assert moved
        assert all(one.tries[0].error is None for one in moved)
        pulled = served.fleet.stats("decode", 1).pulled_tokens
        assert pulled > 0
        await served.idle()
