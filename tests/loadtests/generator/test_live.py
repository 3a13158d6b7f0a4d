"""Figures while a run goes on, counted by second and added up over processes; the page and the line that show them."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from flask import Flask

from tests.cluster.command_line import answering
from twostroke.loadtests.generator import locust_head as live_page
from twostroke.loadtests.generator.live import (
    MIN_S,
    WINDOW_S,
    Histogram,
    LiveFigures,
    RunProgress,
    Second,
    count,
    met,
    percentile,
    progress_line,
    series,
)
from twostroke.loadtests.generator.locust_head import LocustHead
from twostroke.loadtests.plan import SLO, Fixed, Plan, Poisson
from twostroke.loadtests.run_folder import Record, RunFolder

GOOD = Record(0, 0, 1.0, 1.01, 3.0, "ok", output_tokens=5, token_s=(1.5, 2.0, 2.5))
REFUSED = Record(1, 0, 1.0, 1.0, 1.2, "refused")


def of(values: list[float]) -> Histogram:
    histogram: Histogram = {}
    for value in values:
        count(histogram, value)
    return histogram


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_a_percentile_is_right_within_one_percent(percent: int) -> None:
    values = [0.001 * 1.01**number for number in range(1000)]
    exact = sorted(values)[10 * percent - 1]
    together = percentile([of(values[::2]), of(values[1::2])], percent)
    assert together == pytest.approx(exact, rel=0.0101)


def test_of_nothing_there_is_no_percentile_and_what_is_early_counts_as_the_least() -> None:
    assert percentile([], 50) is None
    assert percentile([of([-0.5, 0.0])], 50) == MIN_S


@pytest.mark.parametrize(
    ("record", "slo", "verdict"),
    [
        (GOOD, SLO(), True),
        (GOOD, SLO(ttft_s=0.5, tpot_s=0.25), True),
        (GOOD, SLO(ttft_s=0.49), False),
        (GOOD, SLO(tpot_s=0.24), False),
        (REFUSED, SLO(), False),
        (msgspec.structs.replace(GOOD, status="unfinished"), SLO(), False),
        (msgspec.structs.replace(GOOD, output_tokens=None), SLO(tpot_s=0.5), True),  # its events are counted
        (msgspec.structs.replace(GOOD, output_tokens=None), SLO(tpot_s=0.49), False),
        (msgspec.structs.replace(GOOD, output_tokens=1, token_s=(1.5,)), SLO(tpot_s=0.001), True),
    ],
)
def test_both_times_must_hold_and_a_single_token_has_no_time_between(record: Record, slo: SLO, verdict: bool) -> None:
    assert met(record, slo) is verdict


def test_without_an_slo_nothing_is_judged_while_it_runs() -> None:
    live = LiveFigures()
    live.record(GOOD, SLO(), warm_up_s=0.0)
    assert (live.seconds[3].ok, live.seconds[3].judged, live.seconds[3].met) == (1, 0, 0)


def test_a_request_counts_when_it_is_over_and_the_warm_up_is_not_judged() -> None:
    live = LiveFigures()
    live.sent(1.01)
    live.record(GOOD, SLO(ttft_s=1.0), warm_up_s=0.5)
    live.record(REFUSED, SLO(ttft_s=1.0), warm_up_s=1.5)
    assert live.seconds.keys() == {1, 3}
    assert (live.seconds[1].sent, live.seconds[1].refused, live.seconds[1].judged) == (1, 1, 0)
    assert (live.seconds[3].ok, live.seconds[3].judged, live.seconds[3].met) == (1, 1, 1)
    assert sum(live.seconds[3].itl.values()) == 2


def test_processes_tell_each_whole_second_once_and_their_sum_is_the_run() -> None:
    head, sender = LiveFigures(), LiveFigures()
    for _ in range(2):
        sender.record(GOOD, SLO(ttft_s=1.0), 0.0)
        sender.record(REFUSED, SLO(ttft_s=1.0), 0.0)
        assert sender.take(1.9) == {}
        head.add(sender.take(3.5))
        head.add(sender.take(float("inf")))
        assert sender.seconds == {}
    total = Second()
    for second in head.seconds.values():
        total.add(second)
    assert (total.ok, total.refused, total.met, total.output_tokens) == (2, 2, 2, 10)
    assert sum(total.ttft.values()) == 2


def test_curves_are_of_a_moving_window_and_go_on_from_any_second() -> None:
    live = LiveFigures()
    live.seconds = {
        0: Second(sent=4, ok=1, judged=1, met=1, ttft=of([0.1])),
        1: Second(sent=1, ok=1, refused=1, judged=2, met=0, ttft=of([0.4, 0.4])),
        WINDOW_S: Second(ok=2, judged=2, met=2),
    }
    points = series(live, 0, WINDOW_S + 1)
    assert [point["at_s"] for point in points] == list(range(1, WINDOW_S + 2))
    assert [point["under_way"][0] for point in points] == [3, 2, 2, 2, 2, 0]
    assert points[0]["attainment"] == [1.0]
    assert points[1]["attainment"] == [pytest.approx(1 / 3)]
    assert points[WINDOW_S]["attainment"] == [0.5]  # the first second is out of the window
    assert points[1]["ttft"][0] == pytest.approx(0.4, rel=0.0101)
    assert series(live, 2, WINDOW_S + 1) == points[2:]


def head_of(folder: Path) -> LocustHead:
    with answering({"/v1/models": b'{"data": [{"id": "m"}]}'}) as url:
        plan = Plan(url, "m", 4096, Poisson(1.0), Fixed(5, 2), SLO(ttft_s=0.5, tpot_s=0.1), 60.0, name="mine")
        return LocustHead(plan, RunFolder(folder), lambda *_: None, lambda _: None)


def test_the_page_gets_what_is_new_and_locust_s_page_a_link(tmp_path: Path) -> None:
    app = Flask(__name__)
    app.add_url_rule("/", endpoint=live_page.LOCUST_PAGE, view_func=lambda: "<body>Locust</body>")
    app.add_url_rule("/stats", endpoint="locust.stats", view_func=lambda: "<body>else</body>")
    head = head_of(tmp_path)
    live_page.add_to(SimpleNamespace(app=app, auth_required_if_enabled=lambda view: view), head)
    browser = app.test_client()
    assert '<a href="/twostroke"' in browser.get("/").text
    assert browser.get("/stats").text == "<body>else</body>"
    page = browser.get("/twostroke").text
    assert "src=" not in page  # nothing comes from elsewhere
    assert "http" not in page
    head.live.add({0: Second(sent=2), 1: Second(ok=2)})
    figures = json.loads(browser.get("/twostroke/figures/0").data)
    assert figures["points"] == []  # no process has told of a whole second
    assert (figures["name"], figures["progress"]["is_over"]) == ("mine", False)
    assert figures["lag_limit_s"] == pytest.approx(0.025)


BEGINNING = RunProgress(0.5, 2, 2, 0, 0, 0, None, None, None, is_over=False, error=None)


def test_what_is_not_known_yet_and_what_did_not_happen_is_left_out() -> None:
    assert progress_line(BEGINNING) == "2 sent, 2 under way, 0 ok"


def test_a_line_has_all_that_tells_whether_to_go_on() -> None:
    progress = RunProgress(30.0, 50, 4, 40, 5, 1, 0.875, 0.2512, 0.00312, is_over=False, error=None)
    assert progress_line(progress) == (
        "50 sent, 4 under way, 40 ok, 5 refused, 1 failed, SLO met by 87.5%, TTFT P50 0.251 s, lag P99 3.12 ms"
    )
