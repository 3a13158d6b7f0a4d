"""`twostroke simulate`: a workload served by a fleet on virtual time, and reported as a load test is.

Progress goes to stderr; the last line on stdout is one JSON object. The same arguments give the same figures.
"""

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from twostroke.cluster.autoscaling.scaling_decision import PolicyMemory, decide
from twostroke.cluster.config.autoscaling import AutoscalingConfig
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.config.reading import load_yaml
from twostroke.cluster.local.processes import interrupt_once
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands.arguments import (
    above_zero,
    add_arrivals,
    add_workload,
    context_tokens,
    make_arrivals,
    make_workload,
    parse_slo,
    positive_count,
    seconds_left_out,
)
from twostroke.loadtests.commands.measure import parse_rates
from twostroke.loadtests.plan import SLO, Chat, Closed, Plan, Poisson
from twostroke.loadtests.report.figures import Observations, judged_rows, read_observations, summarise_observations
from twostroke.loadtests.run_folder import Record, RunFacts, RunFolder, make_folder, record_line, write_json
from twostroke.loadtests.workloads.sessions import sessions
from twostroke.planning.against import FIGURES, against
from twostroke.planning.baselines import compare_baselines
from twostroke.planning.coarse.fleet import DAY_S, CoarseFleet, day_rates, scaling_cost
from twostroke.planning.coarse.fleet import run as run_coarse
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import CoarseRequest
from twostroke.planning.commands.options import TierHits, add_tiers, tier_lines, tiers_as_json
from twostroke.planning.commands.plan import add_repeated, with_repeated
from twostroke.planning.costs.profiles import PROFILES, named_profile
from twostroke.planning.costs.tier_hits import PrefixHits
from twostroke.planning.exact import VOCABULARY, record_of, simulate_plan
from twostroke.planning.layouts import Layout, router_mode, router_settings
from twostroke.planning.workload import workload_sample
from twostroke.protocol.errors import ConfigError
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.simulator.deployment import WorkerCrash
from twostroke.worker.profile import BLOCK_TOKENS, CALL_S

EXACT_WORKERS, EXACT_REQUESTS = 16, 3_000
"""Up to so many, a run goes event by event unless the other way is asked for."""
MAX_WORKERS = 10_000
STARTUP_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument("--config", type=Path, metavar="FILE", help="whose replicas, SLO classes and autoscaling count")
    fleet.add_argument("--fleet", type=parse_fleet, metavar="prefill=N,decode=N", help="prefill=0: aggregated")
    fleet.add_argument(
        "--costs", default="160m-cpu", metavar="NAME|FILE", help=f"of `bench machine`, or {', '.join(PROFILES)}"
    )
    fleet.add_argument(
        "--kv-tokens", type=positive_count, metavar="N", help="of each worker's cache, whatever --costs says"
    )
    fleet.add_argument(
        "--against", metavar="URL", help="put the same on this running server, and say how far its simulation is off"
    )
    fleet.add_argument(
        "--learn", type=above_zero, default=20.0, metavar="S", help="of each of two learning loads there"
    )
    fleet.add_argument("--rates", type=parse_rates, metavar="RATE,...", help="of --against, instead of --rate")
    fleet.add_argument("--faults", type=Path, metavar="FILE", help="JSON: [{at_s, role, which}], workers that crash")
    fleet.add_argument("--startup", type=above_zero, default=STARTUP_S, metavar="S", help="of a worker that is added")
    arrivals = parser.add_argument_group("arrivals")
    add_arrivals(arrivals)
    arrivals.add_argument(
        "--day", metavar="FILE[:NAME]", help="a day's rates (t_s, rate_rps), scaled to a mean of --rate"
    )
    workload = parser.add_argument_group("workload")
    add_workload(workload)
    add_repeated(workload, "; --against measures it")
    add_tiers(workload)
    of_run = parser.add_argument_group("the run")
    of_run.add_argument("--requests", type=positive_count, metavar="N", help="end after so many")
    of_run.add_argument("--seconds", type=above_zero, metavar="S", help="of arrivals (default: 300, or as --requests)")
    of_run.add_argument(
        "--warm-up", type=seconds_left_out, default=0.0, metavar="S", help="warm-up at the beginning, not judged"
    )
    of_run.add_argument("--max-context", type=context_tokens, default=8192, metavar="TOKENS")
    of_run.add_argument("--slo", type=parse_slo, metavar="TIMES", help="ttft=S,tpot=S, or a preset of `loadtest`")
    of_run.add_argument("--seed", type=int, default=0)
    of_run.add_argument(
        "--events", choices=("auto", "exact", "coarse"), default="auto", help="docs/design/simulation.md"
    )
    of_run.add_argument("--baselines", action="store_true", help="the table of the literature's ways to batch, instead")
    of_run.add_argument("--report", type=Path, metavar="FOLDER", help="a load test's report of what was simulated")
    of_run.add_argument("--json", action="store_true", help="nothing but the last line")


