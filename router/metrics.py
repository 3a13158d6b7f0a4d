"""What Prometheus reads at /metrics: this router's requests, and every worker's numbers as the channels bring them.

Names and units are vLLM's with the prefix `twostroke:`; a worker's series carry its `role` and `worker`. The registry
is this object's own, so that several routers can live in one process.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.errors import TwostrokeError
from protocol.stats import WorkerInfo, WorkerStats
from protocol.tickets import Peer
from router.openai_common import error_object, error_status
from router.stages import Stages

Outcome = Literal["stop", "length", "abort", "error"]

_PREFIX = "twostroke:"
_LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

WorkerNumbers = Callable[[], Iterable[tuple[WorkerInfo, WorkerStats]]]
Ejected = Callable[[], Collection[Peer]]


class RouterMetrics:
    """The series of one router replica. `worker_numbers` and `ejected` are asked at every scrape."""

    def __init__(self, model: str, worker_numbers: WorkerNumbers, ejected: Ejected = tuple):
        self._registry = CollectorRegistry()
        self._registry.register(_WorkerCollector(worker_numbers, ejected))
        self._model = model
        self._outcomes = Counter(
            _PREFIX + "request_success",
            "Choices that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", _LATENCY_BUCKETS)
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between a choice's tokens as they leave.", _TOKEN_BUCKETS
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
        """For series that others add."""
        return self._registry

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
        self._refused.labels(self._model, str(error_status(error)), error_object(error).error.code).inc()

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(_PREFIX + name, help_text, ["model_name"], buckets=buckets, registry=self._registry).labels(
            self._model
        )

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(_PREFIX + name, help_text, ["model_name"], registry=self._registry).labels(self._model)


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
    ("kv_transfer_aborts", "KV transfers given up: their requests were over.", lambda stats: stats.transfers_given_up),
    ("kv_transfer_bytes", "Bytes of KV transferred.", lambda stats: stats.transfer_bytes),
    ("kv_transfer_seconds", "Time of KV transfers.", lambda stats: stats.transfer_seconds),
    ("kv_transfer_digest_failures", "Chunks that arrived damaged.", lambda stats: stats.transfer_digest_failures),
    ("kv_transfer_retries", "Chunks sent again, damaged or lost with a link.", lambda stats: stats.transfer_retries),
    ("kv_transfer_links_lost", "Data links that broke under their peers.", lambda stats: stats.transfer_links_lost),
    ("kv_pulled_tokens", "Prompt tokens pulled from other workers' prefix caches.", lambda stats: stats.pulled_tokens),
    ("broken_logit_rows", "Rows of logits with NaN or infinity.", lambda stats: stats.broken_logit_rows),
)


class _WorkerCollector(Collector):
    """Turns the latest stats of each worker into series at the moment of a scrape."""

    def __init__(self, worker_numbers: WorkerNumbers, ejected: Ejected):
        self._worker_numbers = worker_numbers
        self._ejected = ejected

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to check names against: no worker is known yet

    def collect(self) -> Iterable[Metric]:
        numbers = list(self._worker_numbers())
        families: list[GaugeMetricFamily | CounterMetricFamily] = [*self._queues(numbers), self._left_out(numbers)]
        for name, help_text, value in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, help_text, labels=_LABELS)
            for info, stats in numbers:
                gauge.add_metric((info.role, info.peer.worker_id), value(stats))
            families.append(gauge)
        for name, help_text, value in _COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, help_text, labels=_LABELS)
            for info, stats in numbers:
                counter.add_metric((info.role, info.peer.worker_id), value(stats))
            families.append(counter)
        return families

    def _left_out(self, numbers: Iterable[tuple[WorkerInfo, WorkerStats]]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            _PREFIX + "worker_ejected", "1 while this router leaves it out, since it keeps failing.", labels=_LABELS
        )
        ejected = self._ejected()
        for info, _ in numbers:
            family.add_metric((info.role, info.peer.worker_id), info.peer in ejected)
        return family

    def _queues(self, numbers: Iterable[tuple[WorkerInfo, WorkerStats]]) -> tuple[GaugeMetricFamily, ...]:
        """By SLO class. Classes are those of the configuration: clients can't make series."""
        requests = GaugeMetricFamily(
            _PREFIX + "queued_requests", "Requests that still have prompt to be computed.", labels=_QUEUE_LABELS
        )
        tokens = GaugeMetricFamily(_PREFIX + "queued_tokens", "Prompt tokens of those.", labels=_QUEUE_LABELS)
        for info, stats in numbers:
            for class_name in sorted({queued.class_name for queued in stats.queued}):  # one may be there twice
                of_class = [queued for queued in stats.queued if queued.class_name == class_name]
                labels = (info.role, info.peer.worker_id, class_name)
                requests.add_metric(labels, sum(queued.requests for queued in of_class))
                tokens.add_metric(labels, sum(queued.tokens for queued in of_class))
        return requests, tokens
