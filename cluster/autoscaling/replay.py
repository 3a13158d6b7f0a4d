"""Would fewer workers have done? The last minutes' arrivals, run through them again as a fluid.

A fluid because only sums per look are known; looks are about a second wide, so bursts are in it. Work is in seconds of
one worker.
"""

import numpy as np

from twostroke.cluster.autoscaling.history import Series


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
