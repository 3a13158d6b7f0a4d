"""The reports of runs, sweeps and comparisons: a file of JSON, plots, and one HTML file that has all of it inside it.

A page asks nothing of any network. All is made from what runs have left, and can be made again.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import SWEEP_FILE, Capacity, SweepResult
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report import estimates, words
from twostroke.loadtests.report.chart import Plot, in_our_style
from twostroke.loadtests.report.comparison import AtRate, RunComparison, compare_rounds, compare_sweeps, differences
from twostroke.loadtests.report.figures import (
    Summary,
    judged_rows,
    mean_stages,
    pooled,
    read_observations,
    scale_points,
    summarise,
    summarise_observations,
)
from twostroke.loadtests.report.plots import (
    RatedRun,
    attainment_by_scale,
    latency_cdfs,
    run_plots,
    stage_bars,
    sweep_plots,
    time_plots,
)
from twostroke.loadtests.run_folder import RunFacts, RunFolder, make_folder, read_json, write, write_json


def render(template: str, **what: Any) -> str:
    """The page of `templates/TEMPLATE.html.jinja`. All text from servers and plans is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("duration", "number", "percent", "duration_estimate", "number_estimate", "percent_estimate"):
        environment.filters[name] = getattr(estimates, name)
    environment.filters["data_uri"] = _data_uri
    return environment.get_template(f"{template}.html.jinja").render(**what)


def write_plots(folder: Path, plots: list[Plot]) -> None:
    """One PNG each, beside the page."""
    for plot in plots:
        write(folder / f"{plot.name}.png", plot.png)


def _data_uri(plot: Plot) -> str:
    return "data:image/png;base64," + base64.b64encode(plot.png).decode("ascii")


REPORT_FILE = "report.json"
PAGE_FILE = "report.html"


@in_our_style
def write_report(folder: RunFolder) -> Summary:
    """Make the report, again if there is one. Raises LoadTestError where a file is missing or wrong."""
    plan, facts, samples = folder.plan(), folder.facts(), folder.samples()
    observed = read_observations(folder.records())
    summary = summarise_observations(plan, facts, observed, samples)
    complete = judged_rows(plan, facts, observed) & observed.is_status("ok")
    plots = run_plots(plan, summary, observed, complete) + time_plots(plan, observed, samples)
    write_plots(folder.path, plots)
    write_json(folder.path / REPORT_FILE, summary)
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
        asked=words.plan_rows(plan),
        workers=words.workers_words(summary.num_workers),
        utilization=words.utilization_words(summary.mfu, summary.mbu),
        facts=facts,
        plan_json=_pretty(plan),
        facts_json=_pretty(facts),
    )


