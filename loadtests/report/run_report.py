"""The report of one run: report.json, report.html and the plots, all made from what the run has left."""

from typing import Any

import msgspec

from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report import words
from twostroke.loadtests.report.chart import Plot
from twostroke.loadtests.report.figures import Summary, judged_rows, summary_of
from twostroke.loadtests.report.html import render, write_plots
from twostroke.loadtests.report.observations import read_observations
from twostroke.loadtests.report.run_plots import run_plots, time_plots
from twostroke.loadtests.run_folder import RunFacts, RunFolder, write

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"


def write_report(folder: RunFolder) -> Summary:
    """Make the report, again if there is one. Raises LoadTestError where a file is missing or wrong."""
    plan, facts, samples = folder.plan(), folder.facts(), folder.samples()
    seen = read_observations(folder.records())
    summary = summary_of(plan, facts, seen, samples)
    complete = judged_rows(plan, facts, seen) & seen.is_status("ok")
    plots = run_plots(plan, summary, seen, complete) + time_plots(plan, seen, samples)
    write_plots(folder.path, plots)
    write(folder.path / REPORT_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=2))
    write(folder.path / PAGE_FILE, page(plan, facts, summary, plots))
    return summary


def page(plan: Plan, facts: RunFacts, summary: Summary, plots: list[Plot]) -> str:
    """The whole HTML file."""
    return render(
        "run",
        summary=summary,
        verdict=words.verdict(plan, summary),
        level=words.level(summary),
        plots=plots,
        rates=_rates(summary),
        setting=_setting(plan, facts, summary),
        plan_json=_pretty(plan),
        facts_json=_pretty(facts),
    )


def _rates(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("TTFT met", words.percent_estimate(summary.ttft_attainment)),
        ("TPOT met", words.percent_estimate(summary.tpot_attainment)),
        ("Goodput", f"{words.number_estimate(summary.goodput)} requests/s" if summary.goodput else "no SLO"),
        ("Output", f"{words.number_estimate(summary.output_rate)} tokens/s"),
        ("Prompts", f"{words.number(summary.input_rate)} tokens/s"),
        ("Prompt tokens cached", words.percent(summary.cached_share)),
        ("What a user sees", f"{words.number(summary.user_rate)} tokens/s (1 / median TPOT)"),
    ]


def _setting(plan: Plan, facts: RunFacts, summary: Summary) -> list[tuple[str, str]]:
    generators = ", ".join(
        f"{each.num_sent:,} sent with {each.cpu_seconds / each.wall_seconds:.0%} of a core"
        for each in facts.generators
        if each.wall_seconds > 0
    )
    return [
        *words.plan_rows(plan),
        ("Server's workers", words.workers_words(summary.num_workers)),
        ("Server's version", str(facts.server.get("version", "not told"))),
        ("Generator processes", generators or "not told"),
        ("Generator's machine", _in_words(facts.machine)),
        ("Versions", _in_words(facts.versions)),
    ]


def _in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items()) or "not told"


def _pretty(value: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