def parse_fleet(text: str) -> dict[str, int]:
    """An argument's type."""
    try:
        counts = {name: int(count) for name, _, count in (part.partition("=") for part in text.split(","))}
    except ValueError:
        counts = {}
    if not {"decode"} <= counts.keys() <= {"prefill", "decode"} or counts["decode"] < 1 or min(counts.values()) < 0:
        raise argparse.ArgumentTypeError(f"{text}: write prefill=2,decode=2; decode is to be at least 1")
    if max(counts.values()) > MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text}: give at most {MAX_WORKERS} of a role")
    return counts


def run(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError for what can't be simulated."""
    began = time.perf_counter()
    if arguments.rates and arguments.against is None:
        raise ConfigError("--rates: are of --against; give one --rate")
    if arguments.against is not None and (arguments.tier or arguments.tier_hits):
        raise ConfigError("--tier: a running server has tiers of its own; leave --against or --tier away")
    try:
        report = _run(arguments) if arguments.against is None else _against(arguments)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error
    report["seconds"] = round(time.perf_counter() - began, 3)
    report["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(report))
    return 0


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = read_config(load_yaml(arguments.config)) if arguments.config is not None else ClusterConfig()
    profile = named_profile(arguments.costs)
    if arguments.kv_tokens is not None:
        if arguments.kv_tokens < BLOCK_TOKENS:
            raise ConfigError(f"--kv-tokens {arguments.kv_tokens}: less than a block of {BLOCK_TOKENS} tokens")
        profile = msgspec.structs.replace(profile, kv_tokens=arguments.kv_tokens)
    profile = with_repeated(profile, arguments)
    plan = _plan(arguments)
    hits: PrefixHits | None = None
    if (tiers := TierHits.of(arguments, plan)) is not None:
        profile, hits = tiers.apply(profile, workload_sample(plan, plan.name).mean_prompt)
    prefill, decode = _counts(arguments, config)
    layout = Layout(router_mode(prefill, config.router), profile, decode, profile if prefill else None, prefill)
    is_exact = _is_exact(arguments, config, plan, prefill + decode)
    if arguments.baselines:
        if profile.repeated:
            raise ConfigError("--repeated: the ways of --baselines draft no tokens; leave one of both away")
        if hits is not None:
            raise ConfigError("--tier: the ways of --baselines know no tiers; leave one of both away")
        return compare_baselines(
            list(_lengths(plan, arguments.requests)),
            profile,
            plan.slo,
            prefill + decode,
            _nothing if arguments.json else print,
        )
    say = ProgressLine(arguments)
    scaling: dict[str, float] = {}
    slo = _slo(config, plan.slo, is_asked=arguments.config is not None)
    if is_exact:
        records: Iterable[Record] = simulate_plan(
            plan,
            layout,
            slo=slo,
            most=arguments.requests,
            faults=_faults(arguments.faults),
            progress=say,
            queue=config.decode.queue,
        )
        observed = read_observations(records)
    else:
        if arguments.faults is not None:
            raise ConfigError("--faults: only runs with --events exact have workers that crash")
        coarse, scaling = _coarse(plan, layout, slo, config.autoscaling, arguments, say, moves=config.router.moves)
        observed = read_observations(_coarse_records(coarse))
        records = _coarse_records(coarse) if arguments.report is not None else ()
    if plan.warm_up_s > (last_s := float(observed.scheduled_s.max())):
        raise ConfigError(
            f"--warm-up {plan.warm_up_s:g}: the last request comes after {last_s:.3g} s, so none is judged"
        )
    # With --requests arrivals end with the last of them, whenever that is.
    plan = msgspec.structs.replace(plan, seconds=min(plan.seconds, last_s + 1e-6))
    if arguments.report is not None:
        _report(arguments.report, plan, records)
    told = _told(plan, observed, prefill + decode, is_exact=is_exact, quiet=arguments.json) | scaling
    if hits is not None:
        for line in () if arguments.json else tier_lines(hits):
            print(line)
        told["prefix_hits"] = tiers_as_json(hits)
    return told


def _against(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = arguments.report or Path(f"against-{datetime.now():%Y%m%d-%H%M%S}")
    config = read_config(load_yaml(arguments.config)) if arguments.config is not None else ClusterConfig()
    make_folder(folder)
    interrupt_once()
    cells = against(
        arguments.against,
        (Path(arguments.workload).stem, make_workload(arguments)),
        arguments.rates or [_rate(arguments)],
        folder,
        _nothing if arguments.json else print,
        seconds=arguments.seconds or 30.0,
        learn_s=arguments.learn,
        seed=arguments.seed,
        longest=arguments.max_context,
        router=config.router,
    )
    near = {name: sum(name in cell.near for cell in cells) for name in FIGURES}
    return {"folder": str(folder), "cells": [msgspec.to_builtins(one) for one in cells], "near": near}


def _rate(arguments: argparse.Namespace) -> float:
    arrivals = make_arrivals(arguments)
    if not isinstance(arrivals, Poisson):
        raise ConfigError("--against: its arrivals are Poisson's: leave --arrivals away, and give --rate or --rates")
    return arrivals.rate


def _plan(arguments: argparse.Namespace) -> Plan:
    arrivals = make_arrivals(arguments)
    seconds = arguments.seconds
    if arguments.day is not None:
        if not isinstance(arrivals, Poisson):
            raise ConfigError("--day says itself when requests arrive: leave --arrivals away, and give --rate")
        arrivals = day_rates(arguments.day, arrivals.rate)
        seconds = DAY_S if seconds is None else seconds
    if seconds is None:
        seconds = 300.0
        if arguments.requests is not None:  # enough for them all, however bursts fall
            seconds = 1e9 if arguments.arrivals != "ramp" else seconds
    return Plan(
        url="simulated",
        model=arguments.costs,
        max_context=arguments.max_context,
        arrivals=arrivals,
        workload=make_workload(arguments),
        slo=arguments.slo or SLO(),
        seconds=seconds,
        name=Path(arguments.workload).stem,
        seed=arguments.seed,
        warm_up_s=arguments.warm_up,
        vocabulary=VOCABULARY,
    )


def _counts(arguments: argparse.Namespace, config: ClusterConfig) -> tuple[int, int]:
    if arguments.fleet is not None:
        return arguments.fleet.get("prefill", 0), arguments.fleet["decode"]
    return config.counts["prefill"].first, config.counts["decode"].first


def _is_exact(arguments: argparse.Namespace, config: ClusterConfig, plan: Plan, workers: int) -> bool:
    if arguments.tier or arguments.tier_hits:
        if arguments.events == "exact" or arguments.faults is not None or _times_follow_answers(plan):
            raise ConfigError(
                "--tier: its shares are of --events coarse, which has no --faults, --arrivals closed and --workload "
                "chat: leave one of both away"
            )
        return False
    if _times_follow_answers(plan):
        if arguments.events == "coarse" or arguments.baselines or config.autoscaling.enabled:
            what = "--arrivals closed" if isinstance(plan.arrivals, Closed) else "--workload chat"
            raise ConfigError(
                f"{what}: its times follow from the answers, which only --events exact simulates, without --baselines "
                "and autoscaling"
            )
        return True
    if arguments.events != "auto":
        return bool(arguments.events == "exact")
    rate = getattr(plan.arrivals, "rate", 0.0)
    requests = arguments.requests or rate * plan.seconds
    is_small = workers <= EXACT_WORKERS and 0 < requests <= EXACT_REQUESTS and not config.autoscaling.enabled
    return is_small or arguments.faults is not None


def _times_follow_answers(plan: Plan) -> bool:
    return isinstance(plan.arrivals, Closed) or isinstance(plan.workload, Chat)


def _slo(config: ClusterConfig, slo: SLO, *, is_asked: bool) -> SLOConfig:
    """The file's classes; without a file the times of --slo are promised to all, and nobody is refused."""
    if is_asked or slo == SLO():
        return config.slo
    return SLOConfig(classes=(SLOClass(name="standard", ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),), admission=False)


class ProgressLine:
    """A line on stderr, some times a second at most."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._total = arguments.requests
        self._began = self._last = time.monotonic()
        self._is_shown = sys.stderr.isatty() or not arguments.json

    def __call__(self, ended: int) -> None:
        now = time.monotonic()
        if self._is_shown and now - self._last >= 2.0:
            self._last = now
            of = "" if self._total is None else f" of {self._total:,}"
            print(f"{ended:,}{of} requests answered after {now - self._began:.0f} s", file=sys.stderr, flush=True)


def _lengths(plan: Plan, most: int | None) -> Iterator[tuple[float, int, int, str]]:
    """Yield each request's arrival, prompt tokens, answer tokens and kind."""
    for number, session in enumerate(sessions(plan)):
        if number == most:
            return
        turn = session.turns[0]
        yield session.at_s, sum(piece.tokens for piece in turn.prompt), turn.output_tokens, turn.kind


def _nothing(line: str) -> None:
    """Print nothing, where only the last line is wanted."""


def _faults(path: Path | None) -> Sequence[WorkerCrash]:
    if path is None:
        return ()
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[WorkerCrash, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--faults {path}: {error}") from error


# --- many workers ---


def _coarse(
    plan: Plan,
    layout: Layout,
    slo: SLOConfig,
    autoscaling: AutoscalingConfig,
    arguments: argparse.Namespace,
    progress: Callable[[int], None],
    *,
    moves: bool,
) -> tuple[list[CoarseRequest], dict[str, float]]:
    requests = [CoarseRequest(*one[:3]) for one in _lengths(plan, arguments.requests)]
    if not requests:
        raise ConfigError("no request comes in that time")
    longest = max(one.prompt_tokens + one.output_tokens for one in requests)
    profile = layout.decode
    if longest > profile.kv_tokens:
        raise ConfigError(
            f"a request of {longest:,} tokens has no room in a worker's {profile.kv_tokens:,} (--kv-tokens)"
        )
    one = slo.default_class
    router = SimulatedRouter(slo, **router_settings(layout.mode), moves=moves)
    fleet = CoarseFleet(layout.decode, arguments.startup, one.ttft_s or math.inf, one.tpot_s or math.inf, router=router)
    counts = layout.num_prefill, layout.num_decode
    memory = PolicyMemory()

    def scaler(fleet: CoarseFleet) -> tuple[int, int]:
        nonlocal memory
        if not autoscaling.enabled:
            return counts
        decision, memory = decide(fleet.signals(), memory, autoscaling)
        return decision.prefill, decision.decode

    look_s = autoscaling.interval_s if autoscaling.enabled else 1.0
    ends_s = requests[-1].at_s
    run_coarse(fleet, requests, scaler, counts, ends_s, look_s, progress)
    return requests, scaling_cost(fleet, counts, ends_s)


def _coarse_records(requests: Sequence[CoarseRequest]) -> Iterator[Record]:
    """Yield records that have each answer's first and last token alone."""
    for number, one in enumerate(requests):
        token_s = None if one.is_refused else (one.first_s + CALL_S, one.last_s + CALL_S)
        yield record_of(number, one.at_s, one.prompt_tokens, one.output_tokens, token_s)


# --- what came of it ---


def _facts(workers: int) -> RunFacts:
    return RunFacts(started_at="", server={"simulated_workers": workers}, machine={}, versions={})


def _report(folder: Path, plan: Plan, records: Iterable[Record]) -> None:
    from twostroke.loadtests.report.pages import write_report

    make_folder(folder)
    of_run = RunFolder(folder)
    write_json(of_run.plan_path, plan)
    write_json(of_run.facts_path, _facts(0))
    with of_run.records_path(0).open("wb") as file:
        for record in records:
            file.write(record_line(record))
    write_report(of_run)


def _told(plan: Plan, observed: Observations, workers: int, *, is_exact: bool, quiet: bool) -> dict[str, Any]:
    facts = _facts(workers)
    summary = summarise_observations(plan, facts, observed, ())
    report: dict[str, Any] = {
        "workers": workers,
        "requests": int(judged_rows(plan, facts, observed).sum()),
        "events": "exact" if is_exact else "coarse",
        "attainment": None if summary.attainment is None else summary.attainment.value,
        "refused": summary.counts.refused,
    }
    for name, spread in (("ttft", summary.ttft), ("tpot", summary.tpot)):
        report[f"{name}_p50_s"] = None if spread is None else spread.p50.value
        report[f"{name}_p90_s"] = None if spread is None else spread.p90
        report[f"{name}_p99_s"] = None if spread is None else spread.p99.value
        if not quiet and spread is not None:
            p50, p90, p99 = spread.p50.value, spread.p90, spread.p99.value
            print(f"{name.upper()}: P50 {p50:.4g} s, P90 {p90:.4g} s, P99 {p99:.4g} s")
    if not quiet:
        print(f"output: {summary.output_rate.value:.1f} tokens a second; refused: {summary.counts.refused}")
    return report
