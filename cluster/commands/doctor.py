"""`twostroke doctor`: how KV travels between the workers of a running server, how fast, and what would be better."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from twostroke.cluster.commands.status import table_console
from twostroke.cluster.local.asking import answered

SILENCE_S = 60.0  # between two lines of the server; one pair takes 30 s at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print what the router says, a line for each pair")


def run(arguments: argparse.Namespace) -> int:
    """Try all pairs once; returns 0, or 1 where one failed or a worker is missing.

    Raises ConfigError where no server tries them.
    """
    console = table_console()
    pairs: list[dict[str, Any]] = []
    missing_workers: list[str] = []
    expected = left_out = 0
    is_whole = False
    # On a terminal it shows how far the trials are; elsewhere it is silent.
    progress = Console(stderr=True)
    with progress.status("Trying the links between the workers ...") as shown:
        for line in fetch_report(arguments.url):
            if arguments.json:
                print(json.dumps(line), flush=True)
            match line["event"]:
                case "begin":
                    expected, left_out, missing_workers = line["pairs"], line["left_out"], line["missing_workers"]
                case "pair":
                    pairs.append(line)
                    shown.update(f"Trying the links between the workers: {len(pairs)} of {expected} pairs are done ...")
                case "end":
                    is_whole = True
    if not arguments.json:
        _show(pairs, missing_workers, left_out, is_whole, console)
    if not is_whole:
        progress.print(f"twostroke: the server stopped answering after {len(pairs)} of {expected} pairs")
    return 0 if is_whole and not missing_workers and all(pair["error"] is None for pair in pairs) else 1


def fetch_report(url: str) -> Iterator[dict[str, Any]]:
    """The lines of GET /doctor as they come; ends early where the server does.

    Raises ConfigError where no server of ours answers, or it refuses.
    """
    with answered(url, "doctor", timeout_s=SILENCE_S) as answer:
        try:
            for line in answer:
                yield json.loads(line)
        except (OSError, ValueError):  # cut off: at a line's end, or within it
            return


def doctor_table(pairs: list[dict[str, Any]]) -> Table:
    """One row a pair, in the order in which they were tried."""
    table = Table(box=box.SIMPLE, title="KV from worker to worker", title_justify="left")
    for heading in ("from", "to", "transport"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "round trip ms"):
        table.add_column(heading, justify="right")
    for pair in pairs:
        ends = [f"{pair[side + '_role']} {pair[side]}" for side in ("source", "target")]
        if pair["error"] is not None:
            row = [*ends, "[red]failed[/]", "", ""]
        else:
            row = [*ends, pair["transport"], f"{pair['bytes_per_s'] / 1e9:.2f}", f"{pair['round_trip_s'] * 1e3:.2f}"]
        table.add_row(*row)
    return table


def counted_lines(reasons: Iterable[str]) -> list[str]:
    """Each reason once, with how many pairs it is told of."""
    return [f"{reason} ({count} {'pair' if count == 1 else 'pairs'})" for reason, count in Counter(reasons).items()]


def _show(
    pairs: list[dict[str, Any]], missing_workers: list[str], left_out: int, is_whole: bool, console: Console
) -> None:
    if pairs:
        console.print(doctor_table(pairs))
    sections = {
        "Why:": counted_lines(pair["why"] for pair in pairs if pair["error"] is None),
        "Failed:": [f"{pair['source']} to {pair['target']}: {pair['error']}" for pair in pairs if pair["error"]],
        "Missing for a better transport:": counted_lines(reason for pair in pairs for reason in pair["missing"]),
    }
    for heading, lines in sections.items():
        if lines:
            console.print(heading)
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    if left_out:
        console.print(f"{left_out} more pairs were not tried.")
    for line in missing_workers:
        console.print(f"{line[0].upper()}{line[1:]}.", soft_wrap=True)
    if is_whole:
        console.print(summary(pairs, has_all_workers=not missing_workers), soft_wrap=True)


def summary(pairs: list[dict[str, Any]], *, has_all_workers: bool) -> str:
    """Return the result of all probes in one sentence."""
    if not pairs:
        reason = "decode workers compute prompts themselves" if has_all_workers else "workers are missing"
        return f"There is no pair of workers that KV could travel between: {reason}."
    num_failed = sum(pair["error"] is not None for pair in pairs)
    if num_failed:
        return f"{num_failed} of {len(pairs)} pairs failed."
    num_lacking = sum(bool(pair["missing"]) for pair in pairs)
    if num_lacking:
        return f"All pairs work; {num_lacking} of {len(pairs)} could use a better transport."
    return "All pairs use the best transport there is."
