"""`twostroke bench overload`: what becomes of promises, of the rest and of the server at five times its capacity.

A first server without promises tells what a request takes by itself, and how many the machine can do at once. From that
come the SLOs of two classes, as multiples. A second server has these classes; its capacity is the highest rate of which
nine requests out of ten get what they are promised. It is then offered once and five times that.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twostroke.benchmarks.clients import Mix, has_met, send_arrivals, send_in_turn, whole
from twostroke.benchmarks.console import add_load_arguments, positive
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.server_process import twostroke_server
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
STEPS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5)  # of what the closed loop did
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
    with twostroke_server(arguments.serve) as server:
        mix = Mix(fetch_status(server.url)["model"], PARTS, arguments.prompt_tokens, arguments.max_tokens)
        ttft_s, tpot_s, peak = asyncio.run(measure_alone(server.url, mix, arguments.step_seconds))
    classes = classes_for(ttft_s * arguments.ttft_multiple, tpot_s * arguments.tpot_multiple)
    print(f"alone: TTFT {ttft_s * 1e3:.1f} ms, TPOT {tpot_s * 1e3:.2f} ms; {CLOSED_LOOP_CLIENTS} clients: {peak:.1f}/s")
    for one in classes.values():
        print(f"class {one.name}: TTFT {(one.ttft_s or 0) * 1e3:.0f} ms, TPOT {(one.tpot_s or 0) * 1e3:.1f} ms")
    with tempfile.TemporaryDirectory(prefix="twostroke-overload-") as folder:
        path = Path(folder) / "slo.yaml"
        path.write_text(json.dumps(settings_of(classes)))  # YAML takes JSON
        with twostroke_server([*arguments.serve, "--config", str(path)]) as server:
            figures = asyncio.run(measure(server.url, mix, classes, peak, arguments))
    print(json.dumps(figures))
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
    """What a server's configuration says of them."""
    return {"slo": {"classes": [one.model_dump() for one in classes.values()], "default": BATCH}}


async def measure_alone(url: str, mix: Mix, seconds: float) -> tuple[float, float, float]:
    """A request's TTFT and TPOT by itself (medians), and how many a second many clients get in turn."""
    draw = random.Random(1)
    await _answers_per_s(url, mix, draw, 3.0)  # warms everything up
    alone = [await mix.ask_alone(url, draw) for _ in range(ALONE_REQUESTS)]
    ttft_s, tpot_s = (statistics.median(times) for times in zip(*alone, strict=True))
    return ttft_s, tpot_s, await _answers_per_s(url, mix, draw, seconds)


async def _answers_per_s(url: str, mix: Mix, draw: random.Random, seconds: float) -> float:
    """Of clients that each send the next request when the last one is answered."""
    until = time.perf_counter() + seconds
    bodies = (mix.body(draw) for _ in itertools.takewhile(lambda _: time.perf_counter() < until, itertools.count()))
    answers = map(whole, await send_in_turn(url, bodies, CLOSED_LOOP_CLIENTS))
    return sum(answer.token_s[-1] < seconds for answer in answers) / seconds


async def measure(
    url: str, mix: Mix, classes: dict[str, SLOClass], peak: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The figures of a server with these classes."""
    load_s, recovery_s = arguments.seconds, max(15.0, arguments.seconds / 3)
    await send_arrivals(url, mix.arrivals(0.2 * peak, 5.0, seed=2))  # so that the workers know what steps cost
    capacity = await find_capacity(url, mix, classes, peak, arguments.step_seconds)
    workers = _epochs(url)
    usual = await send_arrivals(url, mix.arrivals(capacity, load_s, seed=3))
    overload = await send_arrivals(url, mix.arrivals(OVERLOAD * capacity, load_s, seed=4))
    # Recovery runs on from the last arrival: what is still being served is a part of it.
    calm = await send_arrivals(url, mix.arrivals(CALM * capacity, recovery_s, seed=5))
    _show("1x", usual, classes, load_s)
    _show(f"{OVERLOAD:g}x", overload, classes, load_s)
    _show("after", calm, classes, recovery_s)
    goodput = [sum(has_met(one, classes) for one in outcomes) / load_s for outcomes in (usual, overload)]
    return {
        "only_200_and_429": not any(map(_has_failed, (*usual, *overload, *calm))),
        "ttft_p99_over_slo": _worst(overload, classes, "ttft_s"),
        "tpot_p99_over_slo": _worst(overload, classes, "tpot_s"),
        "goodput_ratio": goodput[1] / goodput[0] if goodput[0] else 0.0,
        "recovery_s": max((one.scheduled_s for one in calm if not has_met(one, classes)), default=0.0),
        "workers_unchanged": _epochs(url) == workers,
        "capacity_per_s": capacity,
        "goodput_at_capacity_per_s": goodput[0],
        "goodput_at_overload_per_s": goodput[1],
        "attainment_by_class": {
            name: [_attainment(outcomes, classes, name) for outcomes in (usual, overload)] for name in classes
        },
        "client_lag_p99_s": percentile([one.lag_s for one in overload], 99),
    }


async def find_capacity(url: str, mix: Mix, classes: dict[str, SLOClass], peak: float, seconds: float) -> float:
    """The highest rate of the steps before the first that misses the attainment; half of the first where that does."""
    capacity = STEPS[0] * peak / 2
    for i, step in enumerate(STEPS):
        outcomes = await send_arrivals(url, mix.arrivals(step * peak, seconds, seed=10 + i))
        attained = sum(has_met(one, classes) for one in outcomes) / max(1, len(outcomes))
        print(f"{step * peak:8.1f}/s  attainment {attained:.3f}", flush=True)
        if attained < ATTAINMENT:
            break
        capacity = step * peak
    return capacity


def _has_failed(one: Record) -> bool:
    """Whether it is neither a whole answer nor refused for the load."""
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
        times = [getattr(one, what) for one in outcomes if one.kind == name and one.status == "ok"]
        p99 = percentile([one for one in times if one is not None], 99)
        if p99 is not None:
            worst = max(worst, p99 / getattr(promised, what))
    return worst


def _show(title: str, outcomes: Sequence[Record], classes: dict[str, SLOClass], seconds: float) -> None:
    for name in classes:
        own = [one for one in outcomes if one.kind == name]
        done = [one for one in own if one.status == "ok"]
        ttft_ms = 1e3 * (percentile([one.ttft_s for one in done if one.ttft_s is not None], 99) or math.nan)
        tpot_ms = 1e3 * (percentile([one.tpot_s for one in done if one.tpot_s is not None], 99) or math.nan)
        print(
            f"{title:>6} {name:>12}: {len(own) / seconds:7.1f}/s offered, {len(done) / seconds:6.1f}/s served, "
            f"attainment {_attainment(outcomes, classes, name):.3f}, P99 TTFT {ttft_ms:.0f} ms, TPOT {tpot_ms:.1f} ms"
        )
    failures = {one.error for one in filter(_has_failed, outcomes)}
    for why in sorted(str(one) for one in failures)[:5]:
        print(f"{title:>6} failed: {why}")
