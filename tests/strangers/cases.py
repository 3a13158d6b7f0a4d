"""Odd requests as strangers sent them to servers of this kind, each with what is right to answer.

A case needs a live server and nothing else of it: no API key, no worker's log. `variations` of a case change what must
make no difference: the endpoint, whether the answer is a stream, who wrote the text.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.strangers.checks import (
    Case,
    Check,
    Response,
    answered,
    called,
    held,
    leaves_out,
    no_bug,
    of_schema,
    of_schema_or_refused,
    refused,
    says,
)

# --- the requests ---

USER = {"role": "user", "content": "Name three rivers."}
COMPLETION = {"prompt": "import os\n", "max_tokens": 8, "seed": 1}
CHAT = {"messages": [USER], "max_tokens": 8, "seed": 1}
RESPONSE = {"input": "Name three rivers.", "max_output_tokens": 16}
MESSAGE = {"messages": [USER], "max_tokens": 8}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
CONTROLS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|end|>", "</s>", "<|eot_id|>", "<tool_call>", "</think>")
UNWRITABLE = ("1e999", "-1e999", "NaN", "Infinity", '"\\ud800"', '{"\\udfff": 1}', '[["\\udc00x"]]')
TEMPLATELESS = "no_chat_template"


def cases() -> Iterator[Case]:
    """All of them."""
    groups = (_numbers, _sizes, _held, _lenient, _tools, _history, _others_fields, _marks, _transport, _small)
    for group in (*groups, _clients, _cut_calls, _places):
        yield from group()


def _post(name: str, path: str, body: Any, check: Check, **headers: str) -> Case:
    return Case(name, path, body, check, {key.replace("_", "-"): value for key, value in headers.items()})


def _numbers() -> Iterator[Case]:
    """Values that Python reads and JSON can't write."""
    schema_form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "@"}}}
    places = {
        "/v1/completions": {
            "guided_json": COMPLETION | {"guided_json": {"const": "@"}},
            "structured_outputs": COMPLETION | {"structured_outputs": {"json": {"enum": ["@"]}}},
            "temperature": COMPLETION | {"temperature": "@"},
            "logit_bias": COMPLETION | {"logit_bias": {"5": "@"}},
            "metadata": COMPLETION | {"metadata": {"a": "@"}},
        },
        "/v1/chat/completions": {
            "response_format": CHAT | {"response_format": schema_form},
            "tools": CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "@"}}}]},
            "documents": CHAT | {"documents": [{"text": "@"}]},
            "chat_template_kwargs": CHAT | {"chat_template_kwargs": {"a": "@"}},
        },
        "/v1/responses": {
            "text": RESPONSE | {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"x": "@"}}}}
        },
        "/v1/messages": {"tools": MESSAGE | {"tools": [{"name": "f", "input_schema": {"type": "object", "x": "@"}}]}},
    }
    for path, fields in places.items():
        for (param, body), value in itertools.product(fields.items(), UNWRITABLE):
            sent = json.dumps(body).replace('"@"', value).encode()
            yield Case(f"{value} in {param}", path, sent, refused(param))
    for number in (-(2**63), -(2**63) + 1, -9.3e18, 2**53 + 1, 123456789012345678, 2**63):
        for schema in (
            {"const": number},
            {"enum": [number]},
            {"type": "integer", "minimum": number, "maximum": number},
        ):
            yield _post(
                f"{schema}", "/v1/completions", COMPLETION | {"guided_json": schema}, of_schema_or_refused(schema)
            )
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            yield _post(f"{schema}, not strict", "/v1/chat/completions", CHAT | {"response_format": form}, answered)
    for digits in (30, 400, 4000):
        sent = json.dumps(COMPLETION | {"guided_json": {"const": "@"}}).replace('"@"', "7" * digits).encode()
        yield Case(f"a number of {digits} digits", "/v1/completions", sent, no_bug)


