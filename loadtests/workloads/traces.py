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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count, groupby
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import Piece, SessionTurn
from twostroke.loadtests.workloads.arrivals import derive_seed
from twostroke.loadtests.workloads.prompts import block_pieces
from twostroke.loadtests.workloads.synthetic import Scale, scale_to

COARSE_CLOCK_S = 1.0  # times that are equal or at least so far from each other are those of a coarse clock
MAX_TOKENS = 10**9  # of a prompt or an answer
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
    format: "TraceFormat"
    num_requests: int
    begin_s: float
    span_s: float  # to the last request
    tick_s: float  # what its clock rounds to, where that is coarse; else 0
    long_request: int  # tokens, prompt and answer, of the 99.9th percentile

    def timed_turns(self, max_context: int, seed: int) -> Iterator[tuple[float, SessionTurn]]:
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

    def _turn(self, request: TraceRequest, scale: Scale, origin: tuple[int | str, ...], index: int) -> SessionTurn:
        prompt, answer = scale.request(max(1, request.input_tokens), max(1, request.output_tokens))
        own = derive_seed(*origin, "prompt", index)
        if not request.blocks:
            return SessionTurn((Piece(own, prompt),), answer)
        blocks = [derive_seed(*origin, "block", block) for block in request.blocks]
        return SessionTurn(block_pieces(blocks, scale.tokens(self.format.block_tokens), prompt, own), answer)


def open_trace(path: Path, format: str = "auto") -> Trace:
    """Reads all of the file. Raises LoadTestError where it is missing, wrong, out of order or empty."""
    totals = array("q")
    begin_s = end_s = 0.0
    least_step_s = inf
    bundled = False
    try:
        found = FORMATS[format if format != "auto" else _trace_format(path)]
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
        long_request=max(1, sorted(totals)[min(len(totals) - 1, int(len(totals) * LONG_REQUESTS))]),
    )


def _trace_format(path: Path) -> str:
    """Return the format, found by the names of the columns."""
    with path.open(encoding="utf-8-sig") as lines:
        head = lines.readline(65536)
    if head.startswith("{"):
        return "bailian" if '"chat_id"' in head else "mooncake"
    for name in ("azure", "burstgpt"):
        if set(FORMATS[name].row.__struct_encode_fields__) <= set(head.strip().split(",")):
            return name
    raise LoadTestError(
        f"{path}, line 1: the columns are of no known trace; there are {', '.join(FORMATS)} "
        "(docs/loadtests.md has their columns)"
    )


Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Azure(
    msgspec.Struct,
    rename={"at": "TIMESTAMP", "input_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"},
):
    at: datetime  # 2024's have a zone, 2023's mean UTC
    input_tokens: Tokens
    output_tokens: Tokens


class _BurstGPT(
    msgspec.Struct,
    rename={"at": "Timestamp", "input_tokens": "Request tokens", "output_tokens": "Response tokens"},
):
    at: float
    input_tokens: Tokens
    output_tokens: Tokens


class _Mooncake(
    msgspec.Struct,
    rename={"at": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"},
):
    at: float
    input_tokens: Tokens
    output_tokens: Tokens
    hash_ids: tuple[int, ...]


class _Bailian(_Mooncake):
    chat_id: Any


@dataclass(frozen=True)
class TraceFormat:
    """Reader of a format: JSONL where blocks of prompts have hashes, else CSV."""

    row: type[_Azure | _BurstGPT | _Mooncake]
    second: float = 1.0  # in the file's unit of time, where it has no dates
    block_tokens: int = 0  # of the blocks in hash_ids; 0: nothing is known of shared prefixes
    has_failed: bool = False  # rows without an answer

    def read(self, path: Path) -> Iterator[TraceRequest]:
        """The file's requests that were answered. Raises LoadTestError."""
        for number, parse in self._rows(path):
            try:
                row = parse()
            except msgspec.DecodeError as error:
                raise LoadTestError(f"{path}, line {number}: {error}; correct or remove the line") from error
            if isinstance(row, _Azure):
                at_s = (row.at if row.at.tzinfo else row.at.replace(tzinfo=UTC)).timestamp()
            else:
                at_s = row.at / self.second
            blocks = row.hash_ids if isinstance(row, _Mooncake) else ()
            if row.output_tokens or not self.has_failed:
                yield TraceRequest(at_s, row.input_tokens, row.output_tokens, blocks)

    def _rows(self, path: Path) -> Iterator[tuple[int, Callable[[], _Azure | _BurstGPT | _Mooncake]]]:
        """Each row's line, and what reads it; empty lines are skipped."""
        with path.open(newline="", encoding="utf-8-sig") as lines:
            if self.block_tokens:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield number, partial(msgspec.json.decode, line, type=self.row)
            else:
                rows = csv.DictReader(lines)
                for row in rows:
                    yield rows.line_num, partial(msgspec.convert, row, self.row, strict=False)


FORMATS = {
    "azure": TraceFormat(_Azure),
    "mooncake": TraceFormat(_Mooncake, second=1000.0, block_tokens=512),
    "burstgpt": TraceFormat(_BurstGPT, has_failed=True),
    "bailian": TraceFormat(_Bailian, block_tokens=16),
}
