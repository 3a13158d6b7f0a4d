"""`twostroke status`: the workers of a running server, as its router sees them."""

import argparse
import json
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.commands.asking import endpoint, fits, no_answer, table_console
from protocol.errors import ConfigError

_HEADINGS = (
    "worker",
    "role",
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
    "swapped",
)
_NUM_TEXTS = 2  # worker and role; the others are numbers

# Shown as they are, since a worker's start: prompt tokens that came from another worker's prefix cache, then transfers
# that failed, chunks sent again, chunks that came damaged, links that broke, requests that gave way, and those of them
# whose KV went to host memory.
_COUNTERS = (
    "pulled_tokens",
    "transfers_failed",
    "transfer_retries",
    "transfer_digest_failures",
    "transfer_links_lost",
    "preemptions",
    "swaps",
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
    show_status(before, after, time.monotonic() - began, table_console())
    return 0 if after["ready"] else 1


def fetch_status(url: str) -> dict[str, Any]:
    """What GET /status says. Raises ConfigError where no server of ours answers."""
    try:
        with urllib.request.urlopen(endpoint(url, "status"), timeout=10) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(no_answer(url, error)) from error


def show_status(before: dict[str, Any], after: dict[str, Any], seconds: float, console: Console) -> None:
    """One row a worker where that fits; else one row a number, with as many workers beside each other as fit.

    Rates are of the time between the two answers, other numbers since the worker's start.
    """
    state = "ready" if after["ready"] else "not ready"
    console.print(f"{after['model']} — {state}, {after['places_held']} places held", markup=False, highlight=False)
    rows = worker_rows(before, after, seconds)
    wide = _table(_HEADINGS, rows, num_texts=_NUM_TEXTS)
    if fits(wide, console):
        console.print(wide)
        return
    while rows:
        count = len(rows)
        while count > 1 and not fits(_transposed(rows[:count]), console):
            count -= 1
        console.print(_transposed(rows[:count]))
        rows = rows[count:]


def worker_rows(before: dict[str, Any], after: dict[str, Any], seconds: float) -> list[list[str]]:
    """What _HEADINGS name, of each worker."""
    rows: list[list[str]] = []
    earlier = {worker["epoch"]: worker["stats"] for worker in before["workers"]}
    for worker in after["workers"]:
        stats, old = worker["stats"], earlier.get(worker["epoch"])
        row = [worker["worker_id"], worker["role"]]
        if stats is None:
            row += ["unreachable", *[""] * (len(_HEADINGS) - _NUM_TEXTS - 1)]
        else:
            queries = stats["prefix_queries"]
            row += [
                str(stats["num_running"]),
                str(stats["num_waiting"]),
                f"{stats['owned_blocks']}/{stats['total_blocks']}",
                f"{stats['prefix_hits'] / queries:.0%}" if queries else "-",
                _rate(stats, old, "computed_tokens", seconds),
                _rate(stats, old, "generated_tokens", seconds),
                _rate(stats, old, "transfer_bytes", seconds, unit=1e6),
                *(str(stats[counter]) for counter in _COUNTERS),
            ]
        rows.append(row)
    return rows


def _transposed(rows: Sequence[Sequence[str]]) -> Table:
    headings, *numbers = zip(_HEADINGS, *rows, strict=True)
    return _table(headings, numbers, num_texts=1)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int) -> Table:
    table = Table(box=box.SIMPLE)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _rate(now: dict[str, Any], before: dict[str, Any] | None, counter: str, seconds: float, unit: float = 1.0) -> str:
    """How fast a counter grew; a worker that is new, or was unreachable, has no rate yet."""
    if before is None:
        return "-"
    return f"{(now[counter] - before[counter]) / seconds / unit:.1f}"
