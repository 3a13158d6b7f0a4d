"""The paths that this server has, and the OpenAPI document about them: one table, which
`router/http/app.py` serves by too.

Request bodies are described by the models that check them (`router/openai/schemas.py`), answers by the structs that
they are written from. What a schema can't say (fields that must agree, the model's context) the descriptions do.

What the endpoints answer that generate nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from twostroke.router.openai.chat import ChatChunk, ChatCompletion
from twostroke.router.openai.common import ErrorObject
from twostroke.router.openai.completions import Completion
from twostroke.router.openai.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from twostroke.router.slo.classes import STANDARD
from twostroke.router.slo.promises import (
    CLASS_HEADER,
    MOST_MS,
    MOST_PRIORITY,
    OPENAI_TIERS,
    PRIORITY_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)


class ModelCard(msgspec.Struct):
    """A model, as OpenAI lists them."""

    id: str
    created: int
    max_model_len: int | None  # tokens, prompt and output together; None until a decode worker is known
    object: Literal["model"] = "model"
    owned_by: Literal["twostroke"] = "twostroke"


class ModelList(msgspec.Struct):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenIds(msgspec.Struct):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(msgspec.Struct):
    """POST /detokenize."""

    prompt: str


class Health(msgspec.Struct):
    """GET /health."""

    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct):
    """GET /ready."""

    status: Literal["ready"] = "ready"


class Version(msgspec.Struct):
    """GET /version."""

    version: str


_REF = "#/components/schemas/"

_JSON = "application/json"
_EVENTS = "text/event-stream"

BODY = (400, 413)
"""What any endpoint with a body may answer."""

_ERRORS: Mapping[int, str] = {
    400: "A field is wrong, missing or unknown, or the prompt does not fit the model's context",
    401: "The API key is missing, or unknown here",
    403: "The API key may not do this",
    404: "Another model than the one served",
    408: "The client does not read the answer",
    409: "An examination is going on already",
    413: "The body is too large",
    422: "The request has taken down the workers that computed it",
    429: "Too much is under way, or the request would be late: again after `Retry-After` seconds",
    500: "A bug; the server's log has it",
    503: "No worker can serve the request now: again after `Retry-After` seconds",
    504: "The request took longer than the server lets one take",
}
_RETRY_LATER = (429, 503)


_LABEL = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
_HEADERS: Mapping[str, Any] = {"X-Request-Id": {"required": True, "schema": _LABEL}}
_RETRY_AFTER = {"required": True, "schema": {"type": "integer", "minimum": 1}}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "Echoed where it is 1 to 128 characters of A-Z a-z 0-9 . _ : -, else replaced",
    "schema": {"type": "string"},
}
_MILLISECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_MS}
_PRIORITIES = {"type": "integer", "minimum": -MOST_PRIORITY, "maximum": MOST_PRIORITY}


@dataclass(frozen=True)
class Operation:
    """One path and method. `name` is that of its endpoint in `router/http/app.py`."""

    path: str
    method: str
    name: str
    summary: str
    answers: Mapping[str, type[msgspec.Struct] | None]  # content type to schema; None: a text
    body: type[BaseModel] | None = None
    errors: Sequence[int] = ()
    description: str = "The answer"
    takes_slo: bool = False  # in headers
    is_open: bool = False  # to everybody, with or without a key
    for_admins: bool = False  # needs a key with `admin: true`, where there are keys
    parameters: Sequence[Mapping[str, Any]] = ()


_STREAMED = "With `stream: true`, server-sent events: each `data` is a {} as JSON, the last is [DONE]"
_GENERATING = (*BODY, 404, 408, 422, 429, 503, 504)

OPERATIONS: Sequence[Operation] = (
    Operation(
        "/v1/completions",
        "POST",
        "completions",
        "Continue a prompt",
        {_JSON: Completion, _EVENTS: None},
        CompletionRequest,
        _GENERATING,
        description=_STREAMED.format(Completion.__name__),
        takes_slo=True,
    ),
    Operation(
        "/v1/chat/completions",
        "POST",
        "chat_completions",
        "Answer a chat",
        {_JSON: ChatCompletion, _EVENTS: None},
        ChatRequest,
        _GENERATING,
        description=_STREAMED.format(ChatChunk.__name__),
        takes_slo=True,
    ),
    Operation("/v1/models", "GET", "models", "The model served", {_JSON: ModelList}, errors=(503,)),
    Operation(
        "/v1/models/{name:path}",
        "GET",
        "model",
        "One model",
        {_JSON: ModelCard},
        errors=(404, 503),
        parameters=({"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},),
    ),
    Operation(
        "/tokenize", "POST", "tokenize", "Text to token ids", {_JSON: TokenIds}, TokenizeRequest, (*BODY, 404, 503)
    ),
    Operation(
        "/detokenize",
        "POST",
        "detokenize",
        "Token ids to text",
        {_JSON: Text},
        DetokenizeRequest,
        (*BODY, 404, 503),
    ),
    Operation("/health", "GET", "health", "This process is alive", {_JSON: Health}, is_open=True),
    Operation("/ready", "GET", "ready", "A whole path is there", {_JSON: Ready}, errors=(503,), is_open=True),
    Operation("/metrics", "GET", "metrics", "Prometheus' text", {"text/plain": None}, errors=(503,), for_admins=True),
    Operation(
        "/status", "GET", "status", "The workers and their numbers", {_JSON: None}, errors=(503,), for_admins=True
    ),
    Operation(
        "/doctor",
        "GET",
        "doctor",
        "Every way of KV, tried out: one line of JSON for each",
        {"application/x-ndjson": None},
        errors=(409, 503),
        for_admins=True,
    ),
    Operation("/version", "GET", "show_version", "The server's version", {_JSON: Version}, errors=(503,)),
    Operation("/openapi.json", "GET", "openapi", "This document", {_JSON: None}, errors=(503,)),
)


def document(*, version: str, model: str, has_keys: bool, slo_classes: Sequence[str] = (STANDARD,)) -> dict[str, Any]:
    """The OpenAPI document of a server of `model`; `has_keys`: API keys are asked for."""
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    structs = [
        ErrorObject,
        ChatChunk,
        *(one for each in OPERATIONS for one in each.answers.values() if one is not None),
    ]
    _, components = msgspec.json.schema_components(structs, ref_template=_REF + "{name}")
    schemas = definitions["$defs"] | components
    for body in bodies:
        _name_model(schemas[body.__name__], model)
        _name_classes(schemas[body.__name__], slo_classes)
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        described = _described(one, has_keys, slo_classes)
        paths.setdefault(one.path.replace(":path", ""), {})[one.method.lower()] = described
    told: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Twostroke",
            "version": version,
            "description": "OpenAI's API. Unknown fields and paths are refused; every error is an OpenAI error object.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return told


def _name_model(schema: dict[str, Any], model: str) -> None:
    """Only the model that is served may be asked for."""
    is_optional = "model" not in schema.get("required", ())
    schema["properties"]["model"] = {"enum": [model, None] if is_optional else [model]}


def _name_classes(schema: dict[str, Any], slo_classes: Sequence[str]) -> None:
    """Only the classes that there are may be asked for, and OpenAI's own tiers, which mean one of them."""
    if "service_tier" in schema["properties"]:
        schema["properties"]["service_tier"] = {"enum": [*dict.fromkeys((*slo_classes, *OPENAI_TIERS)), None]}


