"""One `X-Request-Id` an answer, although Serve's middleware appends another."""

import asyncio

import pytest
from ray.serve._private.http_util import _apply_middlewares
from starlette.types import Message, Receive, Scope, Send

from twostroke.cluster.deployments.proxies import http_middlewares
from twostroke.router.http.middleware import RequestIds


def ids_of_answer(given: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The ids (inside, in the answer) of a request with these `X-Request-Id`s, through Serve's middleware and ours."""
    inside: list[bytes] = []
    answer: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inside.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        raise AssertionError("nobody asks for a body")

    async def send(message: Message) -> None:
        answer.extend(value for name, value in message["headers"] if name == b"x-request-id")

    served = _apply_middlewares(RequestIds(app), http_middlewares())
    scope = {"type": "http", "headers": [(b"x-request-id", one) for one in given]}
    asyncio.run(served(scope, receive, send))
    return inside, answer


@pytest.mark.parametrize("given", [[], [b"my id \xe9"], [b"x" * 129], [b"a b", b"c"]])
def test_an_answer_through_serve_has_one_sound_id_that_serve_knows_too(given: list[bytes]) -> None:
    inside, answer = ids_of_answer(given)
    assert inside == answer
    assert len(answer) == 1
    assert answer[0] not in given
    assert answer[0].isalnum()


def test_a_sound_id_is_kept_and_comes_once() -> None:
    assert ids_of_answer([b"abc-1.2:3"]) == ([b"abc-1.2:3"], [b"abc-1.2:3"])
