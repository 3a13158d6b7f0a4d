"""Workers whose models are cut into stages: each stage's KV goes straight to the ranks that own its layers, and no
token changes by it, whatever happens on the way. All ranks but each worker's first are processes of their own.
"""

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import (
    GREEDY,
    Shape,
    asking,
    before_steps,
    check_cold_and_warm,
    flip_a_bit,
    of_one_worker,
    serve,
)
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.cluster.ranks.worker_parts import WorkerParts
from twostroke.kvtransfer.transports.host_units import HostWire
from twostroke.kvtransfer.transports.tcp import TcpStream
from twostroke.protocol.errors import WorkerLost
from twostroke.worker.worker import Worker

NEW_TOKENS = 24
PROMPTS = random_prompts(96, 1, (1, 15, 16, 17, 64, 100, 300))
PLENTY = Shape(None, num_blocks=512)
TO_ONE_RANK = replace(PLENTY, transport="tcp", prefill_stages=2, prefill_step_tokens=129)
WAYS = {
    "2 stages to 1 rank": TO_ONE_RANK,
    "2 stages to 2, through shared memory": replace(PLENTY, transport="shm", prefill_stages=2, decode_stages=2),
    "2 ranks to 2 stages": replace(PLENTY, transport="tcp", prefill_ranks=2, decode_stages=2),
    "2 stages of 2 ranks to 3 stages": replace(
        PLENTY, transport="tcp", prefill_ranks=2, prefill_stages=2, decode_stages=3
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3},
    "deepseek": FAMILY_SHAPES["deepseek_v3_experts"],
    "gpt-oss": {**FAMILY_SHAPES["gpt_oss"], "num_hidden_layers": 4},
    "llama4": FAMILY_SHAPES["llama4_dense_between"],
    "gemma4": FAMILY_SHAPES["gemma4_large"]
    | {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
    | {"per_layer_config": {str(layer): {"head_dim": 32, "num_key_value_heads": 2} for layer in (1, 3, 5, 7)}},
}
USUAL = {("llama", way) for way in ("2 stages to 1 rank", "2 ranks to 2 stages")} | {
    ("deepseek", "2 stages to 1 rank"),
    ("gpt-oss", "2 stages to 2, through shared memory"),
    ("llama4", "2 ranks to 2 stages"),
    ("gemma4", "2 ranks to 2 stages"),
}
CASES = [
    pytest.param(model, way, marks=() if (model, way) in USUAL else pytest.mark.models)
    for way in WAYS
    for model in MODELS
    # These have layers of two kinds, which three stages can't share.
    if not (model in ("gpt-oss", "llama4", "gemma4") and way == "2 stages of 2 ranks to 3 stages")
]


answers = asking(PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, write_checkpoint: Any) -> tuple[Path, list[list[int]]]:
    """A model, and what one worker of one rank answers."""
    folder: Path = write_checkpoint(seed=3, **MODELS[request.param])
    return folder, of_one_worker(folder, answers, PLENTY)


@pytest.mark.parametrize(("case", "way"), CASES, indirect=["case"])
async def test_stages_draw_the_tokens_that_one_rank_draws(case: tuple[Path, list[list[int]]], way: str) -> None:
    folder, expected = case
    shape = WAYS[way]
    async with serve(folder, shape) as served:
        assert all((await check_cold_and_warm(served, answers, expected)).values())
        assert {info.layout.pp_size for info in served.fleet.infos} == {shape.prefill_stages, shape.decode_stages}


@pytest.mark.parametrize("case", ["deepseek"], indirect=True)
async def test_hits_of_all_stages_experts_are_told(case: tuple[Path, list[list[int]]]) -> None:
    folder, _ = case
    async with serve(folder, replace(PLENTY, decode_stages=2)) as served, asyncio.timeout(60):
        await answers(served)
        dense, *routed = served.fleet.stats("decode").expert_skews
        assert dense == 0
        while min(routed) < 1:  # the other stage tells now and then, behind a step
            await answers(served)
            dense, *routed = served.fleet.stats("decode").expert_skews


@pytest.mark.parametrize("case", ["llama"], indirect=True)
async def test_requests_of_a_worker_of_stages_are_swapped_out_and_back(case: tuple[Path, list[list[int]]]) -> None:
    folder, expected = case
    tight = replace(
        PLENTY, num_blocks=40, swap_bytes=2**20, decode={"preemption": "swap", "swap_gib": 1.0}, decode_step_tokens=64
    )
    async with serve(folder, replace(tight, decode_stages=2)) as served:
        assert await answers(served) == expected
        await served.idle()
        stats = served.fleet.stats("decode")
    assert stats.swaps > 0
    assert stats.swapped_blocks == 0


@pytest.mark.parametrize("case", ["llama"], indirect=True)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_stage_is_its_workers_end_and_the_stream_goes_on_elsewhere(
    role: str, case: tuple[Path, list[list[int]]]
) -> None:
    folder, expected = case
    two = {"prefill": {"prefill_stages": 2}, "decode": {"decode_stages": 2, "num_decode": 2}}[role]
    shape = replace(PLENTY, transport="tcp", prefill_step_tokens=64, **two)  # type: ignore[arg-type]
    async with serve(folder, shape) as served, asyncio.timeout(120):
        victims: list[Any] = []
        for peer, parts in served.fleet.parts.items():
            if parts.led is not None:
                before_steps(parts.deps.engine, partial(_kill_one, parts, victims, served.fleet.by_peer[peer]))
        assert await served.generate(PROMPTS[-1], NEW_TOKENS, GREEDY) == expected[-1]
        ((process, worker),) = victims
        with pytest.raises(WorkerLost, match="rank 1"):
            worker.check_health()
        await served.idle()
        processes = [one for parts in served.fleet.parts.values() if parts.led for one in parts.led.own.processes]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def _kill_one(parts: WorkerParts, victims: list[Any], worker: Worker, step: int) -> None:
    """Kill the other rank's process before the third step of the first worker that comes to it."""
    if step == 3 and not victims and parts.led is not None:
        (process,) = parts.led.own.processes
        victims.append((process, worker))
        process.kill()


@pytest.mark.parametrize("case", ["llama"], indirect=True)
async def test_a_flipped_bit_of_a_stages_kv_is_found_by_its_checksum(
    case: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = case
    of_stage: set[int] = set()  # sockets over which the last stage's layers come
    make = TcpStream.__init__

    def note(stream: TcpStream, connected: Any, wire: HostWire) -> None:
        make(stream, connected, wire)
        if wire.shard.layers.start > 0:
            of_stage.add(id(stream))

    monkeypatch.setattr(TcpStream, "__init__", note)
    flipped = flip_a_bit(monkeypatch, lambda stream: id(stream) in of_stage)
    async with serve(folder, TO_ONE_RANK) as served:
        assert await answers(served) == expected
        await served.idle()
        stats = served.fleet.stats("decode")
    assert len(flipped) == stats.transfer_digest_failures == 1
    assert stats.transfers_failed >= 1
