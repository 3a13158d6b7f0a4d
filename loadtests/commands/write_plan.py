"""`twostroke loadtest plan`: writes the plan that `twostroke loadtest run --plan` and Locust's `--plan` carry out.

Standard output has the plan alone, for `> plan.json`.
"""

import sys
from argparse import ArgumentParser, Namespace

import msgspec

from twostroke.loadtests.commands.arguments import add_plan_arguments, make_plan
from twostroke.loadtests.generator.dispatcher import check_prompts
from twostroke.loadtests.workloads.sessions import sessions


def add_arguments(parser: ArgumentParser) -> None:
    add_plan_arguments(parser)


def run(arguments: Namespace) -> int:
    """Returns 0. Raises LoadTestError for a plan that can't be carried out."""
    plan = make_plan(arguments)
    check_prompts(plan)
    sessions(plan)  # raises where lengths, arrivals or a trace are wrong
    print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
    carry_out = "locust -f loadtests/locustfile.py --headless --plan FILE --folder FOLDER"
    more = "" if plan.num_workers == 1 else f" --master, and {plan.num_workers} workers"
    print(f"{plan.model} at {plan.url}; carry it out: {carry_out}{more}", file=sys.stderr)
    return 0
