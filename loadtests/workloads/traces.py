"""A trace file as a workload: its format found, checked from end to end, and its requests brought into a context.

Four public formats are read; a file's columns tell which it is.

azure     Azure's LLM inference traces of 2023 and 2024: CSV. github.com/Azure/AzurePublicDataset; Patel et al.,
          "Splitwise", ISCA 2024; CC-BY 4.0. Nothing of prompts is known but their lengths.
mooncake  JSONL with hash_ids of 512-token blocks. github.com/kvcache-ai/Mooncake; Qin et al., "Mooncake: Trading More
          Storage for Less Computation", FAST 2025; Apache-2.0.
burstgpt  CSV, its times whole seconds. github.com/HPMLL/BurstGPT; Wang et al., "BurstGPT: A Real-World Workload
          Dataset", KDD 2025; CC-BY 4.0. Rows without response tokens are requests that failed there: they are left
          out, as the authors' own file "without fails" does.
bailian   Qwen-Bailian's traces: JSONL with hash_ids of 16-token blocks. github.com/alibaba-edu/
          qwen-bailian-usagetraces-anon; Apache-2.0. A turn's prompt has its conversation's blocks at its beginning, so
          the hashes carry what parent_chat_id says; each turn is sent at the trace's time, as it was there.
"""

import csv
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, groupby
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Piece, Turn
from twostroke.loadtests.workloads.arrivals import seed_of
from twostroke.loadtests.workloads.prompts import block_pieces
from twostroke.loadtests.workloads.synthetic import Scale, scale_to

COARSE_CLOCK_S = 1.0  # times that are equal or at least so far from each other are those of a coarse clock
LONG_REQUESTS = 0.999  # this share of requests keeps its proportions when lengths are scaled


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, in the trace's own tokens and time."""

    at_s: float  # by the trace's clock; only differences mean something
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # equal numbers: equal blocks of the prompt, from its beginning


@dataclass(frozen=True)
class Trace:
    """A file that has been read once, and found good."""

    path: Path
    format: "Format"
    num_requests: int
    begin_s: float
    span_s: float  # to the last request
    tick_s: float  # what its clock rounds to, where that is coarse; else 0
    long_request: int  # tokens, prompt and answer, of the 99.9th percentile

    def timed_turns(self, max_context: int, seed: int) -> Iterator[tuple[float, Turn]]:
        """Endless: (seconds after the first request, request), again from the beginning after the last.

        Prompts of a repetition share nothing with those before. Requests that a coarse clock has put on one moment are
        spread evenly at random over the time until its next tick, lest they be a burst that never was.
        """
        draw = random.Random(f"trace {seed}")
        scale = scale_to(max_context, self.long_request)
        # Between the last request and the first of the next repetition lies a mean gap: the rate stays the trace's.
        mean_gap_s = self.span_s / (self.num_requests - 1) if self.span_s else 1.0
        repeats_after_s = self.span_s + max(mean_gap_s, self.tick_s)
        for repetition in count():
            begin_s = repetition * repeats_after_s - self.begin_s
            index = 0
            for at_s, requests in groupby(self.format.read(self.path), key=lambda request: request.at_s):
                together = list(requests)
                spread = sorted(draw.random() * self.tick_s for _ in together)
                for after_s, request in zip(spread, together, strict=True):
                    turn = self._turn(request, scale, (seed, "trace", repetition), index)
                    yield begin_s + at_s + after_s, turn
                    index += 1

    def _turn(self, request: TraceRequest, scale: Scale, origin: tuple[int | str, ...], index: int) -> Turn:
        prompt, answer = scale.request(max(1, request.input_tokens), max(1, request.output_tokens))
        own = seed_of(*origin, "prompt", index)
        if not request.blocks:
            return Turn((Piece(own, prompt),), answer)
        blocks = [seed_of(*origin, "block", block) for block in request.blocks]
        return Turn(block_pieces(blocks, scale.tokens(self.format.block_tokens), prompt, own), answer)


