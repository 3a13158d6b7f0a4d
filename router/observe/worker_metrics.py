"""The series of the workers, made of what they last told: one of each kind for each `role` and `worker`.

Every router hears the same of a worker; whether it leaves the worker out is its own affair.

The series about promises: which were kept, and how good the predictions are that admission relies on.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import GenerateRequest, Peer
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.router.observe.stages import Stages
from twostroke.router.slo.admission import Admission, Limit
from twostroke.router.slo.attainment import SLOAttainment, SLOVerdict
from twostroke.router.slo.classes import SLOClass

PREFIX = "twostroke:"

WorkerNumbers = Sequence[tuple[WorkerInfo, WorkerStats]]

_LABELS = ("role", "worker")
_QUEUE_LABELS = (*_LABELS, "slo_class")

_GAUGES: Sequence[tuple[str, str, Callable[[WorkerStats], float]]] = (
    ("num_requests_running", "Requests that take part in steps.", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests that hold no place in a step yet.", lambda stats: stats.num_waiting),
    ("num_waiting_tokens", "Prompt tokens still to be computed.", lambda stats: stats.num_waiting_tokens),
    (
        "kv_cache_usage_perc",
        "Owned blocks over all blocks, 0 to 1.",
        lambda stats: stats.owned_blocks / stats.total_blocks if stats.total_blocks else 0.0,
    ),
    ("kv_blocks_owned", "Blocks that a request or transfer holds; 0 when idle.", lambda stats: stats.owned_blocks),
    ("kv_blocks_total", "All blocks of the pool.", lambda stats: stats.total_blocks),
    ("kv_swapped_blocks", "Blocks of host memory that hold a request's KV.", lambda stats: stats.swapped_blocks),
    ("kv_transfers_running", "KV transfers in flight.", lambda stats: stats.num_transfers),
    ("num_context_tokens", "Tokens in the contexts of requests that decode.", lambda stats: stats.context_tokens),
    ("worker_draining", "1 while the worker takes nothing new.", lambda stats: stats.is_draining),
    (
        "engine_step_base_seconds",
        "What any step takes here, as fitted; 0 until it is.",
        lambda stats: stats.costs.base_s if stats.costs is not None else 0.0,
    ),
)

_COUNTERS: Sequence[tuple[str, str, Callable[[WorkerStats], float]]] = (
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda stats: stats.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found.", lambda stats: stats.prefix_hits),
    ("worker_prompt_tokens", "Prompt tokens computed.", lambda stats: stats.computed_tokens),
    ("worker_generation_tokens", "Tokens generated.", lambda stats: stats.generated_tokens),
    ("engine_steps", "Engine steps.", lambda stats: stats.steps),
    ("engine_step_seconds", "Time spent in engine steps.", lambda stats: stats.step_seconds),
    ("num_preemptions", "Requests whose blocks were taken back.", lambda stats: stats.preemptions),
    ("num_preemptions_swapped", "Of these, whose KV went to host memory.", lambda stats: stats.swaps),
    ("kv_swap_bytes", "Bytes of KV copied to host memory and back.", lambda stats: stats.swap_bytes),
    ("kv_swap_seconds", "Time of these copies.", lambda stats: stats.swap_seconds),
    ("worker_requests_finished", "Requests that ended by themselves.", lambda stats: stats.finished_requests),
    ("worker_requests_aborted", "Requests that were cancelled or failed.", lambda stats: stats.aborted_requests),
    ("kv_transfers", "KV transfers that succeeded.", lambda stats: stats.transfers_done),
    (
        "kv_transfer_failures",
        "KV transfers that failed while both sides wanted them.",
        lambda stats: stats.transfers_failed - stats.transfers_given_up,
    ),
    (
        "kv_transfer_aborts",
        "KV transfers that one side gave up: the request was over, or a pulled prefix was not worth waiting for.",
        lambda stats: stats.transfers_given_up,
    ),
    ("kv_transfer_bytes", "Bytes of KV transferred.", lambda stats: stats.transfer_bytes),
    ("kv_transfer_seconds", "Time of KV transfers.", lambda stats: stats.transfer_seconds),
    ("kv_transfer_digest_failures", "Chunks that arrived damaged.", lambda stats: stats.transfer_digest_failures),
    ("kv_transfer_links_lost", "Data links that broke under their peers.", lambda stats: stats.transfer_links_lost),
    ("kv_pulled_tokens", "Prompt tokens pulled from other workers' prefix caches.", lambda stats: stats.pulled_tokens),
    ("broken_logit_rows", "Rows of logits with NaN or infinity.", lambda stats: stats.broken_logit_rows),
)


def worker_families(numbers: WorkerNumbers) -> list[Metric]:
    """What the workers tell of themselves; each is in `numbers` once."""
    families: list[Metric] = [*_queues(numbers)]
    for name, help_text, value in _GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=_LABELS)
        for info, stats in numbers:
            gauge.add_metric((info.role, info.peer.worker_id), value(stats))
        families.append(gauge)
    for name, help_text, value in _COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, help_text, labels=_LABELS)
        for info, stats in numbers:
            counter.add_metric((info.role, info.peer.worker_id), value(stats))
        families.append(counter)
    return families


def ejected_family(numbers: WorkerNumbers, ejected: Collection[Peer]) -> Metric:
    """Which of the workers one router leaves out."""
    family = GaugeMetricFamily(
        PREFIX + "worker_ejected", "1 while a router leaves it out, since it keeps failing.", labels=_LABELS
    )
    for info, _ in numbers:
        family.add_metric((info.role, info.peer.worker_id), info.peer in ejected)
    return family


def _queues(numbers: WorkerNumbers) -> tuple[GaugeMetricFamily, ...]:
    """By SLO class. Classes are those of the configuration: clients can't make series."""
    requests = GaugeMetricFamily(
        PREFIX + "queued_requests", "Requests that still have prompt to be computed.", labels=_QUEUE_LABELS
    )
    tokens = GaugeMetricFamily(PREFIX + "queued_tokens", "Prompt tokens of those.", labels=_QUEUE_LABELS)
    for info, stats in numbers:
        for class_name in sorted({queued.class_name for queued in stats.queued}):  # one may be there twice
            of_class = [queued for queued in stats.queued if queued.class_name == class_name]
            labels = (info.role, info.peer.worker_id, class_name)
            requests.add_metric(labels, sum(queued.requests for queued in of_class))
            tokens.add_metric(labels, sum(queued.tokens for queued in of_class))
    return requests, tokens


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

    def over(self, request: GenerateRequest, stages: Stages, verdict: SLOVerdict) -> None:
        """A choice is over; one whose client left is not counted."""
        class_name = request.promise.class_name
        self._verdicts.labels(self._model, class_name, verdict).inc()
        self._attainment.record(class_name, verdict, self._clock())
        if stages.predicted is not None:
            expected, ttft_s = stages.predicted
            if expected.ttft_s > 0:
                self._ratio.labels(self._model, class_name).observe(ttft_s / expected.ttft_s)

    def attainment(self, class_name: str) -> float:
        """Of the last minutes."""
        return self._attainment.of(class_name, self._clock())
