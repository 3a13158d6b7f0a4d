"""`twostroke loadtest sweep`: how much can a server take? Runs at many rates, and one report of all.

The last line of output is one JSON object. What was measured stays, and has its report, also after Ctrl-C.
"""

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path

from twostroke.loadtests.capacity import MOST_REPEATS, Search, Sweep, SweepEnded
from twostroke.loadtests.commands.arguments import add_plan_arguments, add_slo_multiple, plan_of, with_slo_multiple
from twostroke.loadtests.commands.report import sweep_figures
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Arrivals, Gamma, Plan, Poisson
from twostroke.loadtests.report.figures import Summary
from twostroke.loadtests.report.pages import write_report, write_sweep_report
from twostroke.loadtests.report.sweep import SWEEP_FILE

INTERRUPTED_EXIT = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, with_arrivals=False)
    add_slo_multiple(parser)
    sweep = parser.add_argument_group("the sweep")
    sweep.add_argument("--cv", type=float, default=1.0, help="of the gaps between arrivals (default: 1, Poisson)")
    sweep.add_argument("--start", type=float, default=1.0, metavar="RATE", help="where the search begins (default: 1)")
    sweep.add_argument("--rates", metavar="RATE,...", help="measure these alone, instead of searching")
    sweep.add_argument("--precision", type=float, default=0.1, metavar="SHARE", help="of the rate: ends a search "
                       "(default: 0.1)")  # fmt: skip
    sweep.add_argument("--repeats", type=int, default=3, metavar="N", help="of the search, with other requests; fewer "
                       "than 2 give no interval (default: 3)")  # fmt: skip
    sweep.add_argument(
        "--budget", type=float, default=3600.0, metavar="S", help="for all runs together (default: 3600)"
    )
    sweep.add_argument("--output", type=Path, metavar="DIR", help="default: sweep-<time>")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, 1 for a sweep that ended before all was measured, 130 for one that was ended by Ctrl-C.

    Raises LoadTestError where nothing was measured.
    """
    rates = _rates(arguments.rates)
    _check(arguments)
    folder: Path = arguments.output or Path(f"sweep-{datetime.now():%Y%m%d-%H%M%S}")
    if (folder / SWEEP_FILE).exists():
        raise LoadTestError(f"{folder}: has a sweep already; name another folder")
    arrivals: Arrivals = Poisson(1.0) if arguments.cv == 1 else Gamma(1.0, arguments.cv)
    plan = with_slo_multiple(plan_of(arguments, arrivals), arguments, folder)
    if plan.slo == SLO():
        raise LoadTestError("capacity is the highest rate at which an SLO is met: give --slo or --slo-multiple")
    sweep = Sweep(plan, folder, _run_at, _say, arguments.budget)
    exit_code = 0
    try:
        if rates:
            sweep.measure(rates, arguments.repeats)
        else:
            sweep.find(Search(arguments.start, precision=arguments.precision), arguments.repeats)
    except (SweepEnded, LoadTestError) as reason:  # the latter: a server that is gone, a full disk
        sweep.end_early(str(reason))
        exit_code = 1
    except KeyboardInterrupt:
        sweep.end_early("it was interrupted")
        exit_code = INTERRUPTED_EXIT
    print(json.dumps(sweep_figures(folder, write_sweep_report(folder))))
    return exit_code


def _run_at(plan: Plan, folder: Path) -> Summary:
    return write_report(run_plan(plan, folder))


def _rates(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise LoadTestError(f"--rates {text}: write rates with commas between, as in 1,2,4") from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise LoadTestError(f"--rates {text}: give rates above 0")
    return rates


def _check(arguments: argparse.Namespace) -> None:
    for name in ("start", "precision", "budget", "cv"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise LoadTestError(f"--{name} {getattr(arguments, name):g}: give more than 0")
    if not 1 <= arguments.repeats <= MOST_REPEATS:
        raise LoadTestError(f"--repeats {arguments.repeats}: give 1 to {MOST_REPEATS}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
