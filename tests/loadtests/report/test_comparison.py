"""A comparison says which of two servers is better, and when that is not known."""

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loadtests.report.runs import answer, drawn, facts, plan, write_run
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import SWEEP_FILE, Capacity, SweepResult, sweep_point
from twostroke.loadtests.plan import SLO
from twostroke.loadtests.report import words
from twostroke.loadtests.report.comparison import (
    Compared,
    Ratio,
    RunComparison,
    compare_rounds,
    compared,
    differences,
    interval_verdict,
    over_rounds,
)
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import read_observations, summarise
from twostroke.loadtests.report.pages import read_summary, write_comparison
from twostroke.loadtests.report.plots import latency_cdfs
from twostroke.loadtests.run_folder import write_json


@pytest.mark.parametrize(
    ("value", "higher_is_better", "verdict"),
    [
        (Estimate(3.0, 2.5, 3.5), True, "better"),
        (Estimate(3.0, 2.5, 3.5), False, "worse"),
        (Estimate(0.5, 0.4, 0.6), False, "better"),
        (Estimate(2.2, 1.9, 2.5), True, "no difference shown"),  # one's value is in the other's interval
        (Estimate(9.0), True, "not judged"),  # without an interval nothing is shown
        (None, True, "not judged"),
    ],
)
def test_a_difference_is_claimed_only_where_intervals_lie_apart(
    value: Estimate | None, higher_is_better: bool, verdict: str
) -> None:
    assert interval_verdict(value, Estimate(2.0, 1.5, 2.4), higher_is_better) == verdict


def test_over_rounds_the_median_counts_and_the_interval_holds_all_rounds() -> None:
    rounds = [Estimate(3.0, 2.0, 4.0), Estimate(9.0, 8.0, 10.0), Estimate(4.0, 3.0, 5.0)]
    assert over_rounds(rounds) == Estimate(4.0, 2.0, 10.0)
    assert over_rounds([*rounds, Estimate(4.0)]) == Estimate(4.0)  # one without an interval: nothing is known
    assert over_rounds([]) is None


def test_ratios_are_taken_round_by_round() -> None:
    slow_minute = [Estimate(10.0, 9.0, 11.0), Estimate(20.0, 19.0, 21.0), Estimate(30.0, 29.0, 31.0)]
    twice = [
        Estimate(value.value * factor, 1.0, 99.0) for value, factor in zip(slow_minute, (2.0, 2.5, 2.2), strict=True)
    ]
    found = compared("x", "rate", [slow_minute, twice])
    assert found.ratios == (Ratio(2.2, 2.0, 2.5),)
    assert found.verdicts == ("no difference shown",)


def test_a_ratio_to_nothing_is_none() -> None:
    assert compared("x", "rate", [[Estimate(0.0)], [Estimate(1.0)]]).ratios == (None,)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_what_is_better_one_way_is_worse_the_other_way(first: list[float], second: list[float]) -> None:
    one, other = (Estimate(*(sorted(values)[index] for index in (1, 0, 2))) for values in (first, second))
    there, back = interval_verdict(one, other, True), interval_verdict(other, one, True)
    assert {there, back} in ({"better", "worse"}, {"no difference shown"})


def test_the_faster_server_is_found_better_by_its_times(tmp_path: Path) -> None:
    slow, fast = (
        summarise(write_run(tmp_path / str(slowness), drawn(500, 10.0, slowness=slowness))) for slowness in (1.0, 0.5)
    )
    verdicts = {each.name: each.verdicts for each in compare_rounds([[slow], [fast]])}
    assert verdicts["TTFT P50"] == verdicts["ITL P99"] == verdicts["attainment"] == ("better",)
    assert verdicts["output (tokens/s)"] == ("no difference shown",)


def test_rounds_against_one_server_under_two_names_show_no_difference(tmp_path: Path) -> None:
    runs = [summarise(write_run(tmp_path / str(seed), drawn(500, 10.0, seed))) for seed in range(4)]
    found = compare_rounds([runs[:2], runs[2:]])
    assert {each.verdicts for each in found} == {("no difference shown",)}


def test_kinds_are_compared_where_there_are_several(tmp_path: Path) -> None:
    mixed = [answer(2.0 + number / 100, 0.5, kind=("long", "short")[number % 2]) for number in range(200)]
    one = summarise(write_run(tmp_path, mixed))
    names = [each.name for each in compare_rounds([[one], [one]])]
    assert "long: attainment" in names
    assert "short: TTFT P99" in names


