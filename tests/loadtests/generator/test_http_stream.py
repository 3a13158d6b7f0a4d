"""Requests over real sockets, the events in the bytes that come back, however cut, and what an answer says."""

import asyncio
import itertools
import socket
from typing import Any

import pytest

from tests.loadtests.generator.scripted_server import (
    HEAD,
    REFUSAL,
    chunk,
    delta_event,
    end,
    event,
    scripted_server,
    token_event,
)
from twostroke.loadtests.generator.http_stream import (
    PIECES_AT_ONCE,
    BadResponse,
    ClientExchange,
    Endpoint,
    ReportedUsage,
    ServerSentEvent,
    StreamedAnswer,
    make_endpoint,
    read_response,
    read_stream,
    sse_events,
    stream,
)


async def sent(endpoint: Endpoint, limit_s: float = 10.0, **more: Any) -> tuple[ClientExchange, StreamedAnswer]:
    exchange = ClientExchange(0.0)
    request = endpoint.request("/v1/completions", b'{"prompt": [5]}')
    await asyncio.to_thread(stream, endpoint, request, exchange, limit_s, **more)
    return exchange, read_stream(exchange)


async def test_each_piece_has_the_moment_at_which_it_came() -> None:
    ticks = itertools.count(1.0)
    async with scripted_server(lambda _: [HEAD, token_event("a"), token_event("b", "length") + end(1, 2)]) as server:
        exchange, answer = await sent(make_endpoint(server.url), clock=lambda: next(ticks))
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
        endpoint = make_endpoint(server.url.replace("127.0.0.1", "both"))
    assert endpoint.address[0] == "127.0.0.1"
    assert make_endpoint(server.url).address[0] == "127.0.0.2"  # none answers any more


async def test_a_server_may_live_under_a_path() -> None:
    async with scripted_server(lambda _: [HEAD + token_event("a", "length") + end(1, 1)]) as server:
        _, answer = await sent(make_endpoint(server.url + "/models/small/"))
    assert answer.status == "ok"
    assert server.bodies[0]["path"] == "/models/small/v1/completions"


async def test_no_connection_is_a_failure_with_its_reason() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        _, answer = await sent(make_endpoint(f"http://127.0.0.1:{bound.getsockname()[1]}"))
    assert (answer.status, answer.error) == ("failed", "no connection: Connection refused")


async def test_an_answer_that_trickles_beyond_the_limit_is_given_up() -> None:
    moments = iter([0.0])  # when it is sent; whatever comes, comes too late
    async with scripted_server(lambda _: [HEAD, token_event("a"), token_event("b")]) as server:
        exchange, answer = await sent(make_endpoint(server.url), clock=lambda: next(moments, 10.0))
    assert (answer.status, answer.error) == ("failed", "no whole answer within 10 s")
    assert len(exchange.arrivals) == 1


async def test_a_silent_server_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _, answer = await sent(make_endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}"), limit_s=0.05)
    assert (answer.status, answer.error) == ("failed", "no whole answer within 0.05 s")


def test_the_api_key_is_sent_where_there_is_one() -> None:
    assert b"Authorization" not in make_endpoint("http://127.0.0.1").request("/", b"")
    with_key = make_endpoint("http://127.0.0.1:81", "secret").request("/", b"{}")
    assert b"\r\nAuthorization: Bearer secret\r\n" in with_key
    assert b"\r\nHost: 127.0.0.1:81\r\n" in with_key
    assert with_key.endswith(b"\r\nContent-Length: 2\r\n\r\n{}")


