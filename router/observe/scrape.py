"""The text for Prometheus at /metrics: the numbers of all routers, from whichever of them serves it.

Routers stand behind one address, so a scrape reaches any of them. Were it told of that one alone, counters would jump
from router to router and every rate over them be wrong. So a router's series carry its name as the label `router`, and
the one that is asked fetches those of the others. A worker tells all routers the same: its series are there once.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily as Counters
from prometheus_client.core import GaugeMetricFamily as Gauges
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from twostroke.protocol.garbage import collection_seconds
from twostroke.protocol.messages import PROTOCOL
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import ROLES, Role, TierStats, WorkerInfo, WorkerStats
from twostroke.router.observe.metrics import family
from twostroke.router.request_state import MOVE_REASONS, PATH_KINDS, MoveReason, PathKind

WorkerNumbers = Sequence[tuple[WorkerInfo, WorkerStats]]

_LABELS = ("role", "worker")

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
    ("expert_copies", "Copies of experts that ranks hold beside their own.", lambda stats: stats.expert_copies),
    ("kv_blocks_total", "All blocks of the pool.", lambda stats: stats.total_blocks),
    ("kv_swapped_blocks", "Blocks of host memory that hold a request's KV.", lambda stats: stats.swapped_blocks),
    ("kv_transfers_running", "KV transfers in flight.", lambda stats: stats.num_transfers),
    ("num_context_tokens", "Tokens in the contexts of requests that decode.", lambda stats: stats.context_tokens),
    (
        "worker_peak_flops_per_second",
        "What its machine can compute; 0: not known.",
        lambda stats: stats.peak_flops_per_s,
    ),
    (
        "worker_peak_bytes_per_second",
        "What its machine's memory can read; 0: not known.",
        lambda stats: stats.peak_bytes_per_s,
    ),
    ("worker_draining", "1 while the worker takes nothing new.", lambda stats: stats.is_draining),
    (
        "engine_step_base_seconds",
        "What any step takes here, experts aside, as fitted; 0 until it is.",
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
    (
        "spec_decode_num_drafts",
        "Drafts that steps have run, one request's in one step each.",
        lambda stats: stats.drafts,
    ),
    ("spec_decode_num_draft_tokens", "Tokens of these drafts.", lambda stats: stats.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Of these, the ones that were drawn.", lambda stats: stats.accepted_tokens),
    ("worker_flops", "Floating-point operations of the model's tokens.", lambda stats: stats.flops),
    ("worker_read_bytes", "Bytes of weights and KV that steps have read.", lambda stats: stats.read_bytes),
    ("num_preemptions", "Requests whose blocks were taken back.", lambda stats: stats.preemptions),
    ("num_preemptions_swapped", "Of these, whose KV went to host memory.", lambda stats: stats.swaps),
    ("kv_swap_bytes", "Bytes of KV copied to host memory and back.", lambda stats: stats.swap_bytes),
    ("kv_swap_seconds", "Time of these copies.", lambda stats: stats.swap_seconds),
    ("worker_log_lines_dropped", "Log lines that the worker dropped.", lambda stats: stats.dropped_log_lines),
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
    (
        "broken_logit_rows",
        "Rows of logits with NaN or infinity that tokens were drawn from.",
        lambda stats: stats.broken_logit_rows,
    ),
)

_KNOWN_GAUGES: Sequence[tuple[str, str, Callable[[WorkerStats], float | None]]] = (
    (
        "model_flops_utilization",
        "FLOPs of the model's tokens over the machine's, of the last seconds, 0 to 1.",
        lambda stats: stats.mfu,
    ),
    (
        "model_bandwidth_utilization",
        "Bytes of weights and KV read over what the memory can, of the last seconds, 0 to 1.",
        lambda stats: stats.mbu,
    ),
    (
        "gpu_memory_used_bytes",
        "Memory in use on a worker's first GPU.",
        lambda stats: None if stats.gpu is None else stats.gpu.memory_used_bytes,
    ),
    (
        "gpu_memory_total_bytes",
        "Memory of a worker's first GPU.",
        lambda stats: None if stats.gpu is None else stats.gpu.memory_total_bytes,
    ),
    (
        "gpu_utilization",
        "Share of the time in which a worker's first GPU ran a kernel.",
        lambda stats: None if stats.gpu is None else stats.gpu.utilization,
    ),
)
"""Gauges that only some workers have."""

_TIER_COUNTERS: Sequence[tuple[str, str, Callable[[TierStats], float]]] = (
    ("kv_tier_lookups", "Objects looked up in a KV tier.", lambda tier: tier.lookups),
    ("kv_tier_hits", "Of these, those read whole.", lambda tier: tier.hits),
    ("kv_tier_hit_tokens", "Prompt tokens whose KV came from the tier.", lambda tier: tier.hit_tokens),
    ("kv_tier_read_bytes", "Bytes read.", lambda tier: tier.read_bytes),
    ("kv_tier_read_seconds", "Time of reads.", lambda tier: tier.read_seconds),
    ("kv_tier_written_objects", "Objects written.", lambda tier: tier.written_objects),
    ("kv_tier_written_bytes", "Bytes written.", lambda tier: tier.written_bytes),
    ("kv_tier_write_seconds", "Time of writes.", lambda tier: tier.write_seconds),
    ("kv_tier_dropped", "Objects that were not written: the queue or the cache was full.", lambda tier: tier.dropped),
    ("kv_tier_evicted", "Objects deleted for the quota.", lambda tier: tier.evicted),
    ("kv_tier_quarantined", "Objects with a wrong digest, set aside.", lambda tier: tier.quarantined),
    ("kv_tier_errors", "Reads and writes that the storage failed.", lambda tier: tier.errors),
    ("kv_tier_late", "Reads given up, since computing was quicker.", lambda tier: tier.late),
)
"""Counters of each KV tier of a worker."""

_TIER_GAUGES: Sequence[tuple[str, str, Callable[[TierStats], float]]] = (
    ("kv_tier_bytes", "Bytes of a KV tier's objects; 0: not known.", lambda tier: tier.num_bytes),
    ("kv_tier_max_bytes", "Quota of a KV tier; 0: none.", lambda tier: tier.max_bytes),
    ("kv_tier_open", "1; 0: the storage has not answered since the worker's start.", lambda tier: tier.is_open),
)


@dataclass(frozen=True)
class RouterMetricsSample:
    """The numbers of one router at one moment; travels between routers."""

    router: str  # its replica's id
    families: tuple[Metric, ...]  # of its own requests
    workers: WorkerNumbers  # as it last heard of them
    ejected: frozenset[Peer]
    # The version of the router that made it. No default of the class: samples of other versions would get it, too.
    protocol: str = field(default_factory=lambda: PROTOCOL)


OtherRouters = Callable[[], Awaitable[Sequence[RouterMetricsSample]]]
"""Fetches the samples of all other routers that answer in time."""


async def no_other_routers() -> Sequence[RouterMetricsSample]:
    """Return no samples: there is one router."""
    return ()


def path_families(
    paths: Mapping[PathKind, int],
    num_tier_reads: int,
    moved: Mapping[MoveReason, int],
    failed: Mapping[MoveReason, int],
) -> list[Metric]:
    """Return the series of the paths that choices took, of reads from tiers, and of streams that moved or could not."""
    outcomes = {"moved": moved, "failed": failed}
    counted = {
        (reason, how): float(counts.get(reason, 0)) for how, counts in outcomes.items() for reason in MOVE_REASONS
    }
    return [
        family(
            Counters,
            "request_paths",
            "Choices begun, by which workers compute the prompt and write the answer.",
            ["path"],
            {kind: float(paths.get(kind, 0)) for kind in PATH_KINDS},
        ),
        family(
            Counters,
            "request_tier_reads",
            "Choices begun of whose prompt a part was to be read from KV tiers.",
            (),
            {"": float(num_tier_reads)},
        ),
        family(
            Counters,
            "stream_moves",
            "Running streams that went on at another worker, or could not, by why they were to leave.",
            ["reason", "outcome"],
            counted,
        ),
    ]


def other_versions_family(names: Mapping[Role, Collection[str]]) -> Metric:
    """Number of workers of each role that a router leaves out, since they run another version."""
    about = "Workers that a router leaves out, since they run another version than it does."
    numbers = {str(role): len(names.get(role, ())) for role in ROLES}
    return family(Gauges, "workers_of_another_version", about, ("role",), numbers)


def hangs_family(hangs: Mapping[Role, int]) -> Metric:
    """Return the series of workers whose engines hung, as this router heard from them."""
    about = "Workers that ended since a step of their engine did not end within its bound."
    return family(Counters, "engine_hangs", about, ("role",), {str(role): float(hangs.get(role, 0)) for role in ROLES})


def dropped_lines_family(num_lines: int) -> Metric:
    """Return the series of log lines that this router has dropped."""
    about = "Log lines that a router dropped: its output stalled or failed."
    return family(Counters, "router_log_lines_dropped", about, (), {"": float(num_lines)})


def exposition(samples: Sequence[RouterMetricsSample]) -> bytes:
    """The series of these routers and of the workers, in Prometheus' text format."""
    return generate_latest(Scrape(samples))


