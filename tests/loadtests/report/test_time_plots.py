"""What the plots over time draw."""

import pytest

from tests.loadtests.report.runs import answer, miss
from twostroke.loadtests.report.observations import read_observations
from twostroke.loadtests.report.run_plots import bin_edges, by_moment, requests_in_flight
from twostroke.loadtests.run_folder import Sample


@pytest.mark.parametrize(
    ("seconds", "most", "width_s", "count"),
    [(60.0, 60, 1.0, 60), (60.5, 60, 2.0, 31), (600.0, 60, 10.0, 60), (8.0, 5, 2.0, 4)],
)
def test_steps_of_time_have_round_widths_and_cover_the_run(
    seconds: float, most: int, width_s: float, count: int
) -> None:
    edges = bin_edges(seconds, most)
    assert (edges[0], edges[1], len(edges) - 1) == (0.0, width_s, count)
    assert edges[-1] >= seconds


def test_a_request_is_in_flight_from_its_send_to_its_end() -> None:
    seen = read_observations([answer(1.0, 2.0, lag_s=0.5), miss(2.0, "refused")])
    at_s, in_flight = requests_in_flight(seen)
    assert list(zip(at_s.tolist(), in_flight.tolist(), strict=True)) == [(1.5, 1.0), (2.0, 2.0), (2.1, 1.0), (3.0, 0.0)]


def test_workers_of_a_role_are_counted_and_summed_and_their_kv_use_is_averaged() -> None:
    samples = [Sample(1.0, "decode", worker, 2.0, 3.0, 0.0, usage) for worker, usage in (("a", 0.2), ("b", 0.6))]
    at_s, (running, waiting, kv_usage, workers) = by_moment([*samples, Sample(2.0, "decode", "a", 1.0, 0.0, 0.0, 0.5)])
    assert at_s.tolist() == [1.0, 2.0]
    assert (running.tolist(), waiting.tolist(), kv_usage.tolist()) == (
        [4.0, 1.0],
        [6.0, 0.0],
        pytest.approx([0.4, 0.5]),
    )
    assert workers.tolist() == [2.0, 1.0]
