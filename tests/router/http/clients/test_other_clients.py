"""Fields and forms that clients of OpenAI, Anthropic and vLLM send, and that were refused or ignored in silence."""

import asyncio
import gzip
import json

import pytest

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.router.http import middleware
from twostroke.router.text.tokenizer import TextTokenizer

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def chatty():
    return TextTokenizer.load(BUNDLED_MODEL_DIR, chat_template=TEMPLATE)


async def test_the_schema_of_a_json_object_is_honoured(site_of, chatty):
    async with site_of(0, 1, speaks=chatty) as site:
        for schema in ({"const": 5}, {"const": 6}):
            fields = CHAT | {"response_format": {"type": "json_object", "schema": schema}}
            assert (await site.http.post("/v1/chat/completions", json=fields)).status_code == 200
        one, other = (request.grammar for request in site.rig["d0"].seen)
        assert '"const":5' in one
        assert one != other
        wrong = CHAT | {"response_format": {"type": "json_object", "schema": {"type": "nonsense"}}}
        refused = (await site.http.post("/v1/chat/completions", json=wrong)).json()["error"]
        assert refused["param"] == "response_format.schema"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
async def test_a_compressed_body_is_refused_as_such(site_of, encoding):
    async with site_of(0, 1) as site:
        body = gzip.compress(json.dumps({"model": "fake", "prompt": "a"}).encode())
        refused = await site.http.post("/v1/completions", content=body, headers={"content-encoding": encoding})
        assert refused.status_code == 415
        assert refused.json()["error"]["param"] == "Content-Encoding"
        plain = {"content": b'{"prompt": "a"}', "headers": {"content-encoding": "identity"}}
        assert (await site.http.post("/v1/completions", **plain)).status_code == 200


async def test_the_tokens_of_a_message_are_counted_even_where_it_is_too_long(site_of, chatty):
    async with site_of(0, 1, speaks=chatty) as site:
        fields = {"model": "fake", "messages": [{"role": "user", "content": "import os\n" * 2000}]}
        counted = await site.http.post("/v1/messages/count_tokens", json=fields)
        assert counted.status_code == 200
        assert counted.json()["input_tokens"] > site.service.max_context()
        assert (await site.http.post("/v1/messages", json=fields | {"max_tokens": 1})).status_code == 400


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "refusal": "I can't."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
    ],
)
async def test_a_refusal_in_the_history_is_what_the_assistant_said(site_of, chatty, message):
    async with site_of(0, 1, speaks=chatty) as site:
        fields = CHAT | {"messages": [*CHAT["messages"], message, {"role": "user", "content": "why?"}]}
        assert (await site.http.post("/v1/chat/completions", json=fields)).status_code == 200
        (request,) = site.rig["d0"].seen
        assert "assistant: I can't.\n" in chatty.decode(request.token_ids)


async def test_medium_verbosity_is_what_every_answer_has(site_of, chatty):
    async with site_of(0, 1, speaks=chatty) as site:
        assert (await site.http.post("/v1/chat/completions", json=CHAT | {"verbosity": "medium"})).status_code == 200
        assert (await site.http.post("/v1/chat/completions", json=CHAT | {"verbosity": "low"})).status_code == 400
        fields = {"model": "fake", "input": "hello", "max_output_tokens": 2, "text": {"verbosity": "medium"}}
        assert (await site.http.post("/v1/responses", json=fields)).status_code == 200


async def test_no_tokens_are_an_empty_text(site_of):
    async with site_of(0, 1) as site:
        answer = await site.http.post("/detokenize", json={"model": "fake", "tokens": []})
        assert answer.json() == {"prompt": ""}


@pytest.mark.parametrize("char", ["\x7f", "a\x7fb", "\x80", "\u2028"])
async def test_a_choice_may_have_any_character(site_of, char):
    async with site_of(0, 1) as site:
        fields = {"model": "fake", "prompt": "a", "guided_choice": [char, "other"], "max_tokens": 1}
        answer = await site.http.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text


async def test_what_was_cached_is_told_of_answers_that_a_stop_string_ends(site_of):
    async with site_of(0, 1) as site:
        fields = {"model": "fake", "prompt": "import os", "seed": 5, "max_tokens": 12, "ignore_eos": True}
        whole = (await site.http.post("/v1/completions", json=fields)).json()["choices"][0]["text"]
        site.rig["d0"].corrupt = lambda event: type(event)(*told_first(event))
        stopped = (await site.http.post("/v1/completions", json=fields | {"stop": whole[1:3]})).json()
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def told_first(event):
    """An event as a worker's first one, which says how many tokens of the prompt were cached."""
    return event.request_id, event.index, event.tokens, event.finish_reason, None, 3 if event.index == 0 else None


async def test_a_schema_that_can_not_be_held_whole_is_served_and_what_is_left_out_is_told(site_of, chatty):
    async with site_of(0, 1, speaks=chatty) as site:

        def fields(**more):
            schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!b)"}}, "not": {}}
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}
            return CHAT | {"response_format": form}

        for stream in (False, True):
            answer = await site.http.post("/v1/chat/completions", json=fields() | {"stream": stream})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-schema-left-out"] == "not, pattern"
        refused = await site.http.post("/v1/chat/completions", json=fields(strict=True))
        assert refused.status_code == 400
        plain = await site.http.post("/v1/chat/completions", json=CHAT)
        assert "x-schema-left-out" not in plain.headers


async def raw(site, request):
    """All bytes that come back over a socket."""
    reader, writer = await asyncio.open_connection(*site.url.removeprefix("http://").split(":"))
    writer.write(request.encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


def in_old_http(method, path, body=""):
    return f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(site_of, monkeypatch):
    async with site_of(0, 1, listen=True) as site:
        fields = json.dumps({"model": "fake", "prompt": "import os", "seed": 5, "max_tokens": 3, "stream": True})
        head, _, body = (await raw(site, in_old_http("POST", "/v1/completions", fields))).partition("\r\n\r\n")
        assert "transfer-encoding" not in head.lower()
        assert f"content-length: {len(body.encode())}" in head.lower()
        events = body.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: {") for event in events[:-2])
        assert len(events) >= 4
        refused = await raw(site, in_old_http("GET", "/events"))
        assert "505" in refused.splitlines()[0]
        monkeypatch.setattr(middleware, "MAX_COLLECTED_BYTES", 300)
        refused = await raw(site, in_old_http("POST", "/v1/completions", fields))
        assert "505" in refused.splitlines()[0]
