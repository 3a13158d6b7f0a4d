"""The page of a run: what it says, that it asks nothing of any network, and that it is small."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.loadtests.report.runs import answer, drawn, facts, miss, plan, write_run
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.records import Record
from twostroke.loadtests.report.figures import Summary, summary_of
from twostroke.loadtests.report.observations import read_observations
from twostroke.loadtests.report.run_report import page, write_report
from twostroke.loadtests.run_folder import RunFolder, Sample

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


def page_of(records: list[Record], run_plan: Plan | None = None, **more: Any) -> str:
    """Without plots."""
    run_plan, run_facts = run_plan or plan(), facts(**more)
    return page(run_plan, run_facts, summary_of(run_plan, run_facts, read_observations(records), ()), [])


def test_a_page_has_everything_inside_and_asks_nothing_of_any_network(whole: RunFolder) -> None:
    text = (whole.path / "report.html").read_text()
    assert FETCHING.findall(text) == []
    assert "default-src 'none'" in text
    assert text.count("data:image/png;base64,") == 7


def test_each_plot_is_a_file_too_whatever_kinds_are_called(whole: RunFolder) -> None:
    plots = sorted(whole.path.glob("*.png"))
    assert [plot.stem for plot in plots] == [
        "attainment-by-slo-scale",
        "latency-cdfs",
        "latency-over-time",
        "load-over-time",
        "server-over-time",
        "stages",
        "tail-tbt",
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
    folder = write_run(tmp_path, drawn(4000, 400.0), plan(seconds=400.0))
    write_report(folder)
    size = (tmp_path / "report.html").stat().st_size
    assert size < 1.3 * (whole.path / "report.html").stat().st_size
    assert size < 1_500_000  # of the 5 MB that a report may have


def test_percentages_never_round_a_miss_away() -> None:
    text = page_of([*(answer(2.0 + number / 256, 0.5) for number in range(1999)), miss(5.0, "refused")])
    assert "99.95%" in text
    assert "100.0%" not in text
