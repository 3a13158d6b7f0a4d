"""`twostroke bench overload`: what becomes of promises, of the rest and of the server at five times its capacity.

A first server without promises tells what a request takes by itself, and how many the machine can do at once. From that
come the SLOs of two classes, as multiples. A second server has these classes; its capacity is the highest rate of which
nine requests out of ten get what they are promised. It is then offered once and five times that.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from twostroke.benchmarks.clients import exact_records, medians_alone, plan_at, send_whole, spread
from twostroke.benchmarks.console import add_load_arguments, conclude, positive
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.server_process import config_file, twostroke_server
from twostroke.loadtests.capacity import SearchRange, SweepPoint, bracket, next_rate
from twostroke.loadtests.generator.alone import send
from twostroke.loadtests.generator.live import met as met_slo
from twostroke.loadtests.plan import SLO, Closed, Fixed, Plan, Poisson
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.run_folder import Record
from twostroke.router.slo.classes import SLOClass

INTERACTIVE, BATCH = "interactive", "batch"
PARTS = {INTERACTIVE: 0.3, BATCH: 0.7}
SHARES = {INTERACTIVE: 0.3, BATCH: 0.1}
BATCH_IS_LOOSER = 4
LEAST_TTFT_S, LEAST_TPOT_S = 0.1, 0.005  # shorter ones would be a matter of the machine's other processes

OVERLOAD = 5.0
ALONE_REQUESTS = 20
CLOSED_LOOP_CLIENTS = 32
LEAST, FACTOR, PRECISION = 0.4, 1.3, 0.1  # of the search for the capacity; the first of what the closed loop did
ATTAINMENT = 0.9
CALM = 0.5  # of capacity, while the server recovers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=positive, default=60, help="of load at each rate (default: %(default)s)")
    parser.add_argument("--step-seconds", type=positive, default=12, help="of each step (default: %(default)s)")
    parser.add_argument(
        "--ttft-multiple", type=positive, default=10, help="of a first token's time alone (default: %(default)s)"
    )
    parser.add_argument(
        "--tpot-multiple", type=positive, default=5, help="of the time between tokens alone (default: %(default)s)"
    )
    add_load_arguments(parser, prompt_tokens=1024, max_tokens=64)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, or 1 where a criterion is missed. Raises ConfigError, ServerFailed."""
    lengths = Fixed(arguments.prompt_tokens, arguments.max_tokens)
    with twostroke_server(arguments.serve) as server:
        send_whole(plan_at(server.url, Closed(CLOSED_LOOP_CLIENTS, requests=CLOSED_LOOP_CLIENTS), lengths, seed=2))
        ttft_s, tpot_s = medians_alone(server.url, lengths, ALONE_REQUESTS)
        sent = send(plan_at(server.url, Closed(CLOSED_LOOP_CLIENTS), lengths, arguments.step_seconds, seed=3))
        peak = sum(record.status == "ok" for record in sent.records) / sent.wall_s
    classes = classes_for(ttft_s * arguments.ttft_multiple, tpot_s * arguments.tpot_multiple)
    print(f"alone: TTFT {ttft_s * 1e3:.1f} ms, TPOT {tpot_s * 1e3:.2f} ms; {CLOSED_LOOP_CLIENTS} clients: {peak:.1f}/s")
    for one in classes.values():
        print(f"class {one.name}: TTFT {(one.ttft_s or 0) * 1e3:.0f} ms, TPOT {(one.tpot_s or 0) * 1e3:.1f} ms")
    with (
        config_file(settings_of(classes)) as path,
        twostroke_server([*arguments.serve, "--config", path]) as server,
    ):
        plan = plan_at(server.url, Poisson(1.0), msgspec.structs.replace(lengths, tiers=PARTS), arguments.seconds)
        figures = measure(plan, classes, peak, arguments.step_seconds)
    conclude(figures)
    holds = (
        figures["only_200_and_429"]
        and figures["workers_unchanged"]
        and max(figures["ttft_p99_over_slo"], figures["tpot_p99_over_slo"]) <= 1.5
        and figures["goodput_ratio"] >= 0.9
        and figures["recovery_s"] <= 10
    )
    return 0 if holds else 1


def classes_for(ttft_s: float, tpot_s: float) -> dict[str, SLOClass]:
    """An interactive class with these times, and a batch class that has more of both."""
    ttft_s, tpot_s = max(ttft_s, LEAST_TTFT_S), max(tpot_s, LEAST_TPOT_S)
    return {
        INTERACTIVE: SLOClass(name=INTERACTIVE, ttft_s=ttft_s, tpot_s=tpot_s, priority=10, share=SHARES[INTERACTIVE]),
        BATCH: SLOClass(
            name=BATCH, ttft_s=ttft_s * BATCH_IS_LOOSER, tpot_s=tpot_s * BATCH_IS_LOOSER, share=SHARES[BATCH]
        ),
    }


def settings_of(classes: dict[str, SLOClass]) -> dict[str, Any]:
    """Return the section of a server's configuration that has them."""
    return {"slo": {"classes": [one.model_dump() for one in classes.values()], "default": BATCH}}


