"""The same tokens whatever way they take: the engine alone, and disaggregated to two ranks over TCP.

The second rank is a process that its replica has started. By shared memory: test_live_cluster.py; by gloo, between
blocks of unequal sizes: test_autoscaling.py; aggregated: test_instruct_model.py.

And how a request is followed whose KV travels: its log lines, and its trace.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, NEW_TOKENS, PROMPT, PROMPTS, Server, log_lines, serving
from tests.rigs.otlp import ReceivedSpan, receiving_spans
from tests.rigs.processes import alive, eventually
from twostroke.cluster.local.ray import ray_folder
from twostroke.cluster.local.server_process import processes_named

# KV is to travel, and to two ranks.
RANKED = {"decode": {"tensor_parallel": 2, "threads": 1}, "prefill": {"threads": 1}, "logging": {"format": "json"}}


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[str, list[ReceivedSpan]]]:
    with receiving_spans() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory, spans: tuple[str, list[ReceivedSpan]]) -> Iterator[Server]:
    config: Path = tmp_path_factory.mktemp("config") / "cluster.yaml"
    router = {"decodes_alone": False, "roles": "fixed", "tracing": {"endpoint": spans[0]}}
    config.write_text(json.dumps(RANKED | {"router": router}), encoding="utf-8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_SERVICE_NAME", "of-the-operator")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield from serving("--transport", "tcp", "--config", str(config), under_a_stream=True)


def test_by_tcp_to_two_ranks(ranked: Server, expected: list[list[int]]) -> None:
    ranked.check_ways("tcp")
    ranked.check_tokens(expected)


def test_one_id_joins_the_lines_of_a_request_over_router_prefill_and_decode_and_its_trace(
    ranked: Server, spans: tuple[str, list[ReceivedSpan]]
) -> None:
    request_id = f"client-{time.time_ns()}"
    body = {"model": MODEL, "prompt": PROMPT * 3, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    headers = {"X-Request-Id": request_id}
    answer = httpx.post(f"{ranked.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.headers["x-request-id"] == request_id

    def lines() -> dict[str, list[dict[str, Any]]]:
        found = log_lines(ray_folder(), request_id)
        return {role: [line for line in found if line["role"] == role] for role in ("router", "prefill", "decode")}

    def roots() -> list[ReceivedSpan]:
        return [span for span in spans[1] if span.attributes.get("twostroke.request_id") == request_id]

    eventually("all three have written their line", lambda: all(lines().values()))
    of_role = lines()
    assert [len(of_role[role]) for role in of_role] == [1, 1, 1], "one line a process, however many tokens"
    (router,), (prefill,), (decode,) = of_role.values()
    workers = {role: ranked.workers(role)[0]["worker_id"] for role in ("prefill", "decode")}
    for line, role in ((prefill, "prefill"), (decode, "decode")):
        assert line["worker_id"] == line[f"{role}_worker"] == workers[role]
        assert (line["attempt"], line["choice"]) == (1, 0)
        assert line["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert (prefill["decode_worker"], decode["prefill_worker"]) == (workers["decode"], workers["prefill"])
    assert (decode["finish_reason"], decode["output_tokens"]) == ("length", 12)
    assert (router["prefill_workers"], router["decode_workers"]) == ([workers["prefill"]], [workers["decode"]])
    assert router["attempts"] == 1

    eventually("its trace has come", lambda: bool(roots()))
    (root,) = roots()
    assert {line["trace_id"] for line in (router, prefill, decode)} == {root.trace_id}
    assert root.resource["service.name"] == "of-the-operator"
    assert root.attributes["gen_ai.request.model"] == MODEL
    assert root.attributes["gen_ai.usage.output_tokens"] == 12


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
