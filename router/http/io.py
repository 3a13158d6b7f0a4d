"""What HTTP needs beside the endpoints: bounded bodies, request ids, responses that end when the client leaves."""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.router.observe.log_format import REQUEST_ID
from twostroke.router.openai.common import INTERNAL_ERROR, encode_json, error_object, error_status, event

_log = logging.getLogger(__name__)

MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""A body that is too large is read and dropped up to here, so that the client gets to see the answer."""

Result = TypeVar("Result")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


class ServerEnds(RequestError):
    """The response has not ended in the time that the server has left."""

    def __init__(self) -> None:
        super().__init__("the server ends; try again shortly", code="shutting_down", status=503)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body. Raises RequestError (413) before more than `max_bytes` are held; ClientGone."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > MAX_DISCARDED_BYTES:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        else:
            parts.clear()
        if size > MAX_DISCARDED_BYTES or not message.get("more_body", False):
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body is over {max_bytes} bytes", param="body", code="request_too_large", status=413)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON body."""
    return Response(encode_json(value), status, headers, media_type="application/json")


def error_response(error: TwostrokeError) -> Response:
    """OpenAI's error object with its status."""
    headers = {}
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    elif error_status(error) in (429, 503):
        headers["retry-after"] = "1"
    if error_status(error) == 413:
        headers["connection"] = "close"
    if error_status(error) == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(error), error_status(error), headers)


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Result], cut: "asyncio.Future[None] | None" = None
) -> Result:
    """The result of `work`, which is cancelled, and ended, when the client goes: that raises ClientGone.

    Or when `cut` is done: that raises ServerEnds.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch) if cut is None else (task, watch, cut), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if cut is not None and cut.done():
            raise ServerEnds
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The source is closed when it ends, fails, or the client goes.

    Its first event is awaited before the response starts: a failure until then becomes a response of its own.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[TwostrokeError], None],
        cut: "asyncio.Future[None] | None" = None,
    ):
        """`on_error` is told of a failure before the first event. When `cut` is done, an error event ends the stream.

        Of that it is told, too.
        """
        # Not Response's own constructor: it would set the length of a body.
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events = events
        self._on_error = on_error
        self._cut = cut
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refusal = await until_disconnect(receive, self._send_events(send), self._cut)
        except ClientGone:
            return
        except ServerEnds as error:
            refusal = self._refused(error)
            if self._has_begun:
                await send({"type": "http.response.body", "body": event(error_object(error)), "more_body": False})
                return
        if refusal is not None:
            await refusal(scope, receive, send)

    async def _send_events(self, send: Send) -> Response | None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except TwostrokeError as error:
                return self._refused(error)
            except Exception:
                _log.exception("a stream met a bug before it began")
                return self._refused(INTERNAL_ERROR)
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    def _refused(self, error: TwostrokeError) -> Response:
        self._on_error(error)
        return error_response(error)


class RequestIds:
    """Middleware: echoes a sound `X-Request-Id`, mints one otherwise; logs tell it.

    It is a label; nothing inside is named by it.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        MutableHeaders(scope=scope)["x-request-id"] = request_id  # whoever is further inside takes the same

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        label = REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(label)


class Belongings:
    """Middleware: what a request enters on `until_responded` ends with its response, on every path."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            scope[_BELONGINGS] = stack
            await self._app(scope, receive, send)


_BELONGINGS = "twostroke.belongings"


def until_responded(request: Request) -> ExitStack:
    """Enter here what a request holds until its response is over. For an app with `Belongings`."""
    stack: ExitStack = request.scope[_BELONGINGS]
    return stack
