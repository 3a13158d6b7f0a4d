"""The same tokens whatever way they take: equal to transformers' `generate`, run ahead, swapped out, on several ranks.

Against transformers: 20 prompts of 1 to 700 tokens at once, 32 new tokens each, in fp32; a second round finds them in
the prefix cache. The random models have no near-tie between two tokens; the trained one may have, and is compared up
to it. Ranks of one worker are processes of their own but for rank 0. KV between workers of other numbers of ranks:
test_kinds_of_kv.py.
"""

import asyncio
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import (
    GREEDY,
    HOST,
    SECRET,
    VOCAB,
    Served,
    Shape,
    asking,
    before_steps,
    of_one_worker,
    serve,
    worker_settings,
)
from tests.model.architectures.test_conformance import (
    NEW_TOKENS,
    SEEDS,
    SHAPES,
    lengths_before_near_ties,
    random_prompts,
    reference,
)
from twostroke.cluster.ranks.led_ranks import LedRanks
from twostroke.cluster.ranks.worker_parts import load_parts
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Peer, SamplingParams
from twostroke.protocol.stats import Role

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
MODELS = ("bundled", "mha", "gqa", "mqa", "tied", "llama3_rope", "head_dim_40")
THAT_TRAVEL = ("bundled", "mqa", "head_dim_40")  # a transport sees of a model how large its blocks are, and no more
# What each model draws is test_conformance.py's; a plain way, whose blocks and chunks are all alike, is the other's
# easier half. So one model goes each way here, and all of them in `make test-models`.
FIRST = {
    "aggregated, small chunks and blocks": "gqa",
    "tcp, small chunks, unequal blocks": "mqa",
    "shm, unequal blocks": "head_dim_40",
    "gloo, small chunks, large blocks": "mqa",
}


def models_of(way: str) -> tuple[str, ...]:
    if "," not in way:
        return ("gqa",)
    return MODELS if WAYS[way].transport is None else THAT_TRAVEL


CASES = [
    pytest.param(model, way, marks=[] if FIRST.get(way) == model else pytest.mark.models)
    for way in WAYS
    for model in models_of(way)
]


