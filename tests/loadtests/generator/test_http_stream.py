"""Requests over real sockets. Without gevent's patching they just block, so each has a thread."""

import asyncio
import itertools
import socket
from typing import Any

import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.answers import StreamedAnswer, read_stream
from twostroke.loadtests.generator.http_stream import Endpoint, Exchange, endpoint_of, stream


async def sent(endpoint: Endpoint, limit_s: float = 10.0, **more: Any) -> tuple[Exchange, StreamedAnswer]:
    exchange = Exchange(0.0)
    request = endpoint.request("/v1/completions", b'{"prompt": [5]}')
    await asyncio.to_thread(stream, endpoint, request, exchange, limit_s, **more)
    return exchange, read_stream(exchange)


async def test_each_piece_has_the_moment_at_which_it_came() -> None:
    ticks = itertools.count(1.0)
    async with scripted_server(lambda _: [HEAD, token_event("a"), token_event("b", "length") + end(1, 2)]) as server:
        exchange, answer = await sent(endpoint_of(server.base_url.removesuffix("/v1")), clock=lambda: next(ticks))
    assert exchange.sent_at == 1.0
    times = [at for at, _ in exchange.arrivals]
    assert times == [2.0 + number for number in range(len(times))]
    assert (answer.status, answer.text) == ("ok", "ab")
    assert server.bodies == [{"prompt": [5], "path": "/v1/completions"}]


async def test_of_several_addresses_of_a_name_one_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.2", "127.0.0.1")]

    async with scripted_server(lambda _: [HEAD + token_event("a", "length") + end(1, 1)]) as server:
        monkeypatch.setattr(socket, "getaddrinfo", addresses)
        endpoint = endpoint_of(server.base_url.replace("127.0.0.1", "both"))
    assert endpoint.address[0] == "127.0.0.1"
    assert endpoint_of(server.base_url).address[0] == "127.0.0.2"  # none answers any more


async def test_a_server_may_live_under_a_path() -> None:
    async with scripted_server(lambda _: [HEAD + token_event("a", "length") + end(1, 1)]) as server:
        _, answer = await sent(endpoint_of(server.base_url.replace("/v1", "/models/small/")))
    assert answer.status == "ok"
    assert server.bodies[0]["path"] == "/models/small/v1/completions"


async def test_no_connection_is_a_failure_with_its_reason() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        _, answer = await sent(endpoint_of(f"http://127.0.0.1:{bound.getsockname()[1]}"))
    assert (answer.status, answer.error) == ("failed", "no connection: Connection refused")


async def test_an_answer_that_trickles_beyond_the_limit_is_given_up() -> None:
    moments = iter([0.0])  # when it is sent; whatever comes, comes too late
    async with scripted_server(lambda _: [HEAD, token_event("a"), token_event("b")]) as server:
        exchange, answer = await sent(endpoint_of(server.base_url), clock=lambda: next(moments, 10.0))
    assert (answer.status, answer.error) == ("failed", "no whole answer within 10 s")
    assert len(exchange.arrivals) == 1


async def test_a_silent_server_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _, answer = await sent(endpoint_of(f"http://127.0.0.1:{silent.getsockname()[1]}"), limit_s=0.05)
    assert (answer.status, answer.error) == ("failed", "no whole answer within 0.05 s")


def test_the_api_key_is_sent_where_there_is_one() -> None:
    assert b"Authorization" not in endpoint_of("http://127.0.0.1").request("/", b"")
    with_key = endpoint_of("http://127.0.0.1:81", "secret").request("/", b"{}")
    assert b"\r\nAuthorization: Bearer secret\r\n" in with_key
    assert b"\r\nHost: 127.0.0.1:81\r\n" in with_key
    assert with_key.endswith(b"\r\nContent-Length: 2\r\n\r\n{}")


def test_an_https_server_is_spoken_to_by_tls() -> None:
    assert endpoint_of("https://127.0.0.1").tls is not None
    assert endpoint_of("https://127.0.0.1").address == ("127.0.0.1", 443)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(LoadTestError, match="url"):
        endpoint_of(url)
