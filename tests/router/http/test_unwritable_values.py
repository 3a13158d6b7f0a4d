"""Values that Python reads and JSON can't write, in every field that ends in a library: 400 with the field's name."""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from twostroke.router.text.tokenizer import TextTokenizer

VALUES = ["1e999", "-1e999", "NaN", "Infinity", '"\\ud800"', '{"a": ["\\udfff"]}', '{"\\ud800": 1}']
BIG = ["1" * 400, "-" + "9" * 5000, "1e308", "1e-999", '"\\u0000"', '"\\ud83d\\ude00"']
"""Values that are sound JSON, though libraries may not like them."""

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}

FIELDS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "response_format.json_schema.schema": (
        "/v1/chat/completions",
        lambda value: CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": value}}}},
    ),
    "guided_json": ("/v1/completions", lambda value: {"prompt": "a", "guided_json": {"enum": [value]}}),
    "structured_outputs.json": (
        "/v1/completions",
        lambda value: {"prompt": "a", "structured_outputs": {"json": {"default": value}}},
    ),
    "tools": (
        "/v1/chat/completions",
        lambda value: CHAT | {"tools": [TOOL | {"function": {"name": "f", "parameters": {"x": value}}}]},
    ),
    "documents": ("/v1/chat/completions", lambda value: CHAT | {"documents": [{"text": value}]}),
    "chat_template_kwargs": ("/v1/chat/completions", lambda value: CHAT | {"chat_template_kwargs": {"x": value}}),
    "metadata": ("/v1/chat/completions", lambda value: CHAT | {"metadata": {"x": value}}),
    "text": (
        "/v1/responses",
        lambda value: {
            "input": "hello",
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": value}}},
        },
    ),
    "messages": (
        "/v1/messages",
        lambda value: {
            "max_tokens": 2,
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": value}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]},
            ],
        },
    ),
}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """The bundled tokenizer, with a template that writes all it is told as JSON."""
    template = (
        "{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}{{ x | default(0) | tojson }}"
        "{%- if false %}<tool_call>{% endif %}"
    )
    return TextTokenizer.load(Path(str(files("twostroke.model.bundled"))), chat_template=template)


async def posted(site, field: str, value: str):
    """The response to a request that has this JSON text in the field."""
    path, fields = FIELDS[field]
    content = json.dumps({"model": "fake"} | fields("@value@")).replace('"@value@"', value).encode()
    return await site.http.post(path, content=content)


@pytest.mark.parametrize("field", FIELDS)
async def test_what_json_can_not_write_is_refused_by_the_name_of_its_field(site_of, chatty, field):
    async with site_of(0, 1, speaks=chatty, max_body_mib=1) as site:
        for value in VALUES:
            response = await posted(site, field, value)
            assert response.status_code == 400, (value, response.text)
            error = response.json()["error"]
            assert field.split(".")[0] in (error.get("param") or error["message"]), (value, error)


@pytest.mark.parametrize("field", FIELDS)
async def test_values_that_libraries_stumble_over_are_no_bug_of_the_server(site_of, chatty, field):
    async with site_of(0, 1, speaks=chatty, max_body_mib=1) as site:
        for value in BIG:
            response = await posted(site, field, value)
            assert response.status_code in (200, 400, 501), (value, response.text)
            assert "internal" not in response.text, (value, response.text)


async def test_a_schema_within_a_string_is_checked_alike(site_of, chatty):
    async with site_of(0, 1, speaks=chatty) as site:
        for value in [*VALUES, *BIG]:
            body = {"model": "fake", "prompt": "a", "max_tokens": 2, "guided_json": f'{{"const": {value}}}'}
            response = await site.http.post("/v1/completions", json=body)
            assert response.status_code in ((400,) if value in VALUES else (200, 400)), (value, response.text)
