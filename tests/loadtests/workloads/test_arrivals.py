"""Moments of arrival: their mean, their burstiness, and that they are the same each time."""

from itertools import islice, pairwise
from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import Arrivals, Closed, Constant, Gamma, Poisson, Ramp, RateSteps, Replay
from twostroke.loadtests.workloads.arrivals import arrival_times

OPEN = [
    Poisson(5.0),
    Gamma(5.0, 3.0),
    Gamma(5.0, 0.3),
    Constant(5.0),
    Ramp(0.0, 10.0),
    Ramp(10.0, 0.0),
    RateSteps(((0.0, 2.0), (50.0, 8.0))),
]


@pytest.mark.parametrize("arrivals", OPEN, ids=str)
def test_times_rise_within_the_run_and_are_the_same_each_time(arrivals: Arrivals) -> None:
    times = list(arrival_times(arrivals, 100.0, seed=3))
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 100.0
    assert times == list(arrival_times(arrivals, 100.0, seed=3))
    if not isinstance(arrivals, Constant):
        assert times != list(arrival_times(arrivals, 100.0, seed=4))


@pytest.mark.parametrize("arrivals", OPEN, ids=str)
def test_the_mean_number_is_the_rate_times_the_seconds(arrivals: Arrivals) -> None:
    counts = [len(list(arrival_times(arrivals, 100.0, seed))) for seed in range(100)]
    spread = 3.0 if arrivals == Gamma(5.0, 3.0) else 1.0
    # 500 are expected, give or take sqrt(500) times the spread, and a tenth of it over 100 runs; four of these.
    assert mean(counts) == pytest.approx(500, abs=4 * 2.24 * spread)


def test_a_very_bursty_run_has_no_burst_too_many_at_its_beginning() -> None:
    counts = [len(list(arrival_times(Gamma(2.6, 13.0), 200.0, seed))) for seed in range(2000)]
    # Without a first gap from the middle of a long one there would be (13^2 - 1) / 2 = 84 more than 520.
    assert mean(counts) == pytest.approx(520, abs=30)


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_gaps_vary_as_much_as_asked(cv: float) -> None:
    times = list(arrival_times(Gamma(10.0, cv), 3000.0, seed=1))
    gaps = [after - before for before, after in pairwise(times)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.05)


def test_the_rate_of_a_ramp_grows_evenly() -> None:
    times = list(arrival_times(Ramp(0.0, 100.0), 100.0, seed=1))
    # A quarter of all comes in the first half.
    assert sum(at < 50 for at in times) / len(times) == pytest.approx(0.25, abs=0.03)


def test_each_step_has_its_rate_and_nothing_comes_while_it_is_0() -> None:
    times = list(arrival_times(RateSteps(((0.0, 10.0), (100.0, 0.0), (200.0, 40.0), (900.0, 1.0))), 300.0, seed=1))
    assert sum(at < 100 for at in times) == pytest.approx(1000, abs=130)
    assert sum(100 <= at < 200 for at in times) == 0
    assert sum(at >= 200 for at in times) == pytest.approx(4000, abs=260)


def test_a_constant_rate_is_counted_exactly() -> None:
    assert list(arrival_times(Constant(2.0), 2.0, seed=0)) == [0.0, 0.5, 1.0, 1.5]


def test_users_of_a_closed_loop_are_never_at_an_end() -> None:
    assert list(islice(arrival_times(Closed(3), 1.0, seed=0), 1000)) == [0.0] * 1000


@settings(deadline=None)
@given(
    begins=st.lists(st.floats(0.1, 90), min_size=1, max_size=5, unique=True),
    rates=st.lists(st.floats(0, 20), min_size=6, max_size=6),
    seed=st.integers(0, 1000),
)
def test_no_arrival_lies_in_a_step_without_a_rate(begins: list[float], rates: list[float], seed: int) -> None:
    steps = tuple(zip([0.0, *sorted(begins)], rates, strict=False))
    for at in arrival_times(RateSteps(steps), 100.0, seed):
        assert [rate for begin, rate in steps if begin <= at][-1] > 0


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        (Poisson(0.0), "poisson arrivals have rate 0: give a number above 0"),
        (Gamma(1.0, -1.0), "gamma arrivals have cv -1: give a number above 0"),
        (Constant(float("nan")), "constant arrivals have rate nan"),
        (Ramp(0.0, 0.0), "not both 0"),
        (Ramp(-1.0, 2.0), "from 0 on"),
        (RateSteps(()), "the first step is to begin at 0"),
        (RateSteps(((1.0, 1.0),)), "the first step is to begin at 0"),
        (RateSteps(((0.0, 1.0), (0.0, 2.0))), "later than the one before"),
        (RateSteps(((0.0, -1.0),)), "from 0 on"),
        (RateSteps(((0.0, float("inf")),)), "from 0 on"),
        (Poisson(float("inf")), "rate inf"),
        (RateSteps(((0.0, 1.0), (float("nan"), 1.0))), "later than"),
        (Closed(0), "0 users who think 0 s: give at least 1"),
        (Closed(1, float("nan")), "who think nan s"),
        (Replay(), "give arrivals a rate"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_at_once(arrivals: Arrivals, message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        arrival_times(arrivals, 10.0, seed=0)
