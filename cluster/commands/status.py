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
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError
from twostroke.router.text.generation_config import SamplingDefaults

Numbers = Mapping[str, Any]
"""An answer of GET /status, or a part of one."""


@dataclass(frozen=True)
class WorkerRow:
    """One worker that can be reached, now and in the answer before."""

    worker: Numbers
    stats: Numbers
    before: Numbers | None  # its stats then; None: it was not there, or not reachable
    seconds: float  # between the two answers

    def rate(self, counter: str, unit: float = 1.0) -> str:
        """Return how fast a counter grew. A worker that was not there before has no rate yet."""
        if self.before is None or self.seconds <= 0:
            return "-"
        return f"{(self.stats[counter] - self.before[counter]) / self.seconds / unit:.1f}"

    def state(self) -> str:
        """Return whether the worker takes requests, as one word."""
        if not self.worker["reachable"]:
            return UNREACHABLE
        if self.worker.get("ejected"):
            return "ejected"
        return "draining" if self.stats["is_draining"] else "serving"

    def cached_hits(self) -> str:
        """The share of looked up prompt blocks that were cached."""
        queries = self.stats["prefix_queries"]
        return f"{self.stats['prefix_hits'] / queries:.0%}" if queries else "-"

    def step_ms(self) -> str:
        """The mean of the steps since the answer before."""
        num_steps = self.stats["steps"] - self.before["steps"] if self.before is not None else 0
        if self.before is None or not num_steps:
            return "-"
        return f"{1e3 * (self.stats['step_seconds'] - self.before['step_seconds']) / num_steps:.1f}"

    def peak_share(self, peak: str, counter: str) -> str:
        """The part of what the machine could have done since the answer before."""
        most = self.stats[peak] * self.seconds
        if self.before is None or not most:
            return "-"
        return f"{(self.stats[counter] - self.before[counter]) / most:.1%}"

    def base_ms(self) -> str:
        """Return the fitted time of an empty step, in milliseconds."""
        costs = self.stats["costs"]
        return "-" if costs is None else f"{1e3 * costs[0]:.2f}"


UNREACHABLE = "unreachable"

Column = tuple[str, Callable[[WorkerRow], str]]


def _number(heading: str, name: str) -> Column:
    return heading, lambda row: str(row.stats[name])


RUNNING = _number("running", "num_running")
WAITING = _number("waiting", "num_waiting")
PREEMPTED = _number("preempted", "preemptions")
_USE: tuple[Column, ...] = (
    ("blocks owned", lambda row: f"{row.stats['owned_blocks']}/{row.stats['total_blocks']}"),
    ("cached hits", WorkerRow.cached_hits),
)
_RATES: tuple[Column, ...] = (
    ("MFU", lambda row: row.peak_share("peak_flops_per_s", "flops")),
    ("MBU", lambda row: row.peak_share("peak_bytes_per_s", "read_bytes")),
    ("prompt tok/s", lambda row: row.rate("computed_tokens")),
    ("output tok/s", lambda row: row.rate("generated_tokens")),
    ("KV MB/s", lambda row: row.rate("transfer_bytes", unit=1e6)),
)

# Behind each worker's name and role: once, and with --watch.
STATUS: tuple[Column, ...] = (
    RUNNING,
    WAITING,
    *_USE,
    *_RATES,
    # Since the worker's start.
    _number("pulled", "pulled_tokens"),
    # As `kv_transfer_failures` counts them.
    ("failed", lambda row: str(row.stats["transfers_failed"] - row.stats["transfers_given_up"])),
    _number("damaged", "transfer_digest_failures"),
    _number("links lost", "transfer_links_lost"),
    PREEMPTED,
    _number("swapped", "swaps"),
)
LOAD: tuple[Column, ...] = (
    ("state", WorkerRow.state),
    RUNNING,
    WAITING,
    _number("queued tok", "num_waiting_tokens"),
    *_USE,
    ("step ms", WorkerRow.step_ms),
    ("base ms", WorkerRow.base_ms),
    *_RATES,
    PREEMPTED,
)
_CLASS_HEADINGS = ("class", "queued requests", "queued tokens", "SLO attainment")
_SCALING_HEADINGS = ("role", "workers", "to be", "missing", "last decision", "last change")

STARTING_S = 60.0
"""A worker that was asked for so lately starts; one that is missing for longer may have no room anywhere."""

MIN_INTERVAL_S = 0.1
"""Smallest interval between two samples, in seconds."""
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
    if not MIN_INTERVAL_S <= arguments.interval < math.inf:
        raise ConfigError(f"--interval {arguments.interval:g}: seconds between two looks, at least {MIN_INTERVAL_S}")
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
    console = table_console()
    console.print(whole_view(STATUS, before, after, time.monotonic() - began, console))
    return 0 if after["ready"] else 1


