"""The series of one router: the requests that it has had.

Names and units are vLLM's with the prefix `twostroke:`. The registry is this object's own, so that several routers can
live in one process. What workers tell of themselves: `router/observe/worker_metrics.py`; what a scrape brings of all
routers: `router/observe/scrape.py`.

A histogram that may be told of every token: prometheus_client's own takes a lock and walks its buckets each time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from twostroke.protocol.errors import TwostrokeError, public_error
from twostroke.router.observe.stages import Stages


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


Outcome = Literal["stop", "length", "abort", "error"]
Expected = Callable[[], Mapping[str, int]]
"""How many replicas of each role, routers included, there are to be now."""

_PREFIX = "twostroke:"
_LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class RouterMetrics:
    """What one router replica counts."""

    def __init__(self, model: str):
        self._registry = CollectorRegistry()
        self._model = model
        self._outcomes = Counter(
            _PREFIX + "request_success",
            "Choices that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", _LATENCY_BUCKETS)
        self.inter_token_latency = QuickHistogram(
            _PREFIX + "inter_token_latency_seconds",
            "Time between a choice's tokens as they leave.",
            model,
            _TOKEN_BUCKETS,
            self._registry,
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_BUCKETS)
        self._admission = self._histogram(
            "request_admission_time_seconds",
            "From arrival until let through: tokenised, its path chosen.",
            _LATENCY_BUCKETS,
        )
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for prefill.", _LATENCY_BUCKETS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Computing the prompt.", _LATENCY_BUCKETS)
        self._transfer = self._histogram("request_transfer_time_seconds", "KV from P to D.", _LATENCY_BUCKETS)
        self._decode_queue = self._histogram(
            "request_decode_queue_time_seconds", "From the KV's arrival to the first decode step.", _LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY_BUCKETS
        )
        self.decision_time = self._histogram(
            "router_decision_time_seconds", "Choosing the workers of an attempt.", _DECISION_BUCKETS
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a choice.", _COUNT_BUCKETS)
        self._output_length = self._histogram("request_generation_tokens", "Tokens of a choice.", _COUNT_BUCKETS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of choices begun.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens sent to clients.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in a prefix cache.")
        self._resumes = self._counter("request_resumes", "Attempts after a request's first.")
        self._failed_attempts = Counter(
            _PREFIX + "request_attempt_failures",
            "Attempts that failed, by the kind of error, whether another followed or not.",
            ["model_name", "error"],
            registry=self._registry,
        )
        self._prefill_failures = self._counter("prefill_failures", "Prompts that D had to compute because P failed.")
        self._refused = Counter(
            _PREFIX + "requests_refused",
            "Requests answered with an error, by HTTP status and the error's code.",
            ["model_name", "status", "code"],
            registry=self._registry,
        )
        self.in_flight = Gauge(
            _PREFIX + "router_requests_in_flight",
            "Choices that this router has under way.",
            ["model_name"],
            registry=self._registry,
        ).labels(model)

    @property
    def registry(self) -> CollectorRegistry:
        """All series of this router; others may add theirs."""
        return self._registry

    def watch_fleet(self, is_ready: Callable[[], bool], expected: Expected) -> None:
        """Tell at each scrape whether a request could be served, and how many replicas there are to be."""
        ready = Gauge(
            _PREFIX + "router_ready",
            "1 while a whole path is there and the router is not about to end.",
            ["model_name"],
            registry=self._registry,
        )
        ready.labels(self._model).set_function(is_ready)
        self._registry.register(_ExpectedReplicas(expected))

    def begun(self, num_prompt_tokens: int) -> None:
        """A choice starts."""
        self.in_flight.inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_length.observe(num_prompt_tokens)

    def ended(self, stages: Stages, outcome: Outcome) -> None:
        """A choice that had begun is over."""
        self.in_flight.dec()
        self._outcomes.labels(self._model, outcome).inc()
        self._generation_tokens.inc(stages.num_output_tokens)
        self._output_length.observe(stages.num_output_tokens)
        self._cached_tokens.inc(stages.num_cached_tokens)
        self._resumes.inc(stages.resumes)
        for tried in stages.tries:
            if tried.error is not None:
                self._failed_attempts.labels(self._model, tried.error).inc()
        self._prefill_failures.inc(stages.prefill_failures)
        for histogram, seconds in (
            (self._ttft, stages.ttft_s),
            (self._tpot, stages.tpot_s),
            (self._e2e, stages.e2e_s),
            (self._admission, stages.admit_s),
            (self._queue, stages.prefill_queue_s),
            (self._prefill, stages.prefill_s),
            (self._transfer, stages.transfer_s),
            (self._decode_queue, stages.decode_queue_s),
            (self._decode, stages.decode_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def refused(self, error: TwostrokeError) -> None:
        """A request is answered with an error."""
        shown = public_error(error)
        self._refused.labels(self._model, str(shown.status), shown.code).inc()

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(_PREFIX + name, help_text, ["model_name"], buckets=buckets, registry=self._registry).labels(
            self._model
        )

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(_PREFIX + name, help_text, ["model_name"], registry=self._registry).labels(self._model)


class _ExpectedReplicas(Collector):
    def __init__(self, expected: Expected):
        self._expected = expected

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to check names against: roles come with the configuration

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(_PREFIX + "replicas_expected", "Replicas that there are to be.", labels=["role"])
        for role, count in self._expected().items():
            family.add_metric((role,), count)
        return (family,)
