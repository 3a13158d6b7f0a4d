"""The report of a sweep: sweep.html and its plots, from sweep.json and the runs' own reports."""

from pathlib import Path

import msgspec

from loadtests.errors import LoadTestError
from loadtests.report import words
from loadtests.report.figures import Summary, summarise
from loadtests.report.files import write
from loadtests.report.html import render, write_plots
from loadtests.report.run_report import REPORT_FILE
from loadtests.report.sweep import Capacity, SweepResult, read_sweep
from loadtests.report.sweep_plots import RatedRun, sweep_plots
from loadtests.run_folder import RunFolder

PAGE_FILE = "sweep.html"


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
        asked=words.sweep_rows(plan) if plan else [],
        runs=[(point, run.summary) for point, run in zip(sweep.points, runs, strict=True)],
        plots=plots,
    )
    write(folder / PAGE_FILE, page)
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
    """The capacities, or why there are none."""
    if sweep.valid:
        found = [capacity_words(each) for each in sweep.capacities]
    else:
        found = ["No run was a valid one, so the capacity is not known."]
    return found if sweep.ended_early is None else [*found, f"The sweep ended early: {sweep.ended_early}."]


def capacity_words(capacity: Capacity) -> str:
    level = f"{capacity.attainment:.0%}"
    if capacity.rate is None:
        return f"At no rate that was tried did {level} of the requests meet the SLO."
    at_least = "at least " if capacity.is_lower_bound else ""
    text = f"{level} of the requests meet the SLO up to {at_least}{words.number_estimate(capacity.rate)} requests/s"
    if capacity.rate_per_worker is not None:
        text += f", {words.number_estimate(capacity.rate_per_worker)} for each worker"
    if capacity.is_lower_bound:
        text += ": even the highest rate that was tried"
    return text + "."
