"""Distributions of lengths, and how they are brought into a context."""

import random
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.workloads.synthetic import LogNormal, Quantiles, normal_pair, scale_to


def test_a_table_gives_its_own_quantiles_and_lengths_in_between() -> None:
    table = Quantiles(((0.0, 10), (0.5, 100), (1.0, 400)))
    assert [table.at(share) for share in (0.0, 0.5, 1.0)] == [10, 100, 400]
    assert table.at(0.75) == pytest.approx(200)  # as many times 100 as 400 is of it
    assert 10 < table.at(0.1) < table.at(0.2) < 100


def test_a_log_normal_length_has_its_median_and_mean() -> None:
    draw = random.Random(1)
    lengths = [LogNormal(100, 0.8).at(draw.random()) for _ in range(20_000)]
    assert median(lengths) == pytest.approx(100, rel=0.03)
    assert mean(lengths) == pytest.approx(100 * 2.71828 ** (0.8**2 / 2), rel=0.03)


@pytest.mark.parametrize("spearman", [-0.52, 0.0, 0.7])
def test_pairs_are_uniform_and_correlated_as_asked(spearman: float) -> None:
    draw = random.Random(2)
    pairs = [normal_pair(draw.random(), draw.random(), spearman) for _ in range(20_000)]
    first, second = zip(*pairs, strict=True)
    assert mean(second) == pytest.approx(0.5, abs=0.01)
    assert sum(share < 0.1 for share in second) / len(second) == pytest.approx(0.1, abs=0.01)
    # Of uniform shares the rank correlation is the common one: 12 times the covariance.
    covariance = mean(a * b for a, b in pairs) - mean(first) * mean(second)
    assert 12 * covariance == pytest.approx(spearman, abs=0.03)


def test_lengths_that_fit_are_not_touched() -> None:
    assert scale_to(8192, 4000).request(3000, 500) == (3000, 500)


def test_all_lengths_shrink_by_one_factor_and_the_longest_on_their_own() -> None:
    scale = scale_to(1000, 10_000)
    assert scale.request(5000, 1000) == (500, 100)
    assert scale.request(20_000, 5000) == (800, 200)


@settings(deadline=None)
@given(st.integers(2, 5000), st.floats(1, 1e6), st.floats(0.1, 1e6), st.floats(0.1, 1e6))
def test_every_request_fits_and_has_a_token_of_each(
    context: int, long: float, input_tokens: float, output_tokens: float
) -> None:
    prompt, answer = scale_to(context, long).request(input_tokens, output_tokens)
    assert prompt >= 1
    assert answer >= 1
    assert prompt + answer <= context


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(LoadTestError, match="max_context is 1"):
        scale_to(1, 100)
