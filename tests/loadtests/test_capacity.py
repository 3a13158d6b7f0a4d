"""A search on known curves of attainment, and a sweep against a server of known capacity."""

import math
import random
from collections.abc import Callable, Container
from pathlib import Path
from statistics import NormalDist

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loadtests.report.runs import read_sweep
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import (
    Crossing,
    SearchRange,
    Sweep,
    SweepEnded,
    SweepPoint,
    bracket,
    crossing,
    find_capacity,
    geometric_mean,
    interval,
    next_rate,
)
from twostroke.loadtests.plan import SLO, Closed, Fixed, Gamma, Plan
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Summary, Validity


def curve(capacity: float, steepness: float = 8.0) -> Callable[[float], float]:
    """Attainment by rate: all well below the capacity, 90% at it."""
    return lambda rate: 1 / (1 + (rate / capacity) ** steepness / 9)


def at(rate: float, attainment: float) -> SweepPoint:
    return SweepPoint(rate, "", attainment, attainment, attainment, 0.0, valid=True)


def searched(attainment: Callable[[float], float], target: float, search: SearchRange) -> list[SweepPoint]:
    measured: list[SweepPoint] = []
    while (rate := next_rate(measured, target, search)) is not None:
        measured.append(at(rate, attainment(rate)))
        assert len(measured) < 60
    return measured


@settings(deadline=None)
@given(st.floats(0.05, 5000), st.floats(0.01, 8000), st.floats(1.5, 4))
def test_the_capacity_is_found_wherever_it_lies_and_wherever_the_search_begins(
    capacity: float, start: float, factor: float
) -> None:
    measured = searched(curve(capacity), 0.9, SearchRange(start, factor, precision=0.05))
    found = crossing(measured, 0.9)
    assert found.rate == pytest.approx(capacity, rel=0.05)
    assert not found.is_lower_bound


def test_a_search_doubles_then_bisects() -> None:
    measured = searched(curve(11.0), 0.9, SearchRange(1.0, precision=0.2))
    assert [round(each.rate, 2) for each in measured] == [1, 2, 4, 8, 16, 11.31, 9.51]


def test_what_is_known_of_another_target_is_not_measured_again() -> None:
    measured = searched(curve(11.0), 0.9, SearchRange(1.0))
    before = len(measured)
    while (rate := next_rate(measured, 0.99, SearchRange(1.0))) is not None:
        measured.append(at(rate, curve(11.0)(rate)))
    assert len(measured) - before <= 3
    assert curve(11.0)(crossing(measured, 0.99).rate) == pytest.approx(0.99, abs=0.005)


def test_a_search_that_knows_where_to_look_goes_there_at_once() -> None:
    missed = [at(10.0, 0.8), at(11.0, 0.7)]
    assert next_rate(missed, 0.99, SearchRange(start=5.0, factor=1.25)) == 5.0
    met = [at(10.0, 1.0)]
    assert next_rate(met, 0.99, SearchRange(start=20.0, factor=1.25)) == 20.0


def test_a_server_that_never_misses_has_a_lower_bound_alone() -> None:
    measured = searched(lambda rate: 1.0, 0.9, SearchRange(1.0, most=10.0))
    assert [each.rate for each in measured] == [1, 2, 4, 8, 10]
    assert crossing(measured, 0.9) == Crossing(10.0, is_lower_bound=True)


def test_a_server_that_always_misses_has_no_capacity() -> None:
    measured = searched(lambda rate: 0.5, 0.9, SearchRange(1.0, least=0.3))
    assert [each.rate for each in measured] == [1, 0.5, 0.3]
    assert crossing(measured, 0.9) is None


def test_a_rate_met_by_luck_above_one_that_was_missed_does_not_count() -> None:
    measured = [at(4.0, 1.0), at(8.0, 0.8), at(16.0, 0.95)]
    assert bracket(measured, 0.9) == (measured[0], measured[1])
    assert crossing(measured, 0.9) == Crossing(6.0)


