"""A worker of two ranks on a real Ray: the second is an actor in its replica's placement group."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import MODEL, Server, alive, eventually, serving
from twostroke.benchmarks.server_process import processes_named

PROMPT = [300 + (7 * position) % 3000 for position in range(100)]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "cluster.yaml"
    config.write_text(  # KV is to travel
        "decode: {tensor_parallel: 2, threads: 1}\nprefill: {threads: 1}\nrouter: {decodes_alone: false}\n"
    )
    yield from serving("--config", str(config))


def complete(server: Server) -> list[int]:
    answer = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    token_ids: list[int] = answer.choices[0].model_dump()["token_ids"]
    return token_ids


def test_two_ranks_answer_as_one_does(ranked: Server, server: Server) -> None:
    assert complete(ranked) == complete(server)

    def transfers() -> tuple[int, int]:  # as the worker reported them last
        (decode,) = ranked.workers("decode")
        return decode["stats"]["transfers_done"], decode["stats"]["transfers_failed"]

    eventually("the worker has reported the transfer", lambda: transfers() == (1, 0))


def test_a_killed_rank_takes_its_replica_with_it_and_another_is_started(ranked: Server, server: Server) -> None:
    (worker,) = [one["worker_id"] for one in ranked.workers("decode")]
    (rank,) = processes_named("ray::RankActor", ranked.processes())
    replicas = processes_named("ServeReplica:twostroke:DecodeWorker", ranked.processes())
    os.kill(rank, signal.SIGKILL)
    eventually("the replica is gone", lambda: alive([rank, *replicas]) == {})
    eventually(
        "another has come in its place",
        lambda: [one["worker_id"] for one in ranked.workers("decode")] not in ([], [worker]),
        within_s=60,
    )
    eventually("no rank is left over", lambda: len(processes_named("ray::RankActor", ranked.processes())) == 1)
    assert complete(ranked) == complete(server)
