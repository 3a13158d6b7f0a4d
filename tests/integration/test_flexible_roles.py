"""Prefill workers that write answers: the same tokens, beside prompts and streams of other roles. Real engines."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, of_one_worker, serve
from tests.integration.test_transfers import some_tokens
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.request_state import Path as WorkerPath
from twostroke.router.routing.chooser import PathChooser

SHAPE = Shape("tcp", num_blocks=256, pipeline=PipelineConfig(pulls=False))
DRAWN = msgspec.structs.replace(GREEDY, temperature=0.8, seed=5, repetition_penalty=1.1)


async def answers(served: Served) -> list[list[int]]:
    """Answers to prompts of several chunks and of one token, side by side."""
    prompts = [some_tokens(length, seed=length) for length in (1, 15, 16, 200, 333)]
    samplings = [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY]
    calls = [served.generate(prompt, 40, how) for prompt, how in zip(prompts, samplings, strict=True)]
    return list(await asyncio.gather(*calls))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The right answers, of a single worker."""
    return of_one_worker(folder, answers)


async def test_a_prefill_worker_alone_writes_the_tokens_of_a_decode_worker(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(folder, replace(SHAPE, prefill_step_tokens=64)) as served:
        choose = PathChooser.choose

        def alone(chooser: PathChooser, *args: object, **options: object) -> WorkerPath:
            path = choose(chooser, *args, **options)  # type: ignore[arg-type]
            prefill = next(info for info in served.fleet.workers() if info.role == "prefill")
            return msgspec.structs.replace(path, prefill=None, decode=prefill)

        monkeypatch.setattr(PathChooser, "choose", alone)
        assert await answers(served) == expected
        assert served.fleet.stats("decode").steps == 0
        assert served.fleet.stats("prefill").generated_tokens == 200
        await served.idle()


async def test_pairs_and_a_prefill_worker_alone_serve_side_by_side(folder: Path, expected: list[list[int]]) -> None:
    async with serve(folder, replace(SHAPE, prefill_step_tokens=64, decode={"max_batch": 2})) as served:
        await served.generate(some_tokens(100, seed=1), 3, GREEDY)  # so that costs are known
        for _ in range(3):
            assert await answers(served) == expected
        await served.idle()
