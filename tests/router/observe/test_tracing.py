"""Traces: the spans of a request, made of its stamps, under the client's own context."""

import subprocess
import sys
from dataclasses import replace

import pytest
from fastapi.routing import APIRoute
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import StatusCode, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tests.rigs.otlp import receiving_spans
from tests.router.routing.knowing import info
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.app import keyed, resources
from twostroke.router.observe.opentelemetry_traces import (
    OPERATIONS,
    OpenTelemetryTraces,
    TraceIds,
    exporting,
    resource_of,
)
from twostroke.router.observe.request_log import RequestLog
from twostroke.router.observe.tracing import TracingConfig, request_traces
from twostroke.router.request_state import AttemptState, ChoiceJob, Path, RequestState

CONVENTIONS = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FIELDS = {"model": "fake", "prompt": "the princess's whereabouts", "max_tokens": 8, "seed": 3, "ignore_eos": True}


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter):
    provider = TracerProvider(shutdown_on_exit=False, id_generator=TraceIds())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OpenTelemetryTraces(provider, model="fake", wall_clock=lambda: 1000.0)


def by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span):
    return span.start_time / 1e9, span.end_time / 1e9


async def test_a_request_has_a_span_for_every_stage_under_the_clients_own(site_of, traces, exporter):
    async with site_of(1, 1) as site:
        site.service.traces = traces
        await site.http.post("/v1/completions", json=FIELDS, headers={"traceparent": PARENT, "x-request-id": "label"})
        site.service.traces = None  # to look at what is there
    spans = by_name(exporter)
    root = spans["POST /v1/completions"]
    assert root.parent.span_id == 0xB7AD6B7169203331
    assert {span.context.trace_id for span in spans.values()} == {0x0AF7651916CD43DD8448EB211C80319C}
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["twostroke.request_id"] == "label"
    attempt = spans["router/attempt"]
    assert attempt.parent.span_id == root.context.span_id
    for name, worker in {
        "prefill_worker/queue": "p0",
        "prefill_worker/prefill": "p0",
        "decode_worker/transfer": "d0",
        "decode_worker/queue": "d0",
        "decode_worker/decode": "d0",
    }.items():
        assert spans[name].parent.span_id == attempt.context.span_id
        assert spans[name].attributes["twostroke.worker_id"] == worker
    assert "princess" not in "".join(span.to_json() for span in spans.values())


MESSAGES = [{"role": "user", "content": "the princess's whereabouts"}]
ASKED_OF = {
    "/v1/completions": FIELDS | {"top_k": 3, "top_p": 0.5},
    "/v1/chat/completions": {"model": "fake", "messages": MESSAGES, "max_tokens": 8, "ignore_eos": True},
    "/v1/responses": {"model": "fake", "input": "the princess's whereabouts", "max_output_tokens": 8},
    "/v1/messages": {"model": "fake", "messages": MESSAGES, "max_tokens": 8},
    "/v1/embeddings": {"model": "fake", "input": ["the princess's", "whereabouts"]},
}


def test_every_route_that_the_model_computes_something_for_is_traced():
    routes = [route for route in keyed.routes if isinstance(route, APIRoute)]
    computing = {route.path for route in routes if any(one.call is resources for one in route.dependant.dependencies)}
    assert computing == OPERATIONS.keys() == ASKED_OF.keys()


@pytest.mark.parametrize("path", ASKED_OF)
async def test_a_span_tells_model_operation_and_usage_in_the_words_of_the_conventions(site_of, traces, exporter, path):
    async with site_of(1, 1) as site:
        site.service.traces = traces
        assert (await site.http.post(path, json=ASKED_OF[path])).status_code == 200
        site.service.traces = None
    root = by_name(exporter)[f"POST {path}"]
    told = root.attributes
    assert {name for name in told if name.startswith("gen_ai.")} <= CONVENTIONS
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "fake"
    assert told["gen_ai.operation.name"] == OPERATIONS[path]
    assert told["gen_ai.usage.input_tokens"] > 0
    assert told.get("gen_ai.usage.output_tokens", 0) == (0 if path == "/v1/embeddings" else 8)
    attempts = [span for span in exporter.get_finished_spans() if span.name == "router/attempt"]
    workers = [
        {name: span.attributes.get(f"twostroke.{name}") for name in ("prefill_worker", "decode_worker")}
        for span in attempts
    ]
    reading = {"prefill_worker": "p0", "decode_worker": None}
    assert workers == ([reading] * 2 if path == "/v1/embeddings" else [{"prefill_worker": "p0", "decode_worker": "d0"}])
    assert "princess" not in "".join(span.to_json() for span in exporter.get_finished_spans())


