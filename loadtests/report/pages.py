"""The reports of runs, sweeps and comparisons: a file of JSON, plots, and one HTML file that has all of it inside it.

A page asks nothing of any network. All is made from what runs have left, and can be made again.
"""

import base64
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np

from twostroke.loadtests.errors import LoadTestError, unwritable
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report import words
from twostroke.loadtests.report.chart import Plot
from twostroke.loadtests.report.comparison import AtRate, Comparison, compare_rounds, compare_sweeps, differences
from twostroke.loadtests.report.figures import ScalePoint, StagePart, Summary, judged_rows, summarise, summary_of
from twostroke.loadtests.report.observations import read_observations
from twostroke.loadtests.report.run_plots import (
    Times,
    attainment_by_scale,
    latency_cdfs,
    run_plots,
    stage_bars,
    tail_plot,
    time_plots,
)
from twostroke.loadtests.report.sweep import SWEEP_FILE, Capacity, SweepResult, read_sweep
from twostroke.loadtests.report.sweep_plots import RatedRun, sweep_plots
from twostroke.loadtests.run_folder import RunFacts, RunFolder, write


def render(template: str, **what: Any) -> str:
    """The page of `templates/TEMPLATE.html.jinja`. All text from servers and plans is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=words.duration,
        number=words.number,
        percent=words.percent,
        duration_estimate=words.duration_estimate,
        number_estimate=words.number_estimate,
        percent_estimate=words.percent_estimate,
        data_uri=_data_uri,
    )
    return environment.get_template(f"{template}.html.jinja").render(**what)


def write_plots(folder: Path, plots: list[Plot]) -> None:
    """One PNG each, beside the page."""
    for plot in plots:
        write(folder / f"{plot.name}.png", plot.png)


def _data_uri(plot: Plot) -> str:
    return "data:image/png;base64," + base64.b64encode(plot.png).decode("ascii")


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


SWEEP_PAGE_FILE = "sweep.html"


def write_sweep_report(folder: Path) -> SweepResult:
    """Make it, again if there is one. Raises LoadTestError where a file is missing or wrong."""
    sweep = read_sweep(folder)
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
    """In the order of the sweep's points."""
    return [RatedRun(point.rate, read_summary(folder / point.folder)) for point in sweep.points]


def read_summary(run: Path) -> Summary:
    """A run's report.json; reckoned anew where there is none, or one of another version."""
    try:
        return msgspec.json.decode((run / REPORT_FILE).read_bytes(), type=Summary)
    except (FileNotFoundError, msgspec.DecodeError):
        return summarise(RunFolder(run))
    except OSError as error:
        raise LoadTestError(f"{run / REPORT_FILE}: {error.strerror}") from error


def verdicts(sweep: SweepResult) -> list[str]:
    """The capacities, or why there are none, and what is not known: above which rate, and since when."""
    if not sweep.valid:
        said = ["No run was a valid one, so the capacity is not known."]
    else:
        said = [capacity_words(each) for each in sweep.capacities]
        measured = {point.rate for point in sweep.points if point.valid}
        invalid = sorted({point.rate for point in sweep.points} - measured)
        if invalid:
            rates = " and ".join(f"{words.number(rate)}/s" for rate in invalid)
            said.append(f"At {rates} no run was a valid one, so whether the server can take that is not known.")
    return said if sweep.ended_early is None else [*said, f"The sweep ended early: {sweep.ended_early}."]


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
    text = f"{level} of the requests meet the SLO up to {at_least}{words.number_estimate(capacity.rate)} requests/s"
    if capacity.rate_per_worker is not None:
        text += f", {words.number_estimate(capacity.rate_per_worker)} for each worker"
    if capacity.is_lower_bound:
        return f"{text}. This is a lower bound: a search ended without a valid run below {level}."
    return text + "."


COMPARISON_FILE = "comparison.json"
COMPARISON_PAGE_FILE = "comparison.html"
SAME_RATE = 0.01  # rates of two sweeps that differ by less count as one


@dataclass(frozen=True)
class Entry:
    """One server: its runs, one a round, or its one sweep."""

    name: str
    folders: tuple[Path, ...]


