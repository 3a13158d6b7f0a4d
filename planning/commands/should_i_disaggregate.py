"""`twostroke should-i-disaggregate`: one answer for one machine, one workload and one SLO, and how sure it is.

On this machine each mode's server is started in turn, its costs are learnt, the workload is put on it, and the same is
simulated. For hardware that is not there (`--costs`, `--gpu`) simulation answers alone. What fails is said, and left
out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from twostroke.cluster.config.reading import load_yaml
from twostroke.cluster.local.processes import interrupt_once
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import at_rate
from twostroke.loadtests.commands.arguments import (
    above_zero,
    add_workload,
    context_tokens,
    seconds_left_out,
    slo_of,
    workload_of,
)
from twostroke.loadtests.commands.measure import rates_of
from twostroke.loadtests.plan import Chat, Plan, Poisson
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.run_folder import make_folder
from twostroke.loadtests.workloads.sessions import sessions
from twostroke.model.published.hardware import hardware_of
from twostroke.model.published.models import published_model
from twostroke.planning import report
from twostroke.planning.agreement import Cell, add_server, compare, line_of, plan_for, simulated, summary_of
from twostroke.planning.capacities import (
    TARGET,
    Flip,
    Point,
    by_length,
    by_rate,
    by_ratio,
    cost_by_slo,
    flips_of,
    measured_capacity,
    point_of,
    simulated_capacity,
)
from twostroke.planning.commands.plan import sample_of
from twostroke.planning.exact import VOCABULARY
from twostroke.planning.modes import MODES, Fleet, Mode, counts_of, learn_kind, server_in, write_kind
from twostroke.planning.profiles import PROFILES, profile_of
from twostroke.planning.search import Terms, nowhere, profiles_of
from twostroke.protocol.errors import ConfigError
from twostroke.worker.profile import WorkerProfile

INTERRUPTED_EXIT = 130
SEEDS = 2  # of simulated capacities: their spread is part of the uncertainty
RATE_SHARES = (0.4, 0.8, 1.2)  # of the first mode's simulated capacity: the rates that are measured
SWEPT_SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the best capacity
MEAN_OF = 500  # requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser.add_argument_group("the server", "Started on this machine, unless --costs or --gpu is given."))
    server = parser.add_argument_group("in place of a server: simulation alone")
    server.add_argument("--config", type=Path, metavar="FILE", help="of the server; its replicas don't count")
    server.add_argument("--costs", metavar="NAME|FILE", help=f"of `bench costs`, or {', '.join(PROFILES)}")
    server.add_argument("--gpu", metavar="NAME", help="of the planner's table, with a --model that it knows by name")
    add_workload(parser.add_argument_group("what is sent"))
    of_run = parser.add_argument_group("the runs")
    of_run.add_argument("--slo", type=slo_of, metavar="TIMES", help="ttft=S,tpot=S, or a preset of `loadtest`; needed")
    of_run.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    of_run.add_argument("--rates", type=rates_of, metavar="RATE,...", help="to measure (default: by simulation)")
    of_run.add_argument("--seconds", type=above_zero, default=30.0, metavar="S", help="of a run, with the warm-up")
    of_run.add_argument("--warm-up", type=seconds_left_out, default=3.0, metavar="S")
    of_run.add_argument("--max-context", type=context_tokens, metavar="TOKENS", help="longer requests are rescaled")
    of_run.add_argument("--seed", type=int, default=0)
    of_run.add_argument("--no-sweep", action="store_true", help="don't look for where the answer flips")
    of_run.add_argument("--report", action="store_true", help="pictures, and one HTML file; more is simulated for it")
    of_run.add_argument("--usd-per-hour", type=above_zero, metavar="USD", help="of a worker, for --report")
    of_run.add_argument("--output", type=Path, metavar="DIR", help="default: verdict-<time>")
    of_run.add_argument("--json", action="store_true", help="nothing but the last line")


@dataclass
class Found:
    """What is known so far of each mode."""

    fleets: dict[Mode, Fleet] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    points: dict[Mode, list[Point]] = field(default_factory=dict)
    simulated: dict[Mode, list[float]] = field(default_factory=dict)  # capacities, by seed
    failed: dict[str, str] = field(default_factory=dict)
    flips: list[Flip] = field(default_factory=list)
    lengths: list[tuple[float, dict[Mode, float]]] = field(default_factory=list)
    rates: list[tuple[float, dict[Mode, float]]] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, 1 where no answer can be given, 130 after Ctrl-C. Raises ConfigError for what can't be asked."""
    check(arguments)
    interrupt_once()
    folder: Path = arguments.output or Path(f"verdict-{datetime.now():%Y%m%d-%H%M%S}")
    say: Callable[[str], None] = _silent if arguments.json else _progress
    try:
        make_folder(folder)
        workload_of(arguments)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error
    found, exit_code = Found(), 0
    plan: Plan | None = None
    try:
        plan = (
            _by_simulation(arguments, found) if _is_unmeasured(arguments) else _measure(arguments, folder, found, say)
        )
        if plan is not None:
            _simulate(arguments, plan, found, say)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        found.failed["the rest"] = "it was interrupted"
        exit_code = INTERRUPTED_EXIT
    if arguments.report and plan is not None and exit_code == 0:
        _draw(arguments, plan, found, folder, say)
    told = tell(found, is_measured=not _is_unmeasured(arguments))
    (folder / "verdict.json").write_text(json.dumps(told, indent=1) + "\n")
    if not arguments.json:
        print("\n".join(words_of(told)))
    print(json.dumps({"folder": str(folder), **told}))
    return exit_code or (0 if told["best"] is not None else 1)


