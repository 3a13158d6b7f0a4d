"""`twostroke loadtest compare`: servers side by side, from runs or sweeps that there are, or from runs made now.

With --urls the same plan runs against each server in turns: a shared machine changes from minute to minute, and what
is to be compared should stand one right after the other.
"""

import argparse
import json
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from twostroke.loadtests.commands.arguments import add_plan_arguments, add_slo_multiple, plan_of, with_slo_multiple
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report import words
from twostroke.loadtests.report.comparison import Comparison
from twostroke.loadtests.report.pages import COMPARISON_PAGE_FILE as PAGE_FILE
from twostroke.loadtests.report.pages import Entry, write_comparison, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is compared", "The first is what the others are compared with.")
    what.add_argument(
        "folders",
        nargs="*",
        metavar="NAME=FOLDER",
        help="runs, or sweeps; a name that comes several times has so many rounds",
    )
    what.add_argument(
        "--urls", nargs="+", default=(), metavar="NAME=URL", help="run the plan now, against these in turns"
    )
    what.add_argument("--rounds", type=int, default=3, help="with --urls: runs of each (default: %(default)s)")
    what.add_argument("--output", type=Path, metavar="DIR", help="default: comparison-<time>")
    add_plan_arguments(parser, with_url=False)
    add_slo_multiple(parser)


def run(arguments: Namespace) -> int:
    """Returns 0, or 1 where a run is invalid. The last line is JSON. Raises LoadTestError."""
    if bool(arguments.folders) == bool(arguments.urls):
        raise LoadTestError("give either two NAME=FOLDER or more, or --urls with two NAME=URL or more")
    folder: Path = arguments.output or Path(f"comparison-{datetime.now():%Y%m%d-%H%M%S}")
    entries = run_all(arguments, folder) if arguments.urls else entries_of(arguments.folders)
    comparison = write_comparison(folder, entries)
    print("\n".join([*comparison.warnings, *words.comparison_sentences(comparison)]))
    print(f"report: {folder / PAGE_FILE}")
    print(json.dumps(figures_of(comparison, folder)))
    return 1 if comparison.invalid_runs else 0


def entries_of(named: Sequence[str]) -> list[Entry]:
    """NAME=FOLDER of the command line, in the order of the names. Raises LoadTestError."""
    folders: dict[str, list[Path]] = {}
    for name, folder in pairs_of(named, "FOLDER"):
        folders.setdefault(name, []).append(Path(folder))
    _check_names(list(folders))
    return [Entry(name, tuple(paths)) for name, paths in folders.items()]


def run_all(arguments: Namespace, output: Path) -> list[Entry]:
    """The rounds, each against all servers, beginning with another server every time. An SLO that is asked for as a
    multiple is measured at the first server, and asked of all."""
    urls = dict(pairs_of(arguments.urls, "URL"))
    if len(urls) < len(arguments.urls):
        raise LoadTestError("--urls: give each server a name of its own")
    _check_names(list(urls))
    if arguments.rounds < 1:
        raise LoadTestError(f"--rounds {arguments.rounds}: give at least 1")
    plans = alike([plan_of(Namespace(**(vars(arguments) | {"url": url, "name": name}))) for name, url in urls.items()])
    slo = with_slo_multiple(plans[0], arguments, output).slo
    folders: dict[str, list[Path]] = {plan.name: [] for plan in plans}
    for number in range(arguments.rounds):
        first = number % len(plans)
        for plan in (*plans[first:], *plans[:first]):
            folder = output / plan.name / f"round-{number + 1}"
            # Other requests in each round, the same for all servers: nobody has them cached from the round before.
            asked = msgspec.structs.replace(plan, slo=slo, seed=plan.seed + number)
            summary = write_report(run_plan(asked, folder))
            print(f"round {number + 1}, {plan.name}: {words.verdict(asked, summary)}", flush=True)
            folders[plan.name].append(folder)
    return [Entry(plan.name, tuple(folders[plan.name])) for plan in plans]


def alike(plans: Sequence[Plan]) -> list[Plan]:
    """So that all servers are sent the same requests: within the shortest context, with token ids only where all take
    them and have them."""
    with_ids = all(plan.prompts == "ids" for plan in plans)
    return [
        msgspec.structs.replace(
            plan,
            max_context=min(each.max_context for each in plans),
            prompts="ids" if with_ids else "text",
            vocabulary=min(each.vocabulary for each in plans),
        )
        for plan in plans
    ]


def pairs_of(named: Sequence[str], what: str) -> list[tuple[str, str]]:
    """(NAME, rest) of each NAME=rest."""
    pairs = []
    for text in named:
        name, separator, rest = text.partition("=")
        if not name or not separator or not rest or "/" in name:
            raise LoadTestError(f"{text!r} is not NAME={what}")
        pairs.append((name, rest))
    return pairs


def figures_of(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """The line of JSON; comparison.json has the rest."""
    return {
        "report": str(folder / PAGE_FILE),
        "names": list(comparison.names),
        "valid": not comparison.invalid_runs,
        "figures": {
            figure.name: {
                "unit": figure.unit,
                "values": [value.value if value else None for value in figure.values],
                "ratios": [ratio.median if ratio else None for ratio in figure.ratios],
                "verdicts": list(figure.verdicts),
            }
            for figure in comparison.figures
        },
    }


def _check_names(names: Sequence[str]) -> None:
    if len(names) < 2:
        raise LoadTestError("give two servers or more, each with a name of its own")
