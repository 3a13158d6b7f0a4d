"""A trace file as a workload: its format found, checked from end to end, and its requests brought into a context."""

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, groupby
from math import inf
from pathlib import Path

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Piece, Turn
from twostroke.loadtests.traces import azure, bailian, burstgpt, mooncake
from twostroke.loadtests.traces.rows import TraceRequest
from twostroke.loadtests.workloads.arrivals import seed_of
from twostroke.loadtests.workloads.prompts import block_pieces
from twostroke.loadtests.workloads.synthetic import Scale, scale_to

COARSE_CLOCK_S = 1.0  # times that are equal or at least so far from each other are those of a coarse clock
LONG_REQUESTS = 0.999  # this share of requests keeps its proportions when lengths are scaled


@dataclass(frozen=True)
class Format:
    """How a format's files are read."""

    read: Callable[[Path], Iterator[TraceRequest]]
    block_tokens: int = 0  # 0: nothing is known of shared prefixes


FORMATS = {
    "azure": Format(azure.read),
    "mooncake": Format(mooncake.read, mooncake.BLOCK_TOKENS),
    "burstgpt": Format(burstgpt.read),
    "bailian": Format(bailian.read, bailian.BLOCK_TOKENS),
}


@dataclass(frozen=True)
class Trace:
    """A file that has been read once, and found good."""

    path: Path
    format: Format
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
    found = FORMATS[format if format != "auto" else _format_of(path)]
    totals = array("q")
    begin_s = end_s = 0.0
    least_step_s = inf
    bundled = False
    try:
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
    try:
        with path.open(encoding="utf-8-sig") as lines:
            head = lines.readline(65536)
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{path}: can't be read: {error}") from error
    if head.startswith("{"):
        return "bailian" if '"chat_id"' in head else "mooncake"
    for name, columns in (("azure", azure.COLUMNS), ("burstgpt", burstgpt.COLUMNS)):
        if set(columns) <= set(head.strip().split(",")):
            return name
    raise LoadTestError(
        f"{path}, line 1: the columns are of no known trace; there are {', '.join(FORMATS)} "
        "(docs/loadtests.md has their columns)"
    )
