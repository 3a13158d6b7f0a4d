"""A histogram that may be told of every token: prometheus_client's own takes a lock and walks its buckets each time."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class QuickHistogram(Collector):
    """One model's series, told of and collected on one event loop."""

    def __init__(self, name: str, help_text: str, model: str, bounds: Sequence[float], registry: CollectorRegistry):
        """`bounds` are the upper ends of the buckets, rising; above the last there is one more."""
        self._name = name
        self._help_text = help_text
        self._model = model
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, amount: float) -> None:
        """Count `amount` in."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=["model_name"])
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        counts = map(float, accumulate(self._counts))
        family.add_metric([self._model], list(zip(ends, counts, strict=True)), self._sum)
        return (family,)
