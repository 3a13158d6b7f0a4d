"""`twostroke bench results`: keep what benches measured as JSON files, and make the page of current figures from them.

A file of `docs/results/` has a bench's figures as its last line gave them, with the command, the date and the
machine, and the list of those that the page shows. Recording a bench again replaces figures, date and machine and
leaves that list."""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from twostroke.protocol.errors import ConfigError

BEGIN, END = "<!-- made by `twostroke bench results` -->", "<!-- end of what is made -->"
FOLDER = Path("docs/results")


class Shown(msgspec.Struct, frozen=True):
    """A figure on the page: its key in the bench's JSON, what it means, and the aim as text."""

    key: str
    label: str
    aim: str = ""


class BenchResult(msgspec.Struct, frozen=True):
    """One file of the folder: a bench's figures, and where they come from."""

    title: str
    command: str
    date: str  # ISO 8601
    machine: str
    figures: dict[str, Any]
    show: tuple[Shown, ...] = ()
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the folder of JSON files and index.md")
    parser.add_argument(
        "--record", metavar="NAME", help="run the bench whose command follows, and keep its figures as NAME.json"
    )
    parser.add_argument(
        "bench", nargs=argparse.REMAINDER, help="with --record: a command such as -- bench engine --model 160m"
    )


def run(args: argparse.Namespace) -> int:
    """Record a bench if one is named, then write the page. Raises ConfigError for a wrong file or command."""
    if args.record is not None:
        record(args.folder / f"{args.record}.json", [word for word in args.bench if word != "--"])
    page = args.folder / "index.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + tables(args.folder) + rest.partition(END)[2], encoding="utf-8")
    print(msgspec.json.encode({"page": str(page)}).decode())
    return 0


def record(file: Path, words: Sequence[str]) -> None:
    """Run `twostroke WORDS` and keep the JSON of its last line. Raises ConfigError where there is none."""
    ended = subprocess.run(
        [sys.executable, "-m", "twostroke.cluster.cli", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    print(ended.stdout, end="")
    try:
        figures = msgspec.json.decode(ended.stdout.splitlines()[-1], type=dict[str, Any])
    except (IndexError, msgspec.DecodeError) as error:
        raise ConfigError(f"--record: `twostroke {' '.join(words)}` ended without a line of JSON") from error
    command = f"twostroke {' '.join(words)}"
    known = read(file) if file.exists() else BenchResult(command, command, "", "", {})
    now = datetime.now(UTC).date().isoformat()
    fresh = msgspec.structs.replace(known, command=command, date=now, machine=machine(), figures=figures)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(fresh), indent=1) + b"\n")


def machine() -> str:
    """Return the number of cores and the processor's name, and the load at this moment."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}, load {os.getloadavg()[0]:.1f}"


def read(file: Path) -> BenchResult:
    """Read a file of the folder. Raises ConfigError that names it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=BenchResult)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def tables(folder: Path) -> str:
    """Return the generated part of the page: a table for each file that shows something, in the order of file names."""
    lines = [BEGIN, ""]
    for result in map(read, sorted(folder.glob("*.json"))):
        if result.show:
            lines += [f"### {result.title}", "", f"`{result.command}`, {result.date}, {result.machine}.", ""]
            lines += [result.note, ""] if result.note else []
            lines += ["| | measured | aim |", "|---|---|---|"]
            lines += [f"| {shown.label} | {_told(shown.key, result)} | {shown.aim} |" for shown in result.show] + [""]
    return "\n".join([*lines, END])


def _told(key: str, result: BenchResult) -> str:
    """Return a figure with its unit, which the end of its key names."""
    if key not in result.figures:
        raise ConfigError(f"{result.title}: there is no figure {key!r} to show")
    value = result.figures[key]
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith(("tok_s", "_rps")):
        return f"{value:,.0f} a second" if value >= 10 else f"{value:.2g} a second"
    if key.endswith("_ms"):
        return f"{value:.3g} ms"
    if key.endswith("_s"):
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    return f"{value:.3g}"
