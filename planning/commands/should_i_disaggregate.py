"""`twostroke should-i-disaggregate`: one answer for one machine, one workload and one SLO, and how sure it is.

On this machine each mode is served in turn and its capacity measured (planning/against.py), and the same is simulated.
For hardware that is not there (`--costs`, `--gpu`) simulation answers alone. What fails is said, and left out.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import msgspec

from twostroke.cluster.config.reading import load_yaml
from twostroke.cluster.local.processes import interrupt_once
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands.arguments import (
    above_zero,
    add_workload,
    context_tokens,
    make_workload,
    parse_slo,
    positive_count,
    seconds_left_out,
)
from twostroke.loadtests.commands.measure import parse_rates
from twostroke.loadtests.plan import SLO, Chat, Plan, Poisson
from twostroke.loadtests.plan import Workload as SentWorkload
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.run_folder import make_folder
from twostroke.model.published.hardware import known_hardware
from twostroke.model.published.models import published_model
from twostroke.planning import report
from twostroke.planning.against import TARGET, Candidate, Measured, capacity_by_simulation, measure, plan_for, say
from twostroke.planning.commands.plan import add_repeated, with_repeated
from twostroke.planning.costs.profiles import PROFILES, among_busy, named_profile
from twostroke.planning.layouts import TRIED_MODES, Layout, Mode
from twostroke.planning.search import PlanConstraints, nowhere, profiles_of
from twostroke.planning.trials import attained_shares
from twostroke.planning.workload import SLOTargets, Workload, workload_sample
from twostroke.protocol.errors import ConfigError
from twostroke.worker.profile import WorkerProfile

INTERRUPTED_EXIT = 130
SEEDS = 2  # of simulated capacities: their spread is part of the uncertainty
SWEPT_SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the best capacity
LENGTHS = (64, 256, 1024, 4096, 16384)  # of prompts, up to the context
LEAD = 0.02  # of a capacity or attainment, without which no other mode is ahead
UNBOUNDED_S = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    here = parser.add_argument_group("the server", "Started on this machine, unless --costs or --gpu is given.")
    here.add_argument("--model", default="bundled", metavar="DIR|ID", help="as `serve` takes it (default: bundled)")
    here.add_argument("--prefill", type=positive_count, default=1, metavar="N", help="workers, where there are any")
    here.add_argument("--decode", type=positive_count, default=1, metavar="N", help="workers beside those")
    here.add_argument("--aggregated", type=positive_count, default=1, metavar="N", help="workers in the place of both")
    here.add_argument("--learn", type=above_zero, default=20.0, metavar="S", help="of each of two learning loads")
    server = parser.add_argument_group("in place of a server: simulation alone")
    server.add_argument("--config", type=Path, metavar="FILE", help="of the server; its replicas don't count")
    server.add_argument("--costs", metavar="NAME|FILE", help=f"of `bench machine`, or {', '.join(PROFILES)}")
    server.add_argument("--gpu", metavar="NAME", help="of the planner's table, with a --model that it knows by name")
    workload = parser.add_argument_group("workload")
    add_workload(workload)
    add_repeated(workload, "; with a server it is measured")
    of_run = parser.add_argument_group("the runs")
    of_run.add_argument(
        "--slo", type=parse_slo, metavar="TIMES", help="ttft=S,tpot=S, or a preset of `loadtest`; needed"
    )
    of_run.add_argument(
        "--modes",
        nargs="+",
        choices=get_args(Mode),
        default=TRIED_MODES,
        help="fixed: as hybrid, but prefill workers write no answers (default: the others)",
    )
    of_run.add_argument("--rates", type=parse_rates, metavar="RATE,...", help="measured alone (default: a search)")
    of_run.add_argument("--seconds", type=above_zero, default=30.0, metavar="S", help="of a run, with the warm-up")
    of_run.add_argument(
        "--warm-up", type=seconds_left_out, default=3.0, metavar="S", help="warm-up at the beginning, not judged"
    )
    of_run.add_argument("--budget", type=above_zero, default=900.0, metavar="S", help="for a mode's runs together")
    of_run.add_argument("--max-context", type=context_tokens, metavar="TOKENS", help="longer requests are rescaled")
    of_run.add_argument("--seed", type=int, default=0)
    of_run.add_argument("--no-sweep", action="store_true", help="don't look for where the answer flips")
    of_run.add_argument("--report", action="store_true", help="pictures, and one HTML file; more is simulated for it")
    of_run.add_argument("--usd-per-hour", type=above_zero, metavar="USD", help="of a worker, for --report")
    of_run.add_argument("--output", type=Path, metavar="DIR", help="default: verdict-<time>")
    of_run.add_argument("--json", action="store_true", help="nothing but the last line")


@dataclass
class Found:
    """Everything known so far, by mode in the order of measurement; rates are requests a second."""

    sample: Workload
    promise: SLOTargets
    layouts: dict[Mode, Layout] = field(default_factory=dict)
    measured: dict[Mode, Measured] = field(default_factory=dict)
    simulated: dict[Mode, list[float]] = field(default_factory=dict)  # capacities, by seed
    failed: dict[str, str] = field(default_factory=dict)
    flips: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[tuple[float, dict[Mode, float]]] = field(default_factory=list)
    rates: list[tuple[float, dict[Mode, float]]] = field(default_factory=list)

    def capacity(self, mode: Mode, sample: Workload, first: float, seed: int = 0) -> float:
        return capacity_by_simulation(self.layouts[mode], sample, self.promise, first, seed)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, 1 where no answer can be given, 130 after Ctrl-C. Raises ConfigError for what can't be asked."""
    sent = check(arguments)
    interrupt_once()
    folder: Path = arguments.output or Path(f"verdict-{datetime.now():%Y%m%d-%H%M%S}")
    tell_people: Callable[[str], None] = _silent if arguments.json else say
    try:
        make_folder(folder)
        plan = _plan(arguments, sent)
        sample = workload_sample(msgspec.structs.replace(plan, seconds=1e9), Path(arguments.workload).stem)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error
    found = Found(sample, SLOTargets(plan.slo.ttft_s or UNBOUNDED_S, plan.slo.tpot_s or UNBOUNDED_S))
    exit_code = 0
    try:
        if is_unmeasured(arguments):
            _by_profile(arguments, found)
        else:
            _measure(arguments, plan, folder, found, tell_people)
        _simulate(arguments, found, tell_people)
    except KeyboardInterrupt:
        found.failed["the rest"] = "it was interrupted"
        exit_code = INTERRUPTED_EXIT
    verdict = tell(found)
    if arguments.report and found.layouts and exit_code == 0:
        _draw(arguments, plan.slo, found, verdict, folder, tell_people)
    (folder / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n")
    if not arguments.json:
        print("\n".join(verdict_words(verdict)))
    print(json.dumps({"folder": str(folder), **verdict}))
    return exit_code or (0 if verdict["best"] is not None else 1)


def check(arguments: argparse.Namespace) -> SentWorkload:
    """Return the workload. Raises ConfigError for what does not belong together."""
    if arguments.slo is None:
        raise ConfigError("--slo: the answer depends on what is promised; give, for example, --slo ttft=1,tpot=0.1")
    if arguments.costs is not None and arguments.gpu is not None:
        raise ConfigError("--costs and --gpu both say what workers are like: give one of them")
    if is_unmeasured(arguments) and arguments.config is not None:
        raise ConfigError("--config is of a server that is started, and --costs or --gpu starts none: leave one away")
    if not is_unmeasured(arguments) and arguments.repeated is not None:
        raise ConfigError("--repeated: is measured where a server is started; give it with --costs or --gpu")
    if not 0 <= arguments.warm_up < arguments.seconds:
        raise ConfigError(f"--warm-up {arguments.warm_up:g}: is part of --seconds {arguments.seconds:g}; give less")
    if len(set(arguments.modes)) < 2:
        raise ConfigError("--modes: name two or more, or there is nothing to choose from")
    try:
        sent = make_workload(arguments)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error
    if isinstance(sent, Chat):
        raise ConfigError("--workload chat: its sessions have no rate of requests; give another, or a trace's file")
    return sent


def is_unmeasured(arguments: argparse.Namespace) -> bool:
    return arguments.costs is not None or arguments.gpu is not None


def _silent(line: str) -> None:
    """Say nothing: --json wants the last line alone."""


def _plan(arguments: argparse.Namespace, sent: SentWorkload) -> Plan:
    return Plan(
        url="simulated",
        model=arguments.model,
        max_context=arguments.max_context or 8192,
        arrivals=Poisson(1.0),
        workload=sent,
        slo=arguments.slo,
        seconds=arguments.seconds,
        seed=arguments.seed,
        warm_up_s=arguments.warm_up,
    )


# --- on this machine ---


def _measure(arguments: argparse.Namespace, plan: Plan, folder: Path, found: Found, say: Callable[[str], None]) -> None:
    """Measure each mode in turn; a mode that fails is left out."""
    settings: dict[str, Any] = {"model": {"path": arguments.model}}
    if arguments.config is not None:
        settings = dict(load_yaml(arguments.config))

    def make_plan(url: str) -> Plan:
        of_server = plan_for(url, plan.workload, plan.seconds, plan.seed, arguments.max_context)
        return msgspec.structs.replace(of_server, slo=plan.slo, warm_up_s=plan.warm_up_s)

    for mode in arguments.modes:
        candidate = mode_candidate(mode, arguments, arguments.aggregated)
        try:
            found.measured[mode] = measured = measure(
                *(candidate, settings, make_plan, found.sample, folder / mode, say),
                learn_s=arguments.learn,
                budget_s=arguments.budget,
                rates=arguments.rates,
            )
            found.layouts[mode] = candidate.layout(measured.profiles)
        except (ConfigError, LoadTestError, OSError) as error:
            found.failed[mode] = str(error).splitlines()[0]
            say(f"{mode} is given up: {error}")


def mode_candidate(mode: Mode, arguments: argparse.Namespace, aggregated: int) -> Candidate:
    """Return the workers of a mode, where so many take the place of both roles."""
    if mode == "aggregated":
        return Candidate(mode, mode, 0, aggregated)
    return Candidate(mode, mode, arguments.prefill, arguments.decode)


# --- in simulation ---


def _by_profile(arguments: argparse.Namespace, found: Found) -> None:
    """Give every mode as many machines, with a worker each."""
    if arguments.costs is not None:
        profile = among_busy(named_profile(arguments.costs))
    else:
        profile = gpu_profile(arguments.gpu, arguments.model, found.sample)
    profile = with_repeated(profile, arguments)
    for mode in arguments.modes:
        candidate = mode_candidate(mode, arguments, arguments.prefill + arguments.decode)
        found.layouts[mode] = candidate.layout({"prefill": profile, "decode": profile})


def gpu_profile(gpu: str, model: str, sample: Workload) -> WorkerProfile:
    """Return a worker of one such GPU, by its roofline. Raises ConfigError for an unknown GPU or model, and where the
    model, or the longest request, has no room."""
    hardware, shape, terms = known_hardware(gpu), published_model(model), PlanConstraints()
    fitting = [one for one in profiles_of(shape, hardware, ("auto",), sample, terms) if one.ranks == 1]
    if not fitting:
        raise nowhere(shape, [hardware], sample, terms)
    return fitting[0]


def _simulate(arguments: argparse.Namespace, found: Found, say: Callable[[str], None]) -> None:
    first = 1.0
    for mode in found.layouts:
        found.simulated[mode] = [found.capacity(mode, found.sample, first, seed) for seed in range(SEEDS)]
        first = found.simulated[mode][-1] or first
        say(f"{mode}: simulated capacity {statistics.median(found.simulated[mode]):.3g} requests a second")
    if arguments.no_sweep or not found.layouts:
        return
    best = max(statistics.median(values) for values in found.simulated.values())
    for rate in (best * share for share in SWEPT_SHARES if best > 0):
        met = {
            mode: attained_shares(one, found.sample, found.promise, rate).both for mode, one in found.layouts.items()
        }
        found.rates.append((rate, met))
        say(f"{rate:.3g}/s: " + ", ".join(f"{mode} {value:.0%} met" for mode, value in met.items()))
    first = best or 1.0
    for tokens in LENGTHS:
        answer = max(1, round(found.sample.mean_answer))
        if tokens + answer > (arguments.max_context or 8192):
            break
        alike = Workload(f"prompts of {tokens}", ((tokens, answer),))
        rates = {mode: found.capacity(mode, alike, first) for mode in found.layouts}
        found.lengths.append((float(tokens), rates))
        say(f"{alike.name}: " + ", ".join(f"{mode} {rate:.3g}/s" for mode, rate in rates.items()))
        first = max(rates.values()) or first
    found.flips = [*find_flips("rate", found.rates), *find_flips("prompt_tokens", found.lengths)]


def find_flips(what: str, swept: Sequence[tuple[float, Mapping[Mode, float]]]) -> list[dict[str, Any]]:
    """Return where the best mode changes along a sweep: from `at` on `after` is ahead of `before`."""
    flips: list[dict[str, Any]] = []
    leader: Mode | None = None
    for at, values in swept:
        best = max(values, key=lambda mode: values[mode])
        if values[best] <= 0:
            continue
        if leader is None:
            leader = best
        elif best != leader and values[best] > values[leader] * (1 + LEAD):
            flips.append({"what": what, "at": at, "before": leader, "after": best})
            leader = best
    return flips


# --- pictures ---

SPLIT_WORKERS = 4
WATCHED_SHARE = 0.8  # of the capacity, at which KV memory is drawn
SLO_SCALES = (4.0, 2.0, 1.0, 0.5)  # the laxest first: its capacity bounds the others


def _draw(
    arguments: argparse.Namespace,
    slo: SLO,
    found: Found,
    verdict: dict[str, Any],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    first = max((statistics.median(rates) for rates in found.simulated.values()), default=1.0) or 1.0
    shown = found.layouts.get("disaggregated") or next(iter(found.layouts.values()))
    workers = max(SPLIT_WORKERS, shown.num_prefill + shown.num_decode)
    say(f"pictures: every split of {workers} workers")

    def capacity(layout: Layout, promise: SLOTargets = found.promise) -> float:
        return capacity_by_simulation(layout, found.sample, promise, first)

    splits = [
        Layout("disaggregated", shown.decode, workers - prefill, shown.prefill or shown.decode, prefill)
        for prefill in range(1, workers)
    ]
    split = [(one.num_prefill, one.num_decode, capacity(one)) for one in splits]
    say("pictures: KV memory, cost by SLO")
    unit, price = ("worker-hours", 1.0) if arguments.usd_per_hour is None else ("USD", arguments.usd_per_hour)
    curves: dict[Mode, list[tuple[float, float]]] = {}
    for mode, layout in found.layouts.items():
        for scale in SLO_SCALES:
            promise = replace(found.promise, ttft_s=found.promise.ttft_s * scale, tpot_s=found.promise.tpot_s * scale)
            rate, hourly = capacity(layout, promise), price * (layout.num_prefill + layout.num_decode)
            if rate > 0:
                cost = hourly / (rate * found.sample.mean_answer * 3600.0) * 1e6
                curves.setdefault(mode, []).append((scale, cost))
    plots = [
        report.capacities(verdict["modes"]),
        *([report.by_length(found.lengths)] if found.lengths else []),
        *([report.by_rate(found.rates)] if found.rates else []),
        report.by_ratio(split, capacity(Layout("aggregated", shown.decode, workers))),
        report.memory(shown, found.sample, found.promise, WATCHED_SHARE * first),
        report.cost({mode: sorted(points) for mode, points in curves.items()}, slo, unit),
    ]
    say(f"report: {report.write_page(folder, verdict_words(verdict), plots)}")


# --- the answer ---


def tell(found: Found) -> dict[str, Any]:
    """Return all that the last line says. `by` is how much more the best serves than the next, `uncertainty` how far
    that may be off: by what measured intervals, seeds and errors of the simulation leave open."""
    modes: dict[str, dict[str, Any]] = {}
    values: dict[Mode, Estimate] = {}
    errors: list[float] = []
    for mode in found.layouts:
        rates = found.simulated.get(mode, [])
        sweep = found.measured.get(mode)
        capacity = None if sweep is None else sweep.capacity
        expected = statistics.median(rates) if rates else None
        points = () if sweep is None else sweep.sweep.points
        modes[mode] = {
            "measured_rps": None if capacity is None else msgspec.to_builtins(capacity),
            "simulated_rps": expected,
            "attainment": [[one.rate, one.attainment] for one in points],
        }
        if capacity is not None:
            values[mode] = capacity
            errors += [] if expected is None else [abs(expected / capacity.value - 1)]
        elif expected is not None:
            values[mode] = Estimate(expected, min(rates), max(rates))
    ranked = sorted(values, key=lambda mode: values[mode].value, reverse=True)
    off = statistics.median(errors) if errors else None
    verdict: dict[str, Any] = {
        "best": None,
        "by": None,
        "uncertainty": None,
        "is_clear": False,
        "basis": "measurement and simulation" if found.measured else "simulation alone",
        "target": TARGET,
        "modes": modes,
        "flips": found.flips,
        "capacity_error": off,
        "by_prompt_tokens": found.lengths,
        "attainment_by_rate": found.rates,
        "failed": found.failed,
    }
    if len(ranked) < 2 or values[ranked[0]].value <= 0:
        return verdict
    best, second = values[ranked[0]], values[ranked[1]]
    by = best.value / second.value - 1 if second.value > 0 else None
    widths = [
        ((one.high or one.value) - (one.low or one.value)) / 2 / one.value for one in (best, second) if one.value > 0
    ]
    uncertainty = max(*widths, off or 0.0, 0.0)
    is_clear = by is None or by > uncertainty
    return verdict | {
        "best": ranked[0],
        "second": ranked[1],
        "by": by,
        "uncertainty": uncertainty,
        "is_clear": is_clear,
    }


def verdict_words(verdict: dict[str, Any]) -> list[str]:
    """The answer for people, its first line alone enough."""
    lines: list[str] = []
    best = verdict["best"]
    if best is None:
        lines.append("No answer: fewer than two modes could be judged, or none keeps the promise at any rate.")
    else:
        is_yes = best != "aggregated"
        by = "the others none" if verdict["by"] is None else f"{verdict['by']:.0%} more than {verdict['second']}"
        rate = _rate(verdict["modes"][best])
        clear = "" if verdict["is_clear"] else " That is less than what is uncertain: take it for a draw."
        lines.append(
            f"{'Yes' if is_yes else 'No'}: {best} keeps the promise for {rate:.3g} requests a second, {by}, "
            f"give or take {verdict['uncertainty']:.0%}.{clear}"
        )
    lines.append(f"By {verdict['basis']}.")
    modes = verdict["modes"]
    if unknown := [mode for mode, one in modes.items() if one["attainment"] and one["measured_rps"] is None]:
        around = max(modes[mode]["simulated_rps"] or modes[mode]["attainment"][-1][0] for mode in unknown)
        lines.append(
            f"The capacity of {', '.join(unknown)} is simulated: of the rates measured there all held, or none; "
            f"--rates around {around:.3g} would measure it."
        )
    for flip in verdict["flips"]:
        at = (
            f"{flip['at']:.0f} prompt tokens"
            if flip["what"] == "prompt_tokens"
            else f"{flip['at']:.3g} requests a second"
        )
        lines.append(f"From {at} on {flip['after']} is ahead of {flip['before']}.")
    if not verdict["flips"] and verdict["by_prompt_tokens"]:
        lines.append("It flips at none of the simulated prompt lengths and rates.")
    lines += [f"Left out, {name}: {why}" for name, why in verdict["failed"].items()]
    return lines


def _rate(mode: dict[str, Any]) -> float:
    measured = mode["measured_rps"]
    return float(measured["value"] if measured is not None else mode["simulated_rps"])