def check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for what does not belong together."""
    if arguments.slo is None:
        raise ConfigError("--slo: the answer depends on what is promised; give, for example, --slo ttft=1,tpot=0.1")
    if arguments.costs is not None and arguments.gpu is not None:
        raise ConfigError("--costs and --gpu both say what workers are like: give one of them")
    if _is_unmeasured(arguments) and arguments.config is not None:
        raise ConfigError("--config is of a server that is started, and --costs or --gpu starts none: leave one away")
    if not 0 <= arguments.warm_up < arguments.seconds:
        raise ConfigError(f"--warm-up {arguments.warm_up:g}: is part of --seconds {arguments.seconds:g}; give less")
    if len(set(arguments.modes)) < 2:
        raise ConfigError("--modes: name two or more, or there is nothing to choose from")
    if isinstance(workload_of_name(arguments), Chat):
        raise ConfigError("--workload chat: its sessions have no rate of requests; give another, or a trace's file")


def workload_of_name(arguments: argparse.Namespace) -> object:
    """Raises ConfigError for no workload."""
    try:
        return workload_of(arguments)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error


def _is_unmeasured(arguments: argparse.Namespace) -> bool:
    return arguments.costs is not None or arguments.gpu is not None


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass


# --- on this machine ---


def _measure(arguments: argparse.Namespace, folder: Path, found: Found, say: Callable[[str], None]) -> Plan | None:
    """Each mode in turn; a mode that fails is left out. Returns the plan, None where no server came up."""
    settings = {} if arguments.config is None else dict(load_yaml(arguments.config))
    if arguments.config is None:
        settings["model"] = {"path": arguments.model}
    plan: Plan | None = None
    rates: Sequence[float] | None = arguments.rates
    # The mode with both roles first: what it costs is known for the hybrid, too.
    for mode in sorted(arguments.modes, key=lambda one: one != "disaggregated"):
        counts = counts_of(mode, arguments.prefill, arguments.decode, arguments.aggregated)
        try:
            with ExitStack() as stack:
                say(f"{mode}: starting {counts.prefill} prefill and {counts.decode} decode workers")
                url = stack.enter_context(server_in(mode, counts, settings))
                plan = _plan(arguments, url)
                learnt = found.fleets.get("disaggregated") if mode == "hybrid" else None
                profile = learnt.profile if learnt is not None else learn_kind(url, mode, seed=arguments.seed)
                write_kind(profile, folder / f"{mode}.json")
                found.fleets[mode] = fleet = Fleet(mode, counts, profile)
                if rates is None:
                    capacity = simulated_capacity(plan, fleet, 1.0)
                    rates = [round(capacity * share, 3) for share in RATE_SHARES]
                    say(f"rates to measure: {', '.join(f'{rate:g}' for rate in rates)} a second")
                for number, rate in enumerate(rates):
                    asked = msgspec.structs.replace(at_rate(plan, rate), seed=plan.seed + 1 + number)
                    _run_one(asked, arguments.workload, fleet, folder / f"{mode}-{rate:g}", found, say)
        except (ConfigError, LoadTestError, OSError) as error:
            found.failed[mode] = str(error).splitlines()[0]
            say(f"{mode} is given up: {error}")
    return plan


def _run_one(asked: Plan, name: str, fleet: Fleet, folder: Path, found: Found, say: Callable[[str], None]) -> None:
    cell, records = compare(asked, name, fleet, folder)
    point = point_of(records, asked, cell.rate)
    found.points.setdefault(fleet.mode, []).append(point)
    found.cells.append(cell)
    say(f"{point.attainment.value:.0%} met; measured/simulated: {line_of(cell)}")


def _plan(arguments: argparse.Namespace, url: str) -> Plan:
    plan = plan_for(
        url, workload_of(arguments), arguments.seconds, arguments.warm_up, arguments.seed, arguments.max_context
    )
    return msgspec.structs.replace(plan, slo=arguments.slo)


# --- in simulation ---


def _by_simulation(arguments: argparse.Namespace, found: Found) -> Plan:
    plan = Plan(
        url="simulated",
        model=arguments.model,
        max_context=arguments.max_context or 8192,
        arrivals=Poisson(1.0),
        workload=workload_of(arguments),
        slo=arguments.slo,
        seconds=arguments.seconds,
        seed=arguments.seed,
        warm_up_s=arguments.warm_up,
        vocabulary=VOCABULARY,
    )
    profile = profile_of(arguments.costs) if arguments.costs is not None else gpu_kind(arguments.gpu, plan)
    for mode in arguments.modes:
        aggregated = arguments.prefill + arguments.decode  # a machine's worth each
        found.fleets[mode] = Fleet(mode, counts_of(mode, arguments.prefill, arguments.decode, aggregated), profile)
    return plan


def gpu_kind(gpu: str, plan: Plan) -> WorkerProfile:
    """A worker of one such GPU, as the planner knows it. Raises ConfigError for a GPU or model that it does not know,
    and where the model, or the longest request, has no room."""
    hardware, shape, terms = hardware_of(gpu), published_model(plan.model), Terms()
    workload = sample_of(msgspec.structs.replace(plan, seconds=1e9), "asked")
    fitting = [profile for profile in profiles_of(shape, hardware, ("auto",), workload, terms) if profile.ranks == 1]
    if not fitting:
        raise nowhere(shape, [hardware], workload, terms)
    return msgspec.structs.replace(fitting[0], source="the planner's roofline; no GPU has confirmed it")


def _simulate(arguments: argparse.Namespace, plan: Plan, found: Found, say: Callable[[str], None]) -> None:
    first = max(arguments.rates) if arguments.rates else 1.0
    for mode, fleet in found.fleets.items():
        for seed in range(SEEDS):
            asked = msgspec.structs.replace(plan, seed=plan.seed + seed)
            heard = partial(_of_try, say, f"{mode}, {seed + 1} of {SEEDS} seeds")
            found.simulated.setdefault(mode, []).append(simulated_capacity(asked, fleet, first, heard=heard))
            first = found.simulated[mode][-1] or first
        say(f"{mode}: simulated capacity {statistics.median(found.simulated[mode]):.3g} requests a second")
    if arguments.no_sweep or not found.fleets:
        return
    fleets = list(found.fleets.values())
    best = max(statistics.median(values) for values in found.simulated.values())
    if best > 0:
        found.rates = by_rate(plan, fleets, [best * share for share in SWEPT_SHARES], say)
        found.flips += flips_of("rate", found.rates)
    found.lengths = by_length(plan, fleets, mean_answer(plan), best or 1.0, say)
    found.flips += flips_of("prompt_tokens", found.lengths)


def _of_try(say: Callable[[str], None], what: str, rate: float, point: Point) -> None:
    say(f"{what}: {rate:.3g} requests a second: {point.attainment.value:.0%} in time")


def mean_answer(plan: Plan) -> int:
    """Tokens, of the workload's first requests."""
    asked = msgspec.structs.replace(plan, seconds=1e9)
    return round(statistics.fmean(one.turns[0].output_tokens for one in islice(sessions(asked), MEAN_OF)))