def measure(plan: Plan, classes: dict[str, SLOClass], peak: float, step_seconds: float) -> dict[str, Any]:
    """Return the figures of a server with these classes."""
    load_s, recovery_s = plan.seconds, max(15.0, plan.seconds / 3)

    def at(rate: float, seconds: float, seed: int) -> list[Record]:
        return exact_records(send(msgspec.structs.replace(plan, arrivals=Poisson(rate), seconds=seconds, seed=seed)))

    at(0.2 * peak, 5.0, seed=2)  # so that the workers know what steps cost
    capacity = find_capacity(lambda rate, seed: at(rate, step_seconds, seed), classes, peak)
    workers = _epochs(plan.url)
    usual = at(capacity, load_s, seed=3)
    overload = at(OVERLOAD * capacity, load_s, seed=4)
    calm = at(CALM * capacity, recovery_s, seed=5)
    for title, outcomes, seconds in (
        ("1x", usual, load_s),
        (f"{OVERLOAD:g}x", overload, load_s),
        ("after", calm, recovery_s),
    ):
        _show(title, outcomes, classes, seconds)
    goodput = [sum(has_met(one, classes) for one in outcomes) / load_s for outcomes in (usual, overload)]
    return {
        "only_200_and_429": not any(map(_has_failed, (*usual, *overload, *calm))),
        "ttft_p99_over_slo": _worst(overload, classes, "ttft_s"),
        "tpot_p99_over_slo": _worst(overload, classes, "tpot_s"),
        "goodput_ratio": goodput[1] / goodput[0] if goodput[0] else 0.0,
        "recovery_s": max((one.scheduled_s for one in calm if not has_met(one, classes)), default=0.0),
        "workers_unchanged": _epochs(plan.url) == workers,
        "capacity_per_s": capacity,
        "goodput_at_capacity_per_s": goodput[0],
        "goodput_at_overload_per_s": goodput[1],
        "attainment_by_class": {
            name: [_attainment(outcomes, classes, name) for outcomes in (usual, overload)] for name in classes
        },
        "client_lag_p99_s": percentile([one.lag_s for one in overload], 99),
    }


def find_capacity(at: Callable[[float, int], list[Record]], classes: dict[str, SLOClass], peak: float) -> float:
    """Return the highest rate of the search whose requests attain; half of the lowest where none does."""
    points: list[SweepPoint] = []
    search = SearchRange(LEAST * peak, FACTOR, PRECISION, least=LEAST * peak / 2)
    while (rate := next_rate(points, ATTAINMENT, search)) is not None:
        outcomes = at(rate, 10 + len(points))
        attained = sum(has_met(one, classes) for one in outcomes) / max(1, len(outcomes))
        print(f"{rate:8.1f}/s  attainment {attained:.3f}", flush=True)
        points.append(SweepPoint(rate, "", attained, attained, attained, 0.0, True))
    met, _ = bracket(points, ATTAINMENT)
    return met.rate if met else search.least


def has_met(record: Record, classes: Mapping[str, SLOClass]) -> bool:
    """Return whether a request got what its class is promised."""
    promised = classes[record.kind]
    return met_slo(record, SLO(promised.ttft_s, promised.tpot_s))


def _has_failed(one: Record) -> bool:
    """Return whether it is neither a whole answer nor refused for the load."""
    return one.status != "ok" and one.http_status != 429


def _epochs(url: str) -> dict[str, str]:
    return {worker["worker_id"]: worker["epoch"] for worker in fetch_status(url)["workers"]}


def _attainment(outcomes: Sequence[Record], classes: dict[str, SLOClass], name: str) -> float:
    own = [one for one in outcomes if one.kind == name]
    return sum(has_met(one, classes) for one in own) / max(1, len(own))


def _worst(outcomes: Sequence[Record], classes: dict[str, SLOClass], what: str) -> float:
    """The P99 of admitted requests over what their class is promised, of the class that fares worst."""
    worst = 0.0
    for name, promised in classes.items():
        p99 = percentile(spread((one for one in outcomes if one.kind == name and one.status == "ok"), what), 99)
        if p99 is not None:
            worst = max(worst, p99 / getattr(promised, what))
    return worst


def _show(title: str, outcomes: Sequence[Record], classes: dict[str, SLOClass], seconds: float) -> None:
    for name in classes:
        own = [one for one in outcomes if one.kind == name]
        done = [one for one in own if one.status == "ok"]
        ttft_ms, tpot_ms = (1e3 * (percentile(spread(done, what), 99) or math.nan) for what in ("ttft_s", "tpot_s"))
        print(
            f"{title:>6} {name:>12}: {len(own) / seconds:7.1f}/s offered, {len(done) / seconds:6.1f}/s served, "
            f"attainment {_attainment(outcomes, classes, name):.3f}, P99 TTFT {ttft_ms:.0f} ms, TPOT {tpot_ms:.1f} ms"
        )
    failures = {one.error for one in filter(_has_failed, outcomes)}
    for why in sorted(str(one) for one in failures)[:5]:
        print(f"{title:>6} failed: {why}")