def _pretty(value: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


SWEEP_PAGE_FILE = "sweep.html"


@in_our_style
def write_sweep_report(folder: Path) -> SweepResult:
    """Make it, again if there is one. Raises LoadTestError where a file is missing or wrong."""
    sweep = read_json(folder / SWEEP_FILE, SweepResult)
    runs = rated_runs(folder, sweep)
    found = next((each for each in sweep.capacities if each.attainment == 0.9), None)
    plots = sweep_plots({sweep.name: runs}, found.rate if found else None)
    write_plots(folder, plots)
    plan = RunFolder(folder / sweep.points[0].folder).plan() if sweep.points else None
    page = render(
        "sweep",
        sweep=sweep,
        verdicts=verdicts(sweep),
        tone=tone(sweep),
        asked=words.sweep_rows(plan) if plan else [],
        runs=[(point, run.summary) for point, run in zip(sweep.points, runs, strict=True)],
        plots=plots,
    )
    write(folder / SWEEP_PAGE_FILE, page)
    return sweep


def rated_runs(folder: Path, sweep: SweepResult) -> list[RatedRun]:
    """Return the runs in the order of the sweep's points."""
    return [RatedRun(point.rate, read_summary(folder / point.folder)) for point in sweep.points]


def read_summary(run: Path) -> Summary:
    """A run's report.json; reckoned anew where there is none, or one of another version."""
    try:
        return read_json(run / REPORT_FILE, Summary)
    except LoadTestError:
        return summarise(RunFolder(run))


def verdicts(sweep: SweepResult) -> list[str]:
    """The capacities, or why there are none, and what is not known: above which rate, and since when."""
    if not sweep.valid:
        sentences = ["No run was a valid one, so the capacity is not known."]
    else:
        sentences = [capacity_words(each) for each in sweep.capacities]
        measured = {point.rate for point in sweep.points if point.valid}
        invalid = sorted({point.rate for point in sweep.points} - measured)
        if invalid:
            rates = " and ".join(f"{estimates.number(rate)}/s" for rate in invalid)
            sentences.append(f"At {rates} no run was a valid one, so whether the server can take that is not known.")
    return sentences if sweep.ended_early is None else [*sentences, f"The sweep ended early: {sweep.ended_early}."]


def tone(sweep: SweepResult) -> str:
    """The colour of the verdict: only what was measured to its end, and holds, is good."""
    if not sweep.valid or all(each.rate is None for each in sweep.capacities):
        return "invalid"
    whole = sweep.ended_early is None and all(each.rate and not each.is_lower_bound for each in sweep.capacities)
    return "" if whole else "partly"


def capacity_words(capacity: Capacity) -> str:
    level = f"{capacity.attainment:.0%}"
    if capacity.rate is None:
        return f"At no rate that was measured did {level} of the requests meet the SLO."
    at_least = "at least " if capacity.is_lower_bound else ""
    text = f"{level} of the requests meet the SLO up to {at_least}{estimates.number_estimate(capacity.rate)} requests/s"
    if capacity.rate_per_worker is not None:
        text += f", {estimates.number_estimate(capacity.rate_per_worker)} for each worker"
    if capacity.is_lower_bound:
        return f"{text}. This is a lower bound: a search ended without a valid run below {level}."
    return text + "."


COMPARISON_FILE = "comparison.json"
COMPARISON_PAGE_FILE = "comparison.html"
SAME_RATE = 0.01  # rates of two sweeps that differ by less count as one


@in_our_style
def write_comparison(folder: Path, entries: Mapping[str, Sequence[Path]]) -> RunComparison:
    """Compare the runs of each server, one a round, or its one sweep, with those of the first.

    Raises LoadTestError where a folder is none of a load test, or runs and sweeps are mixed.
    """
    are_sweeps = {(each / SWEEP_FILE).exists() for folders in entries.values() for each in folders}
    if len(are_sweeps) > 1:
        raise LoadTestError("a run can't be compared with a sweep: name folders of one sort")
    comparison, plots, asked = _of_sweeps(entries) if are_sweeps == {True} else _of_runs(entries)
    make_folder(folder)
    write_plots(folder, plots)
    write_json(folder / COMPARISON_FILE, comparison)
    page = render(
        "comparison",
        comparison=comparison,
        say=words.in_unit,
        sentences=words.comparison_sentences(comparison),
        asked=asked,
        plots=plots,
    )
    write(folder / COMPARISON_PAGE_FILE, page)
    return comparison


Compared = tuple[RunComparison, list[Plot], list[tuple[str, str]]]
"""Comparison, its plots, and what was asked."""


def _of_runs(entries: Mapping[str, Sequence[Path]]) -> Compared:
    runs = {name: [RunFolder(folder) for folder in folders] for name, folders in entries.items()}
    summaries = {name: [read_summary(run.path) for run in of_server] for name, of_server in runs.items()}
    plans = {name: of_server[0].plan() for name, of_server in runs.items()}
    invalid = [
        f"{name}: {run.path.name} is invalid: {'; '.join(summary.validity.reasons)}"
        for name, of_server in runs.items()
        for run, summary in zip(of_server, summaries[name], strict=True)
        if not summary.validity.valid
    ]
    comparison = RunComparison(
        names=tuple(entries),
        figures=compare_rounds(list(summaries.values())),
        invalid_runs=len(invalid),
        warnings=(*differences(plans), *invalid),
    )
    plan = next(iter(plans.values()))
    observed = {name: pooled(of_server) for name, of_server in runs.items()}
    complete = {name: each.is_status("ok") for name, each in observed.items()}
    plots = []
    if plan.slo != SLO() and all(len(each) for each in observed.values()):
        scales = {name: scale_points(plan.slo, each, np.ones(len(each), bool)) for name, each in observed.items()}
        plots.append(attainment_by_scale(scales, plan.slo))
    if all(rows.any() for rows in complete.values()):
        for kind in sorted(
            set.intersection(*(set(each.kind[complete[name]].tolist()) for name, each in observed.items()))
        ):
            of_kind = {name: (each, complete[name] & (each.kind == kind)) for name, each in observed.items()}
            plots.append(latency_cdfs(of_kind, plan.slo, kind))
        plots.append(stage_bars({name: mean_stages(each, complete[name]) for name, each in observed.items()}))
    return comparison, plots, words.plan_rows(plan)


def _of_sweeps(entries: Mapping[str, Sequence[Path]]) -> Compared:
    sweeps: dict[str, SweepResult] = {}
    curves: dict[str, list[RatedRun]] = {}
    plans: dict[str, Plan] = {}
    for name, (folder, *others) in entries.items():
        if others:
            raise LoadTestError(f"{name}: one sweep for each name, which may repeat its rates itself")
        sweep = read_json(folder / SWEEP_FILE, SweepResult)
        if not sweep.points:
            raise LoadTestError(f"{folder}: a sweep without a run")
        plan = RunFolder(folder / sweep.points[0].folder).plan()
        first_plan = next(iter(plans.values()), plan)
        plans[name] = msgspec.structs.replace(plan, arrivals=first_plan.arrivals)  # they differ by their rates
        sweeps[name], curves[name] = sweep, rated_runs(folder, sweep)
    invalid = [
        f"{name} at {run.rate:g} requests/s is invalid, and left out: {'; '.join(run.summary.validity.reasons)}"
        for name, runs in curves.items()
        for run in runs
        if not run.summary.validity.valid
    ]
    comparison = RunComparison(
        names=tuple(entries),
        figures=compare_sweeps(list(sweeps.values())),
        at_rates=_at_rates(list(curves.values())),
        invalid_runs=len(invalid),
        warnings=(*differences(plans), *invalid),
    )
    return comparison, sweep_plots(curves), words.sweep_rows(next(iter(plans.values())))


def _at_rates(curves: Sequence[Sequence[RatedRun]]) -> tuple[AtRate, ...]:
    """Return the comparison at each rate of the first sweep at which all have a valid run."""
    found: list[AtRate] = []
    for rate in sorted({run.rate for run in curves[0]}):
        runs = [
            [run.summary for run in curve if abs(run.rate - rate) <= SAME_RATE * rate and run.summary.validity.valid]
            for curve in curves
        ]
        if all(runs):
            found.append(AtRate(rate, compare_rounds(runs)))
    return tuple(found)
