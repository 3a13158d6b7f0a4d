"""The steady load of `twostroke cluster-demo`: what it sends, and what it makes of the answers."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.loadtests.generator.scripted_server import HEAD, end, event, scripted_server, token_event
from twostroke.tools.nodes.load import Request, SteadyLoad, ask

REQUEST = Request("m", num_prompts=3, prompt_tokens=4, max_tokens=2)
PROMPTS = [REQUEST.body(number)["prompt"] for number in range(3)]


def whole(text: str) -> list[bytes]:
    return [HEAD, token_event(text), token_event("!", "length") + end(4, 2)]


@contextmanager
def served(answer: Callable[[dict[str, Any]], Sequence[bytes]]) -> Iterator[str]:
    """The address of a server that has a thread to itself, as the load has."""
    urls: list[str] = []
    is_up = threading.Event()
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        async with scripted_server(answer) as server:
            urls.append(server.url)
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    is_up.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()


def test_an_answer_has_its_text_or_says_why_it_has_none() -> None:
    with served(lambda body: whole("a") if body["prompt"] == PROMPTS[0] else [HEAD, token_event("a")]) as url:
        assert (ask(url, REQUEST, 0).text, ask(url, REQUEST, 0).error) == ("a!", None)
        assert ask(url, REQUEST, 1).error == "the stream has no end"


def test_what_is_lost_and_what_is_wrong_are_told_apart() -> None:
    began = time.monotonic()
    seen: list[int] = []
    all_prompts_asked = threading.Event()

    def answer(body: dict[str, Any]) -> list[bytes]:
        seen.append(PROMPTS.index(body["prompt"]))
        if len(seen) >= len(PROMPTS):
            all_prompts_asked.set()
        failed = [HEAD, token_event("x"), event({"error": {"message": "worker lost"}})]
        return [whole("right"), whole("wrong"), failed][seen[-1]]

    with (
        served(answer) as url,
        SteadyLoad(url, REQUEST, rate=200.0, expected=dict.fromkeys(range(3), "right!")) as load,
    ):
        assert all_prompts_asked.wait(30)
    verdict = load.verdict(began)
    assert verdict.requests == len(seen)
    assert set(seen) == {0, 1, 2}
    assert (verdict.mismatched, verdict.lost) == (seen.count(1), seen.count(2))
    assert verdict.lost_new == verdict.lost
    assert verdict.answered_again_s is not None
    assert 0 < verdict.slowest_first_token_s <= time.monotonic() - began
    before = load.verdict(time.monotonic())  # all were sent before it
    assert (before.lost, before.lost_new, before.answered_again_s) == (verdict.lost, 0, None)
    (reason,) = verdict.reasons
    assert "worker lost" in reason
