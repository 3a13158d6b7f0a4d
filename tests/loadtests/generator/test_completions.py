"""What the bytes of an answer say about tokens and times, and how requests are sent."""

import socket
import time

import pytest

from loadtests.generator.completions import Exchange, completion_body, exchange, read_answer
from loadtests.generator.sse import BadResponse
from tests.loadtests.generator.scripted_server import HEAD, end, event, scripted_server, token_event


def answer_of(*pieces: tuple[float, bytes], broken: str | None = None) -> Exchange:
    return Exchange(10.0, [(10.0, HEAD), *pieces], broken)


def test_times_are_those_of_the_events_with_tokens() -> None:
    answer = read_answer(
        answer_of((10.5, token_event("a")), (11.0, token_event("b")), (13.0, token_event("c", "length") + end(7, 3)))
    )
    assert answer.ttft_s == 0.5
    assert answer.gaps_s == [0.5, 2.0]
    assert answer.ended_at == 13.0
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)


def test_tokens_are_counted_by_usage_where_events_bring_several() -> None:
    answer = read_answer(answer_of((11.0, token_event("a b c")), (12.0, token_event("d e f", "length") + end(7, 6))))
    assert answer.completion_tokens == 6
    assert len(answer.token_times) == 2


def test_a_token_without_text_counts_and_an_empty_end_does_not() -> None:
    half_a_character = token_event("")
    answer = read_answer(
        answer_of((11.0, half_a_character), (12.0, token_event("é")), (13.0, token_event("", "length") + end(7, 2)))
    )
    assert answer.token_times == (11.0, 12.0)


def test_usage_may_stand_in_every_event() -> None:
    first = event({"choices": [{"text": "a", "finish_reason": None}], "usage": {"completion_tokens": 1}})
    assert read_answer(answer_of((11.0, first + token_event("b") + end(7, 2)))).completion_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([(11.0, token_event("a"))], "no end"),
        ([(11.0, end(7, 0))], "no tokens"),
        ([(11.0, token_event("a") + end(7, 1).replace(b"usage", b"other"))], "no usage"),
        ([(11.0, event({"error": {"message": "out of blocks"}}))], "out of blocks"),
        ([(11.0, end(7, 1).replace(b'{"choices', b'+"choices'))], "no JSON"),
    ],
)
def test_an_answer_that_is_not_whole_is_bad(pieces: list[tuple[float, bytes]], fault: str) -> None:
    with pytest.raises(BadResponse, match=fault):
        read_answer(answer_of(*pieces))


def test_a_broken_connection_is_bad_even_after_a_whole_answer() -> None:
    with pytest.raises(BadResponse, match="reset by peer"):
        read_answer(answer_of((11.0, token_event("a") + end(7, 1)), broken="reset by peer"))


async def test_a_request_asks_for_greedy_tokens_of_a_fixed_number_and_for_usage() -> None:
    async with scripted_server(lambda body: [HEAD, token_event("a"), end(len(body["prompt"]), 1)]) as server:
        answer = read_answer(await exchange(server.base_url, completion_body("m", [5, 6, 7], 1), time_limit_s=10.0))
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 1)
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
    answer = read_answer(result)
    written_at = server.written_at[1:3]
    assert answer.sent_at < written_at[0]
    assert all(written <= seen for written, seen in zip(written_at, answer.token_times, strict=True))
    assert list(answer.token_times) == sorted(answer.token_times)
    assert answer.ended_at < over_at


async def test_a_server_that_is_not_there_is_a_bad_answer() -> None:
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        result = await exchange(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", {}, time_limit_s=10.0)
    with pytest.raises(BadResponse, match="no connection"):
        read_answer(result)


async def test_a_server_that_does_not_answer_in_time_is_a_bad_answer() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        result = await exchange(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", {}, time_limit_s=0.05)
    with pytest.raises(BadResponse, match=r"no answer within 0.05 s"):
        read_answer(result)
