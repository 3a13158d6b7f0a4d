"""Rows of CSV and JSONL files, each with its line's number.

What all traces tell of a request.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from twostroke.loadtests.errors import LoadTestError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, in the trace's own tokens and time."""

    at_s: float  # by the trace's clock; only differences mean something
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # equal numbers: equal blocks of the prompt, from its beginning


@dataclass(frozen=True, slots=True)
class Line:
    """Where a row was read, for errors."""

    path: Path
    number: int  # from 1

    def wrong(self, what: str) -> NoReturn:
        """Raises LoadTestError."""
        raise LoadTestError(f"{self.path}, line {self.number}: {what}; correct or remove the line")

    def count(self, field: str, value: object) -> int:
        """A number of tokens, from JSON or from a CSV cell. Raises LoadTestError for anything else."""
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self.wrong(f"{field} is {value!r}, not a number of tokens")

    def seconds(self, field: str, value: object) -> float:
        """A time in whatever unit the format has. Raises LoadTestError for what is no number."""
        try:
            return float(value)  # type: ignore[arg-type]  # what float does not take, it says
        except (TypeError, ValueError):
            self.wrong(f"{field} is {value!r}, not a number")


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[Line, dict[str, str]]]:
    """Rows of a file with a head line that has at least `columns`. Raises LoadTestError, also for a row cut short."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.DictReader(lines)
        missing = [column for column in columns if column not in (rows.fieldnames or ())]
        if missing:
            Line(path, 1).wrong(f"no column {', '.join(missing)}")
        for row in rows:
            line = Line(path, rows.line_num)
            for column in columns:
                if row[column] is None:
                    line.wrong(f"the row ends before {column}")
            yield line, row


def json_rows(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[Line, dict[str, object]]]:
    """One object a line, with at least `fields`; empty lines are skipped. Raises LoadTestError."""
    decode = msgspec.json.Decoder(dict[str, object]).decode
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            line = Line(path, number)
            try:
                row = decode(text)
            except msgspec.DecodeError as error:
                line.wrong(f"no JSON object: {error}")
            for field in fields:
                if field not in row:
                    line.wrong(f"no {field}")
            yield line, row


def block_numbers(line: Line, hash_ids: object) -> tuple[int, ...]:
    """The hashes of a prompt's blocks. Raises LoadTestError for anything but a list of whole numbers."""
    if not isinstance(hash_ids, list) or not all(isinstance(number, int) for number in hash_ids):
        line.wrong(f"hash_ids is {str(hash_ids)[:40]}, not a list of whole numbers")
    return tuple(hash_ids)
