"""The numbers that a worker reports: its counters, utilisation, queue by class and tightest promise."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import MIN_STRETCH, QueuedWork, StepCosts, TransferStats
from twostroke.worker.scheduling.scheduler import HostBlocks, Scheduler, Swapping
from twostroke.worker.scheduling.step_policy import PromisedBatch
from twostroke.worker.speculator import Speculator


@dataclass(slots=True)
class WorkerCounters:
    """Numbers of WorkerStats, by their names there, that a worker counts itself. They only grow."""

    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    finished_requests: int = 0
    aborted_requests: int = 0
    pulled_tokens: int = 0


def scheduler_fields(scheduler: Scheduler, costs: StepCosts | None) -> dict[str, Any]:
    """Return the fields of WorkerStats that describe the requests that are here."""
    queued = queued_work(scheduler.waiting_work())
    decoding = PromisedBatch()
    for job in scheduler.decoding:
        decoding.add(job)
    return {
        "num_waiting": scheduler.num_waiting,
        "num_running": scheduler.num_running,
        "num_decoding": scheduler.num_decoding,
        "num_waiting_tokens": sum(of_class.tokens for of_class in queued),
        "prefix_queries": scheduler.prefix_queries,
        "prefix_hits": scheduler.prefix_hits,
        "preemptions": scheduler.num_preemptions,
        "queued": queued,
        "context_tokens": decoding.num_context_tokens,
        "tightest_tpot_s": tightest_tpot_s(decoding, costs),
        "draft_speedup": 1.0 if costs is None else decoding.speedup(costs, *scheduler.usual_steps),
        **_speculation_fields(scheduler.speculator),
    }


def _speculation_fields(speculator: Speculator | None) -> dict[str, Any]:
    """Return the fields of WorkerStats that describe drafted tokens."""
    if speculator is None:
        return {}
    counters = speculator.counters
    return {
        "drafts": counters.num_drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted_tokens": counters.accepted_tokens,
        "accepted_by_position": tuple(counters.accepted_by_position),
    }


def swap_fields(swapping: Swapping, space: HostBlocks | None) -> dict[str, Any]:
    """Return the fields of WorkerStats that describe KV in host memory."""
    return {
        "swaps": swapping.num_swaps,
        "swap_bytes": 0 if space is None else space.num_bytes,
        "swap_seconds": 0.0 if space is None else space.seconds,
        "swapped_blocks": 0 if swapping.pool is None else swapping.pool.owned_blocks,
    }


def transfer_fields(sides: Sequence[TransferStats]) -> dict[str, Any]:
    """Return the fields of WorkerStats that describe transfers, over both directions."""
    return {
        "num_transfers": sum(side.in_flight for side in sides),
        "transfers_done": sum(side.done for side in sides),
        "transfers_failed": sum(side.failed for side in sides),
        "transfers_given_up": sum(side.given_up for side in sides),
        "transfer_bytes": sum(side.bytes for side in sides),
        "transfer_seconds": sum((side.seconds for side in sides), 0.0),
        "transfer_digest_failures": sum(side.digest_failures for side in sides),
        "transfer_links_lost": sum(side.links_lost for side in sides),
    }


def tightest_tpot_s(decoding: PromisedBatch, costs: StepCosts | None) -> float | None:
    """Return the longest step, drafts aside, that keeps the TPOT promises of running requests; None without promises.

    It is bounded below by what one request alone takes, so that one promise that can't be kept does not block
    admission.
    """
    if decoding.tightest_s == math.inf or costs is None:
        return None if decoding.tightest_s == math.inf else decoding.tightest_s
    return max(decoding.longest_s(costs), MIN_STRETCH * decoding.lone_s(costs))


def queued_work(work: Iterable[tuple[Promise, int]]) -> tuple[QueuedWork, ...]:
    """Sum up each request's tokens by SLO class, the highest priority first."""
    tokens: Counter[tuple[str, int, float]] = Counter()
    requests: Counter[tuple[str, int, float]] = Counter()
    for promise, num_tokens in work:
        of_class = (promise.class_name, promise.priority, promise.share)
        tokens[of_class] += num_tokens
        requests[of_class] += 1
    order = sorted(requests, key=lambda of_class: (-of_class[1], of_class))
    return tuple(QueuedWork(*of_class, tokens[of_class], requests[of_class]) for of_class in order)
