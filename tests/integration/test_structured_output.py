"""Answers held to schemas and grammars, through the HTTP app, the pipeline, and real workers of both roles."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.integration.local_fleet import SECRET, Served, Shape, before_steps, die_at, serve
from tests.rigs.processes import comes
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.step import Constraint
from twostroke.protocol.grammars import Grammars
from twostroke.router.http.app import build_app
from twostroke.router.http.doctor import Doctor
from twostroke.router.http.service import RouterService, ServiceConfig
from twostroke.router.text.tokenizer import TextTokenizer

MODEL = "bundled"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long one"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


@dataclass
class Site:
    """A fleet behind the app."""

    served: Served
    http: httpx.AsyncClient

    async def ask(self, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": "import os\n", "max_tokens": 200, "temperature": 1.5, **fields}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice


@contextlib.asynccontextmanager
async def site(folder: Path = BUNDLED_MODEL_DIR, **shape: Any) -> AsyncIterator[Site]:
    async with serve(folder, Shape(**{"transport": "tcp", **shape})) as served:
        service = RouterService(
            config=ServiceConfig(model_name=MODEL, expects_prefill=shape.get("transport", "tcp") is not None),
            tokenizer=TextTokenizer.load(folder),
            fleet=served.fleet,
            channels=served.channels,
            pipeline=served.pipeline,
        )
        await service.start()
        doctor = Doctor(fleet=served.fleet, stats=served.channels.stats, secret=SECRET, expected=dict)
        transport = httpx.ASGITransport(build_app(service, doctor))
        async with httpx.AsyncClient(transport=transport, base_url="http://site", timeout=60) as http:
            yield Site(served, http)
        await service.close()
        await served.idle()


async def test_a_schema_holds_over_the_hand_over_and_beside_others_who_have_none() -> None:
    async with site() as here:
        alone = await here.ask(seed=1, temperature=0)
        free = [here.ask(seed=1, temperature=0) for _ in range(4)]
        held = [here.ask(seed=seed, response_format=AS_PERSON) for seed in range(12)]
        answers = await asyncio.gather(*free, *held)
        assert answers[:4] == [alone] * 4
        ended = [answer for answer in answers[4:] if answer["finish_reason"] == "stop"]
        assert len(ended) >= 6
        for answer in ended:
            jsonschema.validate(json.loads(answer["text"]), PERSON)
        assert len({answer["text"] for answer in ended}) > 1
        assert here.served.fleet.stats("decode").transfers_done >= 12


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"choice": ["red", "dark blue"]}}, lambda text: text in ("red", "dark blue")),
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}, lambda text: len(text) == 6 and text[3] == "-"),
        (
            {"guided_grammar": 'root ::= "x" num\nnum ::= [0-9] [0-9]'},
            lambda text: text[0] == "x" and int(text[1:]) >= 0,
        ),
        ({"guided_json": '{"const": [1, {"a": null}]}'}, lambda text: json.loads(text) == [1, {"a": None}]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_each_kind_of_grammar_is_followed(fields: dict[str, Any], is_right: Any) -> None:
    async with site(transport=None) as here:
        for seed in range(3):
            answer = await here.ask(seed=seed, **fields)
            assert answer["finish_reason"] == "stop" or "response_format" in fields
            assert answer["finish_reason"] == "length" or is_right(answer["text"]), answer["text"]


async def of_persons(here: Site, count: int) -> list[dict[str, Any]]:
    """Streams' answers, which are valid where they end."""
    asked = [here.ask(seed=seed, response_format=AS_PERSON, return_token_ids=True) for seed in range(count)]
    answers = await asyncio.gather(*asked)
    for answer in answers:
        if answer["finish_reason"] == "stop":
            jsonschema.validate(json.loads(answer["text"]), PERSON)
    return answers


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Any]]:
    """Return the answers to six requests without any disturbance."""

    async def ask() -> list[dict[str, Any]]:
        async with site() as here:
            return await of_persons(here, 6)

    answers = asyncio.run(ask())
    assert sum(answer["finish_reason"] == "stop" for answer in answers) >= 3
    return answers


async def test_a_decode_worker_that_dies_in_mid_object_changes_no_token(undisturbed: list[dict[str, Any]]) -> None:
    async with site(num_decode=2) as here:
        failed = die_at(here.served.fleet.engine("decode"), 10)
        assert await of_persons(here, 6) == undisturbed
        assert failed


