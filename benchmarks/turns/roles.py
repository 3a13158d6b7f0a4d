"""`twostroke bench roles`: workers of both roles that help each other, beside the same cores aggregated and divided.

Servers take turns under the same loads, and only one computes at a time:

    aggregated      one worker with all cores
    split           workers of each role that keep to it and to their cores: `roles: fixed`, `lend_cores: false`
    flexible        workers of each role with the default settings
    split-lent      `roles: fixed`, but cores are lent            (on request: what lent cores alone bring)
    flexible-apart  `lend_cores: false`, but roles are flexible   (on request: what flexible roles alone bring)

The loads are closed, with 8 and 32 streams of 128 + 128 tokens and 32 of 64 to 1,024 + 16 to 128 tokens (`mixed`). The
last one is open: mixed requests in bursts (gamma gaps with a coefficient of variation of 3) at 0.8 of the rate at which
the aggregated server ends the closed mixed load. Its goodput is the rate of requests whose first token comes within
`--ttft-s` of their arrival, and of whose gaps between tokens 95% are at most `--itl-s`. After the loads the flexible
server's decode worker gets orders while it writes (worker_orders.py).

A shared machine changes its speed from minute to minute, so figures are divided by those of the same turn, and the
medians of these ratios count.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from twostroke.benchmarks.clients import ENDLESS_S, plan_at
from twostroke.benchmarks.console import conclude, positive, say
from twostroke.benchmarks.engines.engine import MODELS
from twostroke.benchmarks.peers.command import write_model
from twostroke.benchmarks.peers.compare_servers import SETTLE_S, Figures, fault_of, figures_of
from twostroke.benchmarks.turns.worker_orders import measure_orders
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.processes import leaving_no_process
from twostroke.cluster.local.server_process import ServerProcess, config_file, twostroke_server
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.alone import send
from twostroke.loadtests.plan import Arrivals, Closed, Fixed, Gamma, Plan, Uniform
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.run_folder import Record
from twostroke.protocol.errors import ConfigError

AGGREGATED, SPLIT, FLEXIBLE = "aggregated", "split", "flexible"
SERVERS = (AGGREGATED, SPLIT, FLEXIBLE, "split-lent", "flexible-apart")
LOADS = ("c8", "c32", "mixed", "open")
ORDERS = "orders"
EQUAL, MIXED = Fixed(128, 128), Uniform((64, 1024), (16, 128))
MAX_CONTEXT = 2048
KV_CACHE_GIB = 0.5
"""Cache of each worker; the aggregated one has as much as those of a layout together."""
REQUESTS_PER_USER = 3
"""Requests of each stream of a closed load."""
ORDER_ROUNDS = 3
OPEN_SHARE, BURSTS_CV = 0.8, 3.0
STRICT = 95  # percent of a request's gaps that keep its ITL bound
WARM_UP_SEED = 1_000_000
LOAD_SEEDS = 1_000
"""Seeds of each load's turns: no load sends the prompts of another, which some server might still have in its cache."""
END_S = 5.0

Turn = dict[str, dict[str, Figures]]
"""Figures of one turn by load, then by server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="160m", help="shape of the random model (%(default)s)")
    parser.add_argument("--layout", choices=("1+1", "1+2", "2+1"), default="1+1", help="prefill + decode workers")
    parser.add_argument("--turns", type=positive, default=5, help="turns of all loads (default: %(default)s)")
    every = (*LOADS, ORDERS)
    parser.add_argument("--loads", nargs="+", choices=every, default=every, help="only these, and orders to workers")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS[:3], help="only these")
    parser.add_argument("--open-s", type=float, default=30.0, help="seconds of the open load (default: %(default)s)")
    parser.add_argument("--ttft-s", type=float, default=2.0, help="bound of a first token (default: %(default)s)")
    parser.add_argument("--itl-s", type=float, default=0.15, help="bound between tokens (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short turn, which shows that all works")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns 1 where a request or a turn failed.

    Raises ConfigError, and ServerFailed where a server does not start.
    """
    with leaving_no_process(END_S), tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        write_model(arguments.model, 4096, Path(folder))
        urls: dict[str, str] = {}
        for name in arguments.servers:
            server = running.enter_context(started(name, arguments.layout, folder))
            say(f"{name} answers after {server.started_in_s:.1f} s")
            urls[name] = server.url
        turns = measure(urls, arguments)
        orders = {}
        if ORDERS in arguments.loads and FLEXIBLE in urls:
            orders = measure_orders(urls[FLEXIBLE], 1 if arguments.quick else ORDER_ROUNDS)
        taken = {name: _taken(url) for name, url in urls.items()}
    figures = summarise(turns, arguments.servers)
    conclude(
        {
            "layout": arguments.layout,
            "ttft_bound_s": arguments.ttft_s,
            "itl_bound_s": arguments.itl_s,
            **figures,
            **orders,
            "taken": taken,
        }
    )
    return 1 if figures["errors"] or not turns else 0