def write_comparison(folder: Path, entries: Sequence[Entry]) -> Comparison:
    """Compare all of `entries` with the first. Raises LoadTestError where a folder is none of a load test, or runs
    and sweeps are mixed."""
    are_sweeps = {(each / SWEEP_FILE).exists() for entry in entries for each in entry.folders}
    if len(are_sweeps) > 1:
        raise LoadTestError("a run can't be compared with a sweep: name folders of one sort")
    comparison, plots, plan = _of_sweeps(entries) if are_sweeps == {True} else _of_runs(entries)
    asked = words.sweep_rows(plan) if are_sweeps == {True} else words.plan_rows(plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    write_plots(folder, plots)
    write(folder / COMPARISON_FILE, msgspec.json.format(msgspec.json.encode(comparison), indent=2))
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


def _of_runs(entries: Sequence[Entry]) -> tuple[Comparison, list[Plot], Plan]:
    runs = [[RunFolder(folder) for folder in entry.folders] for entry in entries]
    summaries = [[read_summary(run.path) for run in of_server] for of_server in runs]
    names = tuple(entry.name for entry in entries)
    plans = [of_server[0].plan() for of_server in runs]
    comparison = Comparison(
        names=names,
        figures=compare_rounds(summaries),
        invalid_runs=sum(not each.validity.valid for of_server in summaries for each in of_server),
        warnings=(
            *differences(names, plans),
            *(
                f"{name}: {run.path.name} is invalid: {'; '.join(summary.validity.reasons)}"
                for name, of_server, found in zip(names, runs, summaries, strict=True)
                for run, summary in zip(of_server, found, strict=True)
                if not summary.validity.valid
            ),
        ),
    )
    times = {entry.name: _times(of_server) for entry, of_server in zip(entries, runs, strict=True)}
    plots = []
    if plans[0].slo.ttft_s is not None or plans[0].slo.tpot_s is not None:
        scales = {name: _mean_scales(of_server) for name, of_server in zip(names, summaries, strict=True)}
        plots.append(attainment_by_scale(scales, plans[0].slo))
    if all(groups for groups in times.values()):
        kinds = set.intersection(*(set(groups) for groups in times.values()))
        for kind in sorted(kinds):
            groups = {name: of_server[kind] for name, of_server in times.items()}
            plots += [latency_cdfs(groups, plans[0].slo, kind), tail_plot(groups, kind)]
        plots.append(stage_bars({name: _mean_stages(each) for name, each in zip(names, summaries, strict=True)}))
    return comparison, plots, plans[0]


def _of_sweeps(entries: Sequence[Entry]) -> tuple[Comparison, list[Plot], Plan]:
    for entry in entries:
        if len(entry.folders) > 1:
            raise LoadTestError(f"{entry.name}: one sweep for each name, which may repeat its rates itself")
    folders = [entry.folders[0] for entry in entries]
    sweeps = [read_sweep(folder) for folder in folders]
    for folder, sweep in zip(folders, sweeps, strict=True):
        if not sweep.points:
            raise LoadTestError(f"{folder}: a sweep without a run")
    names = tuple(entry.name for entry in entries)
    curves = {name: rated_runs(folder, sweep) for name, folder, sweep in zip(names, folders, sweeps, strict=True)}
    plans = [RunFolder(folder / sweep.points[0].folder).plan() for folder, sweep in zip(folders, sweeps, strict=True)]
    alike = [msgspec.structs.replace(plan, arrivals=plans[0].arrivals) for plan in plans]  # they differ by their rates
    comparison = Comparison(
        names=names,
        figures=compare_sweeps(sweeps),
        at_rates=_at_rates(list(curves.values())),
        invalid_runs=sum(not run.summary.validity.valid for runs in curves.values() for run in runs),
        warnings=(
            *differences(names, alike),
            *(
                f"{name} at {run.rate:g} requests/s is invalid, and left out: {'; '.join(run.summary.validity.reasons)}"
                for name, runs in curves.items()
                for run in runs
                if not run.summary.validity.valid
            ),
        ),
    )
    return comparison, sweep_plots(curves), plans[0]


def _at_rates(curves: Sequence[Sequence[RatedRun]]) -> tuple[AtRate, ...]:
    """At each rate of the first sweep at which all have a valid run."""
    found: list[AtRate] = []
    for rate in sorted({run.rate for run in curves[0]}):
        runs = [
            [run.summary for run in curve if abs(run.rate - rate) <= SAME_RATE * rate and run.summary.validity.valid]
            for curve in curves
        ]
        if all(runs):
            found.append(AtRate(rate, compare_rounds(runs)))
    return tuple(found)


def _times(runs: Sequence[RunFolder]) -> dict[str, Times]:
    """Of all rounds together, by kind; empty without complete answers."""
    by_kind: dict[str, list[Times]] = {}
    for run in runs:
        seen = read_observations(run.records())
        complete = judged_rows(run.plan(), run.facts(), seen) & seen.is_status("ok")
        for index, kind in enumerate(seen.kinds):
            rows = complete & (seen.kind == index)
            if rows.any():
                by_kind.setdefault(kind, []).append(Times.of(seen, rows))
    return {kind: Times.pooled(times) for kind, times in by_kind.items()}


def _mean_scales(rounds: Sequence[Summary]) -> list[ScalePoint]:
    columns = zip(*(summary.slo_scales for summary in rounds), strict=False)
    return [
        ScalePoint(
            points[0].scale,
            statistics.mean(point.attainment for point in points),
            statistics.mean(point.ttft_attainment for point in points),
            statistics.mean(point.tpot_attainment for point in points),
        )
        for points in columns
    ]


def _mean_stages(rounds: Sequence[Summary]) -> list[StagePart]:
    """Of the parts that all rounds tell."""
    names = [part.name for part in rounds[0].stages]
    found = []
    for name in names:
        values = [part.mean_s for summary in rounds for part in summary.stages if part.name == name]
        found.append(StagePart(name, float(np.mean(values))))
    return found
