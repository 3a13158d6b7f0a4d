"""What came in the last `cooldown_s`, look by look, and whether fewer workers would have done.

Demand is counted where requests arrive, not where they end. The looks are run through fewer workers again as a fluid,
since only sums per look are known; looks are about a second wide, so bursts are in it. Work is in seconds of one
worker.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twostroke.cluster.autoscaling.readings import Arrived, Signals

Series = NDArray[np.float64]

MAX_LOOKS = 600
"""The window has no more looks than this; they are at least a second wide."""


class Look(NamedTuple):
    """What arrived between two moments, and what there was at the second of them."""

    at_s: float
    span_s: float
    decoding: float  # requests at decode workers, waiting ones included
    arrived: Arrived


@dataclass(frozen=True)
class Window:
    """The looks as columns, oldest first."""

    at_s: Series
    span_s: Series
    requests: Series
    prompt_tokens: Series
    new_tokens: Series  # of the prompt tokens, those in no prefix cache
    pairs: Series  # of new tokens with those before them: attention's part of the prompts' time
    decoding: Series  # requests at decode workers, waiting ones included
    mean_output: float | None  # tokens of an answer; None: none has ever ended

    def count_of_last(self, span_s: float) -> int:
        """How many of the looks lie within the last `span_s`; one at least, if there is any."""
        if not len(self.at_s):
            return 0
        return max(1, int(len(self.at_s) - np.searchsorted(self.at_s, self.at_s[-1] - span_s, side="right")))


@dataclass(frozen=True)
class History:
    """The looks of one window, oldest first, and the counters at the last one."""

    looks: tuple[Look, ...] = ()
    total: Arrived | None = None
    began_s: float = 0.0
    at_s: float = 0.0
    mean_output: float | None = None  # of the last answers known before the window

    def seen(self, signals: Signals, window_s: float) -> "History":
        """This history and what has come since. Signals out of order change nothing."""
        if self.total is None:
            return History(total=signals.arrived, began_s=signals.at_s, at_s=signals.at_s)
        if signals.at_s <= self.at_s:
            return self
        decoding = float(signals.decode.num_decoding + signals.decode.queued_requests)
        look = Look(signals.at_s, signals.at_s - self.at_s, decoding, signals.arrived.since(self.total))
        looks = self.looks
        if looks and looks[-1].span_s + look.span_s <= max(1.0, window_s / MAX_LOOKS):
            look = look._replace(span_s=looks[-1].span_s + look.span_s, arrived=looks[-1].arrived.plus(look.arrived))
            looks = looks[:-1]
        first = 0
        mean = self.mean_output
        while first < len(looks) and looks[first].at_s <= signals.at_s - window_s:
            left = looks[first].arrived
            mean = left.output_tokens / left.ended if left.ended else mean
            first += 1
        return replace(self, looks=(*looks[first:], look), total=signals.arrived, at_s=signals.at_s, mean_output=mean)

    def window(self) -> Window:
        """As columns, to reckon with."""
        rows = [(look.at_s, look.span_s, look.decoding, *look.arrived) for look in self.looks]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3 + len(Arrived._fields)).T
        at_s, span_s, decoding, requests, prompt_tokens, cached_tokens, pairs, output_tokens, ended = columns
        return Window(
            at_s=at_s,
            span_s=span_s,
            requests=requests,
            prompt_tokens=prompt_tokens,
            new_tokens=np.maximum(prompt_tokens - cached_tokens, 0.0),
            pairs=pairs,
            decoding=decoding,
            mean_output=float(output_tokens.sum() / ended.sum()) if ended.any() else self.mean_output,
        )


def backlogs(spans: Series, work: Series, workers: float) -> Series:
    """Work that is left at the end of each look when so many workers do what they can (Lindley's recursion)."""
    drift: Series = np.cumsum(work - workers * spans)
    return drift - np.minimum.accumulate(np.minimum(drift, 0.0))


def prefill_workers(spans: Series, work: Series, requests: Series, wait_s: float, attainment: float, most: int) -> int:
    """The fewest, up to `most`, that let `attainment` of the requests wait at most `wait_s`."""
    total = requests.sum()
    if total <= 0:
        return 0
    fewest = max(1, int(np.ceil(work.sum() / max(spans.sum(), 1e-9))))
    for workers in range(fewest, most):
        waits = backlogs(spans, work, workers) / workers
        if requests[waits <= wait_s].sum() >= attainment * total:
            return workers
    return most


def departures(spans: Series, work: Series, requests: Series, workers: float) -> Series:
    """Requests whose prompts end in each look: a burst reaches the decode workers as slowly as it is prefilled."""
    total_work = work.sum()
    if total_work <= 0 or workers <= 0:
        return requests
    arrived = np.concatenate([[0.0], np.cumsum(work)])
    counted = np.concatenate([[0.0], np.cumsum(requests)])
    done = np.concatenate([[0.0], arrived[1:] - backlogs(spans, work, workers)])
    left: Series = np.diff(np.interp(done, arrived, counted))  # prompts leave in the order in which they came
    return left


def rows_at_once(spans: Series, starts: Series, stay_s: float) -> Series:
    """Requests that decode at the end of each look when each stays for `stay_s`."""
    times = np.concatenate([[0.0], np.cumsum(spans)])
    begun = np.concatenate([[0.0], np.cumsum(starts)])
    stay_s = max(stay_s, 1e-3)
    longest = np.minimum(stay_s, np.maximum(times[1:], 1e-9))
    if stay_s >= spans.min(initial=np.inf):
        at_once: Series = begun[1:] - np.interp(times[1:] - longest, times, begun)
        return at_once
    return starts / spans * stay_s  # shorter than a look: its mean


def decode_workers(starts: Series, rows: Series, rows_each: float, attainment: float, most: int) -> int:
    """The fewest, up to `most`, that have room for all rows when `attainment` of the requests start."""
    total = starts.sum()
    if total <= 0:
        return 0
    order = np.argsort(rows)
    share = np.cumsum(starts[order]) / total
    enough = rows[order][min(int(np.searchsorted(share, attainment - 1e-9)), len(rows) - 1)]
    return int(min(most, max(1, np.ceil(enough / rows_each - 1e-9))))