def test_the_interval_of_repeated_noisy_searches_holds_the_capacity_nearly_always() -> None:
    draw = random.Random(1)
    capacity, requests = 20.0, 400

    def noisy(rate: float) -> float:
        expected = curve(capacity)(rate)
        return min(1.0, max(0.0, draw.gauss(expected, math.sqrt(expected * (1 - expected) / requests))))

    held = 0
    for _ in range(300):
        rates = []
        for _ in range(3):
            found = crossing(searched(noisy, 0.9, SearchRange(5.0, precision=0.05)), 0.9)
            rates.append(found.rate)
        between = interval(rates)
        held += between[0] <= capacity <= between[1]
    # 95% is promised of unbiased searches; a run that happens to miss pulls a search down a little.
    assert held / 300 >= 0.88


def test_the_interval_is_students() -> None:
    between = interval([math.exp(1), math.exp(2), math.exp(3)])
    half = 4.303 / math.sqrt(3)
    assert [math.log(each) for each in between] == pytest.approx([2 - half, 2 + half], rel=1e-3)
    assert geometric_mean([1.0, 4.0]) == 2.0
    assert interval([1.0]) is None
    # With many degrees of freedom the normal distribution's quantile is near.
    many = interval([math.exp(value) for value in range(11)])
    standard_error = math.sqrt(11) / math.sqrt(11)  # of 0 ... 10
    assert math.log(many[1]) - 5 == pytest.approx(NormalDist().inv_cdf(0.975) * standard_error, rel=0.15)


PLAN = Plan("http://127.0.0.1:1", "m", 4096, Gamma(1.0, 2.0), Fixed(10, 10), SLO(ttft_s=1.0), seconds=60.0, seed=100)


def summarise_observations(attainment: float, validity: Validity) -> Summary:
    known = {
        "name": "run",
        "attainment": Estimate(attainment),
        "goodput": Estimate(1.0),
        "num_workers": {"prefill": 1.0, "decode": 3.0},
        "validity": validity,
    }
    return Summary(**(dict.fromkeys(Summary.__struct_fields__) | known))


class FakeServer:
    """Attainment by rate; runs take their time on a clock of their own."""

    def __init__(
        self,
        attainment: Callable[[float], float],
        invalid_runs: Container[int] = (),
        invalid_from: float = float("inf"),  # a rate
    ) -> None:
        self.attainment = attainment
        self.invalid_runs = invalid_runs
        self.invalid_from = invalid_from
        self.plans: list[Plan] = []
        self.folders: list[Path] = []
        self.said: list[str] = []
        self.now = 0.0

    def run_at(self, plan: Plan, folder: Path) -> Summary:
        self.now += plan.seconds + 5
        self.plans.append(plan)
        self.folders.append(folder)
        assert isinstance(plan.arrivals, Gamma)
        invalid = len(self.plans) in self.invalid_runs or plan.arrivals.rate >= self.invalid_from
        validity = Validity(False, ("too late",)) if invalid else Validity(True)
        return summarise_observations(self.attainment(plan.arrivals.rate), validity)

    def sweep(self, folder: Path, budget_s: float = 1e9) -> Sweep:
        return Sweep(PLAN, folder, self.run_at, self.said.append, budget_s, clock=lambda: self.now)


def test_capacities_are_found_with_intervals_and_per_worker(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0))
    sweep = server.sweep(tmp_path)
    sweep.find(SearchRange(1.0, precision=0.05), repeats=3)
    at_90, at_99 = sweep.result.capacities
    assert at_90.rate.low <= at_90.rate.value == pytest.approx(11.0, rel=0.03)
    assert at_90.rate_per_worker == at_90.rate.divided_by(4)
    assert curve(11.0)(at_99.rate.value) == pytest.approx(0.99, abs=0.005)
    assert read_sweep(tmp_path) == sweep.result
    assert len(server.plans) == len(sweep.result.points) < 40


def test_each_run_has_a_folder_and_prompts_of_its_own_and_the_plans_burstiness(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0))
    server.sweep(tmp_path).find(SearchRange(1.0), repeats=2)
    assert len({plan.seed for plan in server.plans}) == len(server.plans)
    assert len(set(server.folders)) == len(server.folders)
    assert all(folder.parent == tmp_path / "runs" for folder in server.folders)
    assert {msgspec.structs.replace(plan.arrivals, rate=1.0) for plan in server.plans} == {Gamma(1.0, 2.0)}


def test_a_list_of_rates_is_measured_as_it_is(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0))
    sweep = server.sweep(tmp_path)
    sweep.measure([4.0, 8.0, 16.0], repeats=2)
    assert [point.rate for point in sweep.result.points] == [4, 4, 8, 8, 16, 16]
    assert 8 < sweep.result.capacities[0].rate.value < 16


