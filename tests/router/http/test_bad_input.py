"""Every wrong input gets a 4xx with an error object that names the field, and neighbours don't notice."""

import asyncio
import json

import httpx
import pytest

from twostroke.protocol.errors import RequestError
from twostroke.router.http.middleware import MAX_CONTAINERS, MAX_MEMBERS, parse_object

BASE = {"model": "fake", "prompt": "import os", "max_tokens": 8}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}

WRONG = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [4096]}),
    ("prompt", {"prompt": "a\ud800b"}),
    ("prompt", {"prompt": "word " * 600}),
    ("prompt", {"prompt": "x" * 3_000_000}),
    ("prompt", {"prompt": [1] * 512}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 10**9}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("min_tokens", {"min_tokens": 9}),
    ("min_tokens", {"min_tokens": -1}),
    ("n", {"n": 10**6}),
    ("n", {"n": 33, "prompt": ["a", "b"]}),
    ("best_of", {"n": 2, "best_of": 1}),
    ("logprobs", {"logprobs": 21}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(10**5)}}),
    ("logit_bias", {"logit_bias": {"9999": 1}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias.5", {"logit_bias": {"5": 101}}),
    ("logit_bias.5", {"logit_bias": {"5": float("nan")}}),
    ("stop", {"stop": ["a"] * 10000}),
    ("stop", {"stop": 5}),
    ("stop.0", {"stop": [""]}),
    ("stop", {"stop": "\ud800"}),
    ("stop_token_ids", {"stop_token_ids": [5000]}),
    ("stop_token_ids.0", {"stop_token_ids": ["a"]}),
    ("stop_token_ids", {"stop_token_ids": list(range(65))}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": 2.1}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": -1}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": float("nan")}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("seed", {"seed": 2**63}),
    ("stream", {"stream": 1}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 3}}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs.choice.0", {"structured_outputs": {"choice": [5]}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: "}}),
    ("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
    ("guided_json", {"guided_json": "[" * 60_000}),
    ("guided_json", {"guided_json": '{"items":' * 100 + "{}" + "}" * 100}),
    ("guided_json", {"guided_json": {"const": "x" * 70_000}}),
    ("guided_json", {"guided_json": False}),
    ("guided_regex", {"guided_regex": "a" * 70_000}),
    ("guided_choice", {"guided_regex": "a", "guided_choice": ["a"]}),
    ("guided_grammar", {"guided_grammar": "root ::= root"}),
    ("guided_grammar", {"guided_grammar": 'r ::= "a"\n' * 300}),
    ("guided_grammar", {"guided_grammar": "start: j\nj: %json {}"}),
    ("guided_json", {"guided_json": {"type": "integer", "multipleOf": 1_000_003}}),
    ("guided_json", {"guided_json": {"allOf": [{"multipleOf": 1009}, {"multipleOf": 997}]}}),
    ("ebnf", {"ebnf": "root ::= ("}),
    ("ignore_eos", {"guided_choice": ["a"], "ignore_eos": True}),
    ("model", {"model": "another"}),
    ("model", {"model": "m" * 1000}),
]