def _sizes() -> Iterator[Case]:
    """Products of what is bounded one by one."""
    for n, tokens, logprobs in ((64, 4000, 20), (64, 8000, 5), (32, 8000, 20)):
        body = COMPLETION | {"n": n, "max_tokens": tokens, "logprobs": logprobs, "prompt": "a"}
        yield _post(f"{n} x {tokens} x {logprobs}", "/v1/completions", body, refused("logprobs", "max_tokens"))
        chat = CHAT | {"n": n, "max_tokens": tokens, "logprobs": True, "top_logprobs": logprobs}
        yield _post(
            f"{n} x {tokens} x {logprobs} in a chat", "/v1/chat/completions", chat, refused("logprobs", "max_tokens")
        )
    prompts = [[5] * 1000] * 64
    body = COMPLETION | {"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 0}
    yield _post("64 prompts scored", "/v1/completions", body, refused("prompt_logprobs"))
    yield _post(
        "64 prompts echoed",
        "/v1/completions",
        COMPLETION | {"prompt": prompts, "echo": True, "logprobs": 20},
        refused("logprobs"),
    )
    for n in (65, 10**6, 2**70):
        yield _post(f"n = {n}", "/v1/completions", COMPLETION | {"n": n}, refused("n"))
    deep: Any = "a"
    for _ in range(300):
        deep = [deep]
    yield _post("300 levels", "/v1/chat/completions", CHAT | {"metadata": deep}, refused())
    yield _post("2 MB of brackets", "/v1/completions", b'{"prompt":' + b"[" * 2_000_000, refused())
    yield _post("9 MB", "/v1/completions", b'{"prompt": "' + b"a" * 9_000_000 + b'"}', refused(status=413))


def _held() -> Iterator[Case]:
    """Answers that end by `stop` are what was asked for, though their text spells control tokens."""
    long = {"max_tokens": 60, "temperature": 0}
    for text in CONTROLS:
        schemas = (
            {"const": text},
            {"enum": [text, text * 2]},
            {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False},
            {"type": "array", "items": {"const": f"a{text}b"}, "minItems": 1, "maxItems": 1},
        )
        for number, schema in enumerate(schemas):
            form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
            yield _post(
                f"{text} in schema {number}",
                "/v1/completions",
                COMPLETION | long | {"guided_json": schema},
                of_schema(schema),
            )
            yield _post(
                f"{text} in schema {number} of a chat",
                "/v1/chat/completions",
                CHAT | long | {"response_format": form},
                of_schema(schema),
            )
        choices = [f"{text}!", f"?{text}"]
        yield _post(
            f"{text} as a choice",
            "/v1/completions",
            COMPLETION | long | {"guided_choice": choices},
            held(lambda said, choices=choices: said in choices),
        )
        pattern = re.escape(text)
        yield _post(
            f"{text} as a pattern",
            "/v1/completions",
            COMPLETION | long | {"guided_regex": f"a{pattern}b"},
            held(lambda said, text=text: said == f"a{text}b"),
        )
    for char in ("\x7f", "\x80", "\u2028", "\ufeff", "\U0001f600", "\x01", '"', "\\"):
        yield _post(
            f"choice {char!r}",
            "/v1/completions",
            COMPLETION | long | {"guided_choice": [f"a{char}"]},
            held(lambda said, char=char: said == f"a{char}"),
        )
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    yield _post(
        "json_object with a schema",
        "/v1/chat/completions",
        CHAT | long | {"response_format": {"type": "json_object", "schema": schema}},
        of_schema(schema),
    )


def _lenient() -> Iterator[Case]:
    """Schemas as pydantic and zod write them, without `strict`."""
    parts: dict[str, Any] = {
        "decimal": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        "email": {
            "type": "string",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9]\.)+$",
        },
        "word": {"type": "string", "pattern": r"\bfoo\b", "maxLength": 9},
        "back": {"type": "string", "pattern": r"^(a)\1$"},
        "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "uint64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        "double": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        "pattern properties": {"type": "object", "patternProperties": {"^(?!_)": {"type": "integer"}}},
        "sets": {"type": "object", "properties": {name: {"type": "array", "uniqueItems": True} for name in "ab"}},
        "unique": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}, "maxItems": 2},
    }
    for name, part in parts.items():
        whole = {"type": "object", "properties": {"a": part}, "required": ["a"]}
        for is_chat, strict in itertools.product((True, False), (False, None)):
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": whole, "strict": strict}}
            base, path = (CHAT, "/v1/chat/completions") if is_chat else (COMPLETION, "/v1/completions")
            yield _post(f"{name}, strict: {strict}", path, base | {"response_format": form}, answered)
        tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
        yield _post(
            f"{name} of a tool", "/v1/chat/completions", CHAT | {"tools": [tool], "tool_choice": "required"}, answered
        )


