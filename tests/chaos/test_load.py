"""The steady load of `make cluster-demo` and `make chaos`: what it sends, and what is made of the answers."""

import asyncio
from typing import Any

from tests.chaos.answers import survival
from tests.chaos.load import (
    ServerAddress,
    SteadyLoad,
    answers_of_all,
    ask,
    event_loop_beside,
    plain_request,
)
from tests.loadtests.generator.scripted_server import HEAD, end, event, scripted_server

REQUESTS = [plain_request("m", key, prompt_tokens=4, max_tokens=2) for key in range(3)]
PROMPTS = [request.body["prompt"] for request in REQUESTS]


def piece(text: str, token: int, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": [token], "finish_reason": reason, "logprobs": None}
    return event({"choices": [choice]})


def whole(text: str, token: int = 1) -> list[bytes]:
    return [HEAD, piece(text, token), piece("!", 2, "length") + end(4, 2)]


async def test_an_answer_has_its_text_or_says_why_it_has_none() -> None:
    def answer(body: dict[str, Any]) -> list[bytes]:
        return whole("a") if body["prompt"] == PROMPTS[0] else [HEAD, piece("a", 1)]

    async with scripted_server(answer) as server:
        sound, cut = [await ask(ServerAddress(server.url), request) for request in REQUESTS[:2]]
    assert (sound.choices[0].text, sound.choices[0].tokens, sound.has_end, sound.error) == ("a!", [1, 2], True, None)
    assert not cut.has_end


async def test_what_is_lost_and_what_is_wrong_are_told_apart() -> None:
    expected: dict[int, Any] = {}
    seen: list[int] = []
    all_seen = asyncio.Event()

    def answer(body: dict[str, Any]) -> list[bytes]:
        number = PROMPTS.index(body["prompt"])
        if not expected:
            return whole("right")
        seen.append(number)
        if {*seen} == {0, 1, 2}:
            all_seen.set()
        failed = [HEAD, piece("x", 1), event({"error": {"message": "worker lost"}})]
        return [whole("right"), whole("wrong", 9), failed][number]

    async with scripted_server(answer) as server:
        expected |= await answers_of_all(ServerAddress(server.url), REQUESTS, 1)
        load = SteadyLoad(ServerAddress(server.url), REQUESTS, seed=1, rate=200.0)
        await load.start()
        await asyncio.wait_for(all_seen.wait(), 30)
        await load.stop()
    began = min(one.sent_at for one in load.answers)
    verdict = survival(load.answers, expected, began)
    assert verdict.requests == len(seen)
    assert (verdict.mismatched, verdict.lost) == (seen.count(1), seen.count(2))
    assert verdict.lost_new == verdict.lost
    assert verdict.answered_again_s is not None
    assert verdict.slowest_first_token_s > 0
    after = survival(load.answers, expected, max(one.ended_at for one in load.answers))
    assert (after.lost, after.lost_new, after.answered_again_s) == (verdict.lost, 0, None)


async def test_a_rate_does_not_wait_for_answers() -> None:
    num_open = 0
    three_are_open = asyncio.Event()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        num_open += 1
        if num_open == 3:
            three_are_open.set()
        await three_are_open.wait()
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        load = SteadyLoad(ServerAddress(url), REQUESTS, seed=1, rate=50.0)
        await load.start()
        await asyncio.wait_for(three_are_open.wait(), 30)
        await load.stop()
    assert len(load.answers) >= 3


def test_a_caller_without_an_event_loop_has_one_beside_it() -> None:
    async def answered() -> int:
        await asyncio.sleep(0)
        return 7

    with event_loop_beside() as do:
        assert do(answered()) == 7