@contextlib.contextmanager
def started(name: str, layout: str, model: str) -> Iterator[ServerProcess]:
    """Run one of SERVERS while the context lasts. Raises ServerFailed."""
    with (
        config_file(settings_of(name, layout, model)) as path,
        twostroke_server(["--config", path, "--name", "model"]) as server,
    ):
        yield server


def settings_of(name: str, layout: str, model: str) -> dict[str, Any]:
    """Return the configuration of one of SERVERS."""
    num_prefill, num_decode = map(int, layout.split("+"))
    prefill: dict[str, Any] = {"replicas": num_prefill, "kv_cache_gib": KV_CACHE_GIB}
    decode: dict[str, Any] = {"replicas": num_decode, "kv_cache_gib": KV_CACHE_GIB}
    if name == AGGREGATED:
        memory = {"kv_cache_gib": KV_CACHE_GIB * (num_prefill + num_decode)}
        prefill, decode = {"replicas": 0}, {"replicas": 1, **memory}
    if name in (SPLIT, "flexible-apart"):
        prefill["lend_cores"] = decode["lend_cores"] = False
    router = {"roles": "fixed" if name.startswith(SPLIT) else "flexible"}
    held = {"path": model, "dtype": "bfloat16", "max_context": MAX_CONTEXT}
    return {"model": held, "prefill": prefill, "decode": decode, "router": router}


def measure(urls: Mapping[str, str], arguments: argparse.Namespace) -> list[Turn]:
    """Take all turns. A load that fails on a server is missing in its turn; an interrupt ends them early."""
    for name, url in urls.items():  # workers learn what their steps cost
        for workload in (Fixed(128, 32), MIXED):
            say(f"{name} warms up")
            records = send(_plan(url, Closed(8, requests=32), workload, seed=WARM_UP_SEED)).records
            if faults := list(filter(None, map(fault_of, records))):
                raise ConfigError(f"{name} fails while it warms up: {faults[0]}")
    turns: list[Turn] = []
    rate: float | None = None
    try:
        for number in range(1 if arguments.quick else arguments.turns):
            turn: Turn = {}
            turns.append(turn)
            for load in (one for one in LOADS if one in arguments.loads):
                turn[load] = {}
                first = number % len(urls)  # no server always comes after the same one
                names = [*urls][first:] + [*urls][:first]
                for name in names:
                    plan = plan_of(load, urls[name], number, rate, arguments)
                    if plan is None:
                        say(f"{load} is left out: no capacity is known without the load `mixed` on {AGGREGATED}")
                        break
                    figures = _one(plan, arguments)
                    if figures is not None:
                        turn[load][name] = figures
                        say(_line(number, load, name, figures))
                    time.sleep(SETTLE_S)
                if load == "mixed" and rate is None and AGGREGATED in turn[load]:
                    rate = turn[load][AGGREGATED]["requests_s"]
    except KeyboardInterrupt:
        say("interrupted: what was measured so far counts")
    return turns


def plan_of(load: str, url: str, turn: int, capacity: float | None, arguments: argparse.Namespace) -> Plan | None:
    """Return a load's plan for one turn: the same prompts for all servers. None where its capacity is not known."""
    per_user = 1 if arguments.quick else REQUESTS_PER_USER
    seed = LOADS.index(load) * LOAD_SEEDS + turn
    if load == "open":
        if not capacity:
            return None
        seconds = 8.0 if arguments.quick else arguments.open_s
        return _plan(url, Gamma(OPEN_SHARE * capacity, BURSTS_CV), MIXED, seed=seed, seconds=seconds)
    users = 8 if load == "c8" else 32
    workload = MIXED if load == "mixed" else EQUAL
    return _plan(url, Closed(users, requests=per_user * users), workload, seed=seed)


def _taken(url: str) -> dict[str, Any]:
    """Return a server's paths, and its moves by reason, since its start."""
    status = fetch_status(url)
    return {name: status[name] for name in ("paths", "moves")}


def _plan(url: str, arrivals: Arrivals, workload: Fixed | Uniform, *, seed: int, seconds: float = ENDLESS_S) -> Plan:
    return msgspec.structs.replace(plan_at(url, arrivals, EQUAL, seconds, seed=seed), workload=workload)


