"""What every request passes before and behind its endpoint: middleware, the reader of bodies, responses.

`RequestIds` labels it, `Origins` turns away what other sites' pages send, `Authentication` finds out who asks,
`Deadlines` bounds the time that a client takes to send a body and to take its answer, and `BoundedRoute` reads bodies,
bounded in bytes, depth and members, before FastAPI and pydantic look at them.
A response ends when its client leaves, or when the server does.

Connections are bounded in number, so one that nothing moves on must end. Heads are the proxies' business
(`cluster/deployments/haproxy.py`): nothing here hears of a request before its head has come whole.
"""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.protocol.errors import RequestError, TwostrokeError, public_error
from twostroke.protocol.requests import LOG_CONTEXT, LogContext
from twostroke.router.http.tenants import Tenant, Tenants
from twostroke.router.observe.request_log import MINTED, request_log
from twostroke.router.openai.answers import encode_json, error_event, error_object, internal_error
from twostroke.router.openai.fields import check_values, shown
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


HEALTH_PATHS = frozenset({"/health", "/ready"})
"""Paths that load balancers may request by any name: they show nothing but the state."""
OPEN_PATHS = frozenset({*HEALTH_PATHS, "/"})
OPEN_FOLDER = "/page/"
"""Paths that need no key: the page has no data of its own."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TENANT = "twostroke.tenant"


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
        scope[MINTED] = request_id != given
        MutableHeaders(scope=scope)["x-request-id"] = request_id  # inner middleware takes the same

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(scope):
                    headers["request-id"] = request_id
            await send(message)

        before = LOG_CONTEXT.set(LogContext(request_id))
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            LOG_CONTEXT.reset(before)


class Origins:
    """Middleware: a browser's requests are taken from our own page, and from pages of the origins that are allowed.

    Any page that a user opens may have the browser send requests here, to a loopback address, too: it can't read the
    answers, but they would cost as much, and a body is read as JSON whatever its type. Browsers tell whose page it is,
    and pages can't change that. Whoever sends no such header is no browser, and passes.

    One name for page and server is not enough either: the owner of a name in public DNS can have it lead to our
    address once the page is open, wherever we listen. A key keeps such a page out. Where none is needed, `hosts` are
    the public names that we are called by, beside those of `allowed` origins; None: any, since a key is needed.

    For an app with `RequestLogging`.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], *, hosts: Collection[str] | None):
        self._app = app
        self._allowed = allowed
        self._hosts = None
        if hosts is not None and "*" not in (*allowed, *hosts):
            origins = (origin.partition("://")[2] for origin in allowed)
            self._hosts = {_hostname(name).removesuffix(".") for name in (*hosts, *origins)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            error = None
            if not self._takes_page(headers):
                way_out = "name the page's origin in router.cors_origins"
                error = _cross_origin("a browser sends this for the page of another site", way_out, "Origin")
            elif scope["path"] not in HEALTH_PATHS and not self._takes_host(headers.get("host", "")):
                way_out = "name it in router.hosts, or have the server ask for API keys"
                error = _cross_origin("this server is not known by the name that it is called by", way_out, "Host")
            if error is not None:
                request_log(HTTPConnection(scope)).refuses(error)
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _takes_host(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = _hostname(host).removesuffix(".")
        return _is_private(name) or name in self._hosts

    def _takes_page(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is not None:
            if origin in self._allowed or "*" in self._allowed:
                return True
            _, _, host = origin.partition("://")
            return bool(host) and host.lower() == headers.get("host", "").lower()
        # Images, scripts and the like have no origin. Whoever follows a link to us gets to see what is here.
        site = headers.get("sec-fetch-site", "none")
        return site in ("none", "same-origin") or headers.get("sec-fetch-dest") == "document"


def _cross_origin(message: str, way_out: str, param: str) -> RequestError:
    return RequestError(f"{message}; to allow it, {way_out}", param=param, code="cross_origin", status=403)


def _hostname(host: str) -> str:
    """Return the name in a `Host` header, without the port."""
    name, _, port = host.lower().rpartition(":")
    return name if name and port.isdigit() else host.lower()


def _is_private(name: str) -> bool:
    """Return whether public DNS can't lead here by it: an address, a name without a dot, or one under a reserved domain
    (`svc`: a Kubernetes service's short name)."""
    if "." not in name or name.startswith("["):
        return True
    last = name.rpartition(".")[2]
    return last.isdigit() or last in ("localhost", "local", "internal", "svc")


class Authentication:
    """Middleware: where there are keys, no request without one gets further than the open paths.

    Paths that don't exist say so to those with a key alone. What a key sends is counted here. For an app with
    `RequestLogging`.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants | None):
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._tenants:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            log = request_log(HTTPConnection(scope))
            try:
                tenant = scope[_TENANT] = self._tenants.of(_authorization(Headers(scope=scope)))
                log.tenant = tenant.name
                if scope["method"] == "POST":
                    tenant.count_request()
            except RequestError as error:
                log.refuses(error)
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(headers: Headers) -> str | None:
    """The header with the key; Anthropic's clients have a header of their own for it."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (key and f"Bearer {key}")


def tenant_of(request: HTTPConnection) -> Tenant | None:
    """Return the tenant of a request; None on open paths, and where no keys are configured."""
    tenant: Tenant | None = request.scope.get(_TENANT)
    return tenant


async def monitors_only(request: HTTPConnection) -> None:
    """Dependency. Raises RequestError (403) where a key is needed that may look at the server, and this is none."""
    tenant = tenant_of(request)
    if tenant is not None and not tenant.may_monitor:
        message = "this path is for API keys with `metrics: true` or `admin: true`"
        raise RequestError(message, code="not_allowed", status=403)


async def admins_only(request: HTTPConnection) -> None:
    """Dependency. Raises RequestError (403) where a key is needed that may look after the server, and this is none."""
    tenant = tenant_of(request)
    if tenant is not None and not tenant.is_admin:
        raise RequestError("this path is for API keys with `admin: true`", code="not_allowed", status=403)


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


MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes of an unwanted body that are read and dropped, so that the client gets to see the answer."""


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
