"""The search for a capacity, against curves of attainment that are known."""

import math
import random
from collections.abc import Callable
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.loadtests.capacity import (
    Crossing,
    Measured,
    Search,
    bracket,
    crossing,
    geometric_mean,
    interval,
    next_rate,
)


def curve(capacity: float, steepness: float = 8.0) -> Callable[[float], float]:
    """Attainment by rate: all well below the capacity, 90% at it."""
    return lambda rate: 1 / (1 + (rate / capacity) ** steepness / 9)


def searched(attainment: Callable[[float], float], target: float, search: Search) -> list[Measured]:
    measured: list[Measured] = []
    while (rate := next_rate(measured, target, search)) is not None:
        measured.append(Measured(rate, attainment(rate)))
        assert len(measured) < 60
    return measured


@settings(deadline=None)
@given(st.floats(0.05, 5000), st.floats(0.01, 8000), st.floats(1.5, 4))
def test_the_capacity_is_found_wherever_it_lies_and_wherever_the_search_begins(
    capacity: float, start: float, factor: float
) -> None:
    measured = searched(curve(capacity), 0.9, Search(start, factor, precision=0.05))
    found = crossing(measured, 0.9)
    assert found is not None
    assert found.rate == pytest.approx(capacity, rel=0.05)
    assert not found.is_lower_bound


def test_a_search_doubles_then_bisects() -> None:
    measured = searched(curve(11.0), 0.9, Search(1.0, precision=0.2))
    assert [round(each.rate, 2) for each in measured] == [1, 2, 4, 8, 16, 11.31, 9.51]


def test_what_is_known_of_another_target_is_not_measured_again() -> None:
    measured = searched(curve(11.0), 0.9, Search(1.0))
    before = len(measured)
    while (rate := next_rate(measured, 0.99, Search(1.0))) is not None:
        measured.append(Measured(rate, curve(11.0)(rate)))
    assert len(measured) - before <= 3
    assert curve(11.0)(crossing(measured, 0.99).rate) == pytest.approx(0.99, abs=0.005)


def test_a_search_that_knows_where_to_look_goes_there_at_once() -> None:
    missed = [Measured(10.0, 0.8), Measured(11.0, 0.7)]
    assert next_rate(missed, 0.99, Search(start=5.0, factor=1.25)) == 5.0
    met = [Measured(10.0, 1.0)]
    assert next_rate(met, 0.99, Search(start=20.0, factor=1.25)) == 20.0


def test_a_server_that_never_misses_has_a_lower_bound_alone() -> None:
    measured = searched(lambda rate: 1.0, 0.9, Search(1.0, most=10.0))
    assert [each.rate for each in measured] == [1, 2, 4, 8, 10]
    assert crossing(measured, 0.9) == Crossing(10.0, is_lower_bound=True)


def test_a_server_that_always_misses_has_no_capacity() -> None:
    measured = searched(lambda rate: 0.5, 0.9, Search(1.0, least=0.3))
    assert [each.rate for each in measured] == [1, 0.5, 0.3]
    assert crossing(measured, 0.9) is None


def test_a_rate_met_by_luck_above_one_that_was_missed_does_not_count() -> None:
    measured = [Measured(4.0, 1.0), Measured(8.0, 0.8), Measured(16.0, 0.95)]
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
            found = crossing(searched(noisy, 0.9, Search(5.0, precision=0.05)), 0.9)
            assert found is not None
            rates.append(found.rate)
        between = interval(rates)
        assert between is not None
        held += between[0] <= capacity <= between[1]
    # 95% is promised of unbiased searches; a run that happens to miss pulls a search down a little.
    assert held / 300 >= 0.88


def test_the_interval_is_students() -> None:
    between = interval([math.exp(1), math.exp(2), math.exp(3)])
    assert between is not None
    half = 4.303 / math.sqrt(3)
    assert [math.log(each) for each in between] == pytest.approx([2 - half, 2 + half], rel=1e-3)
    assert geometric_mean([1.0, 4.0]) == 2.0
    assert interval([1.0]) is None
    # With many degrees of freedom the normal distribution's quantile is near.
    many = interval([math.exp(value) for value in range(11)])
    assert many is not None
    standard_error = math.sqrt(11) / math.sqrt(11)  # of 0 ... 10
    assert math.log(many[1]) - 5 == pytest.approx(NormalDist().inv_cdf(0.975) * standard_error, rel=0.15)
