"""From a body to a request: bounded, and every refusal names the field at fault as the client wrote it."""

import json
import re
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from twostroke.protocol.errors import RequestError
from twostroke.router.openai.schemas import MAX_CHOICES, FieldError, clean_text

MAX_NESTING = 64
MAX_MEMBERS = 4096  # of one object: more than any field takes
MAX_CONTAINERS = 65536  # objects and lists of one body: every one costs time and memory, far more than its bytes

# Also matches a string without an end, so that no body is scanned twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)

RequestModel = TypeVar("RequestModel", bound=BaseModel)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises RequestError.

    NaN and lone surrogates, which are no JSON, pass here where they can: the field that has them is named later.
    """
    if _num_containers(body) > MAX_CONTAINERS:
        raise RequestError(f"the JSON has more than {MAX_CONTAINERS} objects and lists", param="body")
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
    if len(value) > MAX_MEMBERS:
        raise _too_wide("body")
    for name, one in value.items():
        _check_shape(one, _shown(name))
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


def prompts_of(value: Any, max_context: int) -> list[str] | list[list[int]]:
    """The `prompt` field, always as a list of prompts. Raises RequestError naming `prompt`."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise RequestError("prompt: must be a string, a list of strings, or token ids", param="prompt")
    if not value:
        raise RequestError("prompt: must not be empty", param="prompt")
    if not isinstance(value[0], str | list):
        return [token_ids_of(value, "prompt", max_context)]
    if len(value) > MAX_CHOICES:
        raise RequestError(f"prompt: must be at most {MAX_CHOICES} prompts, is {len(value)}", param="prompt")
    if isinstance(value[0], list):
        return [token_ids_of(one, "prompt", max_context) for one in value]
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


def token_ids_of(value: Any, param: str, max_context: int) -> list[int]:
    """A non-empty list of token ids, `max_context` at most; whether the vocabulary has them is checked elsewhere."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"{param}: must be a non-empty list of token ids", param=param)
    if len(value) > max_context:
        raise too_long(param, str(len(value)), max_context)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31:
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


def _num_containers(body: bytes) -> int:
    """Objects and lists in the body, told without building them."""
    num = body.count(b"{") + body.count(b"[")
    if num <= MAX_CONTAINERS:
        return num
    bare = _STRING.sub(b"", body)  # a text may have any number of brackets
    return bare.count(b"{") + bare.count(b"[")


def _check_shape(value: Any, param: str) -> None:
    """Raises RequestError for containers nested too deeply and for objects too wide; without recursion."""
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        inner: list[Any] = []
        for one in layer:
            if isinstance(one, dict):
                if len(one) > MAX_MEMBERS:
                    raise _too_wide(param)
                inner += [member for member in one.values() if isinstance(member, dict | list)]
            elif not {dict, list}.isdisjoint(map(type, one)):  # a long prompt of token ids has none, told at once
                inner += [member for member in one if isinstance(member, dict | list)]
        layer = inner
        if not layer:
            return
    raise RequestError(f"{param} is nested too deeply", param=param)


def _too_wide(param: str) -> RequestError:
    return RequestError(f"{param}: an object has more than {MAX_MEMBERS} members", param=param)


def too_long(param: str, has: str, max_context: int) -> RequestError:
    """The refusal of a prompt that the model's context can't take."""
    return RequestError(
        f"{param}: the model's context is {max_context} tokens, output included; the prompt has {has}",
        param=param,
        code="context_length_exceeded",
    )
