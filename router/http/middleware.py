"""The middleware that every request passes before its endpoint.

`RequestIds` labels it, `Origins` turns away what other sites' pages send, `Authentication` finds out who asks.
"""

import re
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import LOG_CONTEXT, LogContext
from twostroke.router.http.responses import error_response, is_anthropic
from twostroke.router.http.tenants import Tenant, Tenants
from twostroke.router.observe.request_log import MINTED, request_log

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
