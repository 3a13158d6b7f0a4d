"""Confidence intervals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.loadtests.report.estimates import NUM_SLICES, Estimate, Slices, percentile, share


def bounds(estimate: Estimate) -> tuple[float, float, float]:
    """Low, value, high."""
    return estimate.low, estimate.value, estimate.high


@pytest.mark.parametrize(("hits", "low", "high"), [(8, 0.4902, 0.9433), (10, 0.7225, 1.0)])
def test_a_share_has_wilsons_interval_as_textbooks_have_it(hits: int, low: float, high: float) -> None:
    assert bounds(share(hits, 10)) == pytest.approx((low, hits / 10, high), abs=1e-4)


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 5000))
def test_a_shares_interval_holds_it_and_stays_within_0_and_1(hits: int, total: int) -> None:
    low, value, high = bounds(share(min(hits, total), total))
    assert 0 <= low <= value <= high <= 1


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
    assert [percentile(values, percent) for percent in (20, 21, 50, 99, 100)] == [1.0, 2.0, 3.0, 5.0, 5.0]
    assert percentile(np.zeros(0), 50) is None


def test_a_percentile_has_no_interval_where_too_few_values_could_show_it() -> None:
    slices = Slices(0.0, 1000.0)
    at_s = np.linspace(0, 999, 1000)
    values = np.arange(1000.0)
    for count, has_interval in ((367, False), (368, True)):
        found = slices.percentile(values[:count], slices.of(at_s[:count]), 99)
        assert (found.low is not None) == has_interval


def test_a_percentile_has_no_interval_where_all_values_come_from_one_moment() -> None:
    slices = Slices(0.0, 100.0)
    assert slices.percentile(np.arange(50.0), slices.of(np.zeros(50)), 50) == Estimate(24.0)


def test_a_percentiles_interval_holds_the_true_one_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(5)
    hits = 0
    slices = Slices(0.0, 30.0)
    for _ in range(60):
        values, at_s = draw.exponential(size=400), draw.uniform(0, 30, 400)
        low, _, high = bounds(slices.percentile(values, slices.of(at_s), 50))
        hits += low <= np.log(2) <= high
    assert 51 <= hits <= 60


def test_values_that_are_late_together_have_a_wider_interval_than_values_on_their_own() -> None:
    draw = np.random.default_rng(1)
    at_s = np.sort(draw.uniform(0, 300, 3000))
    bursts = np.where((at_s // 10) % 5 == 0, 2.0, 1.0) + draw.normal(0, 0.1, 3000)
    slices = Slices(0.0, 300.0)
    low, _, high = bounds(slices.percentile(bursts, slices.of(at_s), 75))
    low_apart, _, high_apart = bounds(slices.percentile(draw.permutation(bursts), slices.of(at_s), 75))
    assert high - low > 2 * (high_apart - low_apart)


def test_of_very_many_values_the_interval_is_as_of_all() -> None:
    draw = np.random.default_rng(2)
    at_s, values = draw.uniform(0, 30, 20_000), draw.exponential(size=20_000)
    slices = Slices(0.0, 30.0)
    low, value, high = bounds(slices.percentile(values, slices.of(at_s), 99))
    assert value == percentile(values, 99)
    assert low < value < high
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.99 * 0.01 / 20_000) / 0.01, rel=0.35)


def test_a_rate_counts_events_over_the_whole_window() -> None:
    slices = Slices(10.0, 40.0)
    found = slices.rate(slices.of(np.repeat(np.arange(10.0, 40.0), 3)))
    assert found == Estimate(3.0, 3.0, 3.0)  # equally many in each slice: all resamples are alike


def test_moments_at_the_edges_belong_to_the_first_and_last_slice() -> None:
    assert Slices(2.0, 5.0).of(np.array([2.0, 4.999999, 5.0])).tolist() == [0, NUM_SLICES - 1, NUM_SLICES - 1]


@pytest.mark.parametrize(
    ("other", "overlaps"),
    [(Estimate(2.5, 2.0, 3.0), True), (Estimate(3.5, 3.1, 4.0), False), (Estimate(2.0), None)],
)
def test_estimates_overlap_where_their_intervals_do(other: Estimate, overlaps: bool | None) -> None:
    one = Estimate(2.0, 1.0, 3.0)
    assert one.overlaps(other) is overlaps
    assert other.overlaps(one) is overlaps
