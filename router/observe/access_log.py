"""The access log: one line for each request, when it is over. Traces and counters hear of it in the same place."""

import logging
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.protocol.clock import Clock
from twostroke.router.observe.exchange import EXCHANGE, Exchange
from twostroke.router.observe.log_format import FIELDS, REQUEST_ID

_log = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/status"})
"""Asked for every few seconds by those who watch: these lines are for debugging alone."""


class Exchanges:
    """Middleware: logs each request when it is over, and tells `over` of it."""

    def __init__(self, app: ASGIApp, clock: Clock, over: Callable[[Exchange], None]):
        self._app = app
        self._clock = clock
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        exchange = Exchange(REQUEST_ID.get(), scope["method"], scope["path"], self._clock(), trace)
        scope[EXCHANGE] = exchange

        async def send_and_see(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            exchange.ended = self._clock()
            route = scope.get("route")  # FastAPI leaves it there
            exchange.route = None if route is None else str(route.path)
            _log_line(exchange)
            self._over(exchange)


def _log_line(exchange: Exchange) -> None:
    level = logging.DEBUG if exchange.path in _QUIET_PATHS else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "%s %s", exchange.method, exchange.path[:256], extra={FIELDS: _fields(exchange)})


def _fields(exchange: Exchange) -> dict[str, Any]:
    fields: dict[str, Any] = {"status": exchange.status, "e2e_s": round(exchange.ended - exchange.began, 4)}
    if exchange.code is not None:
        fields["code"] = exchange.code
    if exchange.tenant is not None:
        fields["tenant"] = exchange.tenant
    if exchange.requests:
        first_tokens = [stages.ttft_s for stages in exchange.stages if stages.ttft_s is not None]
        fields |= {
            "slo_class": exchange.requests[0].promise.class_name,
            "choices": len(exchange.requests),
            "prompt_tokens": exchange.num_prompt_tokens,
            "output_tokens": exchange.num_output_tokens,
            "ttft_s": round(min(first_tokens), 4) if first_tokens else None,
            "attempts": max(stages.attempts for stages in exchange.stages),
        }
    return fields