def whole_view(
    columns: Sequence[Column], before: Numbers | None, after: Numbers, seconds: float, console: Console
) -> Group:
    """All tables: of workers one row each where that fits, else one row a number, with as many workers beside each
    other as fit.

    Rates are of the time between the two answers, counters since the worker's start.
    """
    shown: list[RenderableType] = [headline(after)]
    if defaults := str(SamplingDefaults.model_validate(after.get("sampling_defaults", {}))):
        shown.append(Text(f"where a request says nothing: {defaults}"))
    shown += worker_tables(columns, worker_rows(columns, before, after, seconds), console)
    if classes := class_rows(after):
        shown.append(_table(_CLASS_HEADINGS, classes))
    if scaling := scaling_rows(after):
        shown.append(_table(_SCALING_HEADINGS, scaling))
    return Group(*shown)


def headline(status: Numbers) -> Text:
    """The model, whether it is served, and which workers are not called."""
    state = "ready" if status["ready"] else "not ready"
    lines = [f"{status['model']} — {state}, {status['places_held']} choices in flight"]
    for role, names in status.get("other_versions", {}).items():
        lines.append(f"left out, of another version than the router: {len(names)} {role} ({', '.join(names)})")
    return Text("\n".join(lines))


def worker_rows(columns: Sequence[Column], before: Numbers | None, after: Numbers, seconds: float) -> list[list[str]]:
    """Return for each worker its name, its role and its columns."""
    earlier = {worker["epoch"]: worker["stats"] for worker in (before or {"workers": ()})["workers"]}
    rows: list[list[str]] = []
    for worker in after["workers"]:
        stats = worker["stats"]
        if stats is None:
            cells = [UNREACHABLE, *[""] * (len(columns) - 1)]
        else:
            row = WorkerRow(worker, stats, earlier.get(worker["epoch"]), seconds)
            cells = [tell(row) for _, tell in columns]
        home = worker.get("home_role", worker["role"])
        role = worker["role"] if home == worker["role"] else f"{worker['role']} (home: {home})"
        rows.append([worker["worker_id"], role, *cells])
    return rows


def worker_tables(columns: Sequence[Column], rows: Sequence[Sequence[str]], console: Console) -> list[Table]:
    """Return tables of `worker_rows`: one table if its rows fit in one line each, else several with a column per
    worker."""
    headings = ["worker", "role", *(heading for heading, _ in columns)]
    wide = _table(headings, rows, num_texts=headings.index("running"))
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


def scaling_rows(status: Numbers) -> list[list[str]]:
    """Return the cells of _SCALING_HEADINGS for each role; nothing where the number of workers is fixed."""
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


def class_rows(status: Numbers) -> list[list[str]]:
    """Return the cells of _CLASS_HEADINGS for each class that is configured or waits, the urgent first."""
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


def _transposed(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    workers, *numbers = zip(headings, *rows, strict=True)
    return _table(workers, numbers)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1) -> Table:
    """The columns behind the first `num_texts` are numbers."""
    table = Table(box=box.SIMPLE)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


@dataclass
class StatusView:
    """Content of the screen: the newest answer, with rates since the one before."""

    url: str
    console: Console
    newest: Numbers | None = None
    newest_at: float = 0.0  # seconds of a clock that never jumps
    before: Numbers | None = None
    before_at: float = 0.0
    lost: str | None = None  # why nobody answers now

    def refresh(self, fetch: Fetch, clock: Clock) -> None:
        """Ask the server once more."""
        try:
            status = fetch()
        except ConfigError as error:  # it may be starting, or come back
            self.lost = str(error)
            return
        # No rates over a time when nobody answered.
        self.before, self.before_at = (self.newest if self.lost is None else None), self.newest_at
        self.newest, self.newest_at, self.lost = status, clock(), None

    def shown(self, now: float) -> RenderableType:
        """Return the whole screen."""
        lines: list[RenderableType] = [Text(self.url, style="bold")]
        if self.lost is not None:
            lines.append(Text(f"{self.lost}; trying again", style="red"))
        if self.newest is None:
            return Group(*lines)
        if self.lost is not None:
            lines.append(Text(f"What it said {now - self.newest_at:.0f} s ago:", style="dim"))
        lines.append(whole_view(LOAD, self.before, self.newest, self.newest_at - self.before_at, self.console))
        return Group(*lines)


def watch(
    url: str,
    fetch: Fetch,
    interval_s: float,
    console: Console,
    *,
    clock: Clock = time.monotonic,
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
            view.refresh(fetch, clock)
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
    """Return whether each row fits in one line."""
    # Asked of an endless line: within a short one, the table would promise to wrap its cells.
    endless = console.options.update(width=10_000)
    return Measurement.get(console, endless, table).maximum <= console.width
