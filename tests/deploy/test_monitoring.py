"""deploy/monitoring/: scrapes, alerts and the dashboard are right in themselves, and about series that there are.

That each panel shows something when a real Prometheus scrapes a real server: python -m tests.deploy.monitoring
"""

import re
import time
from collections import Counter
from typing import Any

import yaml
from prometheus_client.core import Metric

from tests.deploy.monitoring import (
    PROMETHEUS,
    RULES,
    RULES_TEST,
    dashboard,
    panel_queries,
    panels,
    rule_queries,
    rules,
)
from tests.deploy.programs import ROOT, needed, run
from twostroke.router.observe.metrics import RouterMetrics
from twostroke.router.observe.scaling import planned_families
from twostroke.router.observe.scrape import (
    RouterMetricsSample,
    Scrape,
    dropped_lines_family,
    hangs_family,
    other_versions_family,
    own_collections_family,
)
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOConfig

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def families() -> list[Metric]:
    """All that a scrape may bring."""
    slo = SLOConfig()
    admission = Admission(config=slo, stats=lambda peer: None, clock=time.monotonic)
    metrics = RouterMetrics("tiny", slo.classes, admission, time.monotonic, is_ready=bool, keys_age_s=float)
    of_router = (
        *metrics.registry.collect(),
        *planned_families({}, None),
        other_versions_family({}),
        hangs_family({}),
        dropped_lines_family(0),
        own_collections_family(),
    )
    return list(Scrape([RouterMetricsSample("r", of_router, (), frozenset())]).collect())


def promtool(*arguments: str) -> None:
    done = run(needed("promtool"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_is_about_series_that_there_are():
    there = {family.name + suffix for family in families() for suffix in SUFFIXES[family.type]}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    queries = [*panel_queries(), *rule_queries()]
    assert len(queries) > 100
    for query in queries:
        assert query.series() <= there, query.place
        assert query.recorded() <= recorded, query.place


def test_the_dashboard_leaves_no_series_out():
    shown = set().union(*(query.series() for query in panel_queries()))
    of_families = {
        family.name for family in families() for suffix in SUFFIXES[family.type] if family.name + suffix in shown
    }
    assert {family.name for family in families()} - of_families == set()


def test_panels_have_ids_and_places_of_their_own_and_ask_the_chosen_application():
    ids = Counter(panel["id"] for panel in dashboard()["panels"])
    assert set(ids.values()) == {1}
    taken: Counter[tuple[int, int]] = Counter()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        taken.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert set(taken.values()) == {1}
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            names = re.findall(r"twostroke:\w+(.)", target["expr"])
            assert names.count("{") == len(names) == target["expr"].count('job="$job"')


def test_every_alert_says_what_it_means_and_how_bad_it_is():
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_every_alert_has_its_paragraph_of_the_runbooks_and_no_other_has_one():
    titles = re.findall(
        r"^## (Twostroke\w+)\n\n\S", (ROOT / "docs/runbooks.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    alerts = [rule for rule in rules() if "alert" in rule]
    assert titles == [rule["alert"] for rule in alerts]
    for rule in alerts:
        assert rule["annotations"]["runbook_url"].endswith(f"/runbooks.html#{rule['alert'].lower()}")


def test_every_alert_is_seen_to_fire():
    tested = RULES_TEST.read_text(encoding="utf-8")
    firing = set(re.findall(r'alertname="(\w+)"', tested))
    asked = yaml.safe_load(tested)["tests"]
    firing |= {one["alertname"] for each in asked for one in each.get("alert_rule_test", ()) if one["exp_alerts"]}
    assert {rule["alert"] for rule in rules() if "alert" in rule} == firing


def test_every_alert_is_seen_to_be_silent_with_its_series_there():
    """An alert that is silent because its series is missing would prove nothing."""
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}

    def series_of(rule: dict[str, Any]) -> set[str]:
        text = rule["expr"] + "".join(expr for name, expr in recorded.items() if name in rule["expr"])
        return set(re.findall(r"\btwostroke:\w+|\bup\b(?={)", text))

    silent = set()
    for each in yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]:
        there = {one["series"].partition("{")[0] for one in each["input_series"]}
        asked = [one["expr"] for one in each.get("promql_expr_test", ()) if not one["exp_samples"]]
        none = {one["alertname"] for one in each.get("alert_rule_test", ()) if not one["exp_alerts"]}
        silent |= {
            rule["alert"]
            for rule in rules()
            if "alert" in rule and ("ALERTS" in asked or rule["alert"] in none) and series_of(rule) <= there
        }
    assert {rule["alert"] for rule in rules() if "alert" in rule} == silent


def test_promtool_takes_the_configuration_and_the_rules():
    promtool("check", "config", "--syntax-only", str(PROMETHEUS))  # the key's file is on the head alone
    promtool("check", "rules", str(RULES))


def test_alerts_fire_when_they_should_and_only_then():
    promtool("test", "rules", str(RULES_TEST))
