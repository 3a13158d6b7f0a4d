"""`twostroke status`: the workers of a running server, as its router sees them; once, or for as long as one watches.

All numbers come from one answer of GET /status, rates from two: tables of workers, of SLO classes, and of what the
autoscaler decided. With `--watch` one screen follows the server, also while it is gone.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from twostroke.cluster.local.asking import endpoint, fetch_status
from twostroke.protocol.errors import ConfigError

Numbers = Mapping[str, Any]
"""An answer of GET /status, or a part of one."""

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
    "damaged",
    "links lost",
    "preempted",
    "swapped",
)
_NUM_TEXTS = 2  # worker and role; the others are numbers

# Shown as they are, since a worker's start: after the transfers that failed, chunks that came
# damaged, links that broke, requests that gave way, and those of them whose KV went to host memory.
_COUNTERS = (
    "transfer_digest_failures",
    "transfer_links_lost",
    "preemptions",
    "swaps",
)

_LOAD_HEADINGS = (
    "worker",
    "role",
    "state",
    "running",
    "waiting",
    "queued tok",
    "blocks owned",
    "cached hits",
    "step ms",
    "base ms",
    "prompt tok/s",
    "output tok/s",
    "KV MB/s",
    "preempted",
)

_SCALING_HEADINGS = ("role", "workers", "to be", "missing", "last decision", "last change")

STARTING_S = 60.0
"""A worker that was asked for so lately starts; one that is missing for longer may have no room anywhere."""

_CLASS_HEADINGS = ("class", "queued requests", "queued tokens", "SLO attainment")

LEAST_INTERVAL_S = 0.1
"""Between two looks."""
PIPE_COLUMNS = 190

Fetch = Callable[[], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds over which rates are taken")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print what the router says, as it is")
    how.add_argument("--watch", action="store_true", help="show it again after each interval, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Print once; returns 0, or 1 for a server that is not ready. Raises ConfigError where none answers.

    With --watch, until Ctrl-C; returns 0 then, whatever became of the server.
    """
    if not LEAST_INTERVAL_S <= arguments.interval < math.inf:
        raise ConfigError(f"--interval {arguments.interval:g}: seconds between two looks, at least {LEAST_INTERVAL_S}")
    if arguments.watch:
        endpoint(arguments.url, "status")  # raises for what is no address
        return watch(arguments.url, lambda: fetch_status(arguments.url), arguments.interval, table_console())
    before = fetch_status(arguments.url)
    if arguments.json:
        print(json.dumps(before))
        return 0 if before["ready"] else 1
    began = time.monotonic()
    time.sleep(arguments.interval)
    after = fetch_status(arguments.url)
    show_status(before, after, time.monotonic() - began, table_console())
    return 0 if after["ready"] else 1


def show_status(before: dict[str, Any], after: dict[str, Any], seconds: float, console: Console) -> None:
    """One row a worker where that fits; else one row a number, with as many workers beside each other as fit.

    Rates are of the time between the two answers, other numbers since the worker's start.
    """
    console.print(headline(after))
    for table in worker_tables(worker_rows(before, after, seconds), console):
        console.print(table)
    if rows := scaling_rows(after):
        console.print(scaling_table(rows))


def headline(status: Mapping[str, Any]) -> Text:
    """The model, and whether it is served."""
    state = "ready" if status["ready"] else "not ready"
    return Text(f"{status['model']} — {state}, {status['places_held']} places held")


def worker_tables(rows: Sequence[Sequence[str]], console: Console) -> list[Table]:
    """Of `worker_rows`: one table where its rows fit in one line each, else as many as it takes, a column a worker."""
    return _tables(_HEADINGS, rows, console, num_texts=_NUM_TEXTS)


def load_tables(rows: Sequence[Sequence[str]], console: Console) -> list[Table]:
    """Of `load_rows`, likewise."""
    return _tables(_LOAD_HEADINGS, rows, console, num_texts=3)


