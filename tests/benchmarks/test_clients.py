"""What the benches' clients send, when what comes back is stamped, and what they make of it."""

import json
import socket
import time

import msgspec
import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.benchmarks.clients import (
    Mix,
    completion_body,
    exact,
    has_met,
    record_of,
    send_in_turn,
    stream_completion,
    whole,
)
from twostroke.benchmarks.overload import BATCH, INTERACTIVE, PARTS, classes_for, settings_of
from twostroke.cluster.config.config import read_config
from twostroke.loadtests.generator.http_stream import Exchange, read_stream

CLASSES = classes_for(0.5, 0.05)
MIX = Mix("m", PARTS, prompt_tokens=8, max_tokens=4)
BODY = {"max_tokens": 3, "service_tier": INTERACTIVE}


def test_a_server_reads_the_classes_that_the_overload_is_measured_with() -> None:
    slo = read_config(json.loads(json.dumps(settings_of(CLASSES)))).slo
    assert {one.name: one for one in slo.classes} == CLASSES
    assert slo.default == BATCH


def test_arrivals_are_of_both_classes_and_the_same_for_a_seed() -> None:
    arrivals = MIX.arrivals(50, 100, seed=1)
    tiers = [body["service_tier"] for _, body in arrivals]
    assert tiers.count(INTERACTIVE) == pytest.approx(1500, rel=0.1)
    assert tiers.count(INTERACTIVE) + tiers.count(BATCH) == len(arrivals)
    assert arrivals == MIX.arrivals(50, 100, seed=1)


TOKEN = b'data: {"choices":[{"text":"x"}]}\n\n'
END = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
OK = b"HTTP/1.1 200 OK\r\n\r\n"


def test_times_count_from_the_schedule() -> None:
    came = Exchange(10.1, [(10.2, OK + TOKEN), (10.3, TOKEN), (10.4, TOKEN + END)])
    record = exact(record_of(came, BODY, 9.0, 1.0))
    assert record.status == "ok"
    assert (record.lag_s, record.ttft_s, record.tpot_s) == pytest.approx((0.1, 0.2, 0.1))
    assert not has_met(record, CLASSES)
    assert has_met(msgspec.structs.replace(record, kind=BATCH), CLASSES)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", "refused"),
        (OK + b"data: {}\n\n", "failed"),
        (b"", "failed"),
    ],
)
def test_whatever_is_no_whole_answer_misses_what_was_promised(head: bytes, status: str) -> None:
    record = record_of(Exchange(10.0, [(10.1, head)] if head else []), BODY, 9.0, 1.0)
    assert record.status == status
    assert not has_met(record, CLASSES)


def test_an_answer_that_lacks_tokens_has_failed() -> None:
    came = Exchange(10.1, [(10.2, OK + TOKEN + END)])
    assert whole(record_of(came, BODY, 10.0)).ttft_s == pytest.approx(0.1)
    with pytest.raises(ValueError, match="3 tokens instead of 4"):
        whole(record_of(came, {"max_tokens": 4}, 10.0))


def test_a_batch_class_has_more_time_and_goes_last() -> None:
    interactive, batch = CLASSES[INTERACTIVE], CLASSES[BATCH]
    assert interactive.priority > batch.priority
    assert (batch.ttft_s, batch.tpot_s) == (2.0, 0.2)


async def test_a_request_asks_for_greedy_tokens_of_a_fixed_number_and_for_usage() -> None:
    async with scripted_server(lambda body: [HEAD, token_event("a"), end(len(body["prompt"]), 1)]) as server:
        answer = read_stream(await stream_completion(server.url, completion_body("m", [5, 6, 7], 1)))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 1)
    [body] = server.bodies
    assert body.pop("path") == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_token_comes_after_it_was_written_and_before_the_answer_is_over() -> None:
    async with scripted_server(lambda body: [HEAD, token_event("a"), token_event("b"), end(1, 2)]) as server:
        result = await stream_completion(server.url, completion_body("m", [5], 2))
        over_at = time.perf_counter()
    answer = read_stream(result)
    written_at = server.written_at[1:3]
    assert result.sent_at < written_at[0]
    assert all(written <= seen for written, seen in zip(written_at, answer.token_times, strict=True))
    assert answer.token_times == sorted(answer.token_times)
    assert answer.token_times[-1] < over_at


async def test_a_server_that_is_not_there_is_told() -> None:
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        result = await stream_completion(f"http://127.0.0.1:{taken.getsockname()[1]}", {})
    assert result.broken is not None
    assert "no connection" in result.broken


async def test_a_server_that_does_not_answer_in_time_is_told() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        result = await stream_completion(f"http://127.0.0.1:{silent.getsockname()[1]}", {}, limit_s=0.05)
    assert result.broken == "no answer within 0.05 s"


async def test_so_many_clients_send_one_request_after_the_other() -> None:
    bodies = [completion_body("m", [number], 1) for number in range(5)]
    async with scripted_server(lambda body: [HEAD, token_event("a"), end(1, 1)]) as server:
        came = await send_in_turn(server.url, bodies, clients=2)
    assert server.most_open <= 2
    assert sorted(body["prompt"] for body in server.bodies) == [[number] for number in range(5)]
    assert [record.status for record in came] == ["ok"] * 5