@dataclass(frozen=True)
class Scrape(Collector):
    """All series of these routers and of the workers."""

    samples: Sequence[RouterMetricsSample]

    def collect(self) -> Iterable[Metric]:
        """A family has one place in a text, so the samples of all routers go there."""
        families: dict[str, Metric] = {}
        for router in self.samples:
            for one in (*router.families, _ejected(router)):
                merged = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                merged.samples += [
                    sample._replace(labels={**sample.labels, "router": router.router})
                    for sample in one.samples
                    if not sample.name.endswith("_created")  # one more series for each, which nobody looks at
                ]
        return [*families.values(), *_worker_families(_newest(self.samples))]


def _newest(samples: Sequence[RouterMetricsSample]) -> WorkerNumbers:
    """Each worker once, as the router tells that has heard of it last: else its counters could fall between scrapes."""
    values = [one for sample in samples for one in sample.workers]
    values.sort(key=lambda one: one[1].steps)
    return list({info.peer.worker_id: (info, stats) for info, stats in values}.values())


def _ejected(sample: RouterMetricsSample) -> Metric:
    """Return the series of workers that one router leaves out; each router decides that for itself."""
    ejected = {_labels(info): info.peer in sample.ejected for info, _ in sample.workers}
    about = "1 while a router leaves it out, since it keeps failing."
    return family(Gauges, "worker_ejected", about, _LABELS, ejected)