async def test_another_model_than_the_one_served_is_not_named(site_of, traces, exporter):
    async with site_of(1, 1) as site:
        site.service.traces = traces
        await site.http.post("/v1/completions", json=FIELDS | {"model": "the princess"})
        await site.http.post("/v1/completions", json=FIELDS | {"max_tokens": -1})
        site.service.traces = None
    models = [span.attributes.get("gen_ai.request.model") for span in exporter.get_finished_spans()]
    assert models == [None, "fake"]


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (PARENT, "0af7651916cd43dd8448eb211c80319c"),
        ("", None),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", None),
        ("\x1b[31m", None),
        (PARENT + "0", None),
        (PARENT + "-what", None),
        (PARENT.replace("00-", "cc-", 1) + "-what", "0af7651916cd43dd8448eb211c80319c"),
    ],
)
async def test_log_lines_and_workers_are_told_the_traces_id(site_of, traces, exporter, caplog, traceparent, trace_id):
    caplog.set_level("INFO", logger="twostroke")
    async with site_of(1, 1) as site:
        site.service.traces = traces
        await site.http.post("/v1/completions", json=FIELDS, headers={"traceparent": traceparent})
        site.service.traces = None
        (line,) = [one for one in caplog.records if one.name.endswith("request_log")]
        fields = site.rig["d0"].seen[0].log_context
    ids = {format_trace_id(span.context.trace_id) for span in exporter.get_finished_spans()}
    assert ids == {line.log_context.trace_id} == {fields.trace_id}
    assert (fields.trace_id == "0af7651916cd43dd8448eb211c80319c") == (trace_id is not None)


async def test_without_tracing_a_clients_trace_is_told_and_none_is_begun(site_of):
    async with site_of(1, 1) as site:
        for traceparent in (PARENT, "00-nonsense"):
            await site.http.post("/v1/completions", json=FIELDS, headers={"traceparent": traceparent})
        told = [request.log_context.trace_id for request in site.rig["d0"].seen]
    assert told == ["0af7651916cd43dd8448eb211c80319c", ""]


@pytest.mark.parametrize(
    ("environment", "service", "instance"),
    [
        ({}, "twostroke", "r"),
        ({"OTEL_SERVICE_NAME": "chat"}, "chat", "r"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=of-all,service.instance.id=pod-7,zone=a"}, "of-all", "pod-7"),
        ({"OTEL_SERVICE_NAME": "chat", "OTEL_RESOURCE_ATTRIBUTES": "service.name=of-all"}, "chat", "r"),
    ],
)
def test_the_operators_names_win_over_ours(monkeypatch, environment, service, instance):
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    told = resource_of("r").attributes
    assert (told["service.name"], told["service.instance.id"]) == (service, instance)
    assert told.get("zone") == ("a" if "zone" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "") else None)
    assert told["telemetry.sdk.language"] == "python"


async def test_refusals_have_the_root_span_alone_and_other_paths_have_none(site_of, traces, exporter):
    async with site_of(1, 1) as site:
        site.service.traces = traces
        await site.http.get("/health")
        await site.http.get("/nowhere")
        await site.http.post("/v1/chat/completions", json={"model": "fake"})
        site.service.traces = None
    (root,) = exporter.get_finished_spans()
    assert (root.name, root.attributes["http.response.status_code"]) == ("POST /v1/chat/completions", 400)
    assert root.status.status_code is StatusCode.UNSET, "the client's fault is none of the server's"