def class_table(rows: Sequence[Sequence[str]]) -> Table:
    """Of `class_rows`."""
    return _table(_CLASS_HEADINGS, rows, num_texts=1)


def scaling_table(rows: Sequence[Sequence[str]]) -> Table:
    """Of `scaling_rows`."""
    return _table(_SCALING_HEADINGS, rows, num_texts=1)


def scaling_rows(status: Numbers) -> list[list[str]]:
    """What _SCALING_HEADINGS name, of each role; nothing where the number of workers is fixed."""
    scaling = status.get("autoscaling")
    if scaling is None:
        return []
    return [
        [
            role,
            str(one["running"]),
            str(one["target"]),
            _missing(one),
            f"{one['reason']}, {_duration(scaling['age_s'])} ago",
            "-" if one["last_change"] is None else f"{one['last_change']}, {_duration(one['changed_ago_s'])} ago",
        ]
        for role, one in scaling["roles"].items()
    ]


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
                str(stats["pulled_tokens"]),
                str(stats["transfers_failed"] - stats["transfers_given_up"]),  # as `kv_transfer_failures` counts them
                *(str(stats[counter]) for counter in _COUNTERS),
            ]
        rows.append(row)
    return rows


def load_rows(before: Numbers, after: Numbers, seconds: float) -> list[list[str]]:
    """What _LOAD_HEADINGS name, of each worker. A step's time is the mean since `before`; its base is fitted."""
    rows: list[list[str]] = []
    earlier = {worker["epoch"]: worker["stats"] for worker in before["workers"]}
    for worker in after["workers"]:
        stats, old = worker["stats"], earlier.get(worker["epoch"])
        row = [worker["worker_id"], worker["role"], _state(worker)]
        if stats is None:
            row += [""] * (len(_LOAD_HEADINGS) - len(row))
        else:
            queries, costs = stats["prefix_queries"], stats["costs"]
            num_steps = stats["steps"] - old["steps"] if old is not None else 0
            row += [
                str(stats["num_running"]),
                str(stats["num_waiting"]),
                str(stats["num_waiting_tokens"]),
                f"{stats['owned_blocks']}/{stats['total_blocks']}",
                f"{stats['prefix_hits'] / queries:.0%}" if queries else "-",
                f"{1e3 * (stats['step_seconds'] - old['step_seconds']) / num_steps:.1f}" if old and num_steps else "-",
                f"{1e3 * costs[0]:.2f}" if costs is not None else "-",
                _rate(stats, old, "computed_tokens", seconds),
                _rate(stats, old, "generated_tokens", seconds),
                _rate(stats, old, "transfer_bytes", seconds, unit=1e6),
                str(stats["preemptions"]),
            ]
        rows.append(row)
    return rows


def class_rows(status: Numbers) -> list[list[str]]:
    """What _CLASS_HEADINGS name, of each class that is configured or waits; the urgent first."""
    requests: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    attainment: dict[str, float] = {one["name"]: one["attainment"] for one in status.get("slo_classes", ())}
    for worker in status["workers"]:
        for class_name, _, _, num_tokens, num_requests in (worker["stats"] or {}).get("queued", ()):
            requests[class_name] += num_requests
            tokens[class_name] += num_tokens
    return [
        [name, str(requests[name]), str(tokens[name]), f"{attainment[name]:.1%}" if name in attainment else "-"]
        for name in (*attainment, *sorted(requests.keys() - attainment.keys()))
    ]


def _missing(role: Numbers) -> str:
    missing = role["target"] - role["running"]
    if missing <= 0:
        return "-"
    if role["changed_ago_s"] is not None and role["changed_ago_s"] < STARTING_S:
        return f"{missing}, starting"
    return f"{missing}: still loading, or is there no room? `ray status -v`"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _state(worker: Numbers) -> str:
    if worker["stats"] is None or not worker["reachable"]:
        return "unreachable"
    if worker.get("ejected"):
        return "ejected"
    return "draining" if worker["stats"]["is_draining"] else "serving"


