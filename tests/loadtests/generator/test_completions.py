"""How a request is sent, and when what comes back is stamped."""

import socket
import time

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.loadtests.generator.answers import read_stream
from twostroke.loadtests.generator.http_stream import completion_body, exchange


async def test_a_request_asks_for_greedy_tokens_of_a_fixed_number_and_for_usage() -> None:
    async with scripted_server(lambda body: [HEAD, token_event("a"), end(len(body["prompt"]), 1)]) as server:
        answer = read_stream(await exchange(server.base_url, completion_body("m", [5, 6, 7], 1), time_limit_s=10.0))
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
        result = await exchange(server.base_url, completion_body("m", [5], 2), time_limit_s=10.0)
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
        result = await exchange(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", {}, time_limit_s=10.0)
    assert result.broken is not None
    assert "no connection" in result.broken


async def test_a_server_that_does_not_answer_in_time_is_told() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        result = await exchange(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", {}, time_limit_s=0.05)
    assert result.broken == "no answer within 0.05 s"
