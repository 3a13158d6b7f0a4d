"""Whether requests are traced, and to where. Unless they are, nothing of it is imported."""

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from annotated_types import Ge, Le
from pydantic import field_validator

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import Section

if TYPE_CHECKING:
    from twostroke.router.observe.opentelemetry_traces import OpenTelemetryTraces


class TracingConfig(Section):
    """Which requests are traced."""

    endpoint: str | None = None
    """Of an OTLP receiver over HTTP, such as http://localhost:4318/v1/traces; null: no traces."""
    sample: Annotated[float, Ge(0), Le(1)] = 1.0
    """The part of requests that is traced; where the client's context decides, it does."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        try:
            parts = urlsplit(endpoint)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port  # raises for one that is no number
        except ValueError:
            is_address = False
        if not is_address:
            raise ValueError(f"{endpoint} is no address like http://localhost:4318/v1/traces")
        return endpoint


def request_traces(config: TracingConfig, *, replica: str) -> "OpenTelemetryTraces | None":
    """Where requests' traces go; None for nowhere. Raises ConfigError where what that needs is not installed."""
    if config.endpoint is None:
        return None
    try:
        from twostroke.router.observe.opentelemetry_traces import OpenTelemetryTraces, exporting
    except ImportError as error:
        raise ConfigError(
            f"router.tracing.endpoint: {error.name} is not installed: install twostroke[tracing]"
        ) from error
    return OpenTelemetryTraces(exporting(config.endpoint, config.sample, replica=replica))
