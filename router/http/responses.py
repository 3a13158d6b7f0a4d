"""Responses that end when their client leaves, or when the server does."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.protocol.errors import RequestError, TwostrokeError, public_error
from twostroke.router.openai.answers import encode_json, error_object, event, internal_error

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


class ServerEnds(RequestError):
    """The response has not ended in the time that the server has left."""

    def __init__(self) -> None:
        super().__init__("the server ends; try again shortly", code="shutting_down", status=503)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON body."""
    return Response(encode_json(value), status, headers, media_type="application/json")


def error_response(error: TwostrokeError) -> Response:
    """OpenAI's error object with its status."""
    shown = public_error(error)
    headers = {}
    if shown.retry_after_s is not None:
        headers["retry-after"] = str(shown.retry_after_s)
    elif shown.status in (429, 503):
        headers["retry-after"] = "1"
    if shown.status == 413:
        headers["connection"] = "close"
    if shown.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(error), shown.status, headers)


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
    """Server-sent events, or lines of another kind. The source is closed when it ends, fails, or the client goes.

    Its first event is awaited before the response starts: a failure until then becomes a response of its own.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[TwostrokeError], None],
        cut: "asyncio.Future[None] | None" = None,
        *,
        content_type: str = "text/event-stream; charset=utf-8",
    ):
        """`on_error` is told of a failure before the first event. When `cut` is done, an error event ends the stream.

        Of that it is told, too.
        """
        # Not Response's own constructor: it would set the length of a body.
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": content_type, "cache-control": "no-cache"})
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
                return self._refused(internal_error())
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