def test_an_https_server_is_spoken_to_by_tls() -> None:
    assert make_endpoint("https://127.0.0.1").tls is not None
    assert make_endpoint("https://127.0.0.1").address == ("127.0.0.1", 443)


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def events(pieces: list[tuple[float, bytes]]) -> list[ServerSentEvent]:
    _, body = read_response(pieces)
    return list(sse_events(body))


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (
            [(1.0, PLAIN + b"data: a\n"), (2.0, b"\ndata: "), (3.0, b"b\n\ndata: c\n\n")],
            [ServerSentEvent(2.0, b"a"), ServerSentEvent(3.0, b"b"), ServerSentEvent(3.0, b"c")],
        ),
        (
            [(1.0, HEAD + chunk(b'data: {"te')), (2.0, chunk(b'xt":1}\n\n') + b"0\r\n\r\n")],
            [ServerSentEvent(2.0, b'{"text":1}')],
        ),
        ([(1.0, HEAD + chunk(b"data: a\n\n") + b"0\r\nX: y\r\n\r\n")], [ServerSentEvent(1.0, b"a")]),
        ([(1.0, PLAIN + b": ping\n\nevent: token\nid: 7\ndata: a\ndata:b\n\n")], [ServerSentEvent(1.0, b"a\nb")]),
        ([(1.0, PLAIN + b"data: a\n\ndata: b\n")], [ServerSentEvent(1.0, b"a")]),
    ],
    ids=["come with their last byte", "cut by a chunk", "before the last chunk", "comments between", "cut off"],
)
def test_events(pieces: list[tuple[float, bytes]], found: list[ServerSentEvent]) -> None:
    assert events(pieces) == found


def test_bytes_that_come_one_by_one_make_the_same_events() -> None:
    raw = HEAD + chunk(b"data: a\n\nda") + chunk(b"ta: b\r\n\r\n") + b"0\r\n\r\n"
    together = events([(1.0, raw)])
    apart = events([(float(index), raw[index : index + 1]) for index in range(len(raw))])
    assert [event.data for event in apart] == [event.data for event in together] == [b"a", b"b"]
    assert apart[0].at == raw.index(b"\n\nda") + 1
    assert apart[1].at == raw.index(b"\r\n\r\n", len(HEAD)) + 3


@pytest.mark.parametrize("pieces", [[], [(1.0, b"HTTP/1.1 200 OK\r\n")], [(1.0, HEAD + b"zz\r\nabc")]])
def test_what_is_no_http_response_is_bad(pieces: list[tuple[float, bytes]]) -> None:
    with pytest.raises(BadResponse):
        events(pieces)


HEAD_WITH_ID = HEAD.replace(b"\r\n\r\n", b"\r\nX-Request-Id: r7\r\n\r\n")


def came(*pieces: tuple[float, bytes], head: bytes = HEAD_WITH_ID, broken: str | None = None) -> ClientExchange:
    return ClientExchange(10.0, [(10.0, head), *pieces], broken)


def test_a_whole_answer() -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
        "stages": [{"path": "P then D", "prefill_s": 0.25, "resumes": 0}],
    }
    last = event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    answer = read_stream(came((11.0, token_event("a")), (12.5, token_event("b", "length") + last)))
    assert (answer.status, answer.error, answer.http_status, answer.request_id) == ("ok", None, 200, "r7")
    assert (answer.token_times, answer.text) == ([11.0, 12.5], "ab")
    assert (answer.usage.completion_tokens, answer.usage.cached_tokens) == (2, 4)
    assert answer.usage.stages == {"prefill_s": 0.25, "resumes": 0.0}


def test_the_first_time_is_that_of_the_first_text_and_later_tokens_without_text_count() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    pieces = ((11.0, role), (12.0, delta_event("a")), (13.0, delta_event("")), (14.0, delta_event("b", "stop")))
    answer = read_stream(came(*pieces, (15.0, delta_event("", "stop") + end(7, 3))))
    assert answer.token_times == [12.0, 13.0, 14.0]
    assert answer.text == "ab"


def test_what_a_model_thinks_is_text() -> None:
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    assert read_stream(came((11.0, thought), (12.0, delta_event("a", "stop") + end(7, 2)))).token_times == [11.0, 12.0]


def test_an_answer_without_any_text_has_its_end_as_its_only_time() -> None:
    answer = read_stream(came((11.0, token_event("")), (12.0, token_event("", "length") + end(7, 2))))
    assert (answer.status, answer.token_times) == ("ok", [12.0])


def test_nulls_are_as_what_is_not_there() -> None:
    nulls = event({"choices": None, "usage": None, "error": None})
    answer = read_stream(came((11.0, token_event("a", "stop") + nulls + end(7, 1))))
    assert (answer.status, answer.text) == ("ok", "a")