# --- pictures ---

SPLIT_WORKERS = 4
WATCHED_REQUESTS = 200


def _draw(arguments: argparse.Namespace, plan: Plan, found: Found, folder: Path, say: Callable[[str], None]) -> None:
    told = tell(found, is_measured=not _is_unmeasured(arguments))
    first = max((statistics.median(rates) for rates in found.simulated.values()), default=1.0) or 1.0
    plots = [report.capacities(told["modes"])]
    plots += [report.by_length(found.lengths)] if found.lengths else []
    plots += [report.by_rate(found.rates)] if found.rates else []
    shown = found.fleets.get("disaggregated") or next(iter(found.fleets.values()))
    workers = max(SPLIT_WORKERS, shown.counts.prefill + shown.counts.decode)
    say(f"pictures: every split of {workers} workers")
    split, aggregated = by_ratio(plan, shown.profile, workers, first)
    plots.append(report.by_ratio(split, aggregated))
    say("pictures: KV memory, cost by SLO")
    plots.append(report.memory(_watched(plan, shown, 0.8 * first)))
    price = 1.0 if arguments.usd_per_hour is None else arguments.usd_per_hour
    answer = mean_answer(plan)
    curves = {
        mode: [(scale, hours * price) for scale, hours in cost_by_slo(plan, fleet, answer, first)]
        for mode, fleet in found.fleets.items()
    }
    plots.append(report.cost(curves, plan.slo, "worker-hours" if arguments.usd_per_hour is None else "USD"))
    say(f"report: {report.write_page(folder, words_of(told), plots)}")


