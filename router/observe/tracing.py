"""Whether requests are traced, and to where. Unless they are, nothing of it is imported."""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from twostroke.protocol.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.router.observe.opentelemetry_traces import OpenTelemetryTraces


@dataclass(frozen=True)
class TracingConfig:
    """Raises ConfigError for values that can't be meant."""

    endpoint: str | None = (
        None  # of an OTLP receiver over HTTP, such as http://localhost:4318/v1/traces; None: no traces
    )
    sample: float = 1.0  # the part of requests that is traced, 0 to 1; where the client's context decides, it does

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            try:
                parts = urlsplit(self.endpoint)
                is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
                _ = parts.port  # raises for one that is no number
            except ValueError:
                is_address = False
            if not is_address:
                raise ConfigError(f"endpoint: {self.endpoint} is no address like http://localhost:4318/v1/traces")
        if not 0 <= self.sample <= 1:
            raise ConfigError(f"sample: {self.sample} must be between 0 and 1")


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
