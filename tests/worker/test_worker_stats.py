"""The shares of its machine's limits that a worker uses, over the last seconds."""

import pytest

from twostroke.model.costs.operations import MachineLimits, StepWork
from twostroke.protocol.stats import StepCosts
from twostroke.worker.constants import UTILIZATION_WINDOW_S
from twostroke.worker.scheduling.step_policy import PromisedBatch
from twostroke.worker.step_costs import StepContent, Utilization

WORK = StepWork(100.0, 0.0, 50.0, 0.0, 1000.0, 0.0, 0.0, 0.0)
STEP = StepContent(prompt_tokens=4, pairs=0.0, rows=2, context_tokens=0)  # 500 FLOPs and 1000 bytes


def test_shares_are_those_of_the_last_seconds_idle_time_included() -> None:
    now = 0.0
    used = Utilization(WORK, MachineLimits(gemm=1000.0, read=4000.0), lambda: now)
    for _ in range(10):
        now += 1.0
        used.add(STEP)
        used.shares()
    assert (used.flops, used.read_bytes) == (5000.0, 10_000.0)
    assert used.shares() == pytest.approx((0.5, 0.25))
    for _ in range(int(UTILIZATION_WINDOW_S) // 2):
        now += 1.0
        used.shares()
    assert used.shares() == pytest.approx((0.25, 0.125)), "half of the window was idle"


def test_without_limits_or_a_model_nothing_is_reported() -> None:
    assert Utilization(WORK, None, lambda: 0.0).shares() is None
    unknown = Utilization(None, MachineLimits(1.0, 1.0), lambda: 0.0)
    unknown.add(STEP)
    assert unknown.shares() is None
    assert unknown.flops == 0.0


def test_an_idle_worker_tells_a_speedup_whatever_its_costs_are_put_into() -> None:
    """A fit may put all time into contexts, which an idle worker has none of."""
    of_contexts = StepCosts(0.0, 0.0, 0.0, 0.0, 1e-5)
    assert PromisedBatch().speedup(of_contexts, 2.0, 1.5) == 1.0
    assert PromisedBatch().speedup(StepCosts(0.01, 0.0, 0.0, 0.001, 0.0), 2.0, 1.0) == pytest.approx(2 * 11 / 12)
