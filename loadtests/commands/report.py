"""`twostroke loadtest report`: make the reports of runs and sweeps again, from what they have left."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from twostroke.loadtests.report import words
from twostroke.loadtests.report.figures import Summary
from twostroke.loadtests.report.pages import PAGE_FILE, SWEEP_PAGE_FILE, verdicts, write_report, write_sweep_report
from twostroke.loadtests.report.sweep import SWEEP_FILE, SweepResult
from twostroke.loadtests.run_folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, or of a sweep")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 where a run is invalid. The last line is JSON. Raises LoadTestError for other folders."""
    results = [report_on(folder) for folder in arguments.folders]
    print(json.dumps({"reports": results}))
    return 0 if all(result["valid"] for result in results) else 1


def report_on(folder: Path) -> dict[str, Any]:
    """Make one report, say what it says, and return its main figures."""
    if (folder / SWEEP_FILE).exists():
        return sweep_figures(folder, write_sweep_report(folder))
    summary = write_report(RunFolder(folder))
    print("\n".join(run_lines(RunFolder(folder), summary)))
    return run_figures(folder, summary)


def run_lines(folder: RunFolder, summary: Summary) -> list[str]:
    """A run's verdict for the console."""
    invalid = [f"INVALID: {reason}" for reason in summary.validity.reasons]
    return [f"{summary.name}: {words.verdict(folder.plan(), summary)}", *invalid, f"report: {folder.path / PAGE_FILE}"]


def run_figures(folder: Path, summary: Summary) -> dict[str, Any]:
    """A run's line of JSON: the figures that scripts ask for; the rest is in report.json."""
    return {
        "folder": str(folder),
        "valid": summary.validity.valid,
        "reasons": list(summary.validity.reasons),
        "scheduled": summary.counts.scheduled,
        "refused": summary.counts.refused,
        "failed": summary.counts.failed,
        "attainment": summary.attainment.value if summary.attainment else None,
        "goodput": summary.goodput.value if summary.goodput else None,
        "ttft_p99_s": summary.ttft.p99.value if summary.ttft else None,
        "tpot_p99_s": summary.tpot.p99.value if summary.tpot else None,
        "itl_p99_s": summary.itl.p99.value if summary.itl else None,
    }


def sweep_figures(folder: Path, sweep: SweepResult) -> dict[str, Any]:
    """Say a sweep's capacities, and return them."""
    for sentence in verdicts(sweep):
        print(f"{sweep.name}: {sentence}")
    print(f"report: {folder / SWEEP_PAGE_FILE}")
    capacities = {
        str(each.attainment): (msgspec.to_builtins(each.rate) | {"is_lower_bound": each.is_lower_bound})
        if each.rate
        else None
        for each in sweep.capacities
    }
    return {
        "folder": str(folder),
        "valid": sweep.valid,
        "capacity": capacities,
        "ended_early": sweep.ended_early,
    }