def test_servers_that_were_asked_otherwise_are_named() -> None:
    others = [plan(name="x", seed=7), plan(seconds=20.0, slo=SLO(2.0)), plan(service_tier="gold", request_limit_s=9.0)]
    assert differences(dict(zip("abcd", [plan(), *others], strict=True))) == [
        "c was not asked the same as a: slo, seconds differ",
        "d was not asked the same as a: service_tier, request_limit_s differ",
    ]


def test_the_sentence_tells_what_is_shown_and_what_is_not() -> None:
    def figure(name: str, verdict: str) -> Compared:
        return Compared(name, "rate", True, (), (), (verdict,))  # type: ignore[arg-type]

    shown = (
        figure("goodput (requests/s)", "better"),
        figure("ITL P99", "worse"),
        figure("attainment", "no difference shown"),
    )
    assert words.comparison_sentences(RunComparison(("a", "b"), shown)) == [
        "b is better than a in goodput (requests/s); worse than a in ITL P99. No difference shown in attainment."
    ]
    assert words.comparison_sentences(RunComparison(("a", "b"), shown[2:])) == ["b against a: no difference shown."]


def test_a_comparison_of_runs_is_a_page_with_both_names_and_the_warnings(tmp_path: Path) -> None:
    for name, seed in itertools.product("ab", range(2)):
        write_run(tmp_path / f"{name}{seed}", drawn(40, 10.0, seed), run_facts=facts(ended_early=name == "b"))
    entries = {name: [tmp_path / f"{name}{seed}" for seed in range(2)] for name in "ab"}
    found = write_comparison(tmp_path / "out", entries)
    assert found.invalid_runs == 2
    assert found.warnings[0] == "b: b0 is invalid: the run was ended early: 10 s of 10 s were sent"
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "Read with care" in page
    assert "b against a: no difference shown." in page
    assert msgspec.json.decode((tmp_path / "out" / "comparison.json").read_bytes(), type=RunComparison) == found
    assert (tmp_path / "out" / "latency-cdfs.png").exists()


def test_a_kind_does_not_choose_where_files_are_written() -> None:
    seen = read_observations([answer(3.0, 0.5, 0.7)])
    plot = latency_cdfs({"a": (seen, seen.is_status("ok"))}, SLO(), "../../Up there")
    assert (plot.name, plot.title) == ("latency-cdfs--up-there", "How times are spread: ../../Up there")


def test_sweeps_are_compared_by_capacity_and_at_the_rates_that_both_have(tmp_path: Path) -> None:
    for name, rates, capacity in (("a", (20.0, 40.0), 30.0), ("b", (20.0, 60.0), 50.0)):
        points = []
        for rate in rates:
            folder = f"runs/{rate:g}"
            write_run(tmp_path / name / folder, drawn(int(rate * 10), 10.0), run_facts=facts(ended_early=rate == 60))
            points.append(sweep_point(rate, folder, read_summary(tmp_path / name / folder)))
        limit = Capacity(0.9, Estimate(capacity, capacity - 5, capacity + 5))
        write_json(tmp_path / name / SWEEP_FILE, SweepResult(name, "http://127.0.0.1:1", tuple(points), (limit,)))
    found = write_comparison(tmp_path / "out", {name: [tmp_path / name] for name in "ab"})
    (capacity_at_90,) = found.figures
    assert (capacity_at_90.name, capacity_at_90.verdicts) == ("capacity at 90% (requests/s)", ("better",))
    assert [each.rate for each in found.at_rates] == [20.0]
    assert found.warnings[-1].startswith("b at 60 requests/s is invalid, and left out")
    assert "<svg" not in (tmp_path / "out" / "comparison.html").read_text()


def test_a_run_and_a_sweep_do_not_go_together(tmp_path: Path) -> None:
    write_run(tmp_path / "run", drawn(5, 10.0))
    (tmp_path / "sweep").mkdir()
    write_json(tmp_path / "sweep" / SWEEP_FILE, SweepResult("s", "", (), ()))
    with pytest.raises(LoadTestError, match="folders of one sort"):
        write_comparison(tmp_path / "out", {"a": [tmp_path / "run"], "b": [tmp_path / "sweep"]})