def _worker_families(numbers: WorkerNumbers) -> list[Metric]:
    """Return the series of the workers' own numbers; each worker is in `numbers` once."""
    families = [
        *_queues(numbers),
        *_expert_loads(numbers),
        _collections(numbers),
        _accepted_by_position(numbers),
        *_tiers(numbers),
    ]
    for name, help_text, value in _GAUGES:
        values = {_labels(info): value(stats) for info, stats in numbers}
        families.append(family(Gauges, name, help_text, _LABELS, values))
    for name, help_text, known in _KNOWN_GAUGES:
        of_workers = {_labels(info): number for info, stats in numbers if (number := known(stats)) is not None}
        families.append(family(Gauges, name, help_text, _LABELS, of_workers))
    for name, help_text, value in _COUNTERS:
        values = {_labels(info): value(stats) for info, stats in numbers}
        families.append(family(Counters, name, help_text, _LABELS, values))
    return families


def _by_place(numbers: WorkerNumbers, values: Callable[[WorkerStats], Sequence[float]]) -> dict[tuple[str, ...], float]:
    """Return each worker's values by its labels and their place."""
    return {(*_labels(info), str(place)): value for info, stats in numbers for place, value in enumerate(values(stats))}


def _collections(numbers: WorkerNumbers) -> Metric:
    seconds = _by_place(numbers, lambda stats: stats.collection_seconds)
    about = "Time of Python's garbage collections in a worker's first process, each of which stops its streams."
    return family(Counters, "worker_garbage_collection_seconds", about, (*_LABELS, "generation"), seconds)


def _accepted_by_position(numbers: WorkerNumbers) -> Metric:
    """Return the accepted tokens by their position in the draft, 0 is the first."""
    accepted = _by_place(numbers, lambda stats: stats.accepted_by_position)
    about = "Drafted tokens that were drawn, by their position in the draft."
    labels = (*_LABELS, "position")
    return family(Counters, "spec_decode_num_accepted_tokens_per_pos", about, labels, accepted)


def own_collections_family() -> Metric:
    """Return the seconds of this process's garbage collections, by generation."""
    about = "Time of Python's garbage collections in a router, each of which stops its streams."
    seconds = {str(generation): value for generation, value in enumerate(collection_seconds())}
    return family(Counters, "router_garbage_collection_seconds", about, ("generation",), seconds)


def _queues(numbers: WorkerNumbers) -> list[Metric]:
    """Return series by SLO class. Classes are those of the configuration: clients can't make series."""
    requests, tokens = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for info, stats in numbers:
        for queued in stats.queued:  # a class may be there twice
            labels = (*_labels(info), queued.class_name)
            requests[labels] += queued.requests
            tokens[labels] += queued.tokens
    labels = (*_LABELS, "slo_class")
    return [
        family(Gauges, "queued_requests", "Requests that still have prompt to be computed.", labels, requests),
        family(Gauges, "queued_tokens", "Prompt tokens of those.", labels, tokens),
    ]


def _expert_loads(numbers: WorkerNumbers) -> list[Metric]:
    """A series for each layer, of a hundred at most, and none for each expert, of which there are thousands."""

    def by_layer(values: Callable[[WorkerStats], Sequence[float]]) -> dict[tuple[str, ...], float]:
        return {labels: value for labels, value in _by_place(numbers, values).items() if value}

    labels = (*_LABELS, "layer")
    skews = "Hits of a layer's hottest expert over the mean of its experts, of the last minute or so."
    imbalances = "Rows of a layer's experts at the busiest rank over the mean of the ranks, of the last minute or so."
    return [
        family(Gauges, "expert_skew", skews, labels, by_layer(lambda stats: stats.expert_skews)),
        family(Gauges, "expert_imbalance", imbalances, labels, by_layer(lambda stats: stats.expert_imbalances)),
    ]


def _tiers(numbers: WorkerNumbers) -> list[Metric]:
    """Return the series of KV tiers, by the label `tier`; none of workers without tiers."""
    labels = (*_LABELS, "tier")

    def by_tier(value: Callable[[TierStats], float]) -> dict[tuple[str, ...], float]:
        return {(*_labels(info), tier.name): value(tier) for info, stats in numbers for tier in stats.tiers}

    return [
        *(family(Counters, name, about, labels, by_tier(value)) for name, about, value in _TIER_COUNTERS),
        *(family(Gauges, name, about, labels, by_tier(value)) for name, about, value in _TIER_GAUGES),
    ]


def _labels(info: WorkerInfo) -> tuple[str, ...]:
    return info.role, info.peer.worker_id
