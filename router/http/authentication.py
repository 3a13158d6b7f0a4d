"""The one place that every request passes: nobody gets further without an API key, where keys are configured."""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from twostroke.protocol.errors import RequestError
from twostroke.router.http.io import error_response
from twostroke.router.http.openapi import OPERATIONS
from twostroke.router.http.service import RouterService
from twostroke.router.http.tenants import Tenant
from twostroke.router.observe.exchange import exchange_of

_TENANT = "twostroke.tenant"
_OPEN = frozenset(one.path for one in OPERATIONS if one.is_open)


class Authentication:
    """Middleware. Without a key only the open paths answer; paths that don't exist say so to those with a key alone."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = scope["app"].state.service
        # Until the service is there, everything but /health answers that it isn't.
        if scope["type"] == "lifespan" or not isinstance(service, RouterService) or not service.tenants:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if path not in _OPEN:
            try:
                scope[_TENANT] = service.tenants.of(Headers(scope=scope).get("authorization"))
            except RequestError as error:
                service.metrics.refused(error)
                exchange_of(Request(scope)).fails(error)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def tenant_of(request: Request) -> Tenant | None:
    """Who asks; None on open paths, and where no keys are configured."""
    tenant: Tenant | None = request.scope.get(_TENANT)
    return tenant


def check_admin(request: Request) -> None:
    """Raises RequestError (403) where a key is needed that may look after the server, and this is none."""
    tenant = tenant_of(request)
    if tenant is not None and not tenant.is_admin:
        raise RequestError("this path is for API keys with `admin: true`", code="not_allowed", status=403)
