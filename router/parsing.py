"""From a body to a request: bounded, and every refusal names the field at fault as the client wrote it."""

import json
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from protocol.errors import RequestError
from router.schemas import MAX_CHOICES, FieldError, clean_text

MAX_NESTING = 64

RequestModel = TypeVar("RequestModel", bound=BaseModel)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises RequestError.

    NaN and lone surrogates, which are no JSON, pass here where they can: the field that has them is named later.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(body)
        except RecursionError:
            raise RequestError("the JSON is nested too deeply", param="body", code="invalid_json") from None
        except (ValueError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not valid JSON: {error}", param="body", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", param="body", code="invalid_json")
    for name, one in value.items():
        if _deeper_than(one, MAX_NESTING):
            raise RequestError(f"{_shown(name)} is nested too deeply", param=_shown(name))
    return value


def parse(model: type[RequestModel], body: bytes) -> RequestModel:
    """The request in `body`. Raises RequestError naming the first field at fault."""
    try:
        return model.model_validate(parse_json(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        # Of a field that may be of several types, the attempt that got furthest has the message that helps.
        first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=lambda one: len(one["loc"]))
        param, message = _explain(first["type"], first["loc"], first["msg"], first.get("ctx", {}))
        raise RequestError(f"{param}: {message}", param=param) from None


def prompts_of(value: Any) -> list[str] | list[list[int]]:
    """The `prompt` field, always as a list of prompts. Raises RequestError naming `prompt`."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise RequestError("prompt: must be a string, a list of strings, or token ids", param="prompt")
    if not value:
        raise RequestError("prompt: must not be empty", param="prompt")
    if not isinstance(value[0], str | list):
        return [token_ids_of(value, "prompt")]
    if len(value) > MAX_CHOICES:
        raise RequestError(f"prompt: must be at most {MAX_CHOICES} prompts, is {len(value)}", param="prompt")
    if isinstance(value[0], list):
        return [token_ids_of(one, "prompt") for one in value]
    for one in value:
        if not isinstance(one, str):
            raise RequestError("prompt: a list must be all strings or all token ids", param="prompt")
        if not one:
            raise RequestError("prompt: must not be empty", param="prompt")
        try:
            clean_text(one)
        except ValueError as error:
            raise RequestError(f"prompt: {error}", param="prompt") from None
    return value


def token_ids_of(value: Any, param: str) -> list[int]:
    """A non-empty list of token ids; whether the vocabulary has them is checked elsewhere."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"{param}: must be a non-empty list of token ids", param=param)
    for one in value:
        if type(one) is not int or not 0 <= one < 2**31:
            raise RequestError(f"{param}: token ids must be non-negative integers", param=param)
    return value


def _explain(kind: str, loc: tuple[int | str, ...], message: str, context: dict[str, Any]) -> tuple[str, str]:
    """The field's name as the client wrote it, and what is wrong with it."""
    cause = context.get("error")
    if isinstance(cause, FieldError):
        return cause.param, str(cause)
    # Unions add the tried type's name to the path: not a part of what the client sent.
    path = [str(part) for part in loc if isinstance(part, int) or part.replace("_", "").isalnum()]
    param = _shown(".".join(path[:4])) or "body"
    if kind == "extra_forbidden":
        return param, "is not a known field"
    if kind == "missing":
        return param, "is required"
    if isinstance(cause, ValueError):
        return param, str(cause)
    return param, message[:1].lower() + message[1:]


def _shown(name: str) -> str:
    """A name from outside, safe to put into an answer and a log."""
    return "".join(char if char.isprintable() else "?" for char in name[:80])


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` deep; without recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for one in layer
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True
