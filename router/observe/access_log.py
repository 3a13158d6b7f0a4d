"""The access log: one line for each request, when it is over. Traces are handed over in the same place."""

import logging
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.router.http.authentication import tenant_of
from twostroke.router.http.service import RouterService
from twostroke.router.observe.exchange import EXCHANGE, Exchange
from twostroke.router.observe.log_format import FIELDS, REQUEST_ID

_log = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/status"})
"""Asked for every few seconds by those who watch: these lines are for debugging alone."""


class Exchanges:
    """Middleware: logs each request when it is over, and hands it to those who trace."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = scope["app"].state.service
        if scope["type"] != "http" or not isinstance(service, RouterService):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        exchange = Exchange(REQUEST_ID.get(), scope["method"], scope["path"], service.clock(), trace)
        scope[EXCHANGE] = exchange

        async def send_and_see(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            exchange.ended = service.clock()
            exchange.route = _route(scope)
            tenant = tenant_of(Request(scope))
            exchange.tenant = None if tenant is None else tenant.name
            _tell(exchange)
            if service.traces is not None:
                service.traces.record(exchange)


def _tell(exchange: Exchange) -> None:
    level = logging.DEBUG if exchange.path in _QUIET_PATHS else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "%s %s", exchange.method, exchange.path[:256], extra={FIELDS: _fields(exchange)})


def _fields(exchange: Exchange) -> dict[str, Any]:
    fields: dict[str, Any] = {"status": exchange.status, "e2e_s": round(exchange.ended - exchange.began, 4)}
    if exchange.code is not None:
        fields["code"] = exchange.code
    if exchange.tenant is not None:
        fields["tenant"] = exchange.tenant
    if exchange.jobs:
        first_tokens = [stages.ttft_s for stages in exchange.stages if stages.ttft_s is not None]
        fields |= {
            "slo_class": exchange.jobs[0].request.promise.class_name,
            "choices": len(exchange.jobs),
            "prompt_tokens": exchange.prompt_tokens(),
            "output_tokens": exchange.output_tokens(),
            "ttft_s": round(min(first_tokens), 4) if first_tokens else None,
            "attempts": max(stages.attempts for stages in exchange.stages),
        }
    return fields


def _route(scope: Scope) -> str | None:
    """The path as it is declared, which FastAPI leaves in the scope; None where none is."""
    route = scope.get("route")
    return None if route is None else str(route.path)
