"""One HTTP request from its first byte to the last of its answer: a `RequestLog`, and its line in the log.

Traces and counters hear of it in the same place. All take numbers and names from it, never a word of a prompt, an
answer or a key.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TwostrokeError, public_error
from twostroke.protocol.requests import LOG_CONTEXT, LogContext, about
from twostroke.router.request_state import RequestState

_log = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/status"})
"""Asked for every few seconds by those who watch: these lines are for debugging alone."""


# Whatever follows belongs to later versions than 00.
_TRACE_PARENT = re.compile(
    r"(?!ff|00.{53}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_MAX_WORKERS = 16
"""Most workers of a role that a line names."""

CLIENT_GONE = 499
"""The status in logs of a request whose client left before it was answered."""

_REQUEST_LOG = "twostroke.request_log"
MINTED = "twostroke.minted_id"
"""Key in an ASGI scope that is true where the request's id was made here, and not by its client."""


@dataclass(slots=True, eq=False)
class RequestLog:
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
    choices: Sequence[RequestState] = ()
    has_minted_id: bool = False  # else the id is the client's own text
    trace_id: str = ""  # of the client's trace context, or of the trace that begins here; empty: there is none

    def fails(self, error: TwostrokeError) -> None:
        """Note that the client gets `error`."""
        self.code = public_error(error).code

    def refuses(self, error: TwostrokeError) -> None:
        """The client is answered with `error`, and it is counted."""
        self.fails(error)
        self.refusal = error

    def generates(self, choices: Sequence[RequestState], *, is_stream: bool) -> None:
        """Note that the request has been understood."""
        self.choices, self.is_stream = choices, is_stream

    def log_context(self, choice: int = 0) -> LogContext:
        """Return what log lines about the request tell, or about one of its choices."""
        return LogContext(self.request_id, self.trace_id, choice)

    @property
    def leaders(self) -> list[RequestState]:
        """The first choice of each prompt: others find what that one has computed."""
        return list({one.job.group: one for one in reversed(self.choices)}.values())

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, which count once however many choices each prompt has."""
        return sum(one.request.num_prompt_tokens for one in self.leaders)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(one.num_output_tokens for one in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache."""
        return sum(one.num_cached_tokens for one in self.leaders)

    @property
    def num_tier_tokens(self) -> int:
        """Prompt tokens of these whose KV came from a KV tier."""
        return sum(one.num_tier_tokens for one in self.leaders)


def request_log(request: HTTPConnection) -> RequestLog:
    """Return the record of an HTTP request. For an app with `RequestLogging`."""
    log: RequestLog = request.scope[_REQUEST_LOG]
    return log


class RequestLogging:
    """Middleware: tells `began` of each request, logs it when it is over, and tells `over` of it."""

    def __init__(
        self, app: ASGIApp, clock: Clock, began: Callable[[RequestLog], None], over: Callable[[RequestLog], None]
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
        log = RequestLog(
            LOG_CONTEXT.get().request_id,
            scope["method"],
            scope["path"],
            self._clock(),
            trace,
            has_minted_id=bool(scope.get(MINTED)),
            trace_id=parent[1] if parent else "",
        )
        scope[_REQUEST_LOG] = log
        self._began(log)
        LOG_CONTEXT.set(log.log_context())  # `RequestIds` takes it back

        async def send_and_see(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            log.ended = self._clock()
            route = scope.get("route")  # FastAPI leaves it there
            log.route = None if route is None else str(route.path)
            _log_line(log)
            self._over(log)


def _log_line(log: RequestLog) -> None:
    level = logging.DEBUG if log.path in _QUIET_PATHS else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(
            level,
            "%s %s",
            log.method,
            log.path[:256],
            extra=about(log.log_context(), **_fields(log)),
        )


def _fields(log: RequestLog) -> dict[str, Any]:
    fields: dict[str, Any] = {"status": log.status, "e2e_s": round(log.ended - log.began, 4)}
    if log.code is not None:
        fields["code"] = log.code
    if log.tenant is not None:
        fields["tenant"] = log.tenant
    if log.choices:
        first_tokens = [one.ttft_s for one in log.choices if one.ttft_s is not None]
        workers = [pair for one in log.choices for pair in one.workers()]
        fields |= {
            "slo_class": log.choices[0].request.promise.class_name,
            "choices": len(log.choices),
            "prompt_tokens": log.num_prompt_tokens,
            "output_tokens": log.num_output_tokens,
            "ttft_s": round(min(first_tokens), 4) if first_tokens else None,
            "attempts": max(len(one.attempts) for one in log.choices),
            "prefill_workers": _distinct(prefill for prefill, _ in workers),
            "decode_workers": _distinct(decode for _, decode in workers),
        }
    return fields


def _distinct(names: Iterable[str]) -> list[str]:
    """Return each name once, the first _MAX_WORKERS of them."""
    return list(islice(dict.fromkeys(filter(None, names)), _MAX_WORKERS))
