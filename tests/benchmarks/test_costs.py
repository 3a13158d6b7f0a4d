"""`bench machine --costs` learns an engine whose steps take known times."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.benchmarks import machine as bench
from twostroke.model.step import SequenceStep
from twostroke.protocol.stats import StepCosts
from twostroke.worker.step_costs import StepContent

DENSE = StepCosts(15e-3, 6e-4, 4e-8, 9e-4, 2e-6)
EXPERTS = StepCosts(6e-3, 5e-4, 4e-8, 7e-4, 1e-6, experts_s=33e-3, expert_share=8 / 64)


class Machine:
    """Its clock moves by what steps cost, and by more where it was busy with something else."""

    def __init__(self, costs: StepCosts, delays: Iterator[float]) -> None:
        self.now, self.costs, self.delays = 0.0, costs, delays

    def perf_counter(self) -> float:
        return self.now

    async def step(self, step: Sequence[SequenceStep]) -> None:
        self.now += StepContent.of(step).expected_s(self.costs) * next(self.delays)


def learnt(monkeypatch: pytest.MonkeyPatch, true: StepCosts, delays: Iterator[float]) -> tuple[StepCosts, float]:
    machine = Machine(true, delays)
    monkeypatch.setattr(bench, "time", machine)
    config = SimpleNamespace(kv_groups=SimpleNamespace(count=1), expert_share=true.expert_share)
    loaded: Any = SimpleNamespace(engine=machine, model_config=config)
    return asyncio.run(bench.fit_costs(loaded, 5))


CONTENTS = (StepContent(256, 256 * 128, 0, 0), StepContent(0, 0, 1, 512), StepContent(0, 0, 16, 16 * 512))


@pytest.mark.parametrize("true", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_costs_of_steps_that_never_vary_are_learnt_whole(monkeypatch: pytest.MonkeyPatch, true: StepCosts) -> None:
    costs, error = learnt(monkeypatch, true, itertools.repeat(1.0))
    assert error < 0.01
    for content in CONTENTS:
        assert content.expected_s(costs) == pytest.approx(content.expected_s(true), rel=0.02)


def test_one_step_in_seven_that_takes_three_times_as_long_is_not_what_steps_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs, error = learnt(monkeypatch, DENSE, itertools.cycle([1.0] * 6 + [3.0]))
    assert error < 0.15
    for content in CONTENTS:
        assert content.expected_s(costs) == pytest.approx(content.expected_s(DENSE), rel=0.15)
