"""Answers held to schemas and grammars, through the HTTP app, the pipeline, and real workers of both roles."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest

from tests.integration.local_fleet import SECRET, Served, Shape, serve
from twostroke.model.bundled import BUNDLED_MODEL_DIR
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
async def site(**shape: Any) -> AsyncIterator[Site]:
    async with serve(BUNDLED_MODEL_DIR, Shape(**{"transport": "tcp", **shape})) as served:
        service = RouterService(
            config=ServiceConfig(model_name=MODEL, expects_prefill=shape.get("transport", "tcp") is not None),
            tokenizer=TextTokenizer.load(BUNDLED_MODEL_DIR),
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
