"""`twostroke bench simulation`: this machine's server beside its simulation, cell by cell.

A cell is one workload at one rate in one mode: the same plan goes to the server and into the simulator, whose costs
were learnt on that server, some of them under a load of its own (calibration.py). Ratios are simulated over measured.
A machine that others use changes from minute to minute: how many others want its cores is counted while costs are
learnt and while a cell is measured (neighbours.py), and the costs are scaled by what that leaves to a worker.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from twostroke.benchmarks.console import positive, say
from twostroke.cluster.local.processes import interrupt_once
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import at_rate
from twostroke.loadtests.commands.arguments import above_zero, context_tokens
from twostroke.loadtests.commands.measure import rates_of
from twostroke.loadtests.generator.run_facts import served_model
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Fixed, LongPrompts, Plan, Poisson, Synthetic, Workload
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.report.figures import read_observations
from twostroke.loadtests.run_folder import Record, make_folder
from twostroke.planning.calibration import MIXED, Seen, calibrated
from twostroke.planning.exact import simulate_plan
from twostroke.planning.modes import (
    MODES,
    Counts,
    Fleet,
    Mode,
    beside_others,
    counts_of,
    learn_kind,
    server_in,
    write_kind,
)
from twostroke.planning.neighbours import Neighbours, share
from twostroke.planning.profiles import profile_of
from twostroke.protocol.errors import ConfigError
from twostroke.simulator.deployment import Watch
from twostroke.worker.profile import WorkerProfile

WARM_UP_S = 3.0  # of a cell
WARM_REQUESTS = 36  # of a simulated server, before a plan begins
NEAR = 0.1  # a figure within so much of what was measured is near
FIGURES = ("ttft_mean_s", "ttft_p90_s", "tpot_mean_s", "tpot_p90_s")
STEADY = 1.25  # how much a worker's share of a core may have changed since costs were learnt
LEAST_ANSWERS = 10
"""A cell with fewer says nothing."""
WORKLOADS: dict[str, Workload] = {
    "fixed": Fixed(128, 32),
    "azure-conv": Synthetic("azure-conv"),
    "long-prompts": LongPrompts(32, 48, 400, 8, 0.2),
}


class Cell(msgspec.Struct, frozen=True):
    """Figures by their names, in seconds; `ratios` are simulated over measured."""

    mode: Mode
    workload: str
    rate: float
    answers: int
    failed: int  # or refused
    measured: dict[str, float]
    simulated: dict[str, float]
    others: tuple[float, float] = (0.0, 0.0)  # that wanted cores: when costs were learnt, and in this cell
    cores: int = 1

    @property
    def is_steady(self) -> bool:
        """Whether the others left about as much of the cores as when costs were learnt."""
        shares = [share(self.cores, others, self.cores) for others in self.others]
        return max(shares) / min(shares) <= STEADY

    @property
    def ratios(self) -> dict[str, float]:
        return {name: self.simulated[name] / self.measured[name] for name in FIGURES if self.measured.get(name)}

    @property
    def far(self) -> list[str]:
        """The figures that are not near."""
        return [name for name, ratio in self.ratios.items() if abs(ratio - 1) > NEAR]


def figures_of(records: Iterable[Record], warm_up_s: float) -> tuple[dict[str, float], int, int]:
    """Of the answers after the warm-up; how many they are, and how many were none."""
    seen = read_observations(records)
    inside = seen.scheduled_s >= warm_up_s
    whole = inside & seen.is_status("ok")
    found: dict[str, float] = {}
    for name, values in (("ttft", seen.ttft_s[whole]), ("tpot", seen.tpot_s[whole])):
        known = values[~np.isnan(values)]
        if len(known):
            found |= {f"{name}_mean_s": float(known.mean()), f"{name}_p90_s": percentile(known, 90) or 0.0}
    return found, int(whole.sum()), int(inside.sum() - whole.sum())


def simulated(plan: Plan, fleet: Fleet, watch: Watch | None = None) -> list[Record]:
    """What the load test would have recorded of this plan; `watch` as `serve` has it."""
    return simulate_plan(
        plan,
        fleet.profile,
        fleet.counts.prefill,
        fleet.counts.decode,
        decodes_alone=fleet.mode != "disaggregated",
        warm=WARM_REQUESTS,
        watch=watch,
    )


def compare(plan: Plan, name: str, fleet: Fleet, folder: Path) -> tuple[Cell, list[Record]]:
    """Put the plan on the server, and into the simulator; also the server's records. Raises LoadTestError."""
    cores = len(os.sched_getaffinity(0))
    with Neighbours() as neighbours:
        records = list(run_plan(plan, folder, show=False).records())
    measured, answers, failed = figures_of(records, plan.warm_up_s)
    there = msgspec.structs.replace(fleet, profile=beside_others(fleet.profile, neighbours.others, cores))
    expected, _, _ = figures_of(simulated(plan, there), plan.warm_up_s)
    rate = getattr(plan.arrivals, "rate", 0.0)
    others = fleet.profile.others, neighbours.others
    return Cell(fleet.mode, name, rate, answers, failed, measured, expected, others, cores), records


