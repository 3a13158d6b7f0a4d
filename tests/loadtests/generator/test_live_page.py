"""The page beside Locust's own, in an app like Locust's."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from flask import Flask

from tests.cluster.command_line import answering
from twostroke.loadtests.generator import locust_head as live_page
from twostroke.loadtests.generator.live import Second
from twostroke.loadtests.generator.locust_head import Head
from twostroke.loadtests.plan import SLO, Fixed, Plan, Poisson
from twostroke.loadtests.run_folder import RunFolder


def head_of(folder: Path) -> Head:
    with answering({"/v1/models": b'{"data": [{"id": "m"}]}'}) as url:
        plan = Plan(url, "m", 4096, Poisson(1.0), Fixed(5, 2), SLO(ttft_s=0.5, tpot_s=0.1), 60.0, name="mine")
        return Head(plan, RunFolder(folder), lambda *_: None, lambda _: None)


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
