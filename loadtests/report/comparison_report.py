"""The report of a comparison: comparison.json, comparison.html and plots, in a folder of its own."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from twostroke.loadtests.errors import LoadTestError, unwritable
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report import words
from twostroke.loadtests.report.chart import Plot
from twostroke.loadtests.report.comparison import AtRate, Comparison, compare_rounds, compare_sweeps, differences
from twostroke.loadtests.report.figures import ScalePoint, StagePart, Summary, judged_rows
from twostroke.loadtests.report.html import render, write_plots
from twostroke.loadtests.report.observations import read_observations
from twostroke.loadtests.report.run_plots import Times, attainment_by_scale, latency_cdfs, stage_bars, tail_plot
from twostroke.loadtests.report.sweep import SWEEP_FILE, read_sweep
from twostroke.loadtests.report.sweep_plots import RatedRun, sweep_plots
from twostroke.loadtests.report.sweep_report import rated_runs, read_summary
from twostroke.loadtests.run_folder import RunFolder, write

COMPARISON_FILE = "comparison.json"
PAGE_FILE = "comparison.html"
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
    write(folder / PAGE_FILE, page)
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
