"""The numbers that a worker tells of itself, gathered from where they arise; both roles tell the same."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twostroke.model.step import Engine
from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import LEAST_STRETCH, QueuedWork, StepCosts, TransferStats, WorkerStats
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.scheduler import Scheduler
from twostroke.worker.step_costs import StepCostFit


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

    def count_step(self, seconds: float, computed_tokens: int) -> None:
        """An engine step has run."""
        self.steps += 1
        self.step_seconds += seconds
        self.computed_tokens += computed_tokens


def worker_stats(
    counters: WorkerCounters,
    fit: StepCostFit,
    scheduler: Scheduler[Any],
    pool: BlockPool,
    transfers: Sequence[TransferStats],
    engine: Engine,
    *,
    is_draining: bool,
) -> WorkerStats:
    """All numbers now, but for those of swap space. `transfers` are both sides of KV transfer."""
    queued = queued_work(scheduler.waiting_work())
    contexts = [(job.request.promise, len(job.sequence.token_ids)) for job in scheduler.decoding]
    fit.take_in()  # a router that sends nothing here for its costs would have to wait for ever for better
    costs = fit.costs()
    return WorkerStats(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_waiting_tokens=sum(of_class.tokens for of_class in queued),
        free_blocks=pool.free_blocks,
        total_blocks=pool.num_blocks,
        owned_blocks=pool.owned_blocks,
        num_transfers=sum(side.in_flight for side in transfers),
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        preemptions=scheduler.preemptions,
        transfers_done=sum(side.done for side in transfers),
        transfers_failed=sum(side.failed for side in transfers),
        transfers_given_up=sum(side.given_up for side in transfers),
        transfer_bytes=sum(side.bytes for side in transfers),
        transfer_seconds=sum((side.seconds for side in transfers), 0.0),
        transfer_digest_failures=sum(side.digest_failures for side in transfers),
        transfer_links_lost=sum(side.links_lost for side in transfers),
        broken_logit_rows=engine.num_broken_rows,
        queued=queued,
        context_tokens=sum(num_tokens for _, num_tokens in contexts),
        tightest_tpot_s=_tightest_tpot_s(contexts, costs),
        costs=costs,
        is_draining=is_draining,
        **asdict(counters),
    )


def _tightest_tpot_s(decoding: Sequence[tuple[Promise, int]], costs: StepCosts | None) -> float | None:
    """What the worker keeps: else one request with a promise that nobody could keep would have all others refused."""
    promised_s = [promise.tpot_s for promise, _ in decoding if promise.tpot_s is not None]
    if not promised_s or costs is None:
        return min(promised_s, default=None)
    context_tokens = sum(num_tokens for _, num_tokens in decoding) // len(decoding)
    return max(min(promised_s), LEAST_STRETCH * (costs.base_s + costs.decode_s(1, context_tokens)))


def queued_work(work: Iterable[tuple[Promise, int]]) -> tuple[QueuedWork, ...]:
    """Tokens of each request, summed up by what the requests' classes are: the highest priority first."""
    tokens: Counter[tuple[str, int, float]] = Counter()
    requests: Counter[tuple[str, int, float]] = Counter()
    for promise, num_tokens in work:
        of_class = (promise.class_name, promise.priority, promise.share)
        tokens[of_class] += num_tokens
        requests[of_class] += 1
    order = sorted(requests, key=lambda of_class: (-of_class[1], of_class))
    return tuple(QueuedWork(*of_class, tokens[of_class], requests[of_class]) for of_class in order)
