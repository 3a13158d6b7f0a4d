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
    requests: float
    prompt_tokens: float
    new_tokens: float  # of the prompt tokens, those in no prefix cache
    pairs: float
    output_tokens: float  # of the answers that ended
    ended: float
    decoding: float  # requests at decode workers, waiting ones included


@dataclass(frozen=True)
class Window:
    """The looks as columns, oldest first."""

    at_s: Series
    span_s: Series
    requests: Series
    prompt_tokens: Series
    new_tokens: Series
    pairs: Series
    output_tokens: Series
    ended: Series
    decoding: Series
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
        look = _between(self.total, signals, signals.at_s - self.at_s)
        looks = self.looks
        if looks and looks[-1].span_s + look.span_s <= max(1.0, window_s / MAX_LOOKS):
            looks, look = looks[:-1], _joined(looks[-1], look)
        first = 0
        mean = self.mean_output
        while first < len(looks) and looks[first].at_s <= signals.at_s - window_s:
            if looks[first].ended:
                mean = looks[first].output_tokens / looks[first].ended
            first += 1
        return replace(self, looks=(*looks[first:], look), total=signals.arrived, at_s=signals.at_s, mean_output=mean)

    def window(self) -> Window:
        """As columns, to reckon with."""
        columns = np.array(self.looks, dtype=np.float64).reshape(-1, len(Look._fields)).T
        series = dict(zip(Look._fields, columns, strict=True))
        ended = float(series["ended"].sum())
        return Window(**series, mean_output=float(series["output_tokens"].sum()) / ended if ended else self.mean_output)


def _between(before: Arrived, signals: Signals, span_s: float) -> Look:
    now = signals.arrived
    prompt = max(0.0, now.prompt_tokens - before.prompt_tokens)
    cached = max(0.0, now.cached_tokens - before.cached_tokens)
    return Look(
        at_s=signals.at_s,
        span_s=span_s,
        requests=max(0.0, now.requests - before.requests),
        prompt_tokens=prompt,
        new_tokens=max(0.0, prompt - cached),
        pairs=max(0.0, now.prompt_pairs - before.prompt_pairs),
        output_tokens=max(0.0, now.output_tokens - before.output_tokens),
        ended=max(0.0, now.ended - before.ended),
        decoding=float(signals.decode.num_decoding + signals.decode.queued_requests),
    )


def _joined(first: Look, second: Look) -> Look:
    return second._replace(
        span_s=first.span_s + second.span_s,
        requests=first.requests + second.requests,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        new_tokens=first.new_tokens + second.new_tokens,
        pairs=first.pairs + second.pairs,
        output_tokens=first.output_tokens + second.output_tokens,
        ended=first.ended + second.ended,
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