def _tools() -> Iterator[Case]:
    """Calls, forced and free, of any model."""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        yield _post(
            f"tool_choice {choice}",
            "/v1/chat/completions",
            CHAT | {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200},
            called("weather"),
        )
    for choice in ("auto", "none", None):
        yield _post(
            f"tool_choice {choice}", "/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": choice}, answered
        )
    yield _post(
        "not parallel", "/v1/chat/completions", CHAT | {"tools": [TOOL], "parallel_tool_calls": False}, answered
    )
    anthropic = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    for kind in ("auto", "any"):
        body = MESSAGE | {"tools": [anthropic], "tool_choice": {"type": kind, "disable_parallel_tool_use": True}}
        yield _post(f"Messages' tool_choice {kind}", "/v1/messages", body, answered)
    yield _post("functions", "/v1/chat/completions", CHAT | {"functions": [TOOL["function"]]}, answered)


def _history() -> Iterator[Case]:
    """Earlier turns as clients send them back."""
    for arguments in (
        "",
        None,
        "{",
        '{"place": "Ro',
        "null",
        "[]",
        '{"a": "\\ud800"}',
        '{"a": 1e999}',
        "{}",
        '{"place": "Rome"}',
    ):
        call = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abc123def", "content": "sun"},
            USER,
        ]
        yield _post(
            f"arguments {arguments!r}", "/v1/chat/completions", CHAT | {"messages": messages, "tools": [TOOL]}, answered
        )
    for role in ("developer", "system"):
        yield _post(
            role, "/v1/chat/completions", CHAT | {"messages": [{"role": role, "content": "Be kind."}, USER]}, answered
        )
    for said in ({"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}):
        yield _post(
            "a refusal",
            "/v1/chat/completions",
            CHAT | {"messages": [USER, {"role": "assistant", **said}, USER]},
            answered,
        )
    for text in (">", "end", "assistant", "def f():\n    ", " ", "", "\n", "It rains"):
        messages = [USER, {"role": "assistant", "content": text}]
        body = CHAT | {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        yield _post(f"continues {text!r}", "/v1/chat/completions", body, answered)
        yield _post(f"continues {text!r}", "/v1/messages", MESSAGE | {"messages": messages}, answered)


def _marks() -> Iterator[Case]:
    """Beginnings of answers that are made of a format's marks: the server reads them in no time."""
    marks = (
        "<tool_call>",
        "<tool_call>f\n<arg_key>",
        "<parameter=a>\n",
        "<function=f>\n",
        "<think>",
        "[TOOL_CALLS]",
        '{"name": "f", ',
    )
    for mark, rest in itertools.product(marks, (" " * 3000 + "x", "\n" * 3000)):
        messages = [USER, {"role": "assistant", "content": mark + rest}]
        body = CHAT | {"messages": messages, "continue_final_message": True, "tools": [TOOL], "max_tokens": 4}
        yield _post(f"{mark} and {len(rest)} of {rest[:1]!r}", "/v1/chat/completions", body, no_bug)
    for mark in marks:
        messages = [USER, {"role": "assistant", "content": mark * 200}]
        yield _post(f"{mark} 200 times", "/v1/messages", MESSAGE | {"messages": messages}, no_bug)


def _others_fields() -> Iterator[Case]:
    """Fields with the values that other servers' clients send."""
    for more in (
        {"verbosity": "medium"},
        {"seed": -1},
        {"user": "u"},
        {"store": False},
        {"prediction": None},
        {"top_k": -1},
        {"stop": ""},
        {"stop": []},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"n": 2},
    ):
        yield _post(str(more), "/v1/chat/completions", CHAT | more, answered)
    for wrong, param in (
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"stop": [5]}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
    ):
        yield _post(str(wrong), "/v1/chat/completions", CHAT | wrong, refused(param))
    yield _post("another model", "/v1/completions", COMPLETION | {"model": "gpt-4"}, refused("model", status=404))


def _transport() -> Iterator[Case]:
    """Yield requests that are odd around their body."""
    body = json.dumps(COMPLETION).encode()
    for encoding in ("gzip", "deflate", "br", "zstd"):
        yield _post(
            f"{encoding} body",
            "/v1/completions",
            body,
            refused("Content-Encoding", status=415),
            content_encoding=encoding,
        )
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-16"):
        yield _post(kind, "/v1/completions", body, answered, content_type=kind)
    for host in ("evil.example", "evil.example:8000"):
        yield _post(f"Host: {host}", "/v1/completions", body, refused("Host", status=403), host=host)
    for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
        yield _post(f"Origin: {origin}", "/v1/completions", body, refused("Origin", status=403), origin=origin)
    for sent in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "a"} x'):
        yield _post(f"body {sent!r}", "/v1/completions", sent, refused())


