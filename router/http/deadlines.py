"""Time limits for clients: to send a request's body, and to take their answer.

Connections are bounded in number, so one that nothing moves on must end. Heads are the proxies' business
(`cluster/deployments/haproxy.py`): nothing here hears of a request before its head has come whole.
"""

import asyncio
import logging
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.protocol.errors import RequestError
from twostroke.router.observe.request_log import request_log

MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes of an unwanted body that are read and dropped, so that the client gets to see the answer."""

_log = logging.getLogger(__name__)


class Deadlines:
    """Middleware: a request's body has to come within `body_s`, and each piece of the answer to be taken in `send_s`.

    A body that is late is answered with 408. An answer that comes before the body's end waits for that end, within the
    same time: a connection that is closed under a client that still sends loses the answer. Where the body does not end
    in time, the connection does.

    A client that takes nothing is given up: its request ends as if it had left, and frees what it holds.

    For an app with `RequestLogging`, which is further outside.
    """

    def __init__(self, app: ASGIApp, *, body_s: float, send_s: float):
        self._app = app
        self._body_s = body_s
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, answer = _TimedBody(receive, self._body_s), _TimedResponse(send, self._send_s)
        headers = Headers(scope=scope)
        waits_to_send = headers.get("expect", "").lower() == "100-continue"

        async def send_in_time(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.is_whole:
                if not waits_to_send:
                    await body.discard()
                if not body.is_whole:
                    MutableHeaders(scope=message)["connection"] = "close"
            await answer.send(message)

        try:
            await self._app(scope, body.receive, send_in_time)
        except Exception:
            if not answer.is_stalled:
                raise
            request_log(HTTPConnection(scope)).code = "client_stalled"
            _log.info("a client took nothing of its answer for %g s, and is given up", self._send_s)
        finally:
            answer.close()


class _ClientStalled(Exception):
    """The client takes nothing of what it is sent."""


class _TimedBody:
    """A request's body as it comes, until its deadline."""

    def __init__(self, receive: Receive, timeout_s: float):
        self.is_whole = False
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._num_bytes = 0

    async def receive(self) -> Message:
        """The next message. Raises RequestError (408) where the body has not ended in time."""
        if self.is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestError(
                f"the body did not come within {self._timeout_s:g} s", param="body", code="request_timeout", status=408
            ) from None
        self.is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        return message

    async def discard(self) -> None:
        """Read to the body's end, if that comes in time and is not too far."""
        try:
            while not self.is_whole and self._num_bytes <= MAX_DISCARDED_BYTES:
                await self.receive()
        except RequestError:
            return  # the client has taken too long


class _TimedResponse:
    """An answer as it is sent, piece by piece. One timer looks after all pieces: a stream has thousands a second."""

    def __init__(self, send: Send, timeout_s: float):
        self.is_stalled = False
        self._send = send
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the piece was sent that the client has not taken yet
        self._sender: asyncio.Task[Any] | None = None
        self._num_cancels = 0  # of the sender, by others
        self._timer = self._loop.call_later(timeout_s, self._look)

    async def send(self, message: Message) -> None:
        """Raises _ClientStalled where the client does not take it in time."""
        self._sender, self._since = asyncio.current_task(), self._loop.time()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self.is_stalled and self._sender is not None and self._sender.uncancel() <= self._num_cancels:
                raise _ClientStalled from None
            raise
        finally:
            self._since = None

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since < self._timeout_s:
            self._timer = self._loop.call_at(since + self._timeout_s, self._look)
        elif self._sender is not None:
            self.is_stalled = True
            self._num_cancels = self._sender.cancelling()
            self._sender.cancel()