WRONG_CHAT = [
    ("messages", {"messages": []}),
    ("messages.0", {"messages": ["hello"]}),
    ("messages.0.role", {"messages": [{"role": "king", "content": "a"}]}),
    ("messages.0.role", {"messages": [{"content": "a"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("messages", {"messages": [{"role": "user", "content": "word " * 600}]}),
    ("messages", {"messages": [{"role": "user", "content": "a"}] * 2049}),
    ("messages.0.tool_calls", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("logprobs", {"logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 5000}),
    ("max_tokens", {"max_completion_tokens": 9}),
    ("skip_special_tokens", {"skip_special_tokens": False}),
]


async def post(site, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await site.http.post(path, content=content, headers={"content-type": "application/json"})


def check_error(response, param):
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param or error["param"].startswith(f"{param}."), error
    assert error["message"]
    assert error["code"]


async def test_every_wrong_field_is_named_and_neighbours_are_unchanged(site_of, until):
    async with site_of(1, 1) as site:
        fields = {**BASE, "max_tokens": 300, "seed": 4, "ignore_eos": True, "return_token_ids": True}
        alone = (await post(site, "/v1/completions", fields)).json()["choices"][0]
        site.rig["d0"].gate = asyncio.Semaphore(0)
        neighbours = [asyncio.create_task(post(site, "/v1/completions", fields)) for _ in range(3)]
        await until(lambda: len(site.rig["d0"].owned) == 3)
        for param, change in WRONG:
            response = await post(site, "/v1/completions", {**BASE, **change})
            check_error(response, param)
            site.rig["d0"].gate.release()
            await asyncio.sleep(0)
        for param, change in WRONG_CHAT:
            check_error(await post(site, "/v1/chat/completions", {**CHAT, **change}), param)
        assert len(site.rig["p0"].seen) == 4
        for _ in range(1000):
            site.rig["d0"].gate.release()
        for neighbour in neighbours:
            assert (await neighbour).json()["choices"][0] == alone


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"nonsense", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"model": "fake", "prompt": "a"', 400),
        (b'\xff\xfe{"model": 1}', 400),
        (b"[" * 200_000, 400),
        (b'{"a":' * 200_000, 400),
        (b'{"model": "fake", "seed": ' + b"9" * 10_000 + b"}", 400),
        (b" " * (9 * 1024 * 1024), 413),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_body_that_is_no_request_is_refused(site_of, body, status):
    async with site_of(0, 1) as site:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = await post(site, path, body)
            assert response.status_code == status
            check_error(response, "body")


async def test_deep_nesting_is_refused_by_the_field_that_has_it(site_of):
    async with site_of(0, 1) as site:
        nested = b'{"model": "fake", "prompt": "a", "metadata": ' + b"[" * 100 + b"]" * 100 + b"}"
        check_error(await post(site, "/v1/completions", nested), "metadata")


async def test_a_large_body_is_not_held_while_it_comes(site_of):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 65536

    async with site_of(0, 1) as site:
        response = await site.http.post("/v1/completions", content=endless())
        assert response.status_code == 413
        assert sent * 65536 < 70 * 1024 * 1024


async def test_a_50_mb_body_is_refused_over_a_socket(site_of):
    async with site_of(0, 1, listen=True) as site, httpx.AsyncClient(base_url=site.url, timeout=60) as http:
        response = await http.post("/v1/completions", content=b"x" * 50_000_000)
        assert response.status_code == 413
        check_error(response, "body")
        assert (await http.get("/health")).status_code == 200


async def test_unknown_paths_and_methods_get_error_objects(site_of):
    async with site_of(0, 1) as site:
        missing = await site.http.get("/v2/completions")
        wrong = await site.http.get("/v1/completions")
        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert missing.json()["error"]["code"] == "not_found"
        assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "another"}, "model"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, "prompt"),
    ],
)
async def test_the_tokenizer_endpoints_name_the_field_too(site_of, path, body, param):
    async with site_of(0, 1) as site:
        check_error(await post(site, path, body), param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [' + b"[]," * MAX_CONTAINERS + b"[]]}", "body"),
        (b'{"a": "' + b'\\"{' * 100_000, "body"),
        (json.dumps({str(i): 1 for i in range(MAX_MEMBERS + 1)}).encode(), "body"),
        (json.dumps({"messages": [{str(i): 1 for i in range(MAX_MEMBERS + 1)}]}).encode(), "messages"),
    ],
    ids=["many containers", "no end", "a wide body", "a wide object"],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_looked_at(body, param):
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert caught.value.param == param


def test_brackets_in_a_text_are_no_containers():
    text = '{"\\[' * MAX_CONTAINERS
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


async def test_no_models_name_means_the_only_model(site_of):
    async with site_of(0, 1) as site:
        for path, fields in (("/v1/completions", BASE), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})):
            for given in ({**fields, "model": None}, {name: fields[name] for name in fields if name != "model"}):
                answer = await post(site, path, given)
                assert answer.status_code == 200
                assert answer.json().get("model", "fake") == "fake"


async def test_a_text_may_have_nul_characters(site_of):
    async with site_of(0, 1) as site:
        there = (await post(site, "/tokenize", {"prompt": "a\0b", "add_special_tokens": False})).json()
        assert (await post(site, "/detokenize", {"tokens": there["tokens"]})).json() == {"prompt": "a\0b"}
        assert (await post(site, "/v1/completions", {**BASE, "prompt": "a\0b", "stop": ["\0\0"]})).status_code == 200
        assert site.rig["d0"].seen[-1].token_ids == (0, *there["tokens"])
        chat = {**CHAT, "messages": [{"role": "user", "content": "a\0b"}]}
        assert (await post(site, "/v1/chat/completions", chat)).status_code == 200


UNKNOWN = {"chat_template_kwargs": {"enable_thinking": False}, "temprature": 1, "stream_options": {"surprise": 1}}


async def test_unknown_fields_are_ignored_and_each_is_named_once(site_of, caplog):
    async with site_of(0, 1) as site:
        for _ in range(2):
            chat = {**CHAT, **UNKNOWN, "stream": True, "skip_special_tokens": True, "user": 5, "store": True}
            chat["messages"] = [{"role": "user", "content": "hello", "mood": "gay"}] * 2
            assert (await post(site, "/v1/chat/completions", chat)).status_code == 200
        assert (await post(site, "/v1/completions", {**BASE, "the princess's whereabouts": 1})).status_code == 200
    named = [record.args[0] for record in caplog.records if "is not known here" in record.getMessage()]
    assert named == ["temprature", "stream_options.surprise", "messages.mood", "(not a word)"]


async def test_a_strict_router_refuses_unknown_fields_with_a_suggestion(site_of):
    async with site_of(0, 1, strict=True) as site:
        for param, change in (
            ("temprature", {"temprature": 1}),
            ("stream_options.surprise", {"stream": True, "stream_options": {"surprise": 3}}),
        ):
            check_error(await post(site, "/v1/completions", {**BASE, **change}), param)
        wrong = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "contents": "a"}]}
        check_error(await post(site, "/v1/chat/completions", {**CHAT, **wrong}), "messages.1.contents")
        wrong = await post(site, "/v1/completions", {**BASE, "temprature": 1})
        assert wrong.json()["error"]["message"] == "temprature: is not a known field: did you mean temperature?"
        harmless = {"user": "me", "metadata": {"a": "b"}, "tools": [], "skip_special_tokens": True}
        assert (await post(site, "/v1/completions", {**BASE, **harmless})).status_code == 200


async def test_a_body_counts_as_json_whatever_its_content_type(site_of):
    async with site_of(0, 1) as site:
        for kind in ("application/x-www-form-urlencoded", "text/plain", "nonsense"):
            answer = await site.http.post("/v1/completions", content=json.dumps(BASE), headers={"content-type": kind})
            assert answer.status_code == 200
        assert (await site.http.post("/v1/completions", content=json.dumps(BASE))).status_code == 200
