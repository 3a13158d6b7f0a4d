"""The one reader of request bodies: bounded in bytes, depth and members, before FastAPI and pydantic look at them."""

import json
import logging
import re
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.router.openai.answers import internal_error
from twostroke.router.openai.fields import check_values, shown

MAX_NESTING = 64
MAX_MEMBERS = 4096
"""Most members of one object: more than any field takes."""
MAX_CONTAINERS = 65536
"""Most objects and lists of one body: each costs time and memory, far more than its bytes."""

_log = logging.getLogger(__name__)

# Also matches a string without an end, so that no body is scanned twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


class BoundedRoute(APIRoute):
    """A path whose body FastAPI gets from `read_object`. A bug in its endpoint is logged and answered with an error.

    `app.state.max_body_bytes` bounds the body.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            try:
                if self.body_field is not None:
                    request = _ReadRequest(request, await read_object(request, request.app.state.max_body_bytes))
                return await handle(request)
            except (TwostrokeError, RequestValidationError, HTTPException, ClientDisconnect):
                raise
            except Exception:
                _log.exception("a request to %s met a bug", request.url.path)
                raise internal_error() from None

        return bounded


class _ReadRequest(Request):
    """A request whose body has been read. Clients that name another content type, as curl does, mean JSON too."""

    def __init__(self, request: Request, content: dict[str, Any]):
        super().__init__(request.scope, request.receive)
        MutableHeaders(scope=request.scope)["content-type"] = "application/json"
        self._content = content

    async def body(self) -> bytes:
        return b"{}"  # FastAPI looks whether there is any

    async def json(self) -> dict[str, Any]:
        return self._content


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body. Raises RequestError, 413 before more than `max_bytes` are held; ClientDisconnect.

    `Deadlines` bounds how long this takes, and reads what is left of a body that is refused.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            f"Content-Encoding: {shown(encoding)!r} is not supported: send the JSON without compression",
            param="Content-Encoding",
            code="unsupported_encoding",
            status=415,
        )
    parts: list[bytes] = []
    size = 0
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            size += len(part)
            if size > max_bytes:
                message = f"the body is over {max_bytes} bytes"
                raise RequestError(message, param="body", code="request_too_large", status=413)
            parts.append(part)
    return parse_object(b"".join(parts))


def parse_object(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises RequestError.

    Numbers are finite and texts are Unicode, wherever they stand: schemas, documents and the like end in libraries that
    fail otherwise.
    """
    if _num_containers(body) > MAX_CONTAINERS:
        raise RequestError(f"the JSON has more than {MAX_CONTAINERS} objects and lists", param="body")
    is_sound = True
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        is_sound = False  # Python reads more than JSON
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
        _check_shape(one, shown(name))
        if not is_sound:
            check_values(name, "body")
            check_values(one, shown(name))
    return value


def _num_containers(body: bytes) -> int:
    """Count the objects and lists in the body without building them."""
    num = body.count(b"{") + body.count(b"[")
    if num <= MAX_CONTAINERS:
        return num
    bare = _STRING.sub(b"", body)  # a text may have any number of brackets
    return bare.count(b"{") + bare.count(b"[")


def _check_shape(value: Any, param: str, depth: int = 1) -> None:
    """Raises RequestError for containers nested too deeply and for objects too wide."""
    if not isinstance(value, dict | list):
        return
    if depth > MAX_NESTING:
        raise RequestError(f"{param} is nested too deeply", param=param)
    if isinstance(value, dict):
        if len(value) > MAX_MEMBERS:
            raise _too_wide(param)
        value = value.values()
    elif {dict, list}.isdisjoint(map(type, value)):
        return  # a long prompt of token ids has none within
    for member in value:
        _check_shape(member, param, depth + 1)


def _too_wide(param: str) -> RequestError:
    return RequestError(f"{param}: an object has more than {MAX_MEMBERS} members", param=param)
