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

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from twostroke.router.observe.request_log import RequestLog
from twostroke.router.request_state import RequestState

MAX_CHOICES = 16
"""Most choices of a request that have spans."""

OPERATIONS: Mapping[str, str] = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
"""The routes whose requests have spans, and `gen_ai.operation.name` of each; a test looks for missing ones."""


class TraceIds(RandomIdGenerator):
    """Has a trace that begins here go by the id that log lines have told already."""

    next_trace_id: int | None = None

    def generate_trace_id(self) -> int:
        return self.next_trace_id or super().generate_trace_id()


class RandomShare(Sampler):
    """Samples a share of the traces that clients began. A client may leave its trace out; by no choice of the trace's
    id, which `TraceIdRatioBased` goes by, can it have more than the share recorded."""

    def __init__(self, share: float):
        self._share = share

    def should_sample(self, parent_context: Context | None, *args: Any, **kwargs: Any) -> SamplingResult:
        is_sampled = random.random() < self._share  # nobody gains by guessing it
        state = get_current_span(parent_context).get_span_context().trace_state
        return SamplingResult(Decision.RECORD_AND_SAMPLE if is_sampled else Decision.DROP, trace_state=state)

    def get_description(self) -> str:
        return f"RandomShare({self._share})"


def resource_of(replica: str) -> Resource:
    """Return what all spans of a router tell of it; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    ours = Resource.create({"service.name": "twostroke", "service.instance.id": replica})
    return ours.merge(OTELResourceDetector().detect())


def exporting(endpoint: str, sample: float, *, replica: str) -> TracerProvider:
    """Sends batches of spans to an OTLP receiver, on a thread of its own."""
    provider = TracerProvider(
        resource=resource_of(replica),
        sampler=ParentBased(TraceIdRatioBased(sample), remote_parent_sampled=RandomShare(sample)),
        id_generator=TraceIds(),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class OpenTelemetryTraces:
    """Turns requests that the model computes something for into spans.

    `model` is the name of the one that is served; `wall_clock` gives seconds since 1970.
    """

    def __init__(self, provider: TracerProvider, *, model: str, wall_clock: Callable[[], float] = time.time):
        """`provider` draws its ids by TraceIds."""
        assert isinstance(provider.id_generator, TraceIds)
        self._provider = provider
        self._ids = provider.id_generator
        self._model = model
        self._tracer = provider.get_tracer("twostroke.router")
        self._wall_clock = wall_clock
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, log: RequestLog) -> None:
        """Draw the id of the request's trace, which its log lines tell, where it takes no part in a client's."""
        if not log.trace_id:
            log.trace_id = format_trace_id(RandomIdGenerator.generate_trace_id(self._ids))

    def record(self, log: RequestLog) -> None:
        """Make the spans of a request that is over just now."""
        operation = OPERATIONS.get(log.route or "")
        if operation is None:
            return
        self._ids.next_trace_id = int(log.trace_id or "0", 16)
        spans = _Spans(self._tracer, self._wall_clock() - log.ended)
        parent = self._propagator.extract(log.headers)
        attributes = _attributes(log, operation, self._model)
        root = spans.begin(f"{log.method} {log.route}", log.began, parent, attributes, SpanKind.SERVER)
        if log.status >= 500 or (log.status == 200 and log.code is not None):  # a stream may fail later
            root.set_attribute("error.type", log.code or str(log.status))
            root.set_status(Status(StatusCode.ERROR))
        for index, state in enumerate(log.choices[:MAX_CHOICES]):
            _add_choice(spans, set_span_in_context(root), index, state)
        spans.end(root, log.ended)

    def close(self) -> None:
        """Send what has not been sent yet; takes seconds where no receiver answers."""
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


def _attributes(log: RequestLog, operation: str, model: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "http.request.method": log.method,
        "http.route": log.route or "",
        "http.response.status_code": log.status,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "twostroke",
        "twostroke.request_id": log.request_id,
    }
    if log.code != "model_not_found":  # another name would be the client's text
        attributes["gen_ai.request.model"] = model
    if not log.choices:  # refused before it was understood
        return attributes
    request, drawn = log.choices[0].request, log.choices[0].request.sampling
    attributes |= {
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": log.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": log.num_cached_tokens,
        "twostroke.slo_class": request.promise.class_name,
    }
    if operation == "embeddings":
        return attributes
    first_tokens = [one.ttft_s for one in log.choices if one.ttft_s is not None]
    if log.is_stream and first_tokens:
        attributes["gen_ai.response.time_to_first_chunk"] = min(first_tokens)
    if drawn.top_k:
        attributes["gen_ai.request.top_k"] = drawn.top_k
    return attributes | {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": drawn.temperature,
        "gen_ai.request.top_p": drawn.top_p,
        "gen_ai.request.frequency_penalty": drawn.frequency_penalty,
        "gen_ai.request.presence_penalty": drawn.presence_penalty,
        "gen_ai.request.choice.count": len(log.choices),
        "gen_ai.request.stream": log.is_stream,
        "gen_ai.response.finish_reasons": [one.finish_reason for one in log.choices if one.finish_reason],
        "gen_ai.usage.output_tokens": log.num_output_tokens,
        "gen_ai.usage.reasoning.output_tokens": sum(one.num_reasoning_tokens for one in log.choices),
    }


def _add_choice(spans: _Spans, parent: Context, index: int, state: RequestState) -> None:
    if state.admit is not None and not state.follows:
        spans.end(spans.begin("router/admission", state.arrive, parent), state.admit)
    for number, tried in enumerate(state.all_attempts, start=1):
        prefill, decode = tried.path.worker_ids
        end = tried.begin if tried.end is None else tried.end
        attributes: dict[str, AttributeValue] = {
            "twostroke.choice": index,
            "twostroke.attempt": number,
            "twostroke.cached_tokens": tried.num_cached_tokens,
        }
        workers = {"twostroke.prefill_worker": prefill, "twostroke.decode_worker": decode}
        attributes |= {name: worker for name, worker in workers.items() if worker}
        span = spans.begin("router/attempt", tried.begin, parent, attributes)
        if tried.error is not None:
            span.add_event("exception", {"exception.type": tried.error}, spans.ns(end))
            span.set_status(Status(StatusCode.ERROR, tried.error))
        within = set_span_in_context(span)
        if tried.prefill_s is not None:
            at_prefill = [("queue", tried.prefill_queue_s), ("prefill", tried.prefill_s)]
            role = "prefill_worker" if prefill else "decode_worker"  # which may read a prompt, too
            _add_stages(spans, within, tried.begin, role, prefill or decode, at_prefill)
        if tried.decode_queue_s is not None:  # the decode worker has answered
            decode_s = end - tried.begin - (tried.transfer_s or 0.0) - tried.decode_queue_s
            at_decode = [
                ("transfer", tried.transfer_s),
                ("queue", tried.decode_queue_s),
                ("decode", max(0.0, decode_s)),
            ]
            _add_stages(spans, within, tried.begin, "decode_worker", decode, at_decode)
        spans.end(span, end)


def _add_stages(
    spans: _Spans, parent: Context, begin: float, role: str, worker: str, stages: Iterable[tuple[str, float | None]]
) -> None:
    """One after the other, for so many seconds each; None did not happen."""
    for name, seconds in stages:
        if seconds is not None:
            span = spans.begin(f"{role}/{name}", begin, parent, {"twostroke.worker_id": worker})
            begin += seconds
            spans.end(span, begin)