def _described(one: Operation, has_keys: bool, slo_classes: Sequence[str]) -> dict[str, Any]:
    errors = sorted({*one.errors, 500, *(_errors_of_keys(one) if has_keys and not one.is_open else ())})
    told: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "parameters": [*one.parameters, _REQUEST_ID, *(_slo_headers(slo_classes) if one.takes_slo else ())],
        "responses": {
            "200": {
                "description": one.description,
                "headers": _HEADERS,
                "content": {kind: _content(kind, struct) for kind, struct in one.answers.items()},
            },
            **{str(status): _error(status) for status in errors},
        },
    }
    if one.body is not None:
        told["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": {"$ref": _REF + one.body.__name__}}},
        }
    if has_keys and not one.is_open:
        told["security"] = [{"key": []}]
    return told


def _slo_headers(slo_classes: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "description": description, "schema": schema}
        for name, description, schema in (
            (
                CLASS_HEADER,
                "The SLO class, before what `service_tier` names",
                {"enum": [*dict.fromkeys((*slo_classes, *OPENAI_TIERS))]},
            ),
            (TTFT_HEADER, "Milliseconds to the first token, instead of the class's", _MILLISECONDS),
            (TPOT_HEADER, "Milliseconds between tokens, instead of the class's", _MILLISECONDS),
            (PRIORITY_HEADER, "As the field `priority`: the lower goes first", _PRIORITIES),
        )
    ]


def _errors_of_keys(one: Operation) -> tuple[int, ...]:
    if one.method == "POST":
        return (401, 403, 429) if one.takes_slo else (401, 429)
    return (401, 403) if one.for_admins else (401,)


def _content(kind: str, struct: type[msgspec.Struct] | None) -> dict[str, Any]:
    if struct is not None:
        return {"schema": {"$ref": _REF + struct.__name__}}
    if kind == _EVENTS:
        return {}  # OpenAPI 3.1 has no words for the events of a stream; `description` has
    return {"schema": {"type": "object" if kind == _JSON else "string"}}


def _error(status: int) -> dict[str, Any]:
    headers = {**_HEADERS, **({"Retry-After": _RETRY_AFTER} if status in _RETRY_LATER else {})}
    return {
        "description": _ERRORS[status],
        "headers": headers,
        "content": {_JSON: {"schema": {"$ref": _REF + ErrorObject.__name__}}},
    }
