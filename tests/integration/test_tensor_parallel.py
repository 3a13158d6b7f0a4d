"""Workers of several ranks, each rank but 0 a process of its own: the same tokens as one rank draws, in fp32.

Sizes differ between prefill and decode, so KV travels over lanes of every kind: heads shared out, gathered and copied.
"""

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import HOST, SECRET, Served, Shape, serve, worker_settings
from twostroke.cluster.deployments.worker_parts import load_parts
from twostroke.cluster.ranks.led_ranks import LedRanks, RankOrder
from twostroke.cluster.ranks.rank_process import ProcessRanks, start_processes
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Peer, SamplingParams

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


async def test_a_killed_rank_is_its_workers_end_and_the_request_is_answered_elsewhere(
    folder: Path, expected: list[list[int]]
) -> None:
    async with serve(folder, replace(SHAPE, prefill_ranks=2, prefill_step_tokens=32)) as served, asyncio.timeout(60):
        worker = served.fleet.worker("prefill")
        (parts,) = served.fleet.parts.values()
        assert parts.led is not None
        assert isinstance(parts.led.processes, ProcessRanks)
        (process,) = parts.led.processes.processes
        step, num_steps = worker._engine.step, 0

        async def kill_and_step(*args: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                process.kill()
            return await step(*args)

        worker._engine.step = kill_and_step  # type: ignore[method-assign]
        assert await served.generate(PROMPTS[-1], NEW_TOKENS, GREEDY) == expected[-1]
        with pytest.raises(WorkerLost, match="rank 1"):
            worker.check_health()
        await served.idle()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_ranks_that_still_load_end_when_rank_0_hangs_up(folder: Path) -> None:
    settings = worker_settings(folder, SHAPE, block_size=16, ranks=2)
    led = await LedRanks.start(
        settings, Peer("w", 1), TcpNetwork(SECRET), SECRET, host=HOST, start_ranks=start_processes
    )
    try:
        async with asyncio.timeout(60):
            while not led.connections._connections:  # noqa: ASYNC110  # nobody else wants to know
                await asyncio.sleep(0.01)
    finally:
        await led.close()
    assert isinstance(led.processes, ProcessRanks)
    assert [process.returncode for process in led.processes.processes] == [1], (
        "it left by itself, out of a group that never formed"
    )


async def test_a_worker_whose_rank_never_comes_does_not_start_and_does_not_hang(folder: Path) -> None:
    class Nobody:
        async def close(self) -> None:
            """There is no process."""

    async def start_nobody(orders: Sequence[RankOrder], on_ended: Callable[[str], None]) -> Nobody:
        asyncio.get_running_loop().call_later(1.0, on_ended, "rank 1 has ended with code 1")
        return Nobody()

    settings = worker_settings(folder, SHAPE, block_size=16, ranks=2)
    network, peer = TcpNetwork(SECRET), Peer("w", 1)
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match="can't start: rank 1 has ended with code 1"):
            await load_parts(settings, peer, network, SECRET, host=HOST, start_ranks=start_nobody)
