"""`twostroke loadtest run`: one run at one load, and its report."""

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path

from twostroke.loadtests.commands.arguments import add_plan_arguments, add_slo_multiple, plan_of, with_slo_multiple
from twostroke.loadtests.commands.report import run_figures, run_lines
from twostroke.loadtests.errors import RunLost
from twostroke.loadtests.generator.runner import check_free, run_plan
from twostroke.loadtests.report.pages import write_report
from twostroke.loadtests.run_folder import RunFolder

INTERRUPTED_EXIT = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    add_slo_multiple(parser)
    output = parser.add_argument_group("what comes out")
    output.add_argument("--output", type=Path, metavar="DIR", help="default: loadtest-<time>")
    output.add_argument(
        "--web",
        nargs="?",
        type=int,
        const=8089,
        metavar="PORT",
        help="show Locust's page and live charts while it runs",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, 1 for a run that is invalid or lost, 130 for one that was ended by Ctrl-C. The last line is JSON.

    Raises LoadTestError where the run can't be carried out.
    """
    folder = arguments.output or Path(f"loadtest-{datetime.now():%Y%m%d-%H%M%S}")
    plan = with_slo_multiple(plan_of(arguments), arguments, folder)
    if arguments.web is not None:
        check_free(arguments.web)
        print(f"live charts: http://127.0.0.1:{arguments.web}/twostroke", file=sys.stderr)
    try:
        run_plan(plan, folder, web_port=arguments.web)
    except KeyboardInterrupt:
        _report(RunFolder(folder))
        return INTERRUPTED_EXIT
    except RunLost as error:
        if next(RunFolder(folder).records(), None) is None:
            raise
        print(f"the run is lost: {error}", file=sys.stderr)
        return _report(RunFolder(folder), str(error))
    return _report(RunFolder(folder))


def _report(folder: RunFolder, lost: str | None = None) -> int:
    summary = write_report(folder)
    print("\n".join(run_lines(folder, summary)))
    print(json.dumps(run_figures(folder.path, summary) | {"lost": lost}))
    return 0 if summary.validity.valid and lost is None else 1