def test_an_invalid_run_is_made_again_and_does_not_count(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0), invalid_runs={2})
    sweep = server.sweep(tmp_path)
    sweep.find(SearchRange(1.0), repeats=1)
    assert [point.valid for point in sweep.points].count(False) == 1
    assert server.plans[1].arrivals == server.plans[2].arrivals
    assert sweep.result.capacities[0].rate.value == pytest.approx(11.0, rel=0.1)


def test_a_generator_that_is_saturated_before_the_server_ends_the_sweep_with_its_reason(tmp_path: Path) -> None:
    server = FakeServer(lambda rate: 1.0, invalid_from=9.0)
    sweep = server.sweep(tmp_path)
    with pytest.raises(SweepEnded, match="the runs are invalid: too late"):
        sweep.find(SearchRange(1.0), repeats=3)
    capacity = sweep.result.capacities[0]
    assert capacity.is_lower_bound
    assert 8.0 <= capacity.rate.value < 9.0
    assert read_sweep(tmp_path) == sweep.result


def test_a_capacity_below_what_can_be_measured_is_found(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0), invalid_from=15.0)
    sweep = server.sweep(tmp_path)
    sweep.find(SearchRange(1.0, precision=0.05), repeats=2)
    capacity = sweep.result.capacities[0]
    assert not capacity.is_lower_bound
    assert capacity.rate.value == pytest.approx(11.0, rel=0.05)
    assert [point.rate for point in sweep.points if not point.valid] == [16.0, 16.0]  # tried twice, and never again


def test_a_generator_that_is_never_fast_enough_ends_the_sweep_soon(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0), invalid_from=0.0)
    sweep = server.sweep(tmp_path)
    with pytest.raises(SweepEnded, match=r"at 0\.5/s the runs are invalid"):
        sweep.find(SearchRange(4.0), repeats=3)
    assert [capacity.rate for capacity in sweep.result.capacities] == [None, None]
    assert len(sweep.points) == 8


def test_a_list_of_rates_ends_at_the_first_that_cannot_be_measured(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0), invalid_from=7.0)
    sweep = server.sweep(tmp_path)
    with pytest.raises(SweepEnded, match="at 8/s the runs are invalid"):
        sweep.measure([4.0, 8.0, 16.0], repeats=2)
    assert sweep.result.capacities[0].rate == Estimate(4.0)


def test_no_run_begins_that_would_end_after_the_budget(tmp_path: Path) -> None:
    server = FakeServer(curve(11.0))
    sweep = server.sweep(tmp_path, budget_s=200.0)
    with pytest.raises(SweepEnded, match="budget of 200 s"):
        sweep.find(SearchRange(1.0), repeats=3)
    assert server.now <= 200.0
    assert len(sweep.points) == 3
    assert sweep.result.capacities[0].rate == Estimate(4.0)
    assert read_sweep(tmp_path) == sweep.result


def test_a_server_that_fails_some_requests_at_any_rate_has_no_capacity_at_99_percent(tmp_path: Path) -> None:
    server = FakeServer(lambda rate: min(0.97, curve(11.0)(rate)))
    sweep = server.sweep(tmp_path)
    sweep.find(SearchRange(4.0), repeats=1)
    assert sweep.result.capacities[0].rate is not None
    assert sweep.result.capacities[1].rate is None
    assert min(plan.arrivals.rate for plan in server.plans) >= 1.0


def test_arrivals_without_a_rate_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="use poisson, gamma or constant"):
        Sweep(msgspec.structs.replace(PLAN, arrivals=Closed(1)), tmp_path, FakeServer(curve(1.0)).run_at, print, 1e9)


def test_the_search_finds_an_edge_wherever_it_lies() -> None:
    for edge in (0.003, 0.9, 1.0, 77.0):
        search = SearchRange(1.0, precision=0.01, least=1e-6)
        found = find_capacity(lambda rate, edge=edge: float(rate <= edge), 0.5, search)  # type: ignore[misc]
        assert found == pytest.approx(edge, rel=0.01)
    assert find_capacity(lambda rate: 0.0, 0.5, SearchRange(1.0)) == 0.0
