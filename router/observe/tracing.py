"""Settings of tracing. Its libraries are imported only where requests are traced."""

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le
from pydantic import HttpUrl

from twostroke.protocol.errors import ConfigError, how_to_install
from twostroke.protocol.settings import Section

if TYPE_CHECKING:
    from twostroke.router.observe.opentelemetry_traces import OpenTelemetryTraces


class TracingConfig(Section):
    """Settings of request traces."""

    endpoint: HttpUrl | None = None
    """Address of an OTLP receiver over HTTP that gets OpenTelemetry traces of requests, such as
    `http://localhost:4318/v1/traces`. Needs the extra `tracing`, which `make serve` installs; null: there are none
    (docs/observability.md#traces)."""
    sample: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of the requests that is traced. A client's trace context may leave its request out, never in beyond this
    share."""


def request_traces(config: TracingConfig, *, replica: str, model: str) -> "OpenTelemetryTraces | None":
    """Return what takes traces of requests for `model`, or None. Raises ConfigError where a package is missing, or a
    variable of OpenTelemetry's is wrong."""
    if config.endpoint is None:
        return None
    try:
        from twostroke.router.observe.opentelemetry_traces import OpenTelemetryTraces, exporting
    except ImportError as error:
        raise ConfigError(
            f"router.tracing.endpoint: {error.name} is not installed: {how_to_install('tracing')}"
        ) from error
    try:
        provider = exporting(str(config.endpoint), config.sample, replica=replica)
    except ValueError as error:  # all else that it is given has been checked
        raise ConfigError(f"router.tracing: an environment variable OTEL_* can't be meant: {error}") from error
    return OpenTelemetryTraces(provider, model=model)
