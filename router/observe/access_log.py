"""One HTTP request from its first byte to the last of its answer: an `HttpExchange`, and its line in the access log.

Traces and counters hear of it in the same place. All take numbers and names from it, never a word of a prompt, an
answer or a key.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TwostrokeError, public_error
from twostroke.protocol.requests import LOG_CONTEXT, GenerateRequest, LogContext, about
from twostroke.router.observe.stages import SequenceStages

_log = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/status"})
"""Asked for every few seconds by those who watch: these lines are for debugging alone."""


# Whatever follows belongs to later versions than 00.
_TRACE_PARENT = re.compile(
    r"(?!ff|00.{53}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_MOST_WORKERS = 16
"""Most workers of a role that a line names."""

CLIENT_GONE = 499
"""The status in logs of a request whose client left before it was answered."""

_EXCHANGE = "twostroke.exchange"
MINTED = "twostroke.minted_id"
"""Key in an ASGI scope that is true where the request's id was made here, and not by its client."""


@dataclass(slots=True, eq=False)
class HttpExchange:
    """Moments are the service's clock, in seconds."""

    request_id: str
    method: str
    path: str  # as asked for
    began: float
    headers: Mapping[str, str]  # of W3C trace context
    route: str | None = None  # as it is declared; None for an unknown path
    status: int = CLIENT_GONE
    ended: float = 0.0
    tenant: str | None = None  # the name of the API key that asks, where keys are configured
    code: str | None = None  # of the error that it was answered with, or that ended its stream
    refusal: TwostrokeError | None = None  # the error that it was answered with, where errors are counted
    is_stream: bool = False
    requests: Sequence[GenerateRequest] = field(default=())  # one for each choice
    stages: Sequence[SequenceStages] = field(default=())  # likewise
    leaders: Sequence[SequenceStages] = field(default=())  # of these, the first of each prompt
    has_minted_id: bool = False  # else the id is the client's own text
    num_prompt_tokens: int = 0  # prompts count once, however many choices each has
    trace_id: str = ""  # of the client's trace context, or of the trace that begins here; empty: there is none

    def fails(self, error: TwostrokeError) -> None:
        """Note that the client gets `error`."""
        self.code = public_error(error).code

    def refuses(self, error: TwostrokeError) -> None:
        """The client is answered with `error`, and it is counted."""
        self.fails(error)
        self.refusal = error

    def generates(
        self,
        requests: Sequence[GenerateRequest],
        stages: Sequence[SequenceStages],
        leaders: Sequence[SequenceStages],
        num_prompt_tokens: int,
        *,
        is_stream: bool,
    ) -> None:
        """The request has been understood; `stages` fill up on its way."""
        self.requests, self.stages, self.leaders = requests, stages, leaders
        self.num_prompt_tokens, self.is_stream = num_prompt_tokens, is_stream

    def log_context(self, choice: int = 0) -> LogContext:
        """Return what log lines about the request tell, or about one of its choices."""
        return LogContext(self.request_id, self.trace_id, choice)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(stages.num_output_tokens for stages in self.stages)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache; other choices find what the first of their prompt has computed."""
        return sum(stages.num_cached_tokens for stages in self.leaders)

    @property
    def num_tier_tokens(self) -> int:
        """Prompt tokens of these whose KV came from a KV tier."""
        return sum(stages.num_tier_tokens for stages in self.leaders)


def exchange_of(request: HTTPConnection) -> HttpExchange:
    """The exchange that the request is a part of. For an app with `Exchanges`."""
    exchange: HttpExchange = request.scope[_EXCHANGE]
    return exchange


class Exchanges:
    """Middleware: tells `began` of each request, logs it when it is over, and tells `over` of it."""

    def __init__(
        self, app: ASGIApp, clock: Clock, began: Callable[[HttpExchange], None], over: Callable[[HttpExchange], None]
    ):
        self._app = app
        self._clock = clock
        self._began = began
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = _TRACE_PARENT.fullmatch(trace.get("traceparent", ""))
        exchange = HttpExchange(
            LOG_CONTEXT.get().request_id,
            scope["method"],
            scope["path"],
            self._clock(),
            trace,
            has_minted_id=bool(scope.get(MINTED)),
            trace_id=parent[1] if parent else "",
        )
        scope[_EXCHANGE] = exchange
        self._began(exchange)
        LOG_CONTEXT.set(exchange.log_context())  # `RequestIds` takes it back

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


def _log_line(exchange: HttpExchange) -> None:
    level = logging.DEBUG if exchange.path in _QUIET_PATHS else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(
            level,
            "%s %s",
            exchange.method,
            exchange.path[:256],
            extra=about(exchange.log_context(), **_fields(exchange)),
        )


def _fields(exchange: HttpExchange) -> dict[str, Any]:
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
            "prefill_workers": _distinct(prefill for stages in exchange.stages for prefill, _ in stages.workers()),
            "decode_workers": _distinct(decode for stages in exchange.stages for _, decode in stages.workers()),
        }
    return fields


def _distinct(names: Iterable[str]) -> list[str]:
    """Return each name once, the first _MOST_WORKERS of them."""
    return list(islice(dict.fromkeys(filter(None, names)), _MOST_WORKERS))