def _small() -> Iterator[Case]:
    """Endpoints beside the answers."""
    yield _post(
        "no tokens", "/detokenize", {"tokens": []}, lambda got: None if got.json == {"prompt": ""} else str(got.body)
    )
    yield _post("a token that is none", "/detokenize", {"tokens": [2**30]}, refused("tokens"))
    yield _post(
        "a long message",
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "import os\n" * 9000}]},
        lambda got: None if got.status == 200 and got.json["input_tokens"] > 9000 else str(got.body[:200]),
    )
    yield _post(
        "allowed and bad",
        "/v1/completions",
        COMPLETION
        | {"allowed_token_ids": [40, 41], "min_tokens": 8, "stop_token_ids": [40, 41], "return_token_ids": True},
        lambda got: None if set(got.json["choices"][0]["token_ids"]) <= {40, 41} else str(got.body[:200]),
    )
    for path in ("/v1/models", "/health", "/ready", "/version"):
        yield Case(f"GET {path}", path, b"", answered, method="GET")


def _text(**more: Any) -> dict[str, Any]:
    return {"type": "text", "text": "Name three rivers.", **more}


_FUNCTION = {"type": "function", **TOOL["function"]}
_ANTHROPIC = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
_ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]}
_SCHEMA_FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"const": 7}}}}
_DOCUMENT = {"type": "document", "title": "Rivers", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
_NAMESPACE = {"type": "namespace", "name": "mcp__a__", "description": "a", "tools": [_FUNCTION]}
_OTHER_ITEMS = (
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
    {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"},
    {"type": "local_shell_call", "call_id": "c2", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
)
_LONG = "import os\n" * 40_000


def _clients() -> Iterator[Case]:
    """Yield what common clients send first."""
    clear = {"type": "clear_thinking_20251015", "keep": "all"}
    bill = _text(text="x-anthropic-billing-header: cc_version=2; cch=1;")
    for more in (
        {"context_management": {"edits": [clear]}},
        {"context_management": {"edits": []}},
        {"system": [bill, _text(cache_control={"type": "ephemeral"})]},
        {"output_format": _SCHEMA_FORM},
        {"output_config": {"format": _SCHEMA_FORM}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled"}},
        {"tools": [_ANTHROPIC | {"name": "n" * 128}]},
        {"messages": [USER, {"role": "assistant", "content": []}, USER]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [_DOCUMENT, _text()]}]},
        {"metadata": {"user_id": "a"}, "temperature": 1, "stop_sequences": []},
    ):
        yield _post(f"Messages: {str(more)[:60]}", "/v1/messages", MESSAGE | more, answered)
    left_out = (
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "custom", "name": "p"},
        {"type": "tool_search"},
        {"type": "web_search_preview_2025_03_11"},
        {"type": "file_search", "vector_store_ids": ["vs_1"]},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:1"},
        {"type": "apply_patch"},
        {"type": "shell"},
    )
    for tool in left_out:
        body = RESPONSE | {"tools": [_FUNCTION, tool], "tool_choice": "auto"}
        yield _post(f"Responses: {tool['type']}", "/v1/responses", body, leaves_out(tool["type"]))
    history = [{"role": "user", "content": "a"}, *_OTHER_ITEMS, {"role": "user", "content": "b"}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    for more in (
        {"tools": [_NAMESPACE]},
        {"input": history},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"], "store": False},
        {"tools": [_FUNCTION], "tool_choice": "required", "text": {"format": _SCHEMA_FORM | {"name": "n"}}},
        {"tools": [_FUNCTION], "tool_choice": allowed},
        {"tool_choice": allowed, "tools": [_NAMESPACE]},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ):
        yield _post(f"Responses: {str(more)[:60]}", "/v1/responses", RESPONSE | more, answered)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA_FORM["schema"]}}
    said = {"role": "assistant", "content": "Rhine", "annotations": [{"type": "url_citation", "url_citation": {}}]}
    for more in (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": _ALLOWED}},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": _ALLOWED | {"mode": "required"}}},
        {"messages": [USER, said, USER]},
        {"messages": [USER, {"role": "assistant", "content": "The Rh", "prefix": True}]},
        {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": []}]},
    ):
        yield _post(f"a chat: {str(more)[:60]}", "/v1/chat/completions", CHAT | more, answered)
    body = CHAT | {"tools": [TOOL], "tool_choice": "required", "response_format": form, "max_tokens": 200}
    yield _post("a call beside a format", "/v1/chat/completions", body, called("weather"))
    yield Case(
        "models for Anthropic's", "/v1/models", b"", says("has_more", status=200), {"anthropic-version": "1"}, "GET"
    )
    for path in ("/v1/models/", "/tokenizer_info"):
        yield Case(f"GET {path}", path, b"", answered, method="GET")


