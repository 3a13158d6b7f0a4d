"""Responses that end when their client leaves, or when the server does."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from twostroke.protocol.errors import RequestError, TwostrokeError, public_error
from twostroke.router.observe.request_log import request_log
from twostroke.router.openai.answers import encode_json, error_event, error_object
from twostroke.router.openai.messages import message_error

Result = TypeVar("Result")

MAX_COLLECTED_BYTES = 32 * 1024 * 1024
"""A stream's events that are held for a client of HTTP/1.0, until they are all there."""

_STREAM_HEADERS = {"cache-control": "no-cache"}


class ServerEnds(RequestError):
    """The response has not ended in the time that the server has left."""

    def __init__(self) -> None:
        super().__init__("the server ends; try again shortly", code="shutting_down", status=503)


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is of Anthropic's API: by its path, or, for models, by the header of its clients."""
    path = scope["path"]
    return "/v1/messages" in path or ("/v1/models" in path and "anthropic-version" in Headers(scope=scope))


def error_response(error: TwostrokeError, scope: Scope) -> Response:
    """The error object of the API that the request is of, with its status."""
    shown = public_error(error)
    headers = {}
    if shown.retry_after_s is not None:
        headers["retry-after"] = str(shown.retry_after_s)
    elif shown.status in (429, 503):
        headers["retry-after"] = "1"
    if shown.status in (408, 413):
        headers["connection"] = "close"
    if shown.status == 401:
        headers["www-authenticate"] = "Bearer"
    content = encode_json(message_error(error) if is_anthropic(scope) else error_object(error))
    return Response(content, shown.status, headers, media_type="application/json")


async def until_disconnect(receive: Receive, work: Awaitable[Result], cut: "asyncio.Future[None] | None") -> Result:
    """The result of `work`, which is cancelled, and ended, when the client goes: that raises ClientDisconnect.

    Or when `cut` is done: that raises ServerEnds.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch) if cut is None else (task, watch, cut), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if cut is not None and cut.done():
            raise ServerEnds
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def streamed(
    request: Request,
    events: AsyncGenerator[bytes, None],
    cut: "asyncio.Future[None] | None" = None,
    failure: Callable[[TwostrokeError], bytes] = error_event,
    media_type: str = "text/event-stream",
    *,
    is_endless: bool = False,
) -> Response:
    """Server-sent events, or lines of another kind. The source is closed when it ends, fails, or the client goes.

    HTTP/1.0 has no chunks, and uvicorn no other way to send what has no length: such a client gets all events at once,
    at the end. Raises RequestError where there is none, or they are more than MAX_COLLECTED_BYTES.

    Its first event is awaited here: whatever fails until then is answered like all that fails in an endpoint. When
    `cut` is done later, the events of `failure` end the stream. The source is read by two tasks, one after the other.
    """
    if request.scope.get("http_version") == "1.0":
        if is_endless:
            raise _needs_newer_http("this stream has no end")
        body = await until_disconnect(request.receive, _collected(events), cut)
        return Response(body, headers=_STREAM_HEADERS, media_type=media_type)
    first = await until_disconnect(request.receive, anext(events), cut)
    return _EventStream(first, events, cut, failure, media_type)


async def _collected(events: AsyncGenerator[bytes, None]) -> bytes:
    parts, size = [], 0
    async with aclosing(events):
        async for one in events:
            parts.append(one)
            size += len(one)
            if size > MAX_COLLECTED_BYTES:
                raise _needs_newer_http(f"this stream has more than {MAX_COLLECTED_BYTES} bytes")
    return b"".join(parts)


def _needs_newer_http(reason: str) -> RequestError:
    return RequestError(
        f"{reason}, and HTTP/1.0 has no streams: use HTTP/1.1 (in nginx: proxy_http_version 1.1)",
        code="http_version_not_supported",
        status=505,
    )


class _EventStream(StreamingResponse):
    """A stream that has begun."""

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        cut: "asyncio.Future[None] | None",
        failure: Callable[[TwostrokeError], bytes],
        media_type: str,
    ):
        super().__init__(events, headers=_STREAM_HEADERS, media_type=media_type)
        self._first = first
        self._events = events
        self._cut = cut
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                await until_disconnect(receive, self._send_rest(send), self._cut)
            except ClientDisconnect:
                return
            except ServerEnds as error:
                request_log(HTTPConnection(scope)).refuses(error)
                await send({"type": "http.response.body", "body": self._failure(error), "more_body": False})

    async def _send_rest(self, send: Send) -> None:
        async for one in self._events:
            await send({"type": "http.response.body", "body": one, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
