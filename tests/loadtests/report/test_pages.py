"""The reports of runs and sweeps: what they say and draw, that they ask nothing of any network, and are small."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.loadtests.report.runs import answer, drawn, facts, miss, plan, write_run
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import SWEEP_FILE, Capacity, SweepPoint, SweepResult, sweep_point
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Summary, read_observations, summarise, summarise_observations
from twostroke.loadtests.report.pages import (
    REPORT_FILE,
    capacity_words,
    page,
    read_summary,
    tone,
    verdicts,
    write_report,
    write_sweep_report,
)
from twostroke.loadtests.report.plots import bin_edges, requests_in_flight, server_means
from twostroke.loadtests.run_folder import Record, RunFolder, Sample, write, write_json

# What makes a browser fetch something.
FETCHING = re.compile(
    r"""\b(?:src|href|action|srcset|poster)\s*=\s*["']?+(?!data:)|url\(|@import|<script|<link|<iframe|<object""",
    re.IGNORECASE,
)
PNG_BEGIN = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with everything in it, and its report."""
    samples = [
        Sample(float(at_s), role, "w", 1.0, 2.0, 30.0, 0.5) for at_s in range(10) for role in ("prefill", "decode")
    ]
    records = [*drawn(100, 10.0), miss(4.0, "failed", "see http://elsewhere.example/x")]
    kinds = [
        msgspec.structs.replace(each, kind=("short", "../../long")[number % 2]) for number, each in enumerate(records)
    ]
    folder = write_run(tmp_path_factory.mktemp("whole") / "run", kinds, samples=samples)
    write_report(folder)
    return folder


def page_of(records: list[Record], run_plan: Plan | None = None, samples: Sequence[Sample] = (), **more: Any) -> str:
    """Return the page without plots."""
    run_plan, run_facts = run_plan or plan(), facts(**more)
    return page(
        run_plan, run_facts, summarise_observations(run_plan, run_facts, read_observations(records), samples), []
    )


def test_a_page_tells_how_many_drafted_tokens_were_accepted_where_any_were_drafted() -> None:
    counts = {3.0: (0.0, 0.0, 0.0), 5.0: (40.0, 30.0, 90.0)}
    samples = [
        Sample(at_s, "decode", "w", 1.0, 0.0, 0.0, 0.5, None, None, *counters) for at_s, counters in counts.items()
    ]
    told = page_of(drawn(20, 10.0), samples=samples)
    assert "<td>Drafted tokens accepted</td><td>75.0%, which are 33.3% of the answers' tokens</td>" in told
    assert "<td>Tokens of an answer in one step</td><td>1.5</td>" in told
    assert "Drafted" not in page_of(drawn(20, 10.0), samples=samples[:1])


def test_a_page_has_everything_inside_and_asks_nothing_of_any_network(whole: RunFolder) -> None:
    text = (whole.path / "report.html").read_text()
    assert FETCHING.findall(text) == []
    assert "default-src 'none'" in text
    assert text.count("data:image/png;base64,") == 6


def test_each_plot_is_a_file_too_whatever_kinds_are_called(whole: RunFolder) -> None:
    plots = sorted(whole.path.glob("*.png"))
    assert [plot.stem for plot in plots] == [
        "attainment-by-slo-scale",
        "latency-cdfs",
        "latency-over-time",
        "load-over-time",
        "server-over-time",
        "stages",
    ]
    assert all(plot.read_bytes().startswith(PNG_BEGIN) for plot in plots)
    assert [path.name for path in whole.path.parent.iterdir()] == ["run"]


def test_a_report_made_again_is_the_same_and_is_what_was_returned(whole: RunFolder) -> None:
    before = {path.name: path.read_bytes() for path in whole.path.iterdir()}
    summary = write_report(whole)
    assert {path.name: path.read_bytes() for path in whole.path.iterdir()} == before
    assert msgspec.json.decode(before["report.json"], type=Summary) == summary


def test_a_valid_run_begins_with_what_was_asked_and_attained() -> None:
    text = page_of([answer(2.0 + number, 0.5 + 0.2 * number) for number in range(8)])
    assert "37.5% (13.7–69.4) of 8 requests met TTFT ≤ 1 s and TPOT ≤ 100 ms, at 1 requests/s." in text
    assert "That is below 90%" in text
    assert '<div class="verdict missed">' in text
    assert "Invalid" not in text


def test_the_verdict_is_judged_by_90_and_99_percent() -> None:
    answers = [answer(2.0 + number / 16, 0.5) for number in range(100)]
    assert '<div class="verdict met">' in page_of(answers)
    assert '<div class="verdict partly">' in page_of([*answers, *[miss(5.0, "refused")] * 5])
    assert '<div class="verdict missed">' in page_of([*answers, *[miss(5.0, "refused")] * 50])


def test_without_an_slo_nothing_is_said_to_have_met_it() -> None:
    text = page_of([answer(3.0, 0.5), miss(4.0, "failed", "broken")], plan(slo=SLO()))
    assert "of 2 requests were answered whole, at 0.25 requests/s. No SLO was asked for." in text
    assert '<div class="verdict unjudged">' in text


def test_an_invalid_run_begins_with_why() -> None:
    text = page_of(drawn(50, 10.0), ended_early=True)
    body = text[text.index("<body>") :]
    assert (
        body.index("Invalid: this run is no measurement")
        < body.index("the run was ended early")
        < body.index("met TTFT")
    )


def test_words_of_servers_and_plans_are_text_and_no_markup() -> None:
    records = [answer(3.0, 0.5), miss(4.0, "failed", "<script>alert(1)</script>")]
    text = page_of(records, plan(name="<b>bold</b>"), server={"version": "<i>0</i>"})
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<b>bold" not in text
    assert "<i>0" not in text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [miss(3.0, "failed", "broken")],
        [answer(3.0, 0.5)],
        [answer(3.0)],
        [miss(3.0, "unfinished"), answer(1.0, 0.2)],
    ],
    ids=["nothing", "all failed", "one token", "no text", "all in the warm-up"],
)
def test_poor_runs_have_a_page_too(tmp_path: Path, records: list[Record]) -> None:
    write_report(write_run(tmp_path, records))
    text = (tmp_path / "report.html").read_text()
    assert text.endswith("</html>")
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text).lower()


def test_a_page_does_not_grow_with_the_run(tmp_path: Path, whole: RunFolder) -> None:
    folder = write_run(tmp_path, drawn(1500, 150.0), plan(seconds=150.0))
    write_report(folder)
    size = (tmp_path / "report.html").stat().st_size
    assert size < 1.3 * (whole.path / "report.html").stat().st_size
    assert size < 1_500_000  # of the 5 MB that a report may have


def test_percentages_never_round_a_miss_away() -> None:
    text = page_of([*(answer(2.0 + number / 256, 0.5) for number in range(1999)), miss(5.0, "refused")])
    assert "99.95%" in text
    assert "100.0%" not in text


def test_text_and_bytes_are_written_and_what_can_t_be_is_named(tmp_path: Path) -> None:
    write(tmp_path / "text", "90 %–99 %")
    assert (tmp_path / "text").read_text(encoding="utf-8") == "90 %–99 %"
    with pytest.raises(LoadTestError, match=r"text/under: Not a directory; name another folder"):
        write(tmp_path / "text" / "under", b"")


def test_a_file_that_is_no_run_s_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadTestError, match=r"file/plan\.json: Not a directory"):
        RunFolder(tmp_path / "file").plan()


def test_broken_samples_are_named(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"at_s": 1}\n')
    with pytest.raises(LoadTestError, match=r"samples\.jsonl: .*role"):
        RunFolder(tmp_path).samples()


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
    samples.append(Sample(2.0, "decode", "a", 1.0, 0.0, 0.0, 0.5))
    at_s, (running, waiting, kv_usage, workers) = server_means(samples, np.array([0.0, 1.5, 3.0]))
    assert at_s.tolist() == [1.0, 2.0]
    assert (running.tolist(), waiting.tolist(), kv_usage.tolist()) == (
        [4.0, 1.0],
        [6.0, 0.0],
        pytest.approx([0.4, 0.5]),
    )
    assert workers.tolist() == [2.0, 1.0]


def sweep(folder: Path, rates: tuple[float, ...] = (10.0, 20.0, 20.0, 40.0)) -> SweepResult:
    points: list[SweepPoint] = []
    for number, rate in enumerate(rates):
        name = f"runs/{number}"
        made = drawn(int(rate * 10), 10.0, number, slowness=rate / 20)
        write_run(folder / name, made, run_facts=facts(ended_early=rate == 40))
        points.append(sweep_point(rate, name, read_summary(folder / name)))
    capacities = (Capacity(0.9, Estimate(14.2, 13.0, 15.5), Estimate(7.1, 6.5, 7.75)), Capacity(0.99, None))
    result = SweepResult("s", "http://127.0.0.1:1", tuple(points), capacities, num_workers=2)
    write_json(folder / SWEEP_FILE, result)
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
