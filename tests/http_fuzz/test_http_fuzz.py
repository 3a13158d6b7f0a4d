"""Many requests by schemathesis, sound and unsound: no 5xx, no hang, every answer as the document says.

Virtual time makes a hang exact: whatever of a request's time the engines did not compute in. What takes long by itself
is told by this thread's own time, which other processes don't lengthen.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import requests
import schemathesis
from jsonschema import Draft202012Validator
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from schemathesis import Case, Response

from tests.http_fuzz.cases import CHECKS, run_each, sound, unsound
from tests.http_fuzz.conftest import Ask
from tests.http_fuzz.virtual_site import Answer
from twostroke.router.http.app import build_app
from twostroke.router.http.service import ServiceConfig
from twostroke.router.openai.answers import ChatChunk, Completion

SERVICE = Mock(tenants=None, config=ServiceConfig("m", version="fuzzed"))
SCHEMA = schemathesis.openapi.from_dict(build_app(SERVICE, Mock()).openapi())

HANG_S = 1.0
CPU_S = 1.0
CPU_PER_ENGINE_S = 2.0  # of the fake engines, which run in this very thread

COUNTS: Mapping[tuple[str, str], tuple[int, int]] = {  # (sound, unsound) cases
    ("/v1/completions", "POST"): (140, 100),
    ("/v1/chat/completions", "POST"): (120, 80),
    ("/v1/responses", "POST"): (50, 30),
    ("/v1/embeddings", "POST"): (30, 15),
    ("/v1/messages", "POST"): (50, 30),
    ("/v1/messages/count_tokens", "POST"): (30, 15),
    ("/tokenize", "POST"): (50, 25),
    ("/detokenize", "POST"): (40, 25),
    ("/v1/models/{name}", "GET"): (20, 0),
    ("/workers/{worker_id}", "POST"): (20, 15),
    **{
        (path, "GET"): (1, 0)
        for path in ("/v1/models", "/health", "/ready", "/metrics", "/status", "/doctor", "/version", "/tokenizer_info")
    },
}
"""Unsound ones exist where there is a body; a path without parameters can be asked in one way alone. `make test` has
a fifth of them, `make test-wide` all."""


def _cases(which: int) -> list[Any]:
    """(path, method, cases) of the sound cases, 0, or of the unsound, 1."""
    found = []
    for operation, counts in COUNTS.items():
        if counts[which]:
            found.append(pytest.param(*operation, -(-counts[which] // 5)))
        if counts[which] > 1:
            found.append(pytest.param(*operation, counts[which], marks=pytest.mark.wide))
    return found


def test_every_operation_is_fuzzed():
    described = {(path, method.upper()) for path, methods in SCHEMA.raw_schema["paths"].items() for method in methods}
    assert set(COUNTS) == described


@pytest.mark.parametrize(("path", "method", "count"), _cases(0))
def test_sound_requests_are_answered_as_documented_and_in_time(path, method, count, ask):
    statuses = Counter()

    def check(case):
        statuses[_sent(case, ask).status] += 1

    run_each(check, sound(SCHEMA, path, method), count, seed_of=f"sound {method} {path}")
    assert statuses.total() >= count
    if path not in ("/v1/models/{name}", "/workers/{worker_id}"):  # whose name is anything
        assert statuses[200] > 0.6 * count, statuses


@pytest.mark.parametrize(("path", "method", "count"), _cases(1))
def test_unsound_requests_are_refused_as_documented_and_at_once(path, method, count, ask):
    num_sent = 0

    def check(case):
        nonlocal num_sent
        num_sent += 1
        assert _sent(case, ask).engine_s == 0

    run_each(check, unsound(SCHEMA, path, method), count, seed_of=f"unsound {method} {path}")
    assert num_sent >= count


def _sent(case: Case, ask: Ask) -> Answer:
    request = requests.Request(**case.as_transport_kwargs(base_url="http://router")).prepare()
    body = request.body.encode() if isinstance(request.body, str) else request.body or b""
    answer = ask(request.method, request.url, {name: _text(value) for name, value in request.headers.items()}, body)
    headers = {name: [value] for name, value in answer.headers.items()}
    response = Response(answer.status, headers, answer.body, request, answer.virtual_s, verify=False)
    case.validate_response(response, checks=CHECKS)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        _check_events(case, answer)
    assert answer.virtual_s - answer.engine_s <= HANG_S
    assert answer.cpu_s <= CPU_S + CPU_PER_ENGINE_S * answer.engine_s
    return answer


def _check_events(case: Case, answer: Answer) -> None:
    *events, end = answer.body.decode().split("\n\n")
    assert end == ""
    if case.path in _CHUNKS:
        assert events.pop() == "data: [DONE]"
    for event in events:
        name, _, data = event.rpartition("data: ")
        told = json.loads(data)
        if case.path in _CHUNKS:
            assert name == ""
            _CHUNKS[case.path].validate(told)
        else:
            assert name == f"event: {told['type']}\n"
            if case.path == "/v1/responses":
                _RESPONSE_EVENTS.validate_python(told)


_CHUNKS = {
    path: Draft202012Validator(TypeAdapter(chunk).json_schema())
    for path, chunk in (("/v1/completions", Completion), ("/v1/chat/completions", ChatChunk))
}
_RESPONSE_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)  # as the API's official client knows them


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
