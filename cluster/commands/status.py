"""`twostroke status`: the workers of a running server, as its router sees them."""

import argparse
import json
import time
import urllib.error
import urllib.request
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from protocol.errors import ConfigError

PIPE_COLUMNS = 190

# Shown as they are, since a worker's start: prompt tokens that came from another worker's prefix cache, then transfers
# that failed, chunks sent again, chunks that came damaged, links that broke.
_COUNTERS = (
    "pulled_tokens",
    "transfers_failed",
    "transfer_retries",
    "transfer_digest_failures",
    "transfer_links_lost",
    "preemptions",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print what the router says, as it is")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds over which rates are taken")


def run(arguments: argparse.Namespace) -> int:
    """Print once; returns 0, or 1 for a server that is not ready. Raises ConfigError where none answers."""
    before = fetch_status(arguments.url)
    if arguments.json:
        print(json.dumps(before))
        return 0 if before["ready"] else 1
    began = time.monotonic()
    time.sleep(arguments.interval)
    after = fetch_status(arguments.url)
    console = table_console()
    console.print(status_table(before, after, time.monotonic() - began))
    return 0 if after["ready"] else 1


def table_console() -> Console:
    """Standard output for tables: into a file or a pipe, a row is one line."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def fetch_status(url: str) -> dict[str, Any]:
    """What GET /status says. Raises ConfigError where no server of ours answers."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/status", timeout=10) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ConfigError(f"no Twostroke server answers at {url}: {error}") from error


def status_table(before: dict[str, Any], after: dict[str, Any], seconds: float) -> Table:
    """One row a worker; rates are of the time between the two answers, other numbers since the worker's start."""
    state = "ready" if after["ready"] else "not ready"
    table = Table(
        box=box.SIMPLE, title=f"{after['model']} — {state}, {after['places_held']} places held", title_justify="left"
    )
    for heading in ("worker", "role"):
        table.add_column(heading)
    columns = (
        "running",
        "waiting",
        "blocks owned",
        "cached hits",
        "prompt tok/s",
        "output tok/s",
        "KV MB/s",
        "pulled",
        "failed",
        "retried",
        "damaged",
        "links lost",
        "preempted",
    )
    for heading in columns:
        table.add_column(heading, justify="right")
    earlier = {worker["epoch"]: worker["stats"] for worker in before["workers"]}
    for worker in after["workers"]:
        stats, old = worker["stats"], earlier.get(worker["epoch"])
        if stats is None:
            table.add_row(worker["worker_id"], worker["role"], "unreachable", *[""] * (len(columns) - 1))
            continue
        queries = stats["prefix_queries"]
        table.add_row(
            worker["worker_id"],
            worker["role"],
            str(stats["num_running"]),
            str(stats["num_waiting"]),
            f"{stats['owned_blocks']}/{stats['total_blocks']}",
            f"{stats['prefix_hits'] / queries:.0%}" if queries else "-",
            _rate(stats, old, "computed_tokens", seconds),
            _rate(stats, old, "generated_tokens", seconds),
            _rate(stats, old, "transfer_bytes", seconds, unit=1e6),
            *(str(stats[counter]) for counter in _COUNTERS),
        )
    return table


def _rate(now: dict[str, Any], before: dict[str, Any] | None, counter: str, seconds: float, unit: float = 1.0) -> str:
    """How fast a counter grew; a worker that is new, or was unreachable, has no rate yet."""
    if before is None:
        return "-"
    return f"{(now[counter] - before[counter]) / seconds / unit:.1f}"