def _one(plan: Plan, arguments: argparse.Namespace) -> Figures | None:
    """Send a plan and return its figures; None where that fails."""
    try:
        records = send(plan).records
    except (LoadTestError, OSError) as error:
        say(f"a load is lost: {error}")
        return None
    for fault in set(filter(None, map(fault_of, records))):
        say(f"a request failed: {fault}")
    seconds = None if isinstance(plan.arrivals, Closed) else plan.seconds
    return judged(records, arguments.ttft_s, arguments.itl_s, seconds)


def judged(records: Iterable[Record], ttft_s: float, itl_s: float, seconds: float | None) -> Figures:
    """Return the figures of one load on one server. Only an open load, of so many `seconds`, has a goodput."""
    records = list(records)
    figures = figures_of(records)
    answers = [one for one in records if fault_of(one) is None]
    met = sum(is_good(one, ttft_s, itl_s) for one in answers)
    lasted_s = max((one.end_s for one in answers), default=0.0) - min((one.sent_s for one in answers), default=0.0)
    return figures | {
        "requests_s": len(answers) / lasted_s if lasted_s else None,
        "attained": met / len(records) if records else None,
        "goodput_s": met / seconds if seconds else None,
    }


def is_good(record: Record, ttft_s: float, itl_s: float) -> bool:
    """Return whether an answer kept both bounds."""
    gap_s = percentile(record.gaps_s, STRICT) or 0.0
    return record.ttft_s is not None and record.ttft_s <= ttft_s and gap_s <= itl_s


def summarise(turns: Sequence[Turn], servers: Sequence[str]) -> dict[str, Any]:
    """Return medians of ratios within a turn, and of each server's figures over turns."""
    found: dict[str, Any] = {}

    def over(name: str, other: str, load: str, figure: str) -> float | None:
        return ratio(turns, load, figure, name, (other,))

    for load in ("c8", "c32", "mixed"):
        for name in servers[1:]:
            found[f"{name}_over_{servers[0]}_{load}"] = over(name, servers[0], load, "out_tok_s")
    found["p99_itl_over_aggregated_mixed"] = over(FLEXIBLE, AGGREGATED, "mixed", "itl_p99_s")
    found["ttft_p50_over_aggregated_mixed"] = over(FLEXIBLE, AGGREGATED, "mixed", "ttft_p50_s")
    found["goodput_over_best_fixed"] = ratio(turns, "open", "goodput_s", FLEXIBLE, (AGGREGATED, SPLIT))
    found["turns"] = len(turns)
    lost = sum(len(servers) - len(by) for turn in turns for by in turn.values() if by)  # whole loads
    found["errors"] = lost + int(
        sum(one.get("errors") or 0 for turn in turns for by in turn.values() for one in by.values())
    )
    found["load_average"] = os.getloadavg()[0]
    found["medians"] = {
        load: {name: _medians([turn[load][name] for turn in turns if name in turn.get(load, {})]) for name in servers}
        for load in LOADS
    }
    return found


def ratio(turns: Iterable[Turn], load: str, figure: str, name: str, others: Sequence[str]) -> float | None:
    """Return the median, over turns, of a server's figure over the greatest of the others'; None without any."""
    ratios: list[float] = []
    for turn in turns:
        by_server = turn.get(load, {})
        value = by_server.get(name, {}).get(figure)
        beside = [by_server.get(other, {}).get(figure) for other in others]
        known = [one for one in beside if one]
        if value is not None and len(known) == len(others):
            ratios.append(value / max(known))
    return statistics.median(ratios) if ratios else None


def _medians(figures: Sequence[Figures]) -> Figures:
    shown = ("out_tok_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "attained", "goodput_s")
    known = {name: [one[name] for one in figures if one.get(name) is not None] for name in shown}
    return {name: statistics.median(values) for name, values in known.items() if values}  # type: ignore[type-var]


def _line(number: int, load: str, name: str, figures: Figures) -> str:
    shown = {key: figures[key] or 0.0 for key in ("out_tok_s", "ttft_p50_s", "itl_p50_s", "itl_p99_s", "attained")}
    return (
        f"turn {number + 1} {load:<6}{name:<15}{shown['out_tok_s']:7.1f} tok/s, TTFT {shown['ttft_p50_s']:.3f} s, "
        f"ITL {shown['itl_p50_s'] * 1e3:.1f} ms, P99 {shown['itl_p99_s'] * 1e3:.0f} ms, "
        f"in time {shown['attained']:.2f}, load {os.getloadavg()[0]:.1f}"
    )