@dataclass(frozen=True)
class Case:
    """Requests, and their right answers."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    lengths: list[int]  # tokens of each answer that can be compared

    def is_right(self, answers: list[list[int]]) -> bool:
        """Return whether the answers are complete, and equal wherever they can be compared."""
        complete = all(len(answer) == NEW_TOKENS for answer in answers)
        rows = zip(answers, self.expected, self.lengths, strict=True)
        return complete and all(answer[:length] == row[:length] for answer, row, length in rows)


@pytest.fixture(scope="module")
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


@pytest.mark.parametrize(("case", "way"), CASES, indirect=["case"])
async def test_greedy_output_of_the_whole_path_equals_transformers(case: Case, way: str) -> None:
    async with serve(case.folder, WAYS[way]) as served:
        ask = asking(case.prompts, NEW_TOKENS)
        assert case.is_right(await ask(served))
        await served.idle()
        assert_all_arrived(served, way)
        before = {role: served.fleet.stats(role).prefix_hits for role in roles(way)}
        assert case.is_right(await ask(served)), "with a warm prefix cache"
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


PLENTY = Shape(None, num_blocks=256, block_size=4, decode_step_tokens=64, decode={"run_ahead": False})
TIGHT = replace(PLENTY, num_blocks=24)
MIB = 2**20

PRESSURES = {
    "running ahead": replace(PLENTY, decode={}),
    "recompute": replace(TIGHT, decode={"preemption": "recompute"}),
    "swap": replace(TIGHT, swap_bytes=MIB, decode={"preemption": "swap", "swap_gib": 1.0}),
    "swap, not ahead": replace(
        TIGHT, swap_bytes=MIB, decode={"preemption": "swap", "swap_gib": 1.0, "run_ahead": False}
    ),
    "auto": replace(TIGHT, swap_bytes=MIB, decode={"preemption": "auto", "swap_gib": 1.0}),
    "swap on two ranks": replace(TIGHT, swap_bytes=MIB, decode_ranks=2, decode={"preemption": "swap", "swap_gib": 1.0}),
}


async def kinds_of_answers(served: Served) -> list[list[int]]:
    """Return the answers to a dozen requests of all kinds at once."""
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9, top_k=20),
        SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.5),
    )
    prompts = [[(7 * i + j) % 90 + 1 for j in range(5 + 2 * i)] for i in range(12)]
    return await asyncio.gather(
        *(served.generate(prompt, 30, kinds[i % len(kinds)]) for i, prompt in enumerate(prompts))
    )


@pytest.fixture(scope="module")
def unpressed(folder: Path) -> list[list[int]]:
    """The answers of a worker that has room for all, and schedules nothing ahead."""
    return of_one_worker(folder, kinds_of_answers, PLENTY)


@pytest.mark.parametrize("pressure", PRESSURES)
async def test_running_ahead_and_giving_way_change_no_token(
    pressure: str, folder: Path, unpressed: list[list[int]]
) -> None:
    async with serve(folder, PRESSURES[pressure]) as served:
        assert await kinds_of_answers(served) == unpressed
        await served.idle()
        stats = served.fleet.stats("decode")
    assert (stats.preemptions > 0) == (pressure != "running ahead")
    assert (stats.swaps > 0) == (stats.swap_bytes > 0) == (PRESSURES[pressure].swap_bytes > 0)
    assert stats.swapped_blocks == 0


LENGTHS = (1, 15, 16, 17, 100, 200)
MORE_TOKENS = 24
PROMPTS = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
RANKED = Shape("tcp", num_blocks=256, prefill_step_tokens=129)

ranked_answers = asking(PROMPTS, MORE_TOKENS)


@pytest.fixture(scope="module")
def of_one_rank(folder: Path) -> list[list[int]]:
    """Return what a single worker of one rank draws."""
    return of_one_worker(folder, ranked_answers)


async def test_a_killed_rank_is_its_workers_end_and_the_request_is_answered_elsewhere(
    folder: Path, of_one_rank: list[list[int]]
) -> None:
    async with serve(folder, replace(RANKED, prefill_ranks=2, prefill_step_tokens=32)) as served, asyncio.timeout(60):
        worker = served.fleet.worker("prefill")
        (parts,) = [parts for parts in served.fleet.parts.values() if parts.led is not None]
        assert parts.led is not None
        (process,) = parts.led.own.processes

        async def kill(step: int) -> None:
            if step == 3:
                process.kill()

        before_steps(served.fleet.engine("prefill"), kill)
        assert await served.generate(PROMPTS[-1], MORE_TOKENS, GREEDY) == of_one_rank[-1]
        with pytest.raises(WorkerLost, match="rank 1"):
            worker.check_health()
        await served.idle()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_ranks_that_still_load_end_when_rank_0_hangs_up(folder: Path) -> None:
    settings = worker_settings(folder, RANKED, "prefill", ranks=2)
    led = await LedRanks.start(settings, Peer("w", 1), TcpNetwork(SECRET), SECRET, host=HOST)
    try:
        async with asyncio.timeout(60):
            while not led.connections._connections:  # noqa: ASYNC110  # nobody else wants to know
                await asyncio.sleep(0.01)
    finally:
        await led.close()
    assert [process.returncode for process in led.own.processes] == [1], "it left by itself, out of a group not formed"


async def test_a_worker_whose_rank_never_comes_does_not_start_and_does_not_hang(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    settings = worker_settings(folder, RANKED, "prefill", ranks=2)
    network, peer = TcpNetwork(SECRET), Peer("w", 1)
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match="can't start: rank 1 has ended with code 1"):
            await load_parts(settings, peer, network, SECRET, host=HOST)
