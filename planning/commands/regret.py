"""`twostroke bench plan`: how much of the best layout's goodput the plan's choice loses, by measuring every layout.

The cores of this machine are spent in four ways, and each of them is served and measured (planning/measured.py). The
plan sees what workers cost alone. `--output` keeps everything, and a later call measures only what is missing there.
"""

import argparse
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from twostroke.cluster.local.processes import interrupt_once
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands.arguments import above_zero, add_workload, context_tokens, workload_of
from twostroke.loadtests.plan import SLO, Plan, Poisson
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.run_folder import make_folder
from twostroke.planning.against import plan_for
from twostroke.planning.measured import Candidate, Measured, measure, read_measured, say
from twostroke.planning.trials import simulated_goodput
from twostroke.planning.workload import SLOTargets, Workload, promise_of, sample_of
from twostroke.protocol.errors import ConfigError

CANDIDATES = (
    Candidate("disaggregated", "disaggregated", 1, 1),
    Candidate("one", "aggregated", 0, 1),
    Candidate("two", "aggregated", 0, 2),
    Candidate("hybrid", "hybrid", 1, 1),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="bundled", metavar="DIR|ID", help="as `serve` takes it (default: bundled)")
    add_workload(parser.add_argument_group("workload"))
    parser.add_argument("--slo", metavar="TIMES", default="ttft_p90_s=1,tpot_p90_s=0.05", help="default: %(default)s")
    parser.add_argument(
        "--max-context", type=context_tokens, default=2048, metavar="TOKENS", help="longer ones are rescaled"
    )
    names = [one.name for one in CANDIDATES]
    parser.add_argument("--layouts", nargs="*", choices=names, default=names, metavar="NAME")
    parser.add_argument("--seconds", type=above_zero, default=30.0, metavar="S", help="of a run")
    parser.add_argument("--learn", type=above_zero, default=20.0, metavar="S", help="of each of two learning loads")
    parser.add_argument("--budget", type=above_zero, default=600.0, metavar="S", help="for a layout's runs together")
    parser.add_argument("--output", type=Path, metavar="DIR", help="go on with what is there (default: regret-<time>)")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 where not all layouts have a goodput yet. The last line is JSON. Raises ConfigError."""
    folder: Path = arguments.output or Path(f"regret-{datetime.now():%Y%m%d-%H%M%S}")
    promise = promise_of(arguments.slo)
    interrupt_once()
    offered = Plan("planned", "", arguments.max_context, Poisson(1.0), _workload(arguments), SLO(), seconds=1e9)
    sample = sample_of(offered, arguments.workload)
    one = {"name": "standard", "ttft_s": promise.ttft_s, "tpot_s": promise.tpot_s}
    settings = {"model": {"path": arguments.model}, "slo": {"classes": [one], "admission": False}}

    def plan_of(url: str) -> Plan:
        plan = plan_for(url, offered.workload, arguments.seconds, 0, arguments.max_context)
        return msgspec.structs.replace(plan, slo=SLO(promise.ttft_s, promise.tpot_s))

    found, failed = dict[Candidate, Measured](), dict[str, str]()
    for candidate in CANDIDATES:
        of_one = folder / candidate.name
        try:
            make_folder(of_one)
            known = read_measured(of_one)
            if known is None and candidate.name in arguments.layouts:
                known = measure(
                    *(candidate, settings, plan_of, sample, of_one, say),
                    learn_s=arguments.learn,
                    budget_s=arguments.budget,
                )
        except (ConfigError, LoadTestError, OSError) as error:
            failed[candidate.name] = str(error).splitlines()[0]
            say(f"{candidate.name} is given up: {error}")
        else:
            if known is not None:
                found[candidate] = known
    planned = planned_goodputs(found, sample, promise)
    verdict = verdict_of(planned, {one.name: found[one].capacity for one in found})
    for line in table(verdict):
        say(line)
    print(json.dumps({"folder": str(folder), "failed": failed, **verdict}))
    return 0 if verdict["regret"] is not None else 1


def _workload(arguments: argparse.Namespace) -> Any:
    try:
        return workload_of(arguments)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error


def planned_goodputs(found: Mapping[Candidate, Measured], sample: Workload, promise: SLOTargets) -> dict[str, float]:
    """Return what a plan expects of each layout by its workers' costs alone, the one that it chooses first."""
    planned: dict[str, float] = {}
    for candidate, measured in found.items():
        layout = candidate.layout(measured.profiles)
        guess = layout.goodput(sample, promise) or 1.0
        planned[candidate.name] = simulated_goodput(layout, sample, promise, guess, lambda line: None)
    return dict(sorted(planned.items(), key=lambda one: -one[1]))


def verdict_of(planned: Mapping[str, float], measured: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """Return `regret`, the share of the best goodput that the plan's choice loses, None until all are known."""
    known = {name: one.value for name, one in measured.items() if one is not None}
    chosen, is_whole = next(iter(planned), None), len(known) == len(CANDIDATES)
    best = max(known, key=lambda name: known[name]) if is_whole else None
    return {
        "chosen": chosen,
        "best": best,
        "regret": None if best is None or chosen is None else max(0.0, 1 - known[chosen] / known[best]),
        "planned_rps": {name: round(rate, 3) for name, rate in planned.items()},
        "measured_rps": {name: round(rate, 3) for name, rate in known.items()},
    }


def table(verdict: Mapping[str, Any]) -> list[str]:
    """Return Markdown: a row a layout, requests a second."""
    measured = verdict["measured_rps"]
    rows = [f"| {name} | {measured.get(name, '-')} | {rate} |" for name, rate in verdict["planned_rps"].items()]
    return ["| layout | goodput measured | planned |", "|---|---|---|", *rows]
