"""The report of a sweep: sweep.html and its plots, from sweep.json and the runs' own reports."""

from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.report import words
from twostroke.loadtests.report.figures import Summary, summarise
from twostroke.loadtests.report.html import render, write_plots
from twostroke.loadtests.report.run_report import REPORT_FILE
from twostroke.loadtests.report.sweep import Capacity, SweepResult, read_sweep
from twostroke.loadtests.report.sweep_plots import RatedRun, sweep_plots
from twostroke.loadtests.run_folder import RunFolder, write

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
        tone=tone(sweep),
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