def open_trace(path: Path, format: str = "auto") -> Trace:
    """Reads all of the file. Raises LoadTestError where it is missing, wrong, out of order or empty."""
    totals = array("q")
    begin_s = end_s = 0.0
    least_step_s = inf
    bundled = False
    try:
        found = FORMATS[format if format != "auto" else _format_of(path)]
        for request in found.read(path):
            if not totals:
                begin_s = request.at_s
            elif request.at_s < end_s:
                raise LoadTestError(
                    f"{path}: request {len(totals) + 1} is earlier than the one before it; sort the file by time"
                )
            elif request.at_s == end_s:
                bundled = True
            else:
                least_step_s = min(least_step_s, request.at_s - end_s)
            end_s = request.at_s
            totals.append(request.input_tokens + request.output_tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{path}: can't be read: {error}") from error
    if not totals:
        raise LoadTestError(f"{path}: has no requests; name a trace with at least one")
    return Trace(
        path=path,
        format=found,
        num_requests=len(totals),
        begin_s=begin_s,
        span_s=end_s - begin_s,
        tick_s=least_step_s if bundled and COARSE_CLOCK_S <= least_step_s < inf else 0.0,
        long_request=sorted(totals)[min(len(totals) - 1, int(len(totals) * LONG_REQUESTS))],
    )


def _format_of(path: Path) -> str:
    """By the names of the columns."""
    with path.open(encoding="utf-8-sig") as lines:
        head = lines.readline(65536)
    if head.startswith("{"):
        return "bailian" if '"chat_id"' in head else "mooncake"
    for name in ("azure", "burstgpt"):
        if set(FORMATS[name].fields) <= set(head.strip().split(",")):
            return name
    raise LoadTestError(
        f"{path}, line 1: the columns are of no known trace; there are {', '.join(FORMATS)} "
        "(docs/loadtests.md has their columns)"
    )


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

    def number_of(self, field: str, value: object) -> float:
        """A time in whatever unit the format has. Raises LoadTestError for what is no number."""
        try:
            return float(value)  # type: ignore[arg-type]  # what float does not take, it says
        except (TypeError, ValueError):
            self.wrong(f"{field} is {value!r}, not a number")

    def moment(self, field: str, value: str) -> float:
        """A date and time as seconds. Raises LoadTestError for what is none."""
        try:
            # Seven digits of a second are written, of which Python takes six. 2024's have a zone, 2023's mean UTC.
            at = datetime.fromisoformat(value)
        except ValueError:
            self.wrong(f"{field} is {value!r}, not a date and time like 2023-11-16 18:15:46.6805900")
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()

    def blocks(self, hash_ids: object) -> tuple[int, ...]:
        """The hashes of a prompt's blocks. Raises LoadTestError for anything but a list of whole numbers."""
        if not isinstance(hash_ids, list) or not all(isinstance(number, int) for number in hash_ids):
            self.wrong(f"hash_ids is {str(hash_ids)[:40]}, not a list of whole numbers")
        return tuple(hash_ids)


Rows = Iterator[tuple[Line, Mapping[str, Any]]]


def _csv_rows(path: Path, columns: tuple[str, ...]) -> Rows:
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


def _json_rows(path: Path, fields: tuple[str, ...]) -> Rows:
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


@dataclass(frozen=True)
class Format:
    """How a format's files are read."""

    rows: Callable[[Path, tuple[str, ...]], Rows]
    time: str  # names of columns, here and below
    input_tokens: str
    output_tokens: str
    others: tuple[str, ...] = ()  # that its files have, too
    second: float | None = 1.0  # in the file's unit of time; None: the file has dates
    block_tokens: int = 0  # of the blocks in hash_ids; 0: nothing is known of shared prefixes
    has_failed: bool = False  # rows without an answer

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that a row must have."""
        return *self.others, self.time, self.input_tokens, self.output_tokens

    def read(self, path: Path) -> Iterator[TraceRequest]:
        """The file's requests that were answered. Raises LoadTestError."""
        for line, row in self.rows(path, self.fields):
            at = row[self.time]
            request = TraceRequest(
                at_s=line.moment(self.time, at) if self.second is None else line.number_of(self.time, at) / self.second,
                input_tokens=line.count(self.input_tokens, row[self.input_tokens]),
                output_tokens=line.count(self.output_tokens, row[self.output_tokens]),
                blocks=line.blocks(row["hash_ids"]) if self.block_tokens else (),
            )
            if request.output_tokens or not self.has_failed:
                yield request


FORMATS = {
    "azure": Format(_csv_rows, "TIMESTAMP", "ContextTokens", "GeneratedTokens", second=None),
    "mooncake": Format(
        _json_rows, "timestamp", "input_length", "output_length", ("hash_ids",), second=1000.0, block_tokens=512
    ),
    "burstgpt": Format(_csv_rows, "Timestamp", "Request tokens", "Response tokens", has_failed=True),
    "bailian": Format(
        _json_rows, "timestamp", "input_length", "output_length", ("chat_id", "hash_ids"), block_tokens=16
    ),
}
