"""The series of one router: the requests that it has had, and what became of promises.

Names and units are vLLM's with the prefix `twostroke:`. The registry is this object's own, so that several routers can
live in one process. What workers tell of themselves, and what a scrape brings of all routers:
`router/observe/scrape.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TwostrokeError, public_error
from twostroke.protocol.requests import GenerateRequest
from twostroke.router.request_state import RequestState
from twostroke.router.slo.admission import Admission, Limit
from twostroke.router.slo.classes import SLOAttainment, SLOClass, SLOVerdict

Outcome = Literal["stop", "length", "abort", "error"]
Series = TypeVar("Series", Counter, Gauge, Histogram)
Labels = TypeVar("Labels", bound=str | tuple[str, ...])

PREFIX = "twostroke:"
# To beyond `router.request_timeout_s` as it is by default: a request may take that long, and a percentile must tell.
_LATENCY_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    320,
    640,
)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 3, 5, 10)

_HISTOGRAMS: Mapping[str, tuple[str, str, Sequence[float]]] = {
    "ttft_s": ("time_to_first_token_seconds", "Time to first token.", _LATENCY_BUCKETS),
    "tpot_s": ("request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_BUCKETS),
    "e2e_s": ("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_BUCKETS),
    "admit_s": (
        "request_admission_time_seconds",
        "From arrival until let through: tokenised, its path chosen.",
        _LATENCY_BUCKETS,
    ),
    "prefill_queue_s": ("request_queue_time_seconds", "Waiting for prefill.", _LATENCY_BUCKETS),
    "prefill_s": ("request_prefill_time_seconds", "Computing the prompt.", _LATENCY_BUCKETS),
    "transfer_s": ("request_transfer_time_seconds", "KV from the prefill to the decode worker.", _LATENCY_BUCKETS),
    "decode_queue_s": (
        "request_decode_queue_time_seconds",
        "From the KV's arrival to the first decode step.",
        _LATENCY_BUCKETS,
    ),
    "decode_s": ("request_decode_time_seconds", "From the first token to the last.", _LATENCY_BUCKETS),
    "num_output_tokens": ("request_generation_tokens", "Tokens of a choice.", _COUNT_BUCKETS),
}
"""Histograms of choices that are over, by the attribute of `RequestState`: name, help, buckets."""

_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_output_tokens": ("generation_tokens", "Tokens sent to clients."),
    "num_cached_tokens": ("prompt_tokens_cached", "Prompt tokens found in a prefix cache."),
    "resumes": ("request_resumes", "Attempts that followed a failed one."),
    "num_unparsed": ("unparsed_responses", "Texts in answers that looked like tool calls and were sent as content."),
    "prefill_failures": (
        "prefill_failures",
        "Prompts that the decode worker computed because the prefill worker failed.",
    ),
}
"""Counters of choices that are over, by the attribute of `RequestState`."""


class RouterMetrics:
    """The metrics of one router replica."""

    def __init__(
        self,
        model: str,
        classes: Sequence[SLOClass],
        admission: Admission,
        clock: Clock,
        is_ready: Callable[[], bool],
        keys_age_s: Callable[[], float] | None = None,
    ):
        """`is_ready` tells at each scrape whether a request could be served, `keys_age_s` how old the API keys are."""
        self.registry = CollectorRegistry()
        """All series of this router; others may add theirs."""
        self._model = model
        self._clock = clock
        self._attainment = SLOAttainment()
        self._histograms = {
            attribute: self._series(Histogram, name, about, buckets=buckets)
            for attribute, (name, about, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {attribute: self._series(Counter, *about) for attribute, about in _COUNTERS.items()}
        self.inter_token_latency = self._series(
            Histogram,
            "inter_token_latency_seconds",
            "Time between a choice's tokens as they leave; those of one step leave together.",
            buckets=_TOKEN_BUCKETS,
        )
        self._decision_time = self._series(
            Histogram,
            "router_decision_time_seconds",
            "Choosing the workers of an attempt.",
            buckets=_DECISION_BUCKETS,
        )
        self._prompt_length = self._series(
            Histogram, "request_prompt_tokens", "Prompt tokens of a choice.", buckets=_COUNT_BUCKETS
        )
        self._prompt_tokens = self._series(Counter, "prompt_tokens", "Prompt tokens of choices begun.")
        self._constrained = self._series(
            Counter, "requests_constrained", "Choices begun that are held to a schema or grammar."
        )
        self._outcomes = self._series(Counter, "request_success", "Choices that ended, by how.", ["finished_reason"])
        self._failed_attempts = self._series(
            Counter,
            "request_attempt_failures",
            "Attempts that failed, by the kind of error, whether another followed or not.",
            ["error"],
        )
        self._refused = self._series(
            Counter,
            "requests_refused",
            "Requests answered with an error, by HTTP status and the error's code.",
            ["status", "code"],
        )
        self._in_flight = self._series(Gauge, "router_requests_in_flight", "Choices that this router has under way.")
        ready = self._series(Gauge, "router_ready", "1 while a whole path is there and the router is not about to end.")
        ready.set_function(is_ready)
        if keys_age_s is not None:
            about = "Since the API keys in use were last found to be those of auth.keys_file."
            self._series(Gauge, "api_keys_age_seconds", about).set_function(keys_age_s)
        self._verdicts = self._series(
            Counter,
            "slo_requests",
            "Choices that are over, by whether they got both promised times; errors got none, aborts don't count.",
            ["slo_class", "verdict"],
        )
        self._refusals = self._series(
            Counter,
            "slo_refusals",
            "Choices that admission refused, by what they would have broken.",
            ["slo_class", "limit"],
        )
        self._ratio = self._series(
            Histogram,
            "ttft_prediction_ratio",
            "Time to first token since admission, over what was predicted then.",
            ["slo_class"],
            buckets=_RATIO_BUCKETS,
        )
        attainment = self._series(
            Gauge,
            "slo_attainment",
            "Of the last minutes' choices, refused ones included, those that got both promised times: 0 to 1.",
            ["slo_class"],
        )
        correction = self._series(
            Gauge,
            "ttft_prediction_correction",
            "What admission multiplies predicted times to first token by now.",
            ["slo_class"],
        )
        for one in classes:
            attainment.labels(model, one.name).set_function(partial(self.attainment, one.name))
            correction.labels(model, one.name).set_function(partial(admission.ttft_correction, one.name))

    def begun(self, request: GenerateRequest) -> None:
        """A choice starts."""
        self._in_flight.inc()
        self._prompt_tokens.inc(request.num_prompt_tokens)
        self._prompt_length.observe(request.num_prompt_tokens)
        if request.grammar:
            self._constrained.inc()

    def ended(self, state: RequestState, outcome: Outcome, verdict: SLOVerdict | None) -> None:
        """A choice that had begun is over. Without a verdict its promises don't count: its client has left."""
        self._in_flight.dec()
        self._outcomes.labels(self._model, outcome).inc()
        for attempt in state.all_attempts:
            if attempt.error is not None:
                self._failed_attempts.labels(self._model, attempt.error).inc()
        for attribute, counter in self._counters.items():
            counter.inc(getattr(state, attribute))
        for attribute, histogram in self._histograms.items():
            value = getattr(state, attribute)
            if value is not None:
                histogram.observe(value)
        for seconds in state.decisions_s:
            self._decision_time.observe(seconds)
        if verdict is not None:
            self._judged(state, verdict)

    def overloaded(self, request: GenerateRequest, limit: Limit) -> None:
        """Admission has refused a choice, which is over, too."""
        self._refusals.labels(self._model, request.promise.class_name, limit).inc()

    def refused(self, error: TwostrokeError) -> None:
        """A request is answered with an error."""
        shown = public_error(error)
        self._refused.labels(self._model, str(shown.status), shown.code).inc()

    def attainment(self, class_name: str) -> float:
        """Return the SLO attainment of a class over the last minutes."""
        return self._attainment.of(class_name, self._clock())

    def _judged(self, state: RequestState, verdict: SLOVerdict) -> None:
        class_name = state.request.promise.class_name
        self._verdicts.labels(self._model, class_name, verdict).inc()
        self._attainment.record(class_name, verdict, self._clock())
        if state.predicted is not None:
            expected, ttft_s = state.predicted
            if expected.ttft_s > 0:
                self._ratio.labels(self._model, class_name).observe(ttft_s / expected.ttft_s)

    def _series(
        self, kind: type[Series], name: str, help_text: str, more_labels: Sequence[str] = (), **options: Any
    ) -> Series:
        """Series of the model; with `more_labels`, those of each of their values."""
        made = kind(PREFIX + name, help_text, ["model_name", *more_labels], registry=self.registry, **options)
        return made if more_labels else made.labels(self._model)


def family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    labels: Sequence[str],
    numbers: Mapping[Labels, float],
) -> Metric:
    """Return series of given `numbers`, by the value of the label or those of several."""
    made = kind(PREFIX + name, help_text, labels=labels)
    for values, number in numbers.items():
        made.add_metric((values,) if isinstance(values, str) else values, number)
    return made
