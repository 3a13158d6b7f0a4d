"""What the benches' clients send, when what comes back is stamped, and what they make of it."""

import socket
import time
from itertools import pairwise

import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.benchmarks.clients import (
    Arrival,
    Mix,
    Outcome,
    completion_body,
    outcome_of,
    send_in_turn,
    stream_completion,
)
from twostroke.benchmarks.overload import BATCH, INTERACTIVE, PARTS, classes_for
from twostroke.loadtests.generator.http_stream import Exchange, read_stream

CLASSES = classes_for(0.5, 0.05)
MIX = Mix("m", PARTS, prompt_tokens=8, max_tokens=4)
ARRIVAL = Arrival(1.0, INTERACTIVE, {"max_tokens": 3})


def test_arrivals_are_poisson_of_both_classes_and_the_same_for_a_seed() -> None:
    arrivals = MIX.arrivals(50, 100, seed=1)
    assert len(arrivals) == pytest.approx(5000, rel=0.05)
    assert sum(one.class_name == INTERACTIVE for one in arrivals) == pytest.approx(1500, rel=0.1)
    assert all(before.at <= after.at < 100 for before, after in pairwise(arrivals))
    assert arrivals == MIX.arrivals(50, 100, seed=1)
    assert arrivals[0].body["service_tier"] == arrivals[0].class_name


def test_times_count_from_the_schedule() -> None:
    chunk = b'data: {"choices":[{"text":"x"}]}\n\n'
    end = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    arrivals = [(10.2, b"HTTP/1.1 200 OK\r\n\r\n" + chunk), (10.3, chunk), (10.4, chunk + end)]
    outcome = outcome_of(ARRIVAL, 10.0, Exchange(10.1, arrivals))
    assert outcome.status == "ok"
    assert outcome.lag_s == pytest.approx(0.1)
    assert outcome.ttft_s == pytest.approx(0.2)
    assert outcome.tpot_s == pytest.approx(0.1)
    assert not outcome.met(CLASSES)
    assert Outcome(BATCH, 1.0, 0.1, "ok", 0.2, 0.1).met(CLASSES)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", "refused"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "failed"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", "failed"),
        (b"", "failed"),
    ],
)
def test_whatever_is_neither_a_whole_answer_nor_a_429_is_a_failure(head: bytes, status: str) -> None:
    outcome = outcome_of(ARRIVAL, 10.0, Exchange(10.0, [(10.1, head)] if head else []))
    assert outcome.status == status
    assert not outcome.met(CLASSES)


def test_an_answer_that_lacks_tokens_has_failed() -> None:
    chunk = b'data: {"choices":[{"text":"x"}]}\n\n'
    end = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    result = Exchange(10.1, [(10.2, b"HTTP/1.1 200 OK\r\n\r\n" + chunk + end)])
    short = Arrival(1.0, INTERACTIVE, {"max_tokens": 4})
    assert outcome_of(short, 10.0, result).why == "3 tokens instead of 4"
    assert outcome_of(ARRIVAL, 10.0, result).status == "ok"


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
    assert sorted(body["prompt"] for body, _ in came) == [[number] for number in range(5)]
    assert all(read_stream(exchange).status == "ok" for _, exchange in came)
