"""The simulator itself, against what queueing theory knows."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.simulation.autoscaling.compare import Fixed, Setting, serve_with_fleet
from tests.simulation.autoscaling.traffic import bursts, steps
from twostroke.planning.coarse.fleet import CoarseFleet, reversals, run
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import CoarseDecodeWorker, CoarseRequest
from twostroke.planning.costs.profiles import SMALL
from twostroke.protocol.stats import StepCosts
from twostroke.router.slo.classes import SLOConfig
from twostroke.worker.profile import WorkerProfile

TOKEN_S = 1e-5


def prompts_only(costs: StepCosts) -> WorkerProfile:
    """Return a worker whose prompts take their tokens' time and nothing else, a twentieth of a mean one a step."""
    return WorkerProfile("theory", costs, 1.0, 10**9, 1e12, 5_000, 256, "queueing theory")


def mean_wait_s(lengths: Sequence[int], gaps: Sequence[float], workers: int) -> float:
    """Return the mean wait of prompts that only wait and are computed."""
    kind = prompts_only(StepCosts(0.0, TOKEN_S, 0.0, 0.0, 0.0))
    fleet = CoarseFleet(
        kind, 0.0, 1.0, 1.0, SimulatedRouter(SLOConfig(admission=False), decodes_alone=False, roles="fixed")
    )
    at_s, requests = 0.0, []
    for gap, tokens in zip(gaps, lengths, strict=True):
        at_s += gap
        requests.append(CoarseRequest(at_s, tokens, 1))
    run(fleet, requests, Fixed(workers, 1), (workers, 1), at_s, look_s=at_s)
    return sum(one.ttft_s - one.prompt_tokens * TOKEN_S for one in requests) / len(requests)


@pytest.mark.parametrize(("workers", "load"), [(1, 0.6), (4, 0.8)])
def test_exponential_prompts_wait_as_erlangs_formula_says(workers: int, load: float) -> None:
    rng = random.Random(1)
    count, mean_s = 15_000, 1.0
    lengths = [1 + round(rng.expovariate(TOKEN_S / mean_s)) for _ in range(count)]
    gaps = [rng.expovariate(workers * load / mean_s) for _ in range(count)]
    offered = workers * load
    tail = offered**workers / math.factorial(workers) / (1 - load)
    waits = tail / (sum(offered**k / math.factorial(k) for k in range(workers)) + tail)
    assert mean_wait_s(lengths, gaps, workers) == pytest.approx(waits * mean_s / (workers * (1 - load)), rel=0.12)


def test_equal_prompts_wait_half_as_long_as_exponential_ones() -> None:
    rng = random.Random(2)
    count, load = 15_000, 0.7
    gaps = [rng.expovariate(load) for _ in range(count)]
    expected = load / (2 * (1 - load))  # M/D/1
    assert mean_wait_s([round(1 / TOKEN_S)] * count, gaps, 1) == pytest.approx(expected, rel=0.12)


def test_decoding_takes_the_sum_of_its_steps() -> None:
    costs = StepCosts(base_s=0.01, token_s=0.0, pair_s=0.0, row_s=1e-3, context_s=1e-5)
    worker = CoarseDecodeWorker(prompts_only(costs), 0.0, 0.0)
    requests = [CoarseRequest(0.0, 100, 51), CoarseRequest(0.0, 300, 101)]
    for request in requests:
        worker.join(request, 0.0)
    both = sum(costs.decode_s(2, 402 + 2 * step) + costs.base_s for step in range(50))
    alone = sum(costs.decode_s(1, 301 + step) + costs.base_s for step in range(50, 100))
    assert worker.next_end_s() == pytest.approx(both, rel=2e-3)
    assert worker.end_some(worker.next_end_s()) == [requests[0]]
    assert worker.next_end_s() == pytest.approx(both + alone, rel=2e-3)
    assert worker.end_some(worker.next_end_s()) == [requests[1]]
    assert worker.held_tokens == 0


def test_what_the_kv_cache_has_no_room_for_waits_for_those_that_decode() -> None:
    costs = StepCosts(0.01, 0.0, 0.0, 0.0, 0.0)
    kind = WorkerProfile("small cache", costs, 1.0, 250, 1e12, 10**9, 256, "")
    worker = CoarseDecodeWorker(kind, 0.0, 0.0)
    for _ in range(3):
        worker.join(CoarseRequest(0.0, 100, 11), 0.0)
    assert (len(worker.rows), len(worker.waiting)) == (2, 1)
    worker.end_some(worker.next_end_s())
    assert (len(worker.rows), len(worker.waiting)) == (2, 0)


def test_a_worker_starts_late_drains_before_it_goes_and_is_paid_from_its_order_on() -> None:
    trace = steps(0, ((0.0, 2.0),), 300.0)

    def up_and_down(fleet: CoarseFleet) -> tuple[int, int]:
        return (3 if 100 <= fleet.now_s < 200 else 1), 1

    setting = Setting(SMALL, 5.0, 0.02, startup_s=40.0)
    result, fleet = serve_with_fleet(trace, setting, up_and_down, (1, 1))
    assert fleet.ended == len(trace.requests)
    assert max(change.prefill for change in fleet.changes) == 3
    assert result.worker_hours * 3600 == pytest.approx(2 * 300 + 2 * 100, abs=5)  # and as long as they drained
    assert result.prefill_reversals == 1


def test_reversals_are_turns_and_the_worst_hour_counts() -> None:
    ups_and_downs = [(0.0, 1), (10.0, 2), (20.0, 4), (30.0, 3), (40.0, 5), (5000.0, 2)]
    assert reversals(ups_and_downs) == 2
    assert reversals([(0.0, 1), (10.0, 1), (20.0, 2)]) == 0


def test_synthetic_bursts_are_as_bursty_as_the_trace_they_imitate() -> None:
    times = [at_s for at_s, _, _ in bursts(0, 4 * 3600.0).requests]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    cv = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    seconds = Counter(int(at_s) for at_s in times)
    assert 10 < cv < 17
    assert 2.0 < 1 / mean < 3.3
    assert 40 < max(seconds.values()) < 110
