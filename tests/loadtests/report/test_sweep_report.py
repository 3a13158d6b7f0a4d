"""The page of a sweep."""

from pathlib import Path

import msgspec
import pytest

from tests.loadtests.report.runs import drawn, facts, write_run
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import summarise
from twostroke.loadtests.report.run_report import REPORT_FILE
from twostroke.loadtests.report.sweep import Capacity, SweepPoint, SweepResult, point_of, read_sweep, write_sweep
from twostroke.loadtests.report.sweep_report import capacity_words, read_summary, tone, verdicts, write_sweep_report


def sweep(folder: Path, rates: tuple[float, ...] = (10.0, 20.0, 20.0, 40.0)) -> SweepResult:
    points: list[SweepPoint] = []
    for number, rate in enumerate(rates):
        name = f"runs/{number}"
        made = drawn(int(rate * 10), 10.0, number, slowness=rate / 20)
        write_run(folder / name, made, run_facts=facts(ended_early=rate == 40))
        points.append(point_of(rate, name, read_summary(folder / name)))
    capacities = (Capacity(0.9, Estimate(14.2, 13.0, 15.5), Estimate(7.1, 6.5, 7.75)), Capacity(0.99, None))
    result = SweepResult("s", "http://127.0.0.1:1", tuple(points), capacities, num_workers=2)
    write_sweep(folder, result)
    return result


def test_a_sweeps_page_says_its_capacities_and_lists_its_runs(tmp_path: Path) -> None:
    result = sweep(tmp_path)
    assert write_sweep_report(tmp_path) == result
    page = (tmp_path / "sweep.html").read_text()
    assert (
        "90% of the requests meet the SLO up to 14.2 (13.0–15.5) requests/s, 7.10 (6.50–7.75) for each worker." in page
    )
    assert "At no rate that was measured did 99% of the requests meet the SLO." in page
    assert "runs/3 is no measurement:" in page
    assert '<a href="runs/0/report.html">0</a>' in page
    assert "constant (rate" not in page  # each run has its own
    assert "<td>constant</td>" in page
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == [
        "attainment-by-rate",
        "goodput-by-rate",
        "speed-against-throughput",
        "times-by-rate",
    ]


def test_a_run_is_reckoned_anew_where_its_report_is_missing_or_of_another_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path, drawn(10, 10.0))
    for broken in (b"", b'{"name": "of another version"}'):
        (tmp_path / REPORT_FILE).write_bytes(broken)
        assert read_summary(tmp_path) == summarise(folder)


def test_a_sweep_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = sweep(tmp_path, (10.0,))
    assert read_sweep(tmp_path) == result


def test_a_folder_that_is_no_sweeps_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"sweep\.json: not there"):
        read_sweep(tmp_path)


def test_a_rate_that_even_the_highest_run_reached_is_a_lower_bound() -> None:
    text = capacity_words(Capacity(0.9, Estimate(32.0), is_lower_bound=True))
    assert text == (
        "90% of the requests meet the SLO up to at least 32.0 requests/s. "
        "This is a lower bound: a search ended without a valid run below 90%."
    )


def test_a_sweep_that_the_budget_ended_below_an_invalid_rate_says_both_and_is_not_green() -> None:
    points = (
        SweepPoint(5.66, "runs/3", 1.0, 1.0, 1.0, 5.6, valid=True),
        SweepPoint(8.0, "runs/1", 0.2, 0.2, 1.0, 0.2, valid=False),
    )
    bound = Capacity(0.9, Estimate(5.66), is_lower_bound=True)
    result = SweepResult("s", "http://127.0.0.1:1", points, (bound,), ended_early="the budget of 100 s is spent")
    assert verdicts(result)[1:] == [
        "At 8/s no run was a valid one, so whether the server can take that is not known.",
        "The sweep ended early: the budget of 100 s is spent.",
    ]
    assert tone(result) == "partly"
    found = msgspec.structs.replace(bound, is_lower_bound=False)
    assert tone(msgspec.structs.replace(result, capacities=(found,), ended_early=None)) == ""


def test_a_sweep_without_a_valid_run_says_so_instead_of_blaming_the_server() -> None:
    point = SweepPoint(1.0, "runs/1", 0.2, 0.2, 1.0, 0.2, valid=False)
    nothing = (Capacity(0.9, None), Capacity(0.99, None))
    invalid = SweepResult("s", "http://127.0.0.1:1", (point,), nothing, ended_early="at 1/s the runs are invalid: late")
    assert verdicts(invalid) == [
        "No run was a valid one, so the capacity is not known.",
        "The sweep ended early: at 1/s the runs are invalid: late.",
    ]
    repeated = msgspec.structs.replace(invalid, points=(point, msgspec.structs.replace(point, valid=True)))
    assert (invalid.valid, repeated.valid) == (False, True)
    assert verdicts(repeated)[0] == "At no rate that was measured did 90% of the requests meet the SLO."
