"""A tiny OTLP receiver over HTTP, that keeps the spans sent to it."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, with what its resource tells of the process."""

    name: str
    trace_id: str
    attributes: dict[str, Any]
    resource: dict[str, Any]


@contextmanager
def receiving_spans() -> Iterator[tuple[str, list[ReceivedSpan]]]:
    """The receiver's address while it listens on the loopback interface, and the spans that have come."""
    spans: list[ReceivedSpan] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for of_resource in request.resource_spans:
                resource = _values(of_resource.resource.attributes)
                spans.extend(
                    ReceivedSpan(span.name, span.trace_id.hex(), _values(span.attributes), resource)
                    for scope in of_resource.scope_spans
                    for span in scope.spans
                )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            serving.join()


def _values(attributes: Any) -> dict[str, Any]:
    """Each attribute's value; an OTLP value has one field, of its type."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
