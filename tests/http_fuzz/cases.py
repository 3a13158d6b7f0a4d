"""Cases by schemathesis over the server's own OpenAPI document, as strategies of hypothesis."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import BaseSchema, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from twostroke.router.openai.fields import StructuredFields
from twostroke.router.openai.messages import MessagesRequest
from twostroke.router.openai.responses import ResponsesRequest
from twostroke.router.openai.schemas import LACKING

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]

LONGEST = 24
"""Tokens that a sound case asks for at most: more would only take time."""

MOST_CHOICES = 4
"""Most choices of a sound case; a few cases have more."""


_LACKING = {
    "/v1/responses": ResponsesRequest.lacking,
    "/v1/messages": MessagesRequest.lacking,
    "/v1/messages/count_tokens": MessagesRequest.lacking,
}
_BY_GRAMMAR = (
    *StructuredFields.model_fields,
    *("tools", "tool_choice", "text", "thinking", "output_config", "output_format"),
)
"""Fields of grammars and tool calls, of which hardly any random case is sound."""

_LIMITS = {"/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}


def sound(schema: BaseSchema, path: str, method: str) -> SearchStrategy[Case]:
    """Cases as the document allows them, whose fields agree with each other as the document can't say."""
    return schema[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE).map(_agreeing)


def unsound(schema: BaseSchema, path: str, method: str) -> SearchStrategy[Case]:
    """Cases that the document forbids."""
    return schema[path][method].as_strategy(generation_mode=GenerationMode.NEGATIVE)


def run_each(check: Callable[[Case], None], cases: SearchStrategy[Case], count: int, *, seed_of: str) -> None:
    """Check so many cases: the same ones in every run, and others for each `seed_of`."""

    @seed(seed_of)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def run(case: Case) -> None:
        check(case)

    run()


def _agreeing(case: Case) -> Case:
    if case.headers:
        case.headers.pop("x-slo-class", None)  # the document does not know which there are
    body = case.body
    if not isinstance(body, dict):
        return case
    body = {name: _with_whole_numbers(value) for name, value in body.items()}
    for field in ("model", "service_tier", *_LACKING.get(case.path, LACKING), *_BY_GRAMMAR):
        body.pop(field, None)
    for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if isinstance(body.get(field), int | float):  # what /detokenize does not know may be anything
            body[field] = int(body[field]) % LONGEST + 1
    if isinstance(body.get("n"), int | float) and body["n"] % 7:
        body["n"] = int(body["n"]) % MOST_CHOICES + 1
    if body.get("best_of"):
        body["best_of"] = body.get("n") or 1
    for field in ("messages", "input"):
        if isinstance(body.get(field), list):
            body[field] = _short(body[field])
    if case.path.startswith("/v1/messages") and body.get("messages"):
        last = body["messages"][-1]
        if isinstance(last, dict) and last.get("role") == "assistant":  # which the template must show as it is
            body["messages"] = [*body["messages"], {"role": "user", "content": "a"}]
    if case.path == "/v1/completions":
        _agree_in_completion(body)
    if case.path == "/tokenize":
        body.pop("prompt" if body.get("messages") else "messages", None)
        if not body.get("messages") and body.get("prompt") is None:
            body["prompt"] = "a"
    if "tokens" in body:
        body["tokens"] = [_known(one) for one in body["tokens"][:64]]
    for field in ("stop_token_ids", "allowed_token_ids"):
        if body.get(field):
            body[field] = [_known(one) for one in body[field]]
    if case.path == "/v1/embeddings":
        body["input"] = _with_known(body["input"])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(_known(int(one))): bias for one, bias in body["logit_bias"].items()}
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs") and body.get("top_logprobs"):
        body["logprobs"] = True
    if "max_completion_tokens" in body:
        body.pop("max_tokens", None)
    limit = _LIMITS.get(case.path, "max_tokens")
    if body.get("min_tokens"):
        body[limit] = LONGEST + 1
    elif case.path in _LIMITS:
        body.setdefault(limit, LONGEST)
    case.body = body
    return case


def _agree_in_completion(body: dict[str, Any]) -> None:
    body["prompt"] = _with_known(body["prompt"])
    if isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int):
        body["prompt"] = body["prompt"][: 64 // int(body.get("n") or 1)]
    if body.get("echo"):
        body.pop("logprobs", None)


def _short(value: Any) -> Any:
    """The first of texts, and of lists: conversations that fit into the context."""
    if isinstance(value, str):
        return value[:20]  # no type has a longer name
    if isinstance(value, list):
        return [_short(each) for each in value[:3]]
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value


def _with_whole_numbers(value: Any) -> Any:
    """Write whole floats as integers: for a JSON schema 1.0 is an integer, and the server wants 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    return value


def _with_known(prompts: Any) -> Any:
    """A prompt, or many, whose tokens the vocabulary has."""
    if isinstance(prompts, list):
        return [_with_known(each) for each in prompts[:64]]
    return _known(prompts) if isinstance(prompts, int) else prompts


def _known(token_id: int) -> int:
    """A token id that the vocabulary has."""
    return token_id % 300
