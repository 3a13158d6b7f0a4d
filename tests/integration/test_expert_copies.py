"""Hot experts are copied to other ranks' processes under running streams, and no token changes by it."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import Served, Shape, asking, of_one_worker, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES
from twostroke.model.parallel import experts as expert_slots
from twostroke.model.parallel.ranked_engine import TensorParallelEngine
from twostroke.protocol.errors import WorkerLost

NEW_TOKENS = 24
PROMPTS = [[7] * 20, [7] * 50, [11, 7] * 16, [7, 7, 5] * 12]
COPYING = Shape("tcp", num_blocks=256, decode_ranks=2, whole_experts="decode", redundant_experts=2)


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    made: Path = write_checkpoint(seed=3, **FAMILY_SHAPES["qwen3_moe"])
    return made


answers = asking(PROMPTS, NEW_TOKENS)


async def answers_for_ever(served: Served) -> None:
    while True:
        await answers(served)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return of_one_worker(folder, answers, replace(COPYING, transport=None, decode_ranks=1, redundant_experts=0))


@pytest.fixture(autouse=True)
def often_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rank 0 of this process decide often and move copies in pieces."""
    monkeypatch.setattr("twostroke.worker.experts.EXPERT_EXAMINE_S", 0.05)
    monkeypatch.setitem(expert_slots.STEP_BYTES, "cpu", 2000)


def engine_of(served: Served) -> TensorParallelEngine:
    engine = served.fleet.engine("decode")
    assert isinstance(engine, TensorParallelEngine)
    return engine


async def test_streams_go_on_while_experts_move(folder: Path, expected: list[list[int]]) -> None:
    async with serve(folder, COPYING) as served, asyncio.timeout(120):
        while not (stats := served.fleet.stats("decode")).expert_copies:
            assert await answers(served) == expected
        assert await answers(served) == expected
        assert len(stats.expert_imbalances) == len(stats.expert_skews)
        await served.idle()


async def test_a_rank_killed_in_the_middle_of_a_move_is_its_workers_end(
    folder: Path, expected: list[list[int]]
) -> None:
    async with serve(folder, replace(COPYING, num_decode=1)) as served, asyncio.timeout(120):
        engine = engine_of(served)
        (parts,) = [parts for parts in served.fleet.parts.values() if parts.led is not None]
        assert engine._rebalancing is not None
        assert parts.led is not None
        (process,) = parts.led.own.processes
        arrange: Callable[..., Any] = engine._rebalancing.arrange

        async def kill_and_arrange(order: Any) -> None:
            if order.moves:
                process.kill()
            await arrange(order)

        engine._rebalancing = replace(engine._rebalancing, arrange=kill_and_arrange)
        asking = asyncio.create_task(answers_for_ever(served))
        await asyncio.wait({asking})
        assert asking.exception() is not None
        with pytest.raises(WorkerLost, match="rank 1"):
            served.fleet.worker("decode").check_health()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
