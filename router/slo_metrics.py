"""The series about promises: which were kept, and how good the predictions are that admission relies on."""

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import GenerateRequest
from twostroke.router.admission import Admission, Limit
from twostroke.router.attainment import SLOAttainment, Verdict
from twostroke.router.slo import SLOClass
from twostroke.router.stages import Stages

_PREFIX = "twostroke:"
_RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 3, 5, 10)


class SLOMetrics:
    """Of one router replica, by class."""

    def __init__(
        self,
        *,
        model: str,
        classes: Sequence[SLOClass],
        admission: Admission,
        clock: Clock,
        registry: CollectorRegistry,
    ):
        self._model = model
        self._clock = clock
        self._attainment = SLOAttainment()
        labels = ["model_name", "slo_class"]
        self._verdicts = Counter(
            _PREFIX + "slo_requests",
            "Choices that are over, by whether they got both promised times; errors got none, aborts don't count.",
            [*labels, "verdict"],
            registry=registry,
        )
        self._refusals = Counter(
            _PREFIX + "slo_refusals",
            "Choices that admission refused, by what they would have broken.",
            [*labels, "limit"],
            registry=registry,
        )
        attainment = Gauge(
            _PREFIX + "slo_attainment",
            "Of the last minutes' choices, refused ones included, those that got both promised times: 0 to 1.",
            labels,
            registry=registry,
        )
        correction = Gauge(
            _PREFIX + "ttft_prediction_correction",
            "What admission multiplies predicted times to first token by now.",
            labels,
            registry=registry,
        )
        self._ratio = Histogram(
            _PREFIX + "ttft_prediction_ratio",
            "Time to first token since admission, over what was predicted then.",
            labels,
            buckets=_RATIO_BUCKETS,
            registry=registry,
        )
        for one in classes:
            attainment.labels(model, one.name).set_function(partial(self.attainment, one.name))
            correction.labels(model, one.name).set_function(partial(admission.ttft_correction, one.name))

    def refused(self, request: GenerateRequest, limit: Limit) -> None:
        """Admission has refused a choice; it is `over`, too."""
        self._refusals.labels(self._model, request.promise.class_name, limit).inc()

    def over(self, request: GenerateRequest, stages: Stages, verdict: Verdict) -> None:
        """A choice is over; one whose client left is not counted."""
        class_name = request.promise.class_name
        self._verdicts.labels(self._model, class_name, verdict).inc()
        self._attainment.record(class_name, verdict, self._clock())
        if stages.expected is None or stages.admit is None or stages.first_token is None:
            return
        if stages.attempts == 1 and stages.expected.ttft_s > 0:
            ratio = (stages.first_token - stages.admit) / stages.expected.ttft_s
            self._ratio.labels(self._model, class_name).observe(ratio)

    def attainment(self, class_name: str) -> float:
        """Of the last minutes."""
        return self._attainment.of(class_name, self._clock())