def log(*choices, status=200):
    made = RequestLog("label", "POST", "/v1/completions", 10.0, {}, "/v1/completions", status, 20.0)
    return replace(made, choices=choices)


def path(number):
    return Path(info(f"p{number}"), info(f"d{number}"))


def test_a_failed_attempt_tells_the_kind_of_its_error_and_the_next_one_follows(a_request, traces, exporter):
    failed_one = AttemptState(11.0, path("0"), 13.0, "WorkerLost")
    times = {"prefill_queue_s": 0.5, "prefill_s": 1.0, "transfer_s": 2.0, "decode_queue_s": 0.25}
    attempts = [failed_one, AttemptState(14.0, path("1"), 20.0, **times)]
    traces.record(log(RequestState(ChoiceJob(a_request()), 10.0, admit=11.0, attempts=attempts)))
    spans = by_name(exporter)
    assert seconds(spans["POST /v1/completions"]) == (990.0, 1000.0)
    assert seconds(spans["router/admission"]) == (990.0, 991.0)
    attempts = [span for span in exporter.get_finished_spans() if span.name == "router/attempt"]
    failed, served = sorted(attempts, key=seconds)
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.events[0].attributes["exception.type"] == "WorkerLost"
    assert (served.status.status_code, served.attributes["twostroke.attempt"]) == (StatusCode.UNSET, 2)
    assert seconds(spans["prefill_worker/queue"]) == (994.0, 994.5)
    assert seconds(spans["prefill_worker/prefill"]) == (994.5, 995.5)
    assert seconds(spans["decode_worker/transfer"]) == (994.0, 996.0)
    assert seconds(spans["decode_worker/queue"]) == (996.0, 996.25)
    assert seconds(spans["decode_worker/decode"]) == (996.25, 1000.0)


def test_a_servers_failure_marks_the_root_span(traces, exporter):
    traces.record(log(status=503))
    (root,) = exporter.get_finished_spans()
    assert root.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"endpoint": "localhost:4318"}, "endpoint"),
        ({"endpoint": "http://host:port/"}, "endpoint"),
        ({"sample": 1.5}, "sample"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_by_name(config, names):
    with pytest.raises(ValueError, match=names):
        TracingConfig(**config)


def test_without_an_endpoint_nothing_that_traces_is_imported():
    code = (
        "import sys; from twostroke.router.http.app import build_app; from twostroke.router.observe.tracing import *;"
        "assert request_traces(TracingConfig(), replica='r', model='m') is None;"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_endpoint_without_the_extra_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "twostroke.router.observe.opentelemetry_traces")
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tracing\]'"):
        request_traces(TracingConfig(endpoint="http://localhost:4318/v1/traces"), replica="r", model="m")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "x"),
    ],
)
def test_a_variable_of_opentelemetrys_that_cannot_be_meant_is_told_in_words(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=r"^router\.tracing: an environment variable OTEL_\* can't be meant: "):
        request_traces(TracingConfig(endpoint="http://localhost:4318/v1/traces"), replica="r", model="m")


def test_a_client_has_no_more_of_its_requests_traced_than_the_share():
    sampler = exporting("http://localhost:4318/v1/traces", 0.25, replica="r").sampler
    for flag, most, least in (("01", 350, 150), ("00", 0, 0)):  # the smallest ids are those that a ratio always takes
        parent = TraceContextTextMapPropagator().extract({"traceparent": f"00-{1:032x}-{1:016x}-{flag}"})
        decided = [sampler.should_sample(parent, 1, "a request").decision for _ in range(1000)]
        assert least <= decided.count(Decision.RECORD_AND_SAMPLE) <= most


@pytest.mark.parametrize(("sample", "num_spans"), [(1.0, 1), (0.0, 0)])
def test_what_is_sampled_reaches_a_receiver_at_the_latest_when_the_router_ends(sample, num_spans):
    with receiving_spans() as (url, spans):
        traces = request_traces(TracingConfig(endpoint=url, sample=sample), replica="r", model="m")
        traces.record(log())
        traces.close()
        assert [span.name for span in spans] == ["POST /v1/completions"] * num_spans
