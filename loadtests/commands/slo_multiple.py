"""--slo-multiple: an SLO that is measured before the run."""

import argparse
import sys
from pathlib import Path

import msgspec

from twostroke.loadtests.capacity.slowdown import measure_slo, parse_multiples
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import SLO, Plan

FOLDER = "uncontended"


def add_slo_multiple(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo-multiple",
        metavar="TIMES",
        help="instead of --slo, in multiples of what one user alone gets, who is measured first, for as long as a run "
        "lasts: ttft=5,tpot=2, or one of them",
    )


def with_slo_multiple(plan: Plan, arguments: argparse.Namespace, folder: Path) -> Plan:
    """The plan with the SLO that was asked for as a multiple, measured into a subfolder; as it is where none was.

    Raises LoadTestError for a wrong argument, or where it can't be measured.
    """
    if arguments.slo_multiple is None:
        return plan
    multiples = parse_multiples(arguments.slo_multiple)
    if plan.slo != SLO():
        raise LoadTestError("--slo-multiple: there is an SLO already; leave it or this away")
    slo = measure_slo(plan, multiples, folder / FOLDER)
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
    text = ", ".join(f"{name} {limit * 1e3:.4g} ms" for name, limit in limits.items() if limit is not None)
    print(f"SLO by one user alone: {text}", file=sys.stderr, flush=True)
    return msgspec.structs.replace(plan, slo=slo)