def _watched(plan: Plan, fleet: Fleet, rate: float) -> list[report.Memory]:
    seen: dict[str, list[tuple[float, float]]] = {}

    def watch(worker: str, at_s: float, held: float) -> None:
        if at_s >= 0:
            seen.setdefault(worker, []).append((at_s, held))

    asked = msgspec.structs.replace(at_rate(plan, rate), seconds=WATCHED_REQUESTS / rate, warm_up_s=0.0)
    simulated(asked, fleet, watch)
    return [
        report.Memory(worker, tuple(at_s for at_s, _ in samples), tuple(held for _, held in samples))
        for worker, samples in seen.items()
    ]


# --- the answer ---


def tell(found: Found, *, is_measured: bool) -> dict[str, Any]:
    """All that the last line says. `by` is how much more the best serves than the next, `uncertainty` how far that may
    be off: the larger of what measured intervals and what seeds and prediction errors leave open."""
    capacities: dict[str, dict[str, Any]] = {}
    values: dict[Mode, Estimate] = {}
    for mode in found.fleets:
        simulated_rates = found.simulated.get(mode, [])
        measured = measured_capacity(found.points.get(mode, ()))
        expected = statistics.median(simulated_rates) if simulated_rates else None
        capacities[mode] = {
            "measured_rps": None if measured is None else msgspec.to_builtins(measured),
            "simulated_rps": expected,
            "attainment": [[one.rate, one.attainment.value] for one in found.points.get(mode, ())],
        }
        if measured is not None:
            values[mode] = measured
        elif expected is not None:
            values[mode] = Estimate(expected, min(simulated_rates), max(simulated_rates))
    ranked = sorted(values, key=lambda mode: values[mode].value, reverse=True)
    off = _prediction_error(found)
    told: dict[str, Any] = {
        "best": None,
        "by": None,
        "uncertainty": None,
        "is_clear": False,
        "basis": "measurement and simulation" if is_measured and found.cells else "simulation alone",
        "target": TARGET,
        "modes": capacities,
        "flips": [msgspec.to_builtins(one) for one in found.flips],
        "agreement": summary_of(found.cells),
        "capacity_error": off,
        "by_prompt_tokens": found.lengths,
        "attainment_by_rate": found.rates,
        "failed": found.failed,
    }
    if len(ranked) < 2 or values[ranked[0]].value <= 0:
        return told
    best, second = values[ranked[0]], values[ranked[1]]
    by = best.value / second.value - 1 if second.value > 0 else None
    widths = [((one.high or one.value) - (one.low or 0.0)) / 2 / one.value for one in (best, second) if one.value > 0]
    uncertainty = max(*widths, off or 0.0)
    told |= {
        "best": ranked[0],
        "second": ranked[1],
        "by": by,
        "uncertainty": uncertainty,
        "is_clear": by is None or by > uncertainty,
    }
    return told