def _cut_calls() -> Iterator[Case]:
    """Yield forced calls that are cut: nothing of their marks is shown."""

    def no_mark(response: Response) -> str | None:
        if problem := answered(response):
            return problem
        text = response.body.decode()
        shown = [
            word for word in ("tool_call>", '"content":"', '"type":"text","text"', '"output_text"') if word in text
        ]
        return f"shown: {shown}: {text[:300]}" if shown else None

    for most, stream in itertools.product((1, 3, 8), (False, True)):
        cut = {"max_tokens": most, "stream": stream}
        chat = CHAT | {"tools": [TOOL], "tool_choice": "required", "temperature": 0} | cut
        yield _post(f"a call cut at {most}, {stream}", "/v1/chat/completions", chat, no_mark)
        message = MESSAGE | {"tools": [_ANTHROPIC], "tool_choice": {"type": "any"}} | cut
        yield _post(f"a call cut at {most}, {stream}", "/v1/messages", message, no_mark)
        response = RESPONSE | {"tools": [_FUNCTION], "tool_choice": "required"}
        response |= {"max_output_tokens": most, "stream": stream}
        yield _post(f"a call cut at {most}, {stream}", "/v1/responses", response, no_mark)


def _places() -> Iterator[Case]:
    """Yield wrong requests whose refusals say where and what."""
    part = {"role": "user", "content": [{"type": "text", "text": 5}]}
    named = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}}
    image = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    for path, body, words in (
        ("chat/completions", CHAT | {"messages": [part]}, ("messages.0.content.0.text: must be a string",)),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": 5}]}, ("a string or a list",)),
        ("chat/completions", CHAT | {"messages": [{"role": "king"}]}, ("'system'", "'developer'", "'tool'")),
        ("chat/completions", CHAT | {"tools": [TOOL], "tool_choice": named}, ("allowed_tools.tools.0.function",)),
        (
            "chat/completions",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "input_text"}]}]},
            ("type text",),
        ),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": _LONG}]}, ("maximum context length is",)),
        ("chat/completions", CHAT | {"max_tokens": 10**8}, ("context_length_exceeded", "you requested")),
        ("completions", COMPLETION | {"prompt": _LONG}, ("This model's maximum context length is", "resulted in")),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "text"}]}]},
            ("input.0.content.0", "input_text"),
        ),
        ("responses", RESPONSE | {"tools": [{"type": "retrieval"}]}, ("tools.0", "'retrieval' is not supported")),
        ("responses", RESPONSE | {"input": _LONG}, ("This model's maximum context length is",)),
        ("messages", MESSAGE | {"messages": [part]}, ("messages.0.content.0.text: must be a string",)),
        ("messages", MESSAGE | {"messages": [{"role": "king", "content": "a"}]}, ("'user', 'assistant' or 'system'",)),
        ("messages", MESSAGE | {"messages": [{"role": "user", "content": [image]}]}, ("messages.0.content.0.source",)),
        ("messages", MESSAGE | {"context_management": {"edits": [{"type": "a"}]}}, ("context_management",)),
        ("messages", MESSAGE | {"messages": [{"role": "user", "content": _LONG}]}, ("prompt is too long:", "maximum")),
        ("messages", MESSAGE | {"max_tokens": 10**8}, ("input length and `max_tokens` exceed context limit: ",)),
    ):
        yield _post(f"{path}: {words[0]}", f"/v1/{path}", body, says(*words))
