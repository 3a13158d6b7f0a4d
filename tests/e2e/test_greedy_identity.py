"""The same tokens whatever way they take: the engine alone, aggregated, disaggregated over each transport of CPUs.

By TCP they go to a decode worker of two ranks, the second a process that its replica has started.
"""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Server, serving
from tests.rigs.processes import alive, eventually
from twostroke.benchmarks.server_process import processes_named
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

NEW_TOKENS = 32
BLOCK_SIZE = 16
# Lengths on both sides of the borders of blocks and chunks.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 255, 256, 257, 400, 511, 513, 700)


def prompts() -> list[list[int]]:
    return [[300 + (7 * index + 13 * position) % 3000 for position in range(n)] for index, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one engine draws in this process, one prompt after the other, each in one chunk."""
    loaded = load_engine(
        EngineConfig(model_dir=BUNDLED_MODEL_DIR, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64, threads=1)
    )

    async def generate(prompt: Sequence[int]) -> list[int]:
        table = list(range(-(-(len(prompt) + NEW_TOKENS) // BLOCK_SIZE)))
        tokens = list(prompt)
        computed = 0
        while len(tokens) < len(prompt) + NEW_TOKENS:
            draw = Draw(SamplingParams(temperature=0.0), history=tokens, num_prompt_tokens=len(prompt))
            (sampled,) = await loaded.engine.step([SequenceStep(tokens[computed:], computed, table, draw)])
            assert sampled is not None
            computed = len(tokens)
            tokens.append(sampled.token_id)
        return tokens[len(prompt) :]

    async def generate_all() -> list[list[int]]:
        return [await generate(prompt) for prompt in prompts()]

    try:
        return asyncio.run(generate_all())
    finally:
        loaded.engine.close()


CONFIGS = {
    # Blocks are cut into units of half their size on their way.
    "torch_distributed": "prefill: {block_size: 16}\ndecode: {block_size: 32}\n",
    # KV is to travel, and to two ranks.
    "tcp": "decode: {tensor_parallel: 2, threads: 1}\nprefill: {threads: 1}\nrouter: {decodes_alone: false}\n",
}


@pytest.fixture(scope="module", params=["shm", "tcp", "torch_distributed", "aggregated"])
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param == "shm":
        yield request.getfixturevalue("server")  # what is chosen on one machine
    elif request.param == "aggregated":
        yield from serving("--prefill", "0", under_a_stream=True)
    else:
        config = tmp_path_factory.mktemp("config") / "cluster.yaml"
        config.write_text(CONFIGS[request.param])
        yield from serving("--transport", request.param, "--config", str(config))


def test_the_doctor_measures_every_way_and_leaves_nothing(any_server: Server, request: pytest.FixtureRequest) -> None:
    pairs = any_server.doctor()
    transport = request.node.callspec.params["any_server"]
    ways = [] if transport == "aggregated" else [("prefill", "decode"), ("decode", "prefill")]
    assert [(pair["source_role"], pair["target_role"]) for pair in pairs] == ways
    for pair in pairs:
        assert pair["transport"] == transport
        assert pair["why"]
        assert (pair["missing"] == []) == (transport == "shm")  # nothing is better on one machine
        assert 1e7 < pair["bytes_per_s"] < 1e12
        assert 1e-5 < pair["round_trip_s"] < 1.0
    eventually("all blocks are free again", lambda: any_server.owned_blocks() == 0)


def test_all_prompts_at_once_get_the_tokens_that_the_engine_alone_draws(
    any_server: Server, expected: list[list[int]]
) -> None:
    def complete(prompt: list[int]) -> list[int]:
        return any_server.greedy_tokens(prompt, NEW_TOKENS)[0]

    with ThreadPoolExecutor(len(LENGTHS)) as clients:
        cold = list(clients.map(complete, prompts()))
        warm = list(clients.map(complete, prompts()))  # from the prefix cache
    assert cold == expected
    assert warm == expected
    if any_server.workers("prefill"):
        assert sum(worker["stats"]["transfers_failed"] for worker in any_server.status()["workers"]) == 0
        assert sum(worker["stats"]["transfers_done"] for worker in any_server.workers("decode")) > 0


@pytest.mark.parametrize("any_server", ["tcp"], indirect=True)
def test_a_killed_rank_takes_its_replica_with_it_and_another_is_started(
    any_server: Server, expected: list[list[int]]
) -> None:
    (worker,) = [one["worker_id"] for one in any_server.workers("decode")]
    (rank,) = processes_named("ranks.rank_process", any_server.processes())
    replicas = processes_named("ServeReplica:twostroke:DecodeWorker", any_server.processes())
    os.kill(rank, signal.SIGKILL)
    eventually("the replica is gone", lambda: alive([rank, *replicas]) == {})
    eventually(
        "another has come in its place",
        lambda: [one["worker_id"] for one in any_server.workers("decode")] not in ([], [worker]),
        within_s=60,
    )
    eventually("no rank is left over", lambda: len(processes_named("ranks.rank_process", any_server.processes())) == 1)
    assert any_server.greedy_tokens(prompts()[-1], NEW_TOKENS)[0] == expected[-1]
