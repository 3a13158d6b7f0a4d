"""`twostroke loadtest compare`: servers side by side, from runs or sweeps that there are, or from runs made now.

With --urls the same plan runs against each server in turns: a shared machine changes from minute to minute, and what
is to be compared should stand one right after the other.
"""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands.arguments import (
    add_ci_arguments,
    add_plan_arguments,
    add_slo_multiple,
    make_plan,
    positive_count,
    tell_ci,
    with_slo_multiple,
)
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report import words
from twostroke.loadtests.report.checks import checks_of_comparison
from twostroke.loadtests.report.comparison import RunComparison
from twostroke.loadtests.report.pages import COMPARISON_PAGE_FILE as PAGE_FILE
from twostroke.loadtests.report.pages import write_comparison, write_report


def add_arguments(parser: ArgumentParser) -> None:
    what = parser.add_argument_group("what is compared", "The first is what the others are compared with.")
    what.add_argument(
        "folders",
        nargs="*",
        type=name_and_value,
        metavar="NAME=FOLDER",
        help="runs, or sweeps; a name that comes several times has so many rounds",
    )
    what.add_argument(
        "--urls",
        nargs="+",
        type=name_and_value,
        default=(),
        metavar="NAME=URL",
        help="run the plan now, against these in turns",
    )
    what.add_argument(
        "--rounds", type=positive_count, default=3, help="with --urls: runs of each (default: %(default)s)"
    )
    what.add_argument("--output", type=Path, metavar="DIR", help="default: comparison-<time>")
    what.add_argument(
        "--fail-on", choices=("worse",), help="exit with 1 where any figure of another is worse than the first's"
    )
    add_ci_arguments(what)
    add_plan_arguments(parser, with_url=False)
    add_slo_multiple(parser)


def name_and_value(text: str) -> tuple[str, str]:
    """An argument's type: NAME=REST."""
    name, _, rest = text.partition("=")
    if not name or not rest or "/" in name:
        raise ArgumentTypeError(f"{text} is not a name, = and what it names")
    return name, rest


def run(arguments: Namespace) -> int:
    """Returns 0, or 1 where a run is invalid, or a figure worse that must not be. The last line is JSON.

    Raises LoadTestError.
    """
    if bool(arguments.folders) == bool(arguments.urls):
        raise LoadTestError("give either two NAME=FOLDER or more, or --urls with two NAME=URL or more")
    folder: Path = arguments.output or Path(f"comparison-{datetime.now():%Y%m%d-%H%M%S}")
    names = {name for name, _ in (*arguments.folders, *arguments.urls)}
    if len(names) < 2 or len(names) < len(arguments.urls):
        raise LoadTestError("give two servers or more, each with a name of its own")
    entries: dict[str, list[Path]] = {}
    for name, of_server in run_all(arguments, folder) if arguments.urls else arguments.folders:
        entries.setdefault(name, []).append(Path(of_server))
    comparison = write_comparison(folder, entries)
    sentences = [*comparison.warnings, *words.comparison_sentences(comparison)]
    print("\n".join(sentences))
    print(f"report: {folder / PAGE_FILE}")
    checks = checks_of_comparison(comparison, fail_on_worse=arguments.fail_on == "worse")
    holds = tell_ci(arguments, " and ".join(comparison.names), sentences, checks)
    print(json.dumps(figures_of(comparison, folder)))
    return 0 if holds else 1


def run_all(arguments: Namespace, output: Path) -> Iterator[tuple[str, Path]]:
    """The rounds, each against all servers, beginning with another server every time; a name and a run's folder each.

    An SLO that is asked for as a multiple is measured at the first server, and asked of all.
    """
    asked_of = {name: Namespace(**(vars(arguments) | {"url": url, "name": name})) for name, url in arguments.urls}
    plans = alike([make_plan(round_plan) for round_plan in asked_of.values()])
    slo = with_slo_multiple(plans[0], arguments, output).slo
    for number in range(arguments.rounds):
        first = number % len(plans)
        for plan in (*plans[first:], *plans[:first]):
            folder = output / plan.name / f"round-{number + 1}"
            # Other requests in each round, the same for all servers: nobody has them cached from the round before.
            round_plan = msgspec.structs.replace(plan, slo=slo, seed=plan.seed + number)
            summary = write_report(run_plan(round_plan, folder))
            print(f"round {number + 1}, {plan.name}: {words.verdict(round_plan, summary)}", flush=True)
            yield plan.name, folder


def alike(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans that send all servers the same requests: within the shortest context, with token ids only where
    all take them."""
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


def figures_of(comparison: RunComparison, folder: Path) -> dict[str, Any]:
    """The line of JSON; comparison.json has the rest."""
    figures = {
        figure.name: {
            "unit": figure.unit,
            "values": [value and value.value for value in figure.values],
            "ratios": [ratio and ratio.median for ratio in figure.ratios],
            "verdicts": list(figure.verdicts),
        }
        for figure in comparison.figures
    }
    valid = not comparison.invalid_runs
    return {"report": str(folder / PAGE_FILE), "names": list(comparison.names), "valid": valid, "figures": figures}