def _prediction_error(found: Found) -> float | None:
    """The median distance of simulated capacities from measured ones, where both are known."""
    errors = [
        abs(statistics.median(found.simulated[mode]) / measured.value - 1)
        for mode, points in found.points.items()
        if (measured := measured_capacity(points)) is not None and found.simulated.get(mode)
    ]
    return statistics.median(errors) if errors else None


def words_of(told: dict[str, Any]) -> list[str]:
    """The answer for people, its first line alone enough."""
    lines: list[str] = []
    best = told["best"]
    if best is None:
        lines.append("No answer: fewer than two modes could be judged, or none keeps the promise at any rate.")
    else:
        is_yes = best != "aggregated"
        by = "the others none" if told["by"] is None else f"{told['by']:.0%} more than {told['second']}"
        rate = _rate(told["modes"][best])
        clear = "" if told["is_clear"] else " That is less than what is uncertain: take it for a draw."
        lines.append(
            f"{'Yes' if is_yes else 'No'}: {best} keeps the promise for {rate:.3g} requests a second, {by}, "
            f"give or take {told['uncertainty']:.0%}.{clear}"
        )
    lines.append(f"By {told['basis']}.")
    modes = told["modes"]
    if unknown := [mode for mode, one in modes.items() if one["attainment"] and one["measured_rps"] is None]:
        around = max(modes[mode]["simulated_rps"] or modes[mode]["attainment"][-1][0] for mode in unknown)
        lines.append(
            f"The capacity of {', '.join(unknown)} is simulated: of the rates measured there all held, or none; "
            f"--rates around {around:.3g} would measure it."
        )
    for flip in told["flips"]:
        at = (
            f"{flip['at']:.0f} prompt tokens"
            if flip["what"] == "prompt_tokens"
            else f"{flip['at']:.3g} requests a second"
        )
        lines.append(f"From {at} on {flip['after']} is ahead of {flip['before']}.")
    if not told["flips"] and told["by_prompt_tokens"]:
        lines.append("It flips at none of the simulated prompt lengths and rates.")
    for name, off in told["agreement"].items():
        lines.append(f"{name}: simulation off by {off['median']:.0%} at the median, {off['most']:.0%} at most.")
    lines += [f"Left out, {name}: {why}" for name, why in told["failed"].items()]
    return lines


def _rate(mode: dict[str, Any]) -> float:
    measured = mode["measured_rps"]
    return float(measured["value"] if measured is not None else mode["simulated_rps"])