@pytest.mark.parametrize("swap_bytes", [0, 2**26], ids=["recomputed", "swapped"])
async def test_requests_that_give_way_get_the_same_tokens(swap_bytes: int, undisturbed: list[dict[str, Any]]) -> None:
    async with site(num_blocks=16, block_size=16, swap_bytes=swap_bytes, decode={"watermark": 0.0}) as here:
        are_together = asyncio.Event()

        def has_all() -> bool:
            stats = here.served.fleet.stats("decode")
            return stats.num_running + stats.num_waiting == 6

        async def wait_for_all(_: int) -> None:
            """Hold the first step until all six are there: else quick ones end before slow ones need room."""
            if not are_together.is_set():
                assert await comes(has_all, 60.0)
                are_together.set()

        before_steps(here.served.fleet.engine("decode"), wait_for_all)
        answers = await of_persons(here, 6)
        assert here.served.fleet.stats("decode").preemptions > 0
        assert answers == undisturbed


async def test_prefill_that_fails_leaves_the_first_token_to_a_decode_worker_that_knows_the_grammar(
    undisturbed: list[dict[str, Any]],
) -> None:
    async with site() as here:
        die_at(here.served.fleet.engine("prefill"), 1)
        assert await of_persons(here, 6) == undisturbed


async def test_an_answer_that_can_not_be_followed_ends_with_an_error_and_its_neighbours_go_on(
    undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, has_failed = Constraint.__init__, Constraint.has_failed
    victims: set[Constraint] = set()

    def make(self: Constraint, matcher: Any, renew: Any, stop_token_ids: Any) -> None:
        made(self, matcher, renew, stop_token_ids)
        if "FOO" in renew.args[0]:
            victims.add(self)

    def fails(self: Constraint, position: int) -> bool:
        return (self in victims and position > 20) or has_failed(self, position)

    monkeypatch.setattr(Constraint, "__init__", make)
    monkeypatch.setattr(Constraint, "has_failed", fails)
    async with site() as here:
        body = {
            "model": MODEL,
            "prompt": "import os\n",
            "max_tokens": 100,
            "guided_regex": "(FOO){100}",
            "stream": False,
        }
        asked = here.http.post("/v1/completions", json=body)
        answers, refused = await asyncio.gather(of_persons(here, 6), asked)
        assert answers == undisturbed
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "grammar_too_complex"


async def test_a_bug_in_a_grammar_ends_its_request_and_its_neighbours_go_on(
    undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Constraint.__init__

    def make(self: Constraint, matcher: Any, renew: Any, stop_token_ids: Any) -> None:
        if "FOO" in renew.args[0]:
            raise ZeroDivisionError
        made(self, matcher, renew, stop_token_ids)

    monkeypatch.setattr(Constraint, "__init__", make)
    async with site() as here:
        body = {"model": MODEL, "prompt": "import os\n", "guided_regex": "(FOO){100}"}
        answers, failed = await asyncio.gather(of_persons(here, 6), here.http.post("/v1/completions", json=body))
        assert answers == undisturbed
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "request_failed"


async def test_workers_wait_for_no_grammar_of_a_client_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, release = Grammars._compile, threading.Event()
    compiled: list[str] = []

    def slow(self: Grammars, grammar: str) -> Any:
        compiled.append(grammar)
        if len(compiled) > 1:  # the first one is the router's
            release.wait(20)
        return compile_(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", slow)
    async with site() as here:
        worker = here.served.fleet.worker("decode")
        asked = asyncio.create_task(here.ask(guided_regex="(FOO){100}"))
        try:
            async with asyncio.timeout(20):
                while len(compiled) < 2 or not worker._grammars._tasks:  # noqa: ASYNC110  (nothing tells of it)
                    await asyncio.sleep(0.005)
                asked.cancel()
                while worker._grammars._tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        finally:
            release.set()
        await asyncio.gather(asked, return_exceptions=True)


async def test_no_more_than_the_end_is_drawn_where_nothing_else_may_come() -> None:
    async with site(transport=None) as here:
        answer = await here.ask(guided_choice=["a"], min_tokens=50, return_token_ids=True)
        assert answer["text"] == "a"
        assert answer["finish_reason"] == "stop"
        assert len(answer["token_ids"]) == 2
        streamed = await here.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "x", "guided_choice": ["red"], "stream": True, "logprobs": 2},
        )
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "red"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "rain"}}], ids=str)
async def test_the_default_model_calls_tools_that_its_template_knows_nothing_of(choice: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("rain", "sun")]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Rain in Oslo?"}], "max_tokens": 200}
    asked |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    async with site() as here:
        for seed in range(3):
            answer = await here.http.post("/v1/chat/completions", json={**asked, "seed": seed})
            assert answer.status_code == 200, answer.text
            (one,) = answer.json()["choices"]
            assert one["finish_reason"] == "tool_calls", one
            (call,) = one["message"]["tool_calls"]
            assert call["function"]["name"] in (("rain", "sun") if choice == "required" else ("rain",))
            jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
        answer = await here.http.post("/v1/chat/completions", json={**asked, "tool_choice": "auto"})
        assert answer.status_code == 200, answer.text
