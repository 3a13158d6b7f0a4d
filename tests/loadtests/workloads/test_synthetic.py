"""Synthetic requests against the parameters of the traces that they stand for, and lengths brought into a context."""

import random
from collections import Counter
from itertools import islice, takewhile
from statistics import mean, median, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loadtests.workloads.test_sessions import hit_rate
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.workloads.synthetic import (
    SHAPES,
    Quantiles,
    normal_pair,
    scale_to,
    shape_times,
    shape_turns,
)

WHOLE = 200_000  # a context that everything fits into

# The traces' own means and medians, and the share of tokens that an unlimited prefix cache would have.
KNOWN = [
    ("azure-conv", 1155, 1020, 211, 0.0),
    ("azure-code", 2048, 1469, 28, 0.0),
    ("mooncake-conversation", 12035, 6909, 343, 0.37),
    ("mooncake-synthetic", 15325, 11587, 149, 0.64),
    ("servegen", 920, 620, 156, 0.0),
]


@pytest.mark.parametrize(("name", "mean_input", "median_input", "mean_output", "hits"), KNOWN)
def test_lengths_and_shared_prefixes_are_the_traces(
    name: str, mean_input: float, median_input: float, mean_output: float, hits: float
) -> None:
    turns = list(islice(shape_turns(SHAPES[name], WHOLE, seed=1), 3000))
    inputs = [sum(piece.tokens for piece in turn.prompt) for turn in turns]
    assert mean(inputs) == pytest.approx(mean_input, rel=0.15)
    assert median(inputs) == pytest.approx(median_input, rel=0.1)
    assert mean(turn.output_tokens for turn in turns) == pytest.approx(mean_output, rel=0.25)
    assert hit_rate(turn.prompt for turn in turns) == pytest.approx(hits, abs=0.03)


def test_shared_prefixes_stay_shared_in_a_small_context() -> None:
    turns = list(islice(shape_turns(SHAPES["mooncake-conversation"], 4096, seed=1), 3000))
    assert hit_rate(turn.prompt for turn in turns) == pytest.approx(0.37, abs=0.03)


def dispersion(times: list[float], window_s: float) -> float:
    """Variance of the counts in windows, by their mean: 1 for Poisson arrivals."""
    counts = Counter(int(at // window_s) for at in times)
    every = [counts[index] for index in range(int(times[-1] // window_s))]
    return pvariance(every) / mean(every)


@pytest.mark.parametrize(
    ("name", "rate", "second", "ten_seconds", "minute"),
    [
        ("azure-conv", 5.53, 1.39, 3.86, 16.1),
        ("azure-code", 2.567, 13.2, 71.6, 164.0),
        ("mooncake-synthetic", 3.907, 1.09, 1.18, 1.19),
    ],
)
def test_arrivals_are_as_bursty_as_the_traces(
    name: str, rate: float, second: float, ten_seconds: float, minute: float
) -> None:
    times = list(takewhile(lambda at: at < 40_000, shape_times(SHAPES[name], seed=1)))
    assert len(times) / 40_000 == pytest.approx(rate, rel=0.1)
    assert dispersion(times, 1.0) == pytest.approx(second, rel=0.15)
    assert dispersion(times, 10.0) == pytest.approx(ten_seconds, rel=0.2)
    assert dispersion(times, 60.0) == pytest.approx(minute, rel=0.25)


def test_a_table_gives_its_own_quantiles_and_lengths_in_between() -> None:
    table = Quantiles(((0.0, 10), (0.5, 100), (1.0, 400)))
    assert [table.at(share) for share in (0.0, 0.5, 1.0)] == [10, 100, 400]
    assert table.at(0.75) == pytest.approx(200)  # as many times 100 as 400 is of it
    assert 10 < table.at(0.1) < table.at(0.2) < 100


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
