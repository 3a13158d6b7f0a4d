"""`twostroke loadtest run`, `sweep`, `report` and `plan`: a run at one load, runs at many rates, their reports, a plan.

The last line of output is one JSON object. What was measured stays, and has its report, also after Ctrl-C.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from twostroke.loadtests import LoadTestError, RunLost
from twostroke.loadtests.capacity import MAX_REPEATS, SWEEP_FILE, SearchRange, Sweep, SweepEnded, SweepResult
from twostroke.loadtests.commands.arguments import (
    Option,
    above_zero,
    add_ci_arguments,
    add_options,
    add_plan_arguments,
    add_slo_multiple,
    make_plan,
    tell_ci,
    with_slo_multiple,
)
from twostroke.loadtests.generator.dispatcher import check_prompts
from twostroke.loadtests.generator.runner import check_free, run_plan
from twostroke.loadtests.plan import SLO, Arrivals, Gamma, Plan, Poisson
from twostroke.loadtests.report import words
from twostroke.loadtests.report.checks import Check, checks_of_run, parse_requirement
from twostroke.loadtests.report.figures import Summary
from twostroke.loadtests.report.pages import (
    PAGE_FILE,
    SWEEP_PAGE_FILE,
    read_summary,
    verdicts,
    write_report,
    write_sweep_report,
)
from twostroke.loadtests.run_folder import RunFolder
from twostroke.loadtests.workloads.sessions import sessions

INTERRUPTED_EXIT = 130


def add_run_arguments(parser: ArgumentParser) -> None:
    add_plan_arguments(parser)
    add_slo_multiple(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="DIR", help="default: loadtest-<time>")
    output.add_argument(
        "--web",
        nargs="?",
        type=int,
        const=8089,
        metavar="PORT",
        help="show Locust's page and live charts while it runs",
    )
    output.add_argument(
        "--require",
        action="append",
        type=parse_requirement,
        default=[],
        metavar="FIGURE>=N",
        help="exit with 1 unless it holds, as 'attainment>=0.9' or 'ttft_p99_s<=2'; may come several times",
    )
    add_ci_arguments(output)


def run_run(arguments: Namespace) -> int:
    """Returns 0, 1 for a run that is invalid, lost or not what was required, 130 for one that was ended by Ctrl-C.

    Raises LoadTestError where the run can't be carried out.
    """
    folder = RunFolder(arguments.output or Path(f"loadtest-{datetime.now():%Y%m%d-%H%M%S}"))
    plan = with_slo_multiple(make_plan(arguments), arguments, folder.path)
    if arguments.web is not None:
        check_free(arguments.web)
        print(f"live charts: http://127.0.0.1:{arguments.web}/twostroke", file=sys.stderr)
    lost: str | None = None
    interrupted = False
    try:
        run_plan(plan, folder.path, web_port=arguments.web)
    except KeyboardInterrupt:
        interrupted = True
    except RunLost as error:
        if next(folder.records(), None) is None:
            raise
        lost = str(error)
        print(f"the run is lost: {lost}", file=sys.stderr)
    if interrupted and not folder.facts_path.exists():
        print("interrupted before the run began: nothing was measured", file=sys.stderr)
        return INTERRUPTED_EXIT
    figures = report_on(folder.path)
    summary = read_summary(folder.path)
    checks = checks_of_run(summary, arguments.require)
    if lost is not None:
        checks.append(Check("the run was carried out", lost, False))
    holds = tell_ci(arguments, summary.name, [words.verdict(plan, summary)], checks)
    met = [check.holds for check in checks[1 : 1 + len(arguments.require)]]
    required = dict(zip(map(str, arguments.require), met, strict=True))
    print(json.dumps(figures | {"lost": lost, "required": required}))
    return INTERRUPTED_EXIT if interrupted else 0 if holds else 1


def add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, or of a sweep")


def run_report(arguments: Namespace) -> int:
    """Returns 0, or 1 where a run is invalid. Raises LoadTestError for other folders."""
    results = [report_on(folder) for folder in arguments.folders]
    print(json.dumps({"reports": results}))
    return 0 if all(result["valid"] for result in results) else 1


def report_on(folder: Path) -> dict[str, Any]:
    """Make one report, say what it says, and return the figures that scripts ask for; report.json has the rest."""
    if (folder / SWEEP_FILE).exists():
        return _report_on_sweep(folder)
    summary = write_report(RunFolder(folder))
    print(f"{summary.name}: {words.verdict(RunFolder(folder).plan(), summary)}")
    for reason in summary.validity.reasons:
        print(f"INVALID: {reason}")
    for error in summary.errors[:1]:
        print(f"most common error: {error.count} {error.status}: {error.error}")
    print(f"report: {folder / PAGE_FILE}")
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


def _report_on_sweep(folder: Path) -> dict[str, Any]:
    sweep: SweepResult = write_sweep_report(folder)
    for sentence in verdicts(sweep):
        print(f"{sweep.name}: {sentence}")
    print(f"report: {folder / SWEEP_PAGE_FILE}")
    capacities = {
        str(each.attainment): each.rate and msgspec.to_builtins(each.rate) | {"is_lower_bound": each.is_lower_bound}
        for each in sweep.capacities
    }
    return {"folder": str(folder), "valid": sweep.valid, "capacity": capacities, "ended_early": sweep.ended_early}


_SWEEP_OPTIONS: tuple[Option, ...] = (
    ("--cv", above_zero, 1.0, "CV", "of the gaps between arrivals; 1 is Poisson"),
    ("--start", above_zero, 1.0, "RATE", "where the search begins"),
    ("--precision", above_zero, 0.1, "SHARE", "of the rate: ends a search"),
    ("--budget", above_zero, 3600.0, "S", "for all runs together"),
)


def add_sweep_arguments(parser: ArgumentParser) -> None:
    add_plan_arguments(parser, with_arrivals=False)
    add_slo_multiple(parser)
    sweep = parser.add_argument_group("the sweep")
    add_options(sweep, _SWEEP_OPTIONS)
    sweep.add_argument(
        "--rates", type=parse_rates, metavar="RATE,...", help="measure these alone, instead of searching"
    )
    sweep.add_argument(
        "--repeats",
        type=int,
        choices=range(1, MAX_REPEATS + 1),
        default=3,
        metavar="N",
        help="of the search, with other requests; fewer than 2 give no interval (default: 3)",
    )
    sweep.add_argument("--output", type=Path, metavar="DIR", help="default: sweep-<time>")


def parse_rates(text: str) -> list[float]:
    """An argument's type: rates with commas between."""
    return [above_zero(part) for part in text.split(",")]


