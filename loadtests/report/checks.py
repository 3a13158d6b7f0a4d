"""Runs and comparisons as CI systems judge them: what is required, whether it holds, in Markdown and as JUnit's XML."""

import argparse
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from twostroke.loadtests import unwritable
from twostroke.loadtests.report import words
from twostroke.loadtests.report.comparison import RunComparison
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Spread, Summary
from twostroke.loadtests.run_folder import write

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_WHOLE = ("attainment", "ttft_attainment", "tpot_attainment", "goodput", "goodput_per_worker", "output_rate")
_COUNTS = ("scheduled", "ok", "refused", "failed", "unfinished")
_SPREADS = ("ttft", "tpot", "itl", "e2e")
_POINTS = ("mean", "p50", "p90", "p95", "p99", "max")
FIGURES = (*_WHOLE, "offered_rate", *_COUNTS, *(f"{name}_{point}_s" for name in _SPREADS for point in _POINTS))
"""Figures that may be required of a run, by their names in `report.json`. Times are seconds, shares 0 to 1."""

_REQUIREMENT = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*")


class Requirement(NamedTuple):
    """A bound of one of FIGURES."""

    figure: str
    comparison: str  # one of _COMPARE
    bound: float

    def __str__(self) -> str:
        return f"{self.figure}{self.comparison}{self.bound:g}"


class Check(NamedTuple):
    """A requirement, what was found, and whether that is enough."""

    name: str
    found: str
    holds: bool


def parse_requirement(text: str) -> Requirement:
    """An argument's type: FIGURE<=NUMBER and its like."""
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: write, for example, 'attainment>=0.9' or 'ttft_p99_s<=2'")
    if match[1] not in FIGURES:
        raise argparse.ArgumentTypeError(f"{text}: there is no {match[1]}; there are {', '.join(FIGURES)}")
    return Requirement(match[1], match[2], float(match[3]))


def checks_of_run(summary: Summary, requirements: Sequence[Requirement]) -> list[Check]:
    """Return the checks that the run is valid and that each requirement holds. A figure that is unknown is not
    enough."""
    checks = [Check("the run is valid", "; ".join(summary.validity.reasons) or "yes", summary.validity.valid)]
    for required in requirements:
        value = figure_value(summary, required.figure)
        found = "not known" if value is None else f"{value:.4g}"
        holds = value is not None and _COMPARE[required.comparison](value, required.bound)
        checks.append(Check(str(required), found, holds))
    return checks


def figure_value(summary: Summary, figure: str) -> float | None:
    """One of FIGURES; None where the run does not tell."""
    if figure in _COUNTS:
        return float(getattr(summary.counts, figure))
    found: Estimate | float | None
    if figure in (*_WHOLE, "offered_rate"):
        found = getattr(summary, figure)
    else:
        name, point, _ = figure.split("_")
        spread: Spread | None = getattr(summary, name)
        found = None if spread is None else getattr(spread, point)
    return found.value if isinstance(found, Estimate) else found


def checks_of_comparison(comparison: RunComparison, *, fail_on_worse: bool) -> list[Check]:
    """Return the checks that all runs are valid and that no figure is worse, if worse figures should fail."""
    num_invalid = comparison.invalid_runs
    checks = [Check("all runs are valid", f"{num_invalid} are not" if num_invalid else "yes", not num_invalid)]
    for index, name in enumerate(comparison.names[1:]):
        for figure in comparison.figures:
            verdict = figure.verdicts[index]
            first_value, value = (words.in_unit(figure.unit, figure.values[at]) for at in (0, index + 1))
            found = f"{verdict}: {value} against {first_value}"
            checks.append(Check(f"{name}: {figure.name}", found, not (fail_on_worse and verdict == "worse")))
    return checks


def append_markdown(path: Path, title: str, sentences: Sequence[str], checks: Sequence[Check]) -> None:
    """Append Markdown to a CI system's summary of a job, to which each step adds. Raises LoadTestError."""
    rows = [f"| {'✅' if holds else '❌'} | {_cell(name)} | {_cell(found)} |" for name, found, holds in checks]
    parts = [
        f"## {_cell(title)}",
        *map(_cell, sentences),
        "\n".join(["| | required | found |", "|---|---|---|", *rows]),
    ]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n\n".join(parts) + "\n\n")
    except OSError as error:
        raise unwritable(path, error) from error


def write_junit(path: Path, suite: str, checks: Sequence[Check]) -> None:
    """Write the checks as JUnit XML. Raises LoadTestError."""
    num_failed = sum(not check.holds for check in checks)
    root = ElementTree.Element(
        "testsuite", name=_xml(suite), tests=str(len(checks)), failures=str(num_failed), errors="0"
    )
    for check in checks:
        case = ElementTree.SubElement(root, "testcase", classname="twostroke.loadtest", name=_xml(check.name))
        if check.holds:
            ElementTree.SubElement(case, "system-out").text = _xml(check.found)
        else:
            ElementTree.SubElement(case, "failure", message=_xml(f"{check.name}: found {check.found}"))
    ElementTree.indent(root)
    write(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _cell(text: str) -> str:
    """Servers' and people's own words, which may have what Markdown reads."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def _xml(text: str) -> str:
    """XML has no place for other control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)
