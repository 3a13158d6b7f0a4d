"""Spans of a request, made when it is over: from the router's own stamps and from what the workers' replies told.

So no worker needs a tracer, and nothing is made on the way of a token. Names and attributes are those of
OpenTelemetry's conventions for HTTP servers and generative AI, where these have one; no text of a client's is among
them.

    POST /v1/chat/completions            the request, from arrival to the last byte
      router/admission                   until it was let through
      router/attempt                     one try of one choice; a failed one has the error as an event
        prefill_worker/queue, prefill_worker/prefill
        decode_worker/transfer, decode_worker/queue, decode_worker/decode

Workers tell durations, not moments: their spans are laid out from the beginning of the attempt.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from twostroke.router.observe.access_log import Exchange
from twostroke.router.observe.stages import Stages

MAX_CHOICES = 16
"""Of one request, that have spans; a request may have more."""

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


def exporting(endpoint: str, sample: float, *, replica: str) -> TracerProvider:
    """Sends batches of spans to an OTLP receiver, on a thread of its own."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": "twostroke", "service.instance.id": replica}),
        sampler=ParentBased(TraceIdRatioBased(sample)),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class OpenTelemetryTraces:
    """Turns requests for completions into spans. `wall_clock` gives seconds since 1970."""

    def __init__(self, provider: TracerProvider, *, wall_clock: Callable[[], float] = time.time):
        self._provider = provider
        self._tracer = provider.get_tracer("twostroke.router")
        self._wall_clock = wall_clock
        self._propagator = TraceContextTextMapPropagator()

    def record(self, exchange: Exchange) -> None:
        """Make the spans of a request that is over just now."""
        operation = _OPERATIONS.get(exchange.route or "")
        if operation is None:
            return
        spans = _Spans(self._tracer, self._wall_clock() - exchange.ended)
        parent = self._propagator.extract(exchange.headers)
        attributes = _attributes(exchange, operation)
        root = spans.begin(f"{exchange.method} {exchange.route}", exchange.began, parent, attributes, SpanKind.SERVER)
        if exchange.status >= 500:
            root.set_attribute("error.type", str(exchange.status))
            root.set_status(Status(StatusCode.ERROR))
        for index, stages in enumerate(exchange.stages[:MAX_CHOICES]):
            _add_choice(spans, set_span_in_context(root), index, stages)
        spans.end(root, exchange.ended)

    def close(self) -> None:
        """Send what has not been sent yet; takes seconds where nobody receives it."""
        self._provider.shutdown()


@dataclass(frozen=True)
class _Spans:
    """Makes spans of moments of the router's clock; `offset_s` added, they are seconds since 1970."""

    tracer: Tracer
    offset_s: float

    def begin(
        self,
        name: str,
        moment: float,
        parent: Context,
        attributes: Mapping[str, AttributeValue] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        return self.tracer.start_span(name, parent, kind, attributes, start_time=self.ns(moment))

    def end(self, span: Span, moment: float) -> None:
        span.end(self.ns(moment))

    def ns(self, moment: float) -> int:
        return int((moment + self.offset_s) * 1e9)


def _attributes(exchange: Exchange, operation: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "http.request.method": exchange.method,
        "http.route": exchange.route or "",
        "http.response.status_code": exchange.status,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "twostroke",
        "twostroke.request_id": exchange.request_id,
    }
    if not exchange.requests:  # refused before it was understood
        return attributes
    request = exchange.requests[0]
    reasons = [stages.finish_reason for stages in exchange.stages if stages.finish_reason is not None]
    return attributes | {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.choice.count": len(exchange.requests),
        "gen_ai.request.stream": exchange.is_stream,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": exchange.num_prompt_tokens,
        "gen_ai.usage.output_tokens": exchange.num_output_tokens,
        "twostroke.slo_class": request.promise.class_name,
    }


def _add_choice(spans: _Spans, parent: Context, index: int, stages: Stages) -> None:
    if stages.admit is not None and not stages.follows:
        spans.end(spans.begin("router/admission", stages.arrive, parent), stages.admit)
    for number, tried in enumerate(stages.tries, start=1):
        attributes = {
            "twostroke.choice": index,
            "twostroke.attempt": number,
            "twostroke.cached_tokens": tried.num_cached_tokens,
        }
        span = spans.begin("router/attempt", tried.begin, parent, attributes)
        if tried.error is not None:
            span.add_event("exception", {"exception.type": tried.error}, spans.ns(tried.end))
            span.set_status(Status(StatusCode.ERROR, tried.error))
        within = set_span_in_context(span)
        if tried.prefill is not None and tried.prefill_s is not None:
            at_prefill = [("queue", tried.prefill_queue_s), ("prefill", tried.prefill_s)]
            _add_stages(spans, within, tried.begin, "prefill_worker", tried.prefill, at_prefill)
        if tried.decode_queue_s is not None:  # the decode worker has answered
            decode_s = tried.end - tried.begin - (tried.transfer_s or 0.0) - tried.decode_queue_s
            at_decode = [
                ("transfer", tried.transfer_s),
                ("queue", tried.decode_queue_s),
                ("decode", max(0.0, decode_s)),
            ]
            _add_stages(spans, within, tried.begin, "decode_worker", tried.decode, at_decode)
        spans.end(span, tried.end)


def _add_stages(
    spans: _Spans, parent: Context, begin: float, role: str, worker: str, stages: Iterable[tuple[str, float | None]]
) -> None:
    """One after the other, for so many seconds each; None did not happen."""
    for name, seconds in stages:
        if seconds is not None:
            span = spans.begin(f"{role}/{name}", begin, parent, {"twostroke.worker_id": worker})
            begin += seconds
            spans.end(span, begin)