def test_a_server_may_tell_no_usage() -> None:
    answer = read_stream(came((11.0, token_event("a", "stop") + chunk(b"data: [DONE]\n\n"))))
    assert (answer.status, answer.usage) == ("ok", ReportedUsage())


@pytest.mark.parametrize(("status", "verdict"), [(429, "refused"), (503, "refused"), (500, "failed"), (400, "failed")])
def test_a_status_says_whether_the_server_would_not_or_could_not(status: int, verdict: str) -> None:
    answer = read_stream(ClientExchange(10.0, [(10.0, REFUSAL.replace(b"429", str(status).encode()))]))
    assert (answer.status, answer.http_status) == (verdict, status)
    assert answer.error == f"{status} Too Many Requests: full"


@pytest.mark.parametrize(
    ("last", "broken", "fault"),
    [
        (b"", None, "the stream has no end"),
        (b"", "the connection broke: reset by peer", "reset by peer"),
        (event({"error": {"message": "worker\nlost"}}), None, "worker"),
        (chunk(b"data: {broken\n\n"), None, "no JSON"),
        (chunk(b"data: \xff\n\n"), None, "no JSON"),
        (b"-5\r\nhello\r\n", None, "no length"),
    ],
)
def test_an_answer_that_breaks_keeps_what_had_come(last: bytes, broken: str | None, fault: str) -> None:
    answer = read_stream(came((11.0, token_event("a")), (12.0, last), broken=broken))
    assert answer.status == "failed"
    assert (answer.token_times, answer.text) == ([11.0], "a")
    assert fault in answer.error
    assert "\n" not in answer.error


@pytest.mark.parametrize(
    "unknown",
    [
        event({"choices": "none"}),
        event({"choices": [{"delta": "a"}]}),
        event({"choices": [{"delta": {"content": [{"type": "text"}]}, "finish_reason": 7}]}),
        event({"usage": "much"}),
        event({"usage": {"completion_tokens": "two", "prompt_tokens_details": [1], "stages": {"path": "D"}}}),
        event({"usage": {"prompt_tokens": True, "stages": ["D", 3]}}),
        chunk(b"data: 7\n\n"),
        chunk(b'data: "ping"\n\n'),
    ],
)
def test_what_is_not_known_of_a_response_is_ignored(unknown: bytes) -> None:
    answer = read_stream(came((11.0, token_event("a", "stop") + unknown + chunk(b"data: [DONE]\n\n"))))
    assert (answer.status, answer.error, answer.text) == ("ok", None, "a")
    assert answer.usage == ReportedUsage()


@pytest.mark.parametrize(
    ("exchange", "is_unreadable"),
    [
        (came((11.0, event({"type": "message_start"}) + chunk(b"data: [DONE]\n\n")), head=HEAD_WITH_ID), False),
        (came((11.0, event({"choices": {}}) + chunk(b"data: [DONE]\n\n"))), True),
        (came((11.0, chunk(b"data: {broken\n\n"))), True),
        (came((11.0, chunk(b"data: {broken\n\n")), broken="the connection broke: reset"), False),
        (came((11.0, event({"error": {"message": "lost"}}))), False),
        (ClientExchange(10.0, [(10.0, b"SSH-2.0-OpenSSH\r\n\r\n")]), True),
        (ClientExchange(10.0, [], "no connection: refused"), False),
    ],
)
def test_what_the_client_cannot_read_is_told_from_what_the_server_fails_at(
    exchange: ClientExchange, is_unreadable: bool
) -> None:
    answer = read_stream(exchange)
    assert (answer.status, answer.is_unreadable) == ("failed", is_unreadable)


def test_while_a_long_answer_is_read_others_may_run() -> None:
    pauses: list[int] = []
    pieces = [(11.0 + number, token_event("a")) for number in range(2 * PIECES_AT_ONCE)]
    read_stream(came(*pieces, (500.0, end(7, 128))), lambda: pauses.append(1))
    assert len(pauses) == 2
