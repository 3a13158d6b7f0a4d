"""What deploy/'s files for Prometheus and Grafana ask for."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.deploy.programs import ROOT

PROMETHEUS = ROOT / "deploy/prometheus.yml"
RULES = ROOT / "deploy/alerts.yml"
RULES_TEST = ROOT / "tests/deploy/alerts_test.yml"
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"

_SERIES = re.compile(r"\btwostroke:[a-zA-Z0-9_]+")
_RECORDED = re.compile(r"\b\w+:twostroke_\w+:\w+")


@dataclass(frozen=True)
class Query:
    """An expression of PromQL, and where it stands."""

    place: str
    text: str

    def series(self) -> set[str]:
        """Names of our series, those of histograms with their suffixes."""
        return set(_SERIES.findall(self.text))

    def recorded(self) -> set[str]:
        """Names of what rules record."""
        return set(_RECORDED.findall(self.text))


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def panels() -> list[dict[str, Any]]:
    """Without the rows' titles."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"])


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def rule_queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])