def _tables(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console, *, num_texts: int) -> list[Table]:
    wide = _table(headings, rows, num_texts=num_texts)
    if fits(wide, console):
        return [wide]
    tables: list[Table] = []
    while rows:
        count = len(rows)
        while count > 1 and not fits(_transposed(headings, rows[:count]), console):
            count -= 1
        tables.append(_transposed(headings, rows[:count]))
        rows = rows[count:]
    return tables


def _transposed(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    workers, *numbers = zip(headings, *rows, strict=True)
    return _table(workers, numbers, num_texts=1)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int) -> Table:
    table = Table(box=box.SIMPLE)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _rate(now: dict[str, Any], before: dict[str, Any] | None, counter: str, seconds: float, unit: float = 1.0) -> str:
    """How fast a counter grew; a worker that is new, or was unreachable, has no rate yet."""
    if before is None or seconds <= 0:
        return "-"
    return f"{(now[counter] - before[counter]) / seconds / unit:.1f}"


@dataclass
class _Look:
    """An answer, and when it came (seconds of a clock that never jumps)."""

    status: dict[str, Any]
    at: float


class StatusView:
    """What is on the screen: the newest answer with the rates since the one before."""

    def __init__(self, url: str, console: Console):
        self._url = url
        self._console = console
        self._before: _Look | None = None
        self._newest: _Look | None = None
        self._lost: str | None = None

    def answered(self, status: dict[str, Any], now: float) -> None:
        """The server has told its status."""
        self._before, self._newest = self._newest, _Look(status, now)
        if self._lost is not None:
            self._before, self._lost = None, None  # no rates over a time when nobody answered

    def lost(self, reason: str) -> None:
        """Nobody answers now."""
        self._lost = reason

    def shown(self, now: float) -> RenderableType:
        """All of it."""
        lines: list[RenderableType] = [Text(self._url, style="bold")]
        if self._lost is not None:
            lines.append(Text(f"{self._lost}; trying again", style="red"))
        if self._newest is None:
            return Group(*lines)
        if self._lost is not None:
            lines.append(Text(f"What it said {now - self._newest.at:.0f} s ago:", style="dim"))
        newest = self._newest.status
        before: Numbers = self._before.status if self._before is not None else {"workers": ()}
        seconds = self._newest.at - self._before.at if self._before is not None else 0.0
        lines.append(headline(newest))
        lines += load_tables(load_rows(before, newest, seconds), self._console)
        if classes := class_rows(newest):
            lines.append(class_table(classes))
        if scaling := scaling_rows(newest):
            lines.append(scaling_table(scaling))
        return Group(*lines)


def watch(
    url: str,
    fetch: Fetch,
    interval_s: float,
    console: Console,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show what `fetch` brings, again after each interval, until Ctrl-C; returns 0 then.

    On a terminal the screen is drawn over and over; into a file or a pipe, one view follows another.
    """
    view = StatusView(url, console)
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else None
    try:
        if live is not None:
            live.start()
        while True:
            try:
                view.answered(fetch(), clock())
            except ConfigError as error:  # it may be starting, or come back
                view.lost(str(error))
            if live is not None:
                live.update(view.shown(clock()), refresh=True)
            else:
                console.print(Text(time.strftime("%H:%M:%S")), view.shown(clock()))
            sleep(interval_s)
    except KeyboardInterrupt:
        return 0
    finally:
        if live is not None:
            live.stop()
            console.print(view.shown(clock()))  # the last of it stays, once the screen is the shell's again


def table_console() -> Console:
    """Standard output for tables: into a file or a pipe, a row is one line."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def fits(table: Table, console: Console) -> bool:
    """Whether a row is one line there."""
    # Asked of an endless line: within a short one, the table would promise to wrap its cells.
    endless = console.options.update(width=10_000)
    return Measurement.get(console, endless, table).maximum <= console.width
