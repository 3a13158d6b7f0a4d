"""The same tokens whatever way they take: the engine alone, and disaggregated to two ranks over TCP.

The second rank is a process that its replica has started. By shared memory: test_live_cluster.py; by gloo, between
blocks of unequal sizes: test_autoscaling.py; aggregated: test_instruct_model.py.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import NEW_TOKENS, PROMPTS, Server, serving
from tests.rigs.processes import alive, eventually
from twostroke.benchmarks.server_process import processes_named

# KV is to travel, and to two ranks.
RANKED = "decode: {tensor_parallel: 2, threads: 1}\nprefill: {threads: 1}\nrouter: {decodes_alone: false}\n"


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config: Path = tmp_path_factory.mktemp("config") / "cluster.yaml"
    config.write_text(RANKED)
    yield from serving("--transport", "tcp", "--config", str(config), under_a_stream=True)


def test_by_tcp_to_two_ranks(ranked: Server, expected: list[list[int]]) -> None:
    ranked.check_ways("tcp")
    ranked.check_tokens(expected)


def test_a_killed_rank_takes_its_replica_with_it_and_another_is_started(
    ranked: Server, expected: list[list[int]]
) -> None:
    (worker,) = [one["worker_id"] for one in ranked.workers("decode")]
    (rank,) = processes_named("ranks.rank_process", ranked.processes())
    replicas = processes_named("ServeReplica:twostroke:DecodeWorker", ranked.processes())
    os.kill(rank, signal.SIGKILL)
    eventually("the replica is gone", lambda: alive([rank, *replicas]) == {})
    eventually(
        "another has come in its place",
        lambda: [one["worker_id"] for one in ranked.workers("decode")] not in ([], [worker]),
        within_s=60,
    )
    eventually("no rank is left over", lambda: len(processes_named("ranks.rank_process", ranked.processes())) == 1)
    assert ranked.greedy_tokens(PROMPTS[-1], NEW_TOKENS)[0] == expected[-1]