def learn_under_load(
    url: str,
    mode: Mode,
    counts: Counts,
    loads: Callable[[WorkerProfile], tuple[float, float]],
    folder: Path,
    *,
    seconds: float,
    seed: int,
) -> WorkerProfile:
    """What the workers of the server at `url` cost, by requests one after the other, and then by a low and a high load,
    whose rates follow from those. Raises ConfigError and LoadTestError."""
    profile = learn_kind(url, mode, seed=seed)
    say(f"{mode}: {msgspec.json.encode(profile).decode()}")
    plan = plan_for(url, MIXED, seconds, WARM_UP_S, seed, None)
    return calibrate(plan, Fleet(mode, counts, profile), loads(profile), folder)


def calibrate(plan: Plan, fleet: Fleet, rates: tuple[float, float], folder: Path) -> WorkerProfile:
    """The fleet's profile after a low and a high load on the server. Raises LoadTestError."""
    # Of its own: a run that was broken off is not gone on with.
    folder = folder / f"calibration-{fleet.mode}-{time.time_ns()}"
    cores = len(os.sched_getaffinity(0))
    seen: list[Seen] = []
    waits: list[tuple[float, float]] = []
    for number, rate in enumerate(rates):
        asked = at_rate(msgspec.structs.replace(plan, workload=MIXED, seed=plan.seed + 100 + number), rate)
        with Neighbours() as neighbours:
            records = list(run_plan(asked, folder / str(number), show=False).records())
        seen.append(Seen(asked, figures_of(records, plan.warm_up_s)[0], neighbours.others))

        waits += [
            (one.ttft_s - one.stages["ttft_s"], one.stages["admit_s"])
            for one in records
            if one.stages is not None and one.ttft_s is not None and {"ttft_s", "admit_s"} <= one.stages.keys()
        ]
    profile = fleet.profile
    if waits:  # the load test's client is not the one that probes
        http_s, admit_s = (float(np.mean(values)) for values in zip(*waits, strict=True))
        profile = msgspec.structs.replace(profile, http_s=http_s, admit_s=admit_s)

    def simulate(asked: Plan, profile: WorkerProfile, others: float) -> dict[str, float]:
        there = msgspec.structs.replace(fleet, profile=beside_others(profile, others, cores))
        return figures_of(simulated(asked, there), asked.warm_up_s)[0]

    return calibrated(profile, seen[0], seen[1], simulate)


def plan_for(url: str, workload: Workload, seconds: float, warm_up_s: float, seed: int, longest: int | None) -> Plan:
    """Asks the server for its model. Raises LoadTestError."""
    model = served_model(url, None)
    return Plan(
        url=url,
        model=model.name,
        max_context=min(model.max_context or 4096, longest or 1 << 30),
        arrivals=Poisson(1.0),
        workload=workload,
        slo=SLO(),
        seconds=seconds,
        seed=seed,
        warm_up_s=warm_up_s,
        vocabulary=model.vocabulary or 0,
    )


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser.add_argument_group("the server"))
    cells = parser.add_argument_group("the cells")
    cells.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    cells.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    cells.add_argument("--rates", type=rates_of, default=[2.0, 5.0, 10.0], metavar="RATE,...", help="requests a second")
    cells.add_argument("--seconds", type=above_zero, default=20.0, metavar="S", help="of a cell, with 3 s of warm-up")
    cells.add_argument("--budget", type=above_zero, default=3600.0, metavar="S", help="no cell begins after so long")
    cells.add_argument("--max-context", type=context_tokens, default=1024, metavar="TOKENS", help="of azure-conv")
    cells.add_argument("--seed", type=int, default=0)
    cells.add_argument(
        "--output", type=Path, metavar="DIR", help="default: agreement-<time>; one that is there goes on"
    )