def run_sweep(arguments: Namespace) -> int:
    """Returns 0, 1 for a sweep that ended before all was measured, 130 for one that was ended by Ctrl-C.

    Raises LoadTestError where nothing was measured.
    """
    folder: Path = arguments.output or Path(f"sweep-{datetime.now():%Y%m%d-%H%M%S}")
    if (folder / SWEEP_FILE).exists():
        raise LoadTestError(f"{folder}: has a sweep already; name another folder")
    arrivals: Arrivals = Poisson(1.0) if arguments.cv == 1 else Gamma(1.0, arguments.cv)
    plan = with_slo_multiple(make_plan(arguments, arrivals), arguments, folder)
    if plan.slo == SLO():
        raise LoadTestError("capacity is the highest rate at which an SLO is met: give --slo or --slo-multiple")
    sweep = Sweep(plan, folder, _run_at, _say, arguments.budget)
    exit_code = 0
    try:
        if arguments.rates:
            sweep.measure(arguments.rates, arguments.repeats)
        else:
            sweep.find(SearchRange(arguments.start, precision=arguments.precision), arguments.repeats)
    except (SweepEnded, LoadTestError) as reason:  # the latter: a server that is gone, a full disk
        sweep.end_early(str(reason))
        exit_code = 1
    except KeyboardInterrupt:
        sweep.end_early("it was interrupted")
        exit_code = INTERRUPTED_EXIT
    print(json.dumps(report_on(folder)))
    return exit_code


def _run_at(plan: Plan, folder: Path) -> Summary:
    return write_report(run_plan(plan, folder))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_write_arguments(parser: ArgumentParser) -> None:
    add_plan_arguments(parser)


def run_write(arguments: Namespace) -> int:
    """Write the plan that `run --plan` and Locust's `--plan` carry out. Returns 0. Raises LoadTestError."""
    plan = make_plan(arguments)
    check_prompts(plan)
    sessions(plan)  # raises where lengths, arrivals or a trace are wrong
    print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
    carry_out = "locust -f loadtests/locustfile.py --headless --plan FILE --folder FOLDER"
    more = "" if plan.num_workers == 1 else f" --master, and {plan.num_workers} workers"
    print(f"{plan.model} at {plan.url}; carry it out: {carry_out}{more}", file=sys.stderr)
    return 0
