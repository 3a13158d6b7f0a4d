"""Rows of CSV and JSONL files, each with its line's number."""

import csv
from collections.abc import Iterator
from pathlib import Path

import msgspec

from twostroke.loadtests.traces.request import Line


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