def add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default="bundled", metavar="DIR|ID", help="as `serve` takes it (default: bundled)")
    group.add_argument("--prefill", type=positive, default=1, metavar="N", help="workers, where there are any")
    group.add_argument("--decode", type=positive, default=1, metavar="N", help="workers beside those")
    group.add_argument("--aggregated", type=positive, default=1, metavar="N", help="workers in the place of both")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 where nothing was measured. The last line is JSON."""
    folder: Path = arguments.output or Path(f"agreement-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        make_folder(folder)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error
    interrupt_once()
    deadline = time.monotonic() + arguments.budget
    cells = _done(folder)
    failures: list[str] = []
    for mode in arguments.modes:
        if time.monotonic() + arguments.seconds > deadline:
            failures.append(f"{mode}: the budget is spent")
            break
        try:
            for cell in _mode(mode, arguments, folder, cells, deadline):
                cells.append(cell)
                say(line_of(cell))
                (folder / "cells.json").write_bytes(msgspec.json.format(msgspec.json.encode(cells)))
        except (ConfigError, LoadTestError, OSError) as error:
            failures.append(f"{mode}: {error}")
            say(f"{mode} is given up: {error}")
    print("\n".join(table(cells)))
    told = [cell for cell in cells if cell.answers >= LEAST_ANSWERS and cell.is_steady]
    near = {name: sum(abs(cell.ratios.get(name, 9.0) - 1) <= NEAR for cell in told) for name in FIGURES}
    print(json.dumps({"folder": str(folder), "cells": len(cells), "told": len(told), "near": near, "failed": failures}))
    return 0 if cells else 1


def _done(folder: Path) -> list[Cell]:
    """The cells that a run before has left in the folder. Raises ConfigError for what is none."""
    path = folder / "cells.json"
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Cell])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--output {folder}: its cells.json can't be gone on with: {error}; give another") from error


def _mode(
    mode: Mode, arguments: argparse.Namespace, folder: Path, done: Sequence[Cell], deadline: float
) -> Iterator[Cell]:
    """Cells that are not done yet."""
    known = {(cell.mode, cell.workload, cell.rate) for cell in done}
    asked = list(enumerate((name, rate) for rate in arguments.rates for name in arguments.workloads))
    left = [(number, name, rate) for number, (name, rate) in asked if (mode, name, rate) not in known]
    if not left:
        return
    counts = counts_of(mode, arguments.prefill, arguments.decode, arguments.aggregated)
    with ExitStack() as stack:
        say(f"{mode}: starting {counts.prefill} prefill and {counts.decode} decode workers")
        url = stack.enter_context(server_in(mode, counts, {"model": {"path": arguments.model}}))
        of_mode = folder / f"{mode}.json"
        if of_mode.exists():
            profile = profile_of(str(of_mode))
        else:
            rates = min(arguments.rates), max(arguments.rates)
            profile = learn_under_load(
                url, mode, counts, lambda _: rates, folder, seconds=arguments.seconds, seed=arguments.seed
            )
            write_kind(profile, of_mode)
        say(f"{mode}: {msgspec.json.encode(profile).decode()}")
        for number, name, rate in left:
            if time.monotonic() + arguments.seconds > deadline:
                raise ConfigError("the budget is spent")
            seed = arguments.seed + 1 + number  # prompts of their own
            plan = plan_for(url, WORKLOADS[name], arguments.seconds, WARM_UP_S, seed, arguments.max_context)
            of_cell = folder / f"{mode}-{name}-{rate:g}"
            yield compare(at_rate(plan, rate), name, Fleet(mode, counts, profile), of_cell)[0]


def line_of(cell: Cell) -> str:
    """One cell for people: measured, simulated, and how far off."""
    parts = [
        f"{name[:-2].replace('_', ' ')} {cell.measured.get(name, 0):.4g}/{cell.simulated.get(name, 0):.4g}"
        for name in FIGURES
    ]
    far = f" FAR: {', '.join(cell.far)}" if cell.far else ""
    far += "" if cell.is_steady else f" (threads of others: {cell.others[0]:.1f} when learnt, {cell.others[1]:.1f} now)"
    return f"{cell.mode} {cell.workload} {cell.rate:g}/s, {cell.answers} answers: {'; '.join(parts)}{far}"


def table(cells: Sequence[Cell]) -> list[str]:
    """Markdown; a figure is measured / simulated, in milliseconds, in bold where it is not near."""
    lines = [
        "| mode | workload | rate | answers | TTFT mean | TTFT P90 | TPOT mean | TPOT P90 | others |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        shown: list[str] = []
        for name in FIGURES:
            text = f"{cell.measured.get(name, 0) * 1e3:.4g} / {cell.simulated.get(name, 0) * 1e3:.4g}"
            shown.append(f"**{text}**" if name in cell.far else text)
        figures, (before, after) = " | ".join(shown), cell.others
        changed = "" if cell.is_steady else ", not judged"
        lines.append(
            f"| {cell.mode} | {cell.workload} | {cell.rate:g} | {cell.answers} | {figures} "
            f"| {before:.1f}, {after:.1f}{changed} |"
        )
    return lines


def summary_of(cells: Sequence[Cell]) -> dict[str, Any]:
    """How far apart simulation and measurement are: by figure the median and the largest distance of a ratio from 1."""
    found: dict[str, Any] = {}
    for name in FIGURES:
        off = sorted(abs(cell.ratios[name] - 1) for cell in cells if name in cell.ratios and cell.is_steady)
        if off:
            found[name] = {"median": off[len(off) // 2], "most": off[-1]}
    return found
